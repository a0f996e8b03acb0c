"""Prints the schema revisions that an installed hindsight-api knows, as one line of JSON.

Run as a file by hindsight-api's own interpreter, which has alembic; ours has not. The argument is its alembic directory.
"""

import json
import sys

from alembic.script import ScriptDirectory  # type: ignore[import-not-found]

json.dump(sorted(script.revision for script in ScriptDirectory(sys.argv[1]).walk_revisions()), sys.stdout)
sys.stdout.write("\n")
