"""Exchanges the data directory for another one beside it, so that a kill at any moment leaves the one or the other.

Two renames are no transaction, and between them a start would find no cluster and make an empty one. So what is to be
done is written down first, and whoever starts next does the rest.
"""

import json
import os
from pathlib import Path

from sidecar import volume
from sidecar.errors import BlockedError, Reason

JOURNAL = ".exchange.json"


def exchange(pgdata: Path, incoming: Path, outgoing: Path) -> None:
    """Give `incoming` the name of the data directory, and the data directory the name `outgoing`.

    All three lie in one directory, the volume, whose lock we hold. No Postgres may run in either.

    Raises:
        OSError: it cannot be done, and each has its name again; where not even that can be, the next start tries again.

    """
    if os.path.lexists(outgoing):
        raise FileExistsError(f"{outgoing} is there already; move it away")
    journal = pgdata.parent / JOURNAL
    try:
        volume.replace(journal, json.dumps({"incoming": incoming.name, "outgoing": outgoing.name}).encode())
        finish(pgdata)
    except OSError:
        if not pgdata.exists() and outgoing.exists():
            outgoing.rename(pgdata)
        journal.unlink(missing_ok=True)
        raise


def finish(pgdata: Path) -> str | None:
    """Finish an exchange that was written down; return the name that the old data directory has now, None where none was.

    Raises:
        BlockedError: `damaged-cluster`, where what was written down cannot be read.
        OSError: a rename failed.

    """
    journal = pgdata.parent / JOURNAL
    try:
        told = json.loads(journal.read_text(encoding="utf-8"))
        incoming, outgoing = (pgdata.parent / Path(str(told[name])).name for name in ("incoming", "outgoing"))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BlockedError(
            Reason.DAMAGED_CLUSTER,
            f"{journal} says which data directories are to be exchanged, and cannot be read ({error}); look at what lies "
            f"beside {pgdata}, give the right directory that name, and remove the file",
        ) from error
    if incoming.exists():
        if pgdata.exists() and not outgoing.exists():
            pgdata.rename(outgoing)
            volume.sync(pgdata.parent)
        if not pgdata.exists():
            incoming.rename(pgdata)
            volume.sync(pgdata.parent)
    elif outgoing.exists() and not pgdata.exists():  # what was to come is gone
        outgoing.rename(pgdata)
        volume.sync(pgdata.parent)
    journal.unlink()
    volume.sync(pgdata.parent)
    return outgoing.name
