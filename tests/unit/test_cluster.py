import contextlib
import errno
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import cluster
from sidecar.cluster import MARKER, PID_FILE, Found, Inspection, ServerLock, StillRunningError, inspect
from sidecar.errors import BlockedError, Reason


@pytest.fixture
def pgdata(tmp_path: Path) -> Path:
    return tmp_path / "pgdata"


@pytest.fixture
def no_processes(tmp_path: Path) -> Path:
    path = tmp_path / "proc"
    path.mkdir()
    return path


def fill(pgdata: Path, *names: str, version: str | None = "18\n") -> None:
    pgdata.mkdir()
    for name in names:
        (pgdata / name).write_text("x")
    if version is not None:
        (pgdata / "PG_VERSION").write_text(version)


def blocked(pgdata: Path) -> BlockedError:
    before = sorted(path.name for path in pgdata.iterdir()) if pgdata.is_dir() else None
    with pytest.raises(BlockedError) as caught:
        inspect(pgdata)
    assert before == (sorted(path.name for path in pgdata.iterdir()) if pgdata.is_dir() else None)
    return caught.value


def test_nothing_there_and_an_empty_directory_are_nothing(pgdata: Path) -> None:
    assert inspect(pgdata) == Inspection(Found.NOTHING, None)
    pgdata.mkdir()
    assert inspect(pgdata) == Inspection(Found.NOTHING, None)


def test_what_is_no_directory_is_not_touched(pgdata: Path) -> None:
    pgdata.write_text("precious")
    assert blocked(pgdata).reason is Reason.DAMAGED_CLUSTER
    assert pgdata.read_text() == "precious"


def test_files_without_a_version_are_no_cluster_and_not_ours_to_delete(pgdata: Path) -> None:
    fill(pgdata, "base", "a", "b", "c", version=None)
    error = blocked(pgdata)
    assert error.reason is Reason.DAMAGED_CLUSTER
    assert "holds 4 entries (a, b, base)" in error.detail


def test_a_marker_alone_does_not_make_a_cluster(pgdata: Path) -> None:
    fill(pgdata, MARKER, version=None)
    assert blocked(pgdata).reason is Reason.DAMAGED_CLUSTER


def test_a_cluster_of_others_is_foreign(pgdata: Path) -> None:
    fill(pgdata, "postgresql.conf", version="17\n")
    error = blocked(pgdata)
    assert error.reason is Reason.FOREIGN_CLUSTER
    assert "PostgreSQL 17" in error.detail


@pytest.mark.parametrize(("version", "major"), [("18\n", 18), ("17", 17), ("9.6\n", 9)])
def test_a_cluster_of_ours_has_its_major(pgdata: Path, version: str, major: int) -> None:
    fill(pgdata, MARKER, version=version)
    assert inspect(pgdata) == Inspection(Found.CLUSTER, major)


@pytest.mark.parametrize("version", ["", "\n", "eighteen\n", "\u0661\u0668\n"])
@pytest.mark.parametrize("names", [(), (MARKER,)])
def test_a_version_that_is_none_is_damage(pgdata: Path, version: str, names: tuple[str, ...]) -> None:
    fill(pgdata, *names, version=version)
    error = blocked(pgdata)
    assert error.reason is Reason.DAMAGED_CLUSTER
    assert "does not name a major version" in error.detail


@pytest.mark.parametrize("names", [(), (MARKER, "PG_VERSION")])
def test_a_directory_of_another_user_is_named_with_both_uids(
    pgdata: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pgdata, *names, version=None)
    owner = pgdata.stat().st_uid
    monkeypatch.setattr(cluster.os, "geteuid", lambda: owner + 4321)
    error = blocked(pgdata)
    assert error.reason is Reason.PERMISSIONS
    assert f"belongs to {owner}:" in error.detail
    assert f"this is uid {owner + 4321}" in error.detail
    assert f"runAsUser: {owner}" in error.detail


def test_a_directory_that_may_not_be_entered_is_a_matter_of_permissions(
    pgdata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pgdata, MARKER)

    def refuse(_: Path) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(cluster.os, "listdir", refuse)
    with pytest.raises(BlockedError) as caught:
        inspect(pgdata)
    assert caught.value.reason is Reason.PERMISSIONS


# postmaster.pid ------------------------------------------------------------------------------------------------


def clear(pgdata: Path, proc: Path) -> bool:
    lock = ServerLock(pgdata)
    try:
        return cluster.clear_stale_pid_file(pgdata, lock, proc)
    finally:
        lock.release()


def test_a_stale_pid_file_is_removed_whatever_its_number(pgdata: Path, no_processes: Path) -> None:
    fill(pgdata, MARKER)
    (pgdata / PID_FILE).write_text(f"{os.getpid()}\n{pgdata}\n")
    assert clear(pgdata, no_processes)
    assert not (pgdata / PID_FILE).exists()
    assert not clear(pgdata, no_processes)


def test_without_a_directory_there_is_no_pid_file(pgdata: Path, no_processes: Path) -> None:
    assert not clear(pgdata, no_processes)


def test_a_live_postgres_keeps_its_pid_file_and_is_waited_for(pgdata: Path, no_processes: Path) -> None:
    fill(pgdata, MARKER)
    (pgdata / PID_FILE).write_text("77\n")
    (no_processes / "77").mkdir()
    (no_processes / "77/stat").write_text("77 (postgres) S 1\n")
    (no_processes / "77/cwd").symlink_to(pgdata)
    with pytest.raises(StillRunningError, match=r"PostgreSQL process 77 still works in .* `kill -INT 77`"):
        clear(pgdata, no_processes)
    assert (pgdata / PID_FILE).exists()


def test_a_pid_file_that_cannot_be_removed_is_named(pgdata: Path, no_processes: Path) -> None:
    fill(pgdata, MARKER)
    (pgdata / PID_FILE).mkdir()
    with pytest.raises(BlockedError) as caught:
        clear(pgdata, no_processes)
    assert caught.value.reason is Reason.PERMISSIONS
    assert str(pgdata / PID_FILE) in caught.value.detail


@contextlib.contextmanager
def server_out_of_sight(pgdata: Path) -> Iterator[None]:
    """Have a postmaster, started with the lock as a sidecar does it, that has a child; the postmaster is killed."""
    lock = ServerLock(pgdata)
    lock.acquire()
    with lock.handed_over() as keeps:
        script = "sleep 600 & echo $!; exec sleep 600"
        postmaster = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, pass_fds=keeps)
    assert postmaster.stdout is not None
    backend = int(postmaster.stdout.readline())
    postmaster.stdout.close()
    pidfd = os.pidfd_open(backend)
    try:
        postmaster.kill()
        postmaster.wait()
        yield
    finally:
        os.kill(backend, signal.SIGKILL)
        assert select.select([pidfd], [], [], 10)[0]
        os.close(pidfd)


def test_a_server_that_proc_does_not_show_keeps_its_pid_file_until_its_last_process_ends(
    pgdata: Path, no_processes: Path
) -> None:
    fill(pgdata, MARKER)
    (pgdata / PID_FILE).write_text("77\n")
    with server_out_of_sight(pgdata):
        for _ in range(2):
            with pytest.raises(
                StillRunningError, match=r"another pid namespace still work in .*; .* stop the container"
            ):
                clear(pgdata, no_processes)
        assert (pgdata / PID_FILE).exists()
    assert clear(pgdata, no_processes)


def free(pgdata: Path) -> bool:
    lock = ServerLock(pgdata)
    try:
        lock.acquire()
    except StillRunningError:
        return False
    lock.release()
    return True


def test_the_lock_is_taken_once_however_often_a_start_is_tried(pgdata: Path) -> None:
    lock = ServerLock(pgdata)
    lock.acquire()  # nothing is there yet
    with lock.handed_over() as keeps:
        assert keeps == ()
    fill(pgdata, MARKER)
    lock.acquire()
    lock.acquire()
    assert not free(pgdata)
    with lock.handed_over():
        pass
    assert free(pgdata)


def test_the_lock_is_that_of_the_cluster_that_is_there_now(pgdata: Path, tmp_path: Path) -> None:
    fill(pgdata, MARKER)
    lock = ServerLock(pgdata)
    lock.acquire()
    pgdata.rename(tmp_path / "kept")
    fill(pgdata, MARKER)
    lock.acquire()
    assert not free(pgdata)
    assert free(tmp_path / "kept")
    lock.release()


def test_a_mark_that_cannot_be_opened_is_named(pgdata: Path) -> None:
    pgdata.mkdir()
    (pgdata / MARKER).symlink_to("elsewhere")
    with pytest.raises(BlockedError, match=rf"{MARKER} cannot be opened .*plain file") as caught:
        ServerLock(pgdata).acquire()
    assert caught.value.reason is Reason.PERMISSIONS


def test_what_cannot_be_locked_now_is_tried_again_and_leaves_nothing_open(
    pgdata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    fill(pgdata, MARKER)
    lock = ServerLock(pgdata)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as broken:
        broken.setattr(cluster.fcntl, "flock", fails)
        for _ in range(3):
            with pytest.raises(OSError, match="No locks"):
                lock.acquire()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    lock.acquire()
    assert not free(pgdata)
    lock.release()


def test_the_lock_of_a_socket_that_a_killed_postmaster_left(tmp_path: Path) -> None:
    lock = tmp_path / ".s.PGSQL.5432.lock"
    lock.write_text(f"{os.getpid()}\n")  # a number that is in use again
    cluster.clear_stale_socket_lock(tmp_path)
    assert not lock.exists()
    cluster.clear_stale_socket_lock(tmp_path)
