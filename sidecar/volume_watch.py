"""Looks at the volume in the background, which may hang like any server."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from sidecar import volume
from sidecar.machine import Server
from sidecar.threads import off_loop
from sidecar.watch import INTERVAL, TIMEOUT, Watch


class VolumeWatch(Watch):
    """Asks the volume's file system what is free, again and again, in a thread: one that hangs holds up whoever asks.

    Attributes:
        space: what is free, None where that is not known: before the first answer, without one, and without a volume.

    """

    def __init__(self, directory: Path, changed: Callable[[], None]) -> None:
        super().__init__(changed)
        self._directory = directory
        self.space: volume.Space | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        look: asyncio.Task[volume.Space] | None = None
        while True:
            look = look or asyncio.create_task(off_loop(volume.space, self._directory))
            await asyncio.wait({look}, timeout=TIMEOUT)
            if look.done():
                self._take(look)
                look = None
            else:
                self._miss(f"gave no answer within {TIMEOUT:g} s")
            await asyncio.sleep(INTERVAL)

    def _take(self, look: "asyncio.Task[volume.Space]") -> None:
        error = look.exception()
        if error is None:
            self.space = look.result()
            self._see(Server.UP, None)
        elif isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
            self.end()  # not there yet, or not for us: taking the volume says what is wrong with it
        elif isinstance(error, OSError):
            self._miss(f"cannot be looked at ({error.strerror})")
        else:
            raise error

    def _miss(self, what: str) -> None:
        self.space = None
        self._see(Server.UNRESPONSIVE, f"{self._directory} {what}; look at its disk, or at what it is mounted from")

    def end(self) -> None:
        """Note that there is nothing to look at any more."""
        super().end()
        self.space = None
