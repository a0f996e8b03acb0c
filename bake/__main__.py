"""`python -m bake` is `hindsight-bake`."""

from bake.cli import main

main()
