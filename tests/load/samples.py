"""What the sidecar's own process takes, second by second, as the kernel counts it."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_EVERY = 1.0  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One look at a process.

    Attributes:
        at: monotonic seconds.
        rss, pss: bytes resident, and with what is shared divided among those that share it.
        threads, descriptors: how many it has.
        cpu: seconds that it used so far.

    """

    at: float
    rss: int
    pss: int
    threads: int
    descriptors: int
    cpu: float


def cpu_seconds(pid: int) -> float:
    """Return how much CPU time a process used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def look(pid: int) -> Sample:
    """Look at a process now."""
    proc = Path(f"/proc/{pid}")
    rollup = (proc / "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kilobytes = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in rollup}
    return Sample(
        time.monotonic(),
        kilobytes["Rss"] * 1024,
        kilobytes["Pss"] * 1024,
        len(os.listdir(proc / "task")),  # noqa: PTH208 - their number alone
        len(os.listdir(proc / "fd")),  # noqa: PTH208
        cpu_seconds(pid),
    )


@contextmanager
def sampling(pid: int) -> Iterator[list[Sample]]:
    """Look at a process each second meanwhile."""
    samples: list[Sample] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY):
            samples.append(look(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
