"""What /proc tells about other processes."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")  # a second, in which /proc counts the use of a core
_LISTENS = " 0A "  # a TCP state in /proc/self/net
_WORKING = 0.2  # of a core; one that waits for something uses less by far


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it.

    Attributes:
        pid: its number in our pid namespace.
        name: `comm`, at most 15 characters.
        state: one letter; `Z` is a zombie.
        cwd: device and inode of its working directory, None where we may not look.

    """

    pid: int
    name: str
    state: str
    cwd: tuple[int, int] | None


def _read(entry: Path) -> Process | None:
    try:
        text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # it ended while we looked
    name = text[text.index("(") + 1 : text.rindex(")")]
    state = text[text.rindex(")") + 2]
    try:
        status = (entry / "cwd").stat()
    except OSError:
        cwd = None
    else:
        cwd = (status.st_dev, status.st_ino)
    return Process(int(entry.name), name, state, cwd)


def all_processes(proc: Path = PROC) -> Iterator[Process]:
    """Yield every process of our pid namespace. Threads are not listed: a thread's number is no process here."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            found = _read(entry)
            if found is not None:
                yield found


@dataclass(frozen=True)
class Member:
    """A child of some process, as /proc shows it without asking any file system.

    Attributes:
        pid: its number in our pid namespace.
        started: clock ticks since the machine's start; with `pid` nobody else's.
        state: one letter; `T` is stopped by a signal.
        used: seconds of a core that it used so far, with all its threads.
        memory: bytes of its address space; none where it is ending.

    """

    pid: int
    started: int
    state: str
    used: float
    memory: int = 0

    @property
    def ending(self) -> bool:
        """Whether it is gone but for what its parent has to take note of, or about to be."""
        return self.state in "ZX" or not self.memory


def member(pid: int, proc: Path = PROC) -> Member | None:
    """Look at a process; None where it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return Member(pid, int(fields[19]), fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[20]))


class AtWork:
    """Looks, again and again, at whether a process uses a core: one that is stopped, or waits for what never comes, does not."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid = pid
        self._proc = proc
        self._looked = time.monotonic()
        self._used = self._use()
        self._seen = -math.inf

    def _use(self) -> float:
        found = member(self._pid, self._proc)
        return 0.0 if found is None else found.used

    def seen(self) -> float:
        """Look, and return the monotonic seconds at which it was last seen at work: between that look and the one before."""
        now, used = time.monotonic(), self._use()
        if used > self._used and used - self._used >= _WORKING * (now - self._looked):
            self._seen = now
        self._looked, self._used = now, used
        return self._seen


def children(pid: int, proc: Path = PROC) -> list[Member]:
    """Return the children of a process with one thread, such as a postmaster; none where it is gone."""
    try:
        text = (proc / str(pid) / "task" / str(pid) / "children").read_text(encoding="ascii")
    except OSError:
        return []
    found = (member(int(word), proc) for word in text.split())
    return [one for one in found if one is not None]


def title(pid: int, proc: Path = PROC) -> str:
    """Return what a process calls itself; its number again where it is gone. Not for the event loop: it may wait for its memory."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return str(pid)
    return words.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def kill(members: Iterable[Member]) -> None:
    """Kill those that are still there."""
    for one in members:
        now = member(one.pid)
        if now is not None and now.started == one.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def memory(pid: int, proc: Path = PROC) -> int:
    """Return how many bytes of memory a process has that are no file's; 0 where it is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Listener(Enum):
    """Who listens on a port of our network namespace, as far as one process is concerned."""

    NOBODY = "nobody"
    ITSELF = "itself"
    ANOTHER = "another"
    UNKNOWN = "unknown"  # /proc does not tell


def listener(port: int, pid: int, proc: Path = PROC) -> Listener:
    """Tell whether a process listens on this port, or only another one does. Not for the event loop: a node may have many sockets.

    Who can reach the port cannot tell that: any program in the network namespace may have taken it before.
    """
    try:
        listening = _listening(port, proc)
        if not listening:
            return Listener.NOBODY
        return Listener.ITSELF if listening & _sockets(pid, proc) else Listener.ANOTHER
    except FileNotFoundError:  # it ended
        return Listener.NOBODY
    except PermissionError:
        # To one that is ending, and has given its memory back, the kernel lets nobody look.
        found = member(pid, proc)
        return Listener.NOBODY if found is None or found.ending else Listener.UNKNOWN
    except NotImplementedError:
        return Listener.UNKNOWN
    except OSError:  # of ours, such as no descriptor: it is looked at again
        return Listener.NOBODY


def _listening(port: int, proc: Path) -> set[str]:
    """Return the inodes of the sockets that listen on this port, on any address. Raises NotImplementedError."""
    tables = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            tables.append((proc / "self/net" / name).read_text(encoding="ascii"))
    if not tables:
        raise NotImplementedError("the kernel shows no sockets here")
    mark = f":{port:04X} "
    found = (line.split() for table in tables for line in table.splitlines() if mark in line and _LISTENS in line)
    return {words[9] for words in found if words[3] == _LISTENS.strip() and words[1].endswith(mark.strip())}


def _sockets(pid: int, proc: Path) -> set[str]:
    """Return the inodes of a process' open sockets."""
    found = set()
    for entry in (proc / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def postgres_in(directory: Path, proc: Path = PROC) -> list[int]:
    """Return the pids of live PostgreSQL processes that work in this data directory, the lowest first.

    Every PostgreSQL process has its data directory as working directory, which no reuse of a number can imitate:
    neither one of our threads, nor a sibling, nor a zombie that nobody waited for.
    """
    status = directory.stat()
    here = (status.st_dev, status.st_ino)
    return sorted(
        process.pid
        for process in all_processes(proc)
        if process.name in ("postgres", "postmaster") and process.state not in "ZX" and process.cwd == here
    )
