"""Prints the schema revisions that an installed hindsight-api knows, and those it brings a database to, as one line of JSON.

Run as a file by hindsight-api's own interpreter, which has alembic; ours has not. The argument is its alembic directory.
"""

import json
import sys

from alembic.script import ScriptDirectory  # type: ignore[import-not-found]

scripts = ScriptDirectory(sys.argv[1])
known = sorted(script.revision for script in scripts.walk_revisions())
json.dump({"known": known, "heads": sorted(scripts.get_heads())}, sys.stdout)
sys.stdout.write("\n")
