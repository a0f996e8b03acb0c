"""What can go wrong beneath a running sidecar, each as one function: processes that stop, and volumes that hang or are full."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import administrator
import psycopg
import pytest
from harness import RunningSidecar, call, give_to_the_sidecar, wait_for

from sidecar.probe import SocketConnection

TOLD_WITHIN = 3.0  # seconds from a hang until readiness tells of it
LIVE_WITHIN = 0.1  # seconds for nine of ten answers to liveness, on a machine that others use as well
AT_ONCE = 1.0  # seconds for each of them; one in a row may take longer, on a machine that is busy
AT_LAST = 5.0  # seconds, and no longer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("bindfs") is None or not Path("/dev/fuse").exists(),
    reason="a volume that can hang needs root, bindfs and /dev/fuse",
)


# Processes ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[float]:
    """Have processes stopped; they go on afterwards, where they are still there. Tells when they were stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        resume(pids)


def resume(pids: list[int]) -> None:
    """Let processes go on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# What Python runs at its start: the signal keeps the main thread, which answers everybody, at work for some seconds.
TURNING = """
import signal, time
def turn(*_):
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        pass
signal.signal(signal.SIGUSR2, turn)
"""


def make_it_turn(sidecar: RunningSidecar, seconds: float) -> Callable[[], None]:
    """Have a hindsight-api that is not started yet turn in circles for some seconds whenever what this returns is called."""
    directory = sidecar.home / "turning"
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "sitecustomize.py").write_text(TURNING.format(seconds=seconds))
    sidecar.settings |= {"PYTHONPATH": str(directory), "HINDSIGHT_SIDECAR_PASS_ENV": "PYTHONPATH"}
    return lambda: os.kill(sidecar.pid_of("hindsight-api"), signal.SIGUSR2)


def sql(sidecar: RunningSidecar) -> "psycopg.Connection[tuple[object, ...]]":
    """Connect to the served database as its superuser, in autocommit."""
    return psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight", autocommit=True)


def process_of(sidecar: RunningSidecar, kind: str) -> int:
    """Return the pid of a process of Postgres, such as the `checkpointer`."""
    with sql(sidecar) as connection:
        row = connection.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = %s", (kind,)).fetchone()
    assert row is not None
    return int(str(row[0]))


def waiting_backend(connection: "psycopg.Connection[tuple[object, ...]]") -> int | None:
    """Return the pid of a backend of hindsight-api's that waits for a lock, None for none."""
    row = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name <> 'hindsight-sidecar'"
    ).fetchone()
    return int(str(row[0])) if row else None


def processes_of(sidecar: RunningSidecar) -> list[int]:
    """Return all that run for this sidecar, without asking its volume anything."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and str(sidecar.home).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


# Probes ---------------------------------------------------------------------------------------------------------


class ToldLateError(AssertionError):
    """That something hangs was told, and later than it has to be."""


class Alive:
    """Asks for liveness on every listener without a pause, as a kubelet without mercy would.

    With `from_now=False` a sidecar that is just started may take its time to listen; from its first answer on it may not.
    """

    def __init__(self, sidecar: RunningSidecar, *, from_now: bool = True) -> None:
        self._sidecar = sidecar
        self._from_now = from_now
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took: dict[str, list[float]] = {"control": [], "socket": [], "gateway": []}  # seconds, of each listener
        self.failed: list[str] = []

    @property
    def slowest(self) -> float | None:
        """Seconds of the slowest answer, None where there was none."""
        return max(itertools.chain(*self.took.values()), default=None)

    def _ask_socket(self) -> int:
        connection = SocketConnection(self._sidecar.run_dir / "control.sock")
        try:
            connection.request("GET", "/livez")
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def _run(self) -> None:
        asked = {
            "control": lambda: call(self._sidecar.control_port, "/livez", timeout=5).status,
            "socket": self._ask_socket,
            "gateway": lambda: call(self._sidecar.port, "/health/live", timeout=5).status,
        }
        if not self._from_now:
            wait_for(lambda: self._sidecar.health_status() is not None, 30, "an answer")
        while not self._end.wait(0.02):
            for name, ask in asked.items():
                began = time.monotonic()
                try:
                    status: object = ask()
                except Exception as error:  # noqa: BLE001 - whatever it is: a thread that ends would let all else pass
                    status = repr(error)
                if status != 200:
                    self.failed.append(f"{name}: {status}")
                self.took[name].append(time.monotonic() - began)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def check(self) -> None:
        """Check that every answer came, and came quickly."""
        self.check_none_missing()
        ordered = sorted(itertools.chain(*self.took.values()))
        assert ordered[len(ordered) * 9 // 10] < LIVE_WITHIN, f"of {len(ordered)}: {ordered[-len(ordered) // 10 :]}"

    def check_none_missing(self) -> None:
        """Check that no answer was wrong, and none but single ones slower than the second that a kubelet waits.

        Of the thousands of answers of a long run one is slow on any machine that is busy; a kubelet acts on the third in a row.
        """
        assert self.failed == [], f"liveness failed: {self.failed[:5]}"
        for name, took in self.took.items():
            assert len(took) >= 3, f"too few answers of {name} to tell"
            assert max(took) < AT_LAST, f"liveness of {name} took {max(took):.2f} s"
            slow = [pair for pair in itertools.pairwise(took) if min(pair) >= AT_ONCE]
            assert slow == [], f"liveness of {name} took two in a row: {slow}"


def readiness(sidecar: RunningSidecar) -> dict[str, Any]:
    """Return what the readiness probe is answered."""
    body: dict[str, Any] = call(sidecar.control_port, "/readyz", timeout=5).json()
    return body


def wait_told(sidecar: RunningSidecar, since: float, subject: str) -> str:
    """Wait until every address says that memory calls are not served and why, and check how long that took."""
    for port, path in ((sidecar.port, "/health"), (sidecar.control_port, "/health"), (sidecar.control_port, "/readyz")):
        wait_for(lambda port=port, path=path: call(port, path).status == 503, 30, f"503 from {port}{path}", every=0.02)
    took = time.monotonic() - since
    if took >= TOLD_WITHIN:
        raise ToldLateError(f"it was told after {took:.2f} s")
    body = wait_for(
        lambda: body if (body := readiness(sidecar))["subject"] == subject else None, 3, f"that it is {subject}"
    )
    assert body["state"] == "degraded"
    return str(body["detail"] or body["components"][subject]["fault"])


# Volumes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_volume_that_can_hang(sidecar: RunningSidecar) -> Iterator[int]:
    """Give a sidecar that was not started a FUSE file system as its volume. Tells whose stop hangs it; only root can."""
    below = sidecar.home / "below"
    for directory in (below, sidecar.volume):
        directory.mkdir()
        give_to_the_sidecar(directory)
    argv = ["bindfs", "-f", "-o", "allow_other", str(below), str(sidecar.volume)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)  # whatever else fails: its end is waited for, and it keeps nothing to itself
        wait_for(lambda: os.path.ismount(sidecar.volume), 10, "the file system mounted")
        stack.callback(_unmount, sidecar)
        stack.callback(sidecar.end)
        stack.callback(resume, [server.pid])
        yield server.pid


def _unmount(sidecar: RunningSidecar) -> None:
    subprocess.run(["/bin/umount", "--lazy", str(sidecar.volume)], check=True)


@contextlib.contextmanager
def on_a_disk(sidecar: RunningSidecar, mebibytes: int, inodes: int = 8192) -> Iterator[RunningSidecar]:
    """Give a sidecar that was not started an ext4 of its own as its volume, and end it before that goes; only root can."""
    image = sidecar.home / "disk"
    with image.open("wb") as file:
        file.truncate(mebibytes * 1024**2)
    made = ["/sbin/mkfs.ext4", "-q", "-N", str(inodes), "-m", "0", str(image)]
    subprocess.run(made, check=True)
    sidecar.volume.mkdir()
    subprocess.run(["/bin/mount", "-o", "loop", str(image), str(sidecar.volume)], check=True)
    with contextlib.ExitStack() as stack:
        stack.callback(_unmount, sidecar)
        stack.callback(sidecar.end)
        give_to_the_sidecar(sidecar.volume)
        yield sidecar


def wait_no_space(sidecar: RunningSidecar, within: float = 60.0, says: str = " MiB and ") -> None:
    """Wait until the state names the volume as what is full, and check that whoever administers it is answered."""
    body = sidecar.wait_state("blocked(no-space)", within)
    assert str(sidecar.volume) in body["detail"]
    wait_for(lambda: says in str(sidecar.health()["detail"]), 3, f"that it says {says!r}")
    assert sidecar.health_status() == 503
    assert administrator.ask(sidecar, "GET", "/v1/dumps").status == 200
    assert call(sidecar.control_port, "/metrics").status == 200


def fill_the_log(sidecar: RunningSidecar) -> None:
    """Have Postgres write its log until there is no room for another segment on a full volume; it ends then."""
    with contextlib.suppress(psycopg.Error), sql(sidecar) as connection:
        for _ in range(100):  # each begins a new segment, until there is no old one to be written over
            connection.execute("SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000))")
            connection.execute("SELECT pg_switch_wal()")


class Filler:
    """A file that takes what is free on a volume, all but some."""

    def __init__(self, sidecar: RunningSidecar) -> None:
        self._path = sidecar.volume / "filler"

    def leave(self, mebibytes: int) -> None:
        """Take all but so many MiB."""
        self.gone()
        status = os.statvfs(self._path.parent)
        wanted = status.f_bavail * status.f_frsize - mebibytes * 1024**2
        with self._path.open("wb") as file, contextlib.suppress(OSError):
            while wanted > 0:
                wanted -= os.write(file.fileno(), b"x" * min(wanted, 1024**2))

    def gone(self) -> None:
        """Give it all back."""
        self._path.unlink(missing_ok=True)


class FullOfFiles:
    """Files that take every inode of a volume."""

    def __init__(self, sidecar: RunningSidecar) -> None:
        self._directory = sidecar.volume / "files"
        self._made = 0

    def fill(self) -> None:
        """Take every inode that is free."""
        with contextlib.suppress(OSError):
            self._directory.mkdir(exist_ok=True)
            for _ in range(10**6):
                (self._directory / str(self._made)).touch()
                self._made += 1

    def gone(self) -> None:
        """Give them all back."""
        shutil.rmtree(self._directory)
