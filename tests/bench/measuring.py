"""What the benchmark measures: seconds, peaks of memory, and for how long memory calls were refused."""

import itertools
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import RunningSidecar, call

MIB = 2**20
_PROBE = 0.02  # seconds between memory calls


@dataclass
class Seconds:
    """One figure, measured several times."""

    runs: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the runs."""
        return statistics.median(self.runs)

    def __str__(self) -> str:
        least, most = min(self.runs), max(self.runs)
        return f"{self.median:.1f} s" + (f" ({least:.1f} to {most:.1f})" if len(self.runs) > 1 else "")


class ByHand:
    """PostgreSQL's own programs, of the installation that the sidecar runs, against the same server."""

    def __init__(self, sidecar: RunningSidecar) -> None:
        self._bin = Path(f"/proc/{sidecar.pid_of('postgres')}/exe").readlink().parent
        self._common = [f"--host={sidecar.run_dir}", "--port=5432", "--username=postgres"]

    def run(self, name: str, *arguments: str, more: Mapping[str, str] | None = None) -> float:
        """Run one, and return the seconds that it took."""
        began = time.monotonic()
        done = subprocess.run(
            [str(self._bin / name), *self._common, "--no-password", *arguments],
            env={"PATH": "/usr/bin:/bin", **(more or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        return time.monotonic() - began


class Peak:
    """The most memory that a process had resident in each phase, as the kernel counted it."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.bytes: dict[str, int] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Note the peak of what is done within."""
        (self._proc / "clear_refs").write_text("5", encoding="ascii")
        yield
        status = (self._proc / "status").read_text(encoding="ascii")
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        self.bytes[phase] = max(self.bytes.get(phase, 0), int(kilobytes) * 1024)


@contextmanager
def refused(sidecar: RunningSidecar, path: str) -> Iterator[list[float]]:
    """Make memory calls all the while; at the end the list has the seconds from the first refusal to the next answer."""
    told: list[float] = []
    over = threading.Event()
    first: list[float] = []

    def probe() -> None:
        while not over.is_set():
            began = time.monotonic()
            answered = call(sidecar.port, path).status == 200
            if not answered and not first:
                first.append(began)
            if answered and first:
                told.append(time.monotonic() - first.pop())
            time.sleep(_PROBE)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()


def phases(sidecar: RunningSidecar, operation: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that each phase of an operation took, as the log has them."""
    name = f"{operation['kind']} {operation['id']}"
    marks = [
        (str(event.get("phase", "")), datetime.fromisoformat(event["timestamp"]))
        for event in sidecar.events()
        if event.get("operation") == name
    ]
    found: dict[str, float] = {}
    for (phase, begin), (_, end) in itertools.pairwise(marks):
        found[phase] = found.get(phase, 0.0) + (end - begin).total_seconds()
    return found
