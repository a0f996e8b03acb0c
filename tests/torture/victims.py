"""Who can be killed or stopped: the processes of one sidecar, by what they are."""

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from matrix import MissedError

from sidecar.api_environment import ROLE

CLUSTER = "hindsight"  # cluster_name, which Postgres has in its processes' titles
VICTIMS = ("postmaster", "one backend", "checkpointer", "hindsight-api", "sidecar", "all at once")


_API = re.compile(r"/bin/hindsight-api( |$)")  # and not what else its interpreter runs
# And not `postgres --single`, which makes a cluster, nor initdb and others that lie beside it.
_POSTMASTER = re.compile(r"(\S*/)?postgres -D ")


@dataclass(frozen=True)
class Process:
    """One process: its pid, its parent's, its state and its command line."""

    pid: int
    parent: int
    state: str
    words: str

    @property
    def looks_like_postmaster(self) -> bool:
        """Whether it has a postmaster's command line, as a child of one has until it takes its own title."""
        return _POSTMASTER.match(self.words) is not None

    @property
    def is_startup(self) -> bool:
        """Whether it replays Postgres' log."""
        return self.words.startswith(f"postgres: {CLUSTER}: startup")


def _read(pid: int) -> Process | None:
    entry = Path(f"/proc/{pid}")
    try:
        state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        words = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").replace("\0", " ")
    except OSError:
        return None  # it ended while we looked
    return Process(pid, int(parent), state, words)


def replays_the_log(pid: int) -> bool:
    """Tell whether a process that is there replays Postgres' log."""
    found = _read(pid)
    return found is not None and found.is_startup


def everybody() -> list[Process]:
    """Return every process of this machine."""
    return [found for entry in Path("/proc").iterdir() if entry.name.isdigit() and (found := _read(int(entry.name)))]


def family(root: int) -> list[Process]:
    """Return a process and all that descend from it, parents first."""
    all_of_them = everybody()
    found = [process for process in all_of_them if process.pid == root]
    for parent in found:
        found += [process for process in all_of_them if process.parent == parent.pid]
    return found


def choose(victim: str, sidecar: int) -> list[int]:
    """Return the pids to hit for one of `VICTIMS`.

    Raises:
        MissedError: there is no such process now.

    """
    return select(victim, family(sidecar))


def select(victim: str, members: list[Process]) -> list[int]:
    """Choose among a sidecar, which is the first, and all that descend from it."""
    like_postmasters = [process for process in members if process.looks_like_postmaster]
    pids = {process.pid for process in like_postmasters}
    postmasters = [process for process in like_postmasters if process.parent not in pids]
    children = [process for process in members if process.parent in {one.pid for one in postmasters}]
    client = f"postgres: {CLUSTER}: {ROLE} "
    found = {
        "sidecar": [process.pid for process in members[:1]],
        "all at once": [process.pid for process in members],
        "postmaster": [process.pid for process in postmasters],
        "checkpointer": [p.pid for p in children if p.words.startswith(f"postgres: {CLUSTER}: checkpointer")],
        # While a log is replayed, the one that replays it is all that works.
        "one backend": [p.pid for p in children if p.words.startswith(client) or p.is_startup],
        "hindsight-api": [p.pid for p in members[1:] if p.parent == members[0].pid and _API.search(p.words)],
    }[victim]
    if not found:
        raise MissedError(f"no {victim} is there now")
    return found[-1:] if victim == "one backend" else found


def send(pids: Iterable[int], number: signal.Signals) -> int:
    """Signal them all, as nearly at once as can be; return how many were still there."""
    hit = 0
    for pid in pids:
        with suppress(ProcessLookupError):  # one that ended with its parent
            os.kill(pid, number)
            hit += 1
    return hit


def alive(members: Iterable[Process]) -> list[Process]:
    """Return those that still run; their numbers may be somebody else's by now."""
    now = {process.pid: process for process in everybody() if process.state != "Z"}
    return [p for p in members if p.pid in now and now[p.pid].words == p.words]
