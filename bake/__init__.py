"""hindsight-bake: model directories made at build time, which hindsight-api loads by path, offline."""
