"""How much space the volume has, and how much of it Postgres' log takes: looked at in the background."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sidecar import volume

INTERVAL = 10.0  # seconds between looks
SHARE = 50  # times as long as a look took, if that is longer: on a slow volume it must not cost


@dataclass(frozen=True)
class Space:
    """Bytes on the volume.

    Attributes:
        size: of its filesystem.
        free: what an unprivileged process can still write there.
        wal: what the files of Postgres' log take, None where there is none.

    """

    size: int
    free: int
    wal: int | None


def measure(pgdata: Path) -> Space | None:
    """Return the space of the volume that PGDATA is on, None where it cannot be looked at."""
    try:
        status = os.statvfs(pgdata.parent)
        log = pgdata / "pg_wal"
        wal = volume.size(log) if log.is_dir() else None
    except OSError:
        return None
    return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize, wal)


class SpaceWatch:
    """Looks in a thread of its own: on a volume that hangs a look does not come back, and holds nothing up but itself.

    Attributes:
        space: what was seen last.

    """

    def __init__(self, pgdata: Path) -> None:
        self.space: Space | None = None
        self._pgdata = pgdata
        self._ended = threading.Event()

    def start(self) -> None:
        """Look from now on."""
        # A daemon: unlike asyncio's own threads it is not waited for at the end of the process.
        threading.Thread(target=self._look, name="space", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            began = time.monotonic()
            self.space = measure(self._pgdata)
            pause = max(INTERVAL, SHARE * (time.monotonic() - began))
