"""Probes at a steady rate, as a kubelet or an exec probe makes them: a new connection each."""

import threading
import time
from dataclasses import dataclass, field

from harness import call

_PATIENCE = 5.0  # seconds for one probe


@dataclass(frozen=True)
class Probe:
    """One address that is probed.

    Attributes:
        name: as the table has it.
        port, path: of the address.

    """

    name: str
    port: int
    path: str


@dataclass
class Probed:
    """What came of one probe.

    Attributes:
        seconds: how long each answer took, whatever its status.
        bad: what was not answered with 200, and when, in seconds from the beginning.

    """

    seconds: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def run(probes: list[Probe], rate: float, begin: float, end: float) -> dict[str, Probed]:
    """Make each probe at this rate (a second) from begin to end (monotonic seconds); for a process of its own."""
    found = {probe.name: Probed() for probe in probes}
    threads = [
        threading.Thread(target=_probe, args=(probe, 1 / rate, begin + number / rate / len(probes), end, found[probe.name]))
        for number, probe in enumerate(probes)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _probe(probe: Probe, interval: float, due: float, end: float, found: Probed) -> None:
    first = due
    while due < end:
        now = time.monotonic()
        if now < due:
            time.sleep(due - now)
            began = time.monotonic()
        else:
            began = due  # the one before was slow: what had to wait for it waited too
        try:
            answer = call(probe.port, probe.path, timeout=_PATIENCE)
            told = "" if answer.status == 200 else f"{answer.status} {answer.body[:300].decode(errors='replace')}"
        except OSError as error:
            told = f"{type(error).__name__}: {error}"
        found.seconds.append(time.monotonic() - began)
        if told:
            found.bad.append(f"{began - first:.1f} s: {told}")
        due += interval
