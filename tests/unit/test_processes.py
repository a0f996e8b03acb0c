"""A /proc made by hand: what must be seen in the real one cannot be made to happen there."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.processes import (
    AtWork,
    Listener,
    Process,
    all_processes,
    children,
    kill,
    listener,
    member,
    memory,
    postgres_in,
    title,
)


class Proc:
    def __init__(self, root: Path) -> None:
        self.root = root / "proc"
        self.root.mkdir()
        for name in ("self", "sys", "uptime.d"):
            (self.root / name).mkdir()
        (self.root / "stat").write_text("cpu 1 2 3\n")

    def add(self, pid: int, name: str, cwd: Path | None, state: str = "S", entry: str | None = None) -> None:
        directory = self.root / (entry or str(pid))
        directory.mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} ({name}) {state} 1 {pid} {pid} 0 -1 4194560\n")
        if cwd is not None:
            (directory / "cwd").symlink_to(cwd)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.fixture
def pgdata(tmp_path: Path) -> Path:
    path = tmp_path / "pgdata"
    path.mkdir()
    return path


def test_a_postgres_that_works_in_the_directory_is_found(proc: Proc, pgdata: Path) -> None:
    proc.add(41, "postgres", pgdata)
    proc.add(7, "postmaster", pgdata, "D")
    assert postgres_in(pgdata, proc.root) == [7, 41]


def test_it_is_found_by_any_path_that_leads_there(proc: Proc, pgdata: Path, tmp_path: Path) -> None:
    (tmp_path / "other-name").symlink_to(pgdata)
    proc.add(41, "postgres", tmp_path / "other-name")
    assert postgres_in(pgdata, proc.root) == [41]
    assert postgres_in(tmp_path / "other-name", proc.root) == [41]


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_dead_one_that_nobody_waited_for_does_not_count(state: str, proc: Proc, pgdata: Path) -> None:
    proc.add(41, "postgres", pgdata, state)
    assert postgres_in(pgdata, proc.root) == []


def test_one_of_another_directory_does_not_count(proc: Proc, pgdata: Path, tmp_path: Path) -> None:
    (tmp_path / "sibling").mkdir()
    proc.add(41, "postgres", tmp_path / "sibling")
    assert postgres_in(pgdata, proc.root) == []


def test_another_program_in_the_directory_does_not_count(proc: Proc, pgdata: Path) -> None:
    proc.add(41, "bash", pgdata)
    proc.add(42, "pg_dump", pgdata)
    assert postgres_in(pgdata, proc.root) == []


def test_a_thread_is_no_process(proc: Proc, pgdata: Path) -> None:
    # A2: the number of a dead postmaster may by now be a thread of ours.
    proc.add(40, "python3", pgdata)
    proc.add(41, "postgres", pgdata, entry="40/task/41")
    assert postgres_in(pgdata, proc.root) == []


def test_one_that_may_not_be_looked_at_does_not_count(proc: Proc, pgdata: Path) -> None:
    proc.add(41, "postgres", None)
    assert postgres_in(pgdata, proc.root) == []


@pytest.mark.parametrize("name", ["tmux: server", "a) Z 1 (b", ")", "(sd-pam)", "postgres) Z (x", "\u00e9"])
def test_names_may_hold_anything(name: str, proc: Proc, pgdata: Path) -> None:
    proc.add(41, name, pgdata)
    status = pgdata.stat()
    assert list(all_processes(proc.root)) == [Process(41, name, "S", (status.st_dev, status.st_ino))]
    assert postgres_in(pgdata, proc.root) == []


def test_one_that_ends_while_it_is_looked_at_is_left_out(proc: Proc, pgdata: Path) -> None:
    (proc.root / "41").mkdir()
    proc.add(42, "postgres", pgdata)
    assert [process.pid for process in all_processes(proc.root)] == [42]


def test_the_real_proc_has_this_process() -> None:
    here = Path.cwd().stat()
    found = {process.pid: process for process in all_processes()}
    assert found[os.getpid()].cwd == (here.st_dev, here.st_ino)
    assert postgres_in(Path("/proc")) == []


def test_the_memory_of_a_process() -> None:
    assert memory(os.getpid()) > 1024**2
    assert memory(2**22 + 1) == 0


def test_the_children_of_a_process_and_their_end() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        deadline = time.monotonic() + 20
        while title(child) != "sleep 60":  # it was forked, and becomes another program in a moment
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = children(parent.pid)
        assert [one.pid for one in found] == [child]
        kill([replace(found[0], started=found[0].started - 1)])  # by that number another one, long gone
        assert member(child) == found[0]
        kill(found)
        parent.wait(20)
    assert children(parent.pid) == []
    assert member(parent.pid) is None
    kill(found)


def test_a_process_is_at_work_where_it_uses_a_core_and_not_where_it_waits_or_is_stopped() -> None:
    turning = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", turning], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            work = AtWork(process.pid)
            deadline = time.monotonic() + 20
            while work.seen() == -math.inf:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGSTOP)
            while (found := member(process.pid)) is not None and found.state != "T":
                assert time.monotonic() < deadline
            seen = work.seen()  # what it used until then
            time.sleep(0.05)  # in which it could use something
            assert work.seen() == seen
        finally:
            process.kill()
    assert work.seen() == seen, "it is gone"
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            waits = AtWork(process.pid)
            time.sleep(0.05)
            assert waits.seen() == -math.inf
        finally:
            process.kill()


@pytest.mark.parametrize("ticks", [0, 1, 4, 6, 50])
def test_a_fifth_of_a_core_since_the_look_before_is_work(
    ticks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    now = 1000.0
    monkeypatch.setattr("sidecar.processes.time.monotonic", lambda: now)

    def uses(own: int, for_it: int) -> None:
        fields = ["S", *["0"] * 10, str(own), str(for_it), *["0"] * 6, "5", "4096"]
        (tmp_path / "7/stat").write_text(f"7 (api (x)) {' '.join(fields)}\n")

    works = ticks > 5  # a fifth of 25
    uses(100, 200)
    work = AtWork(7, tmp_path)
    now += 0.25
    uses(100, 200 + ticks)
    assert work.seen() == (now if works else -math.inf)
    now += 0.25
    assert work.seen() == (now - 0.25 if works else -math.inf), "it has used nothing since"


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_on_a_port(family: int, host: str) -> None:
    with socket.socket(family) as ours, subprocess.Popen(["/bin/sleep", "60"]) as other:
        try:
            try:
                ours.bind((host, 0))
            except OSError:
                assert family == socket.AF_INET6, "a machine may have no IPv6"
                return
            port = ours.getsockname()[1]
            assert listener(port, os.getpid()) is Listener.NOBODY, "it has the port, and does not listen"
            ours.listen()
            assert listener(port, os.getpid()) is Listener.ITSELF
            assert listener(port, other.pid) is Listener.ANOTHER
            with socket.create_connection((host, port)):
                assert listener(port, other.pid) is Listener.ANOTHER
        finally:
            other.kill()
    assert listener(port, os.getpid()) is Listener.NOBODY


def test_a_process_that_is_gone_listens_to_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
        assert listener(ours.getsockname()[1], gone.pid) is Listener.NOBODY


def proc_of(directory: Path, *, memory: int, tables: bool = True) -> Path:
    """Make a /proc with somebody who listens on port 80, and a process 7 that may not be looked into."""
    if tables:
        (directory / "self/net").mkdir(parents=True)
        line = "   0: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1"
        (directory / "self/net/tcp").write_text(f"  sl  local_address\n{line}\n")
    (directory / "7").mkdir()
    fields = ["S", *["0"] * 18, "5", str(memory)]
    (directory / "7/stat").write_text(f"7 (api) {' '.join(fields)}\n")
    return directory


@pytest.mark.parametrize(
    ("memory", "error", "who"),
    [
        (4096, PermissionError, Listener.UNKNOWN),
        (0, PermissionError, Listener.NOBODY),  # it is ending
        (4096, OSError, Listener.NOBODY),
    ],
)
def test_one_that_may_not_be_looked_into(
    memory: int, error: type[OSError], who: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Path) -> None:
        raise error("no")

    monkeypatch.setattr(Path, "iterdir", fails)
    assert listener(80, 7, proc_of(tmp_path, memory=memory)) is who
    assert listener(81, 7, tmp_path) is Listener.NOBODY


def test_where_no_sockets_are_shown_who_listens_is_not_known(tmp_path: Path) -> None:
    assert listener(80, 7, proc_of(tmp_path, memory=4096, tables=False)) is Listener.UNKNOWN
