"""A writer that stores memories through the gateway, and the ledger of those that were acknowledged."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import RunningSidecar, call, wait_for

BANK = "ledger"
LANES = 4
_PAUSE = 0.05  # seconds before a refused memory's lane goes on
_PATIENCE = 60.0  # seconds for one call
_SPARE = 20.0  # seconds more, for a call that is about to end


class Ledger:
    """The texts that were acknowledged, one a line, in a file of its own beside the sidecar's volume.

    Attributes:
        path: the file.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.touch()

    def add(self, text: str) -> None:
        """Note a text that was acknowledged."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def texts(self) -> list[str]:
        """Return all of them, in the order in which they were acknowledged."""
        return self.path.read_text(encoding="utf-8").splitlines()


def store(sidecar: RunningSidecar, text: str) -> int:
    """Store one text, and return the HTTP status. Raises OSError, http.client.HTTPException."""
    body = {"items": [{"content": text}], "async": False}
    return call(sidecar.port, f"/v1/default/banks/{BANK}/memories", "POST", body, timeout=_PATIENCE).status


class Writer:
    """Stores one text after another in some lanes, none of them twice."""

    def __init__(self, sidecar: RunningSidecar, ledger: Ledger, name: str) -> None:
        self._sidecar = sidecar
        self._ledger = ledger
        self._name = name
        self._end = threading.Event()
        self._lanes = [threading.Thread(target=self._run, args=(lane,), daemon=True) for lane in range(LANES)]
        self.acknowledged: list[str] = []

    def _run(self, lane: int) -> None:
        number = 0
        while not self._end.is_set():
            number += 1
            text = f"In {self._name}, lane {lane}, letter {number} went out with the night train."
            try:
                status = store(self._sidecar, text)
            except (OSError, http.client.HTTPException):
                status = 0  # whether it was stored is not known; nobody said that it was
            if status == 200:
                self._ledger.add(text)
                self.acknowledged.append(text)
            else:
                self._end.wait(_PAUSE)

    @contextmanager
    def writing(self) -> Iterator["Writer"]:
        """Write meanwhile."""
        for lane in self._lanes:
            lane.start()
        try:
            yield self
        finally:
            self._end.set()
            for lane in self._lanes:
                lane.join(_PATIENCE + _SPARE)
            assert not any(lane.is_alive() for lane in self._lanes), "a writer waits for its answer for ever"

    def wait_for_more(self, count: int) -> None:
        """Wait until that many more are acknowledged."""
        target = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= target, 60, f"{count} more acknowledged memories")
