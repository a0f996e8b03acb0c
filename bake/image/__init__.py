"""The image's build: which engine, with what, how long, and what its steps run. Standard library only."""
