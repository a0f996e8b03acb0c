"""The data directory before Postgres may touch it: whose it is, what made it, what a dead server left in it."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sidecar import processes
from sidecar.errors import BlockedError, Reason, TransientError
from sidecar.paths import POSTGRES_SOCKET

MARKER = "hindsight-sidecar.marker"  # written by initscripts/10-initdb before the cluster gets its final name
PID_FILE = "postmaster.pid"
_NO_PLAIN_FILE_OF_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.EISDIR})


class Found(Enum):
    """What is at PGDATA."""

    NOTHING = "nothing"
    CLUSTER = "cluster"
    FOREIGN = "foreign"  # a whole cluster that this sidecar did not make


class StillRunningError(TransientError):
    """A PostgreSQL that is not our child works in the data directory; one that lost its sidecar is about to end."""


@dataclass(frozen=True)
class Inspection:
    """What is at PGDATA.

    Attributes:
        found: nothing yet, a cluster of ours, or one that others made.
        major: the cluster's PG_VERSION, None where there is no cluster.

    """

    found: Found
    major: int | None


def inspect(pgdata: Path) -> Inspection:
    """Look at a data directory that is to be used, without changing anything.

    Raises:
        BlockedError: as `look`, and `foreign-cluster`.

    """
    seen = look(pgdata)
    if seen.found is Found.FOREIGN:
        raise BlockedError(
            Reason.FOREIGN_CLUSTER,
            f"PGDATA {pgdata} is a cluster of PostgreSQL {seen.major} that this sidecar did not make, and nothing in it was "
            "touched; run `hindsight-sidecar adopt` to bring its memories over, or point PGDATA at another directory",
        )
    return seen


def look(pgdata: Path) -> Inspection:
    """Look at a data directory without changing anything.

    Raises:
        BlockedError: `permissions`, `volume-layout` or `damaged-cluster`.

    """
    try:
        names = set(os.listdir(pgdata))  # noqa: PTH208 - names are all that is wanted
        owner = pgdata.stat().st_uid
    except FileNotFoundError:
        if pgdata.is_symlink():
            raise BlockedError(
                Reason.VOLUME_LAYOUT,
                f"PGDATA {pgdata} is a link to {pgdata.readlink()}, which is not there; remove the link",
            ) from None
        return Inspection(Found.NOTHING, None)
    except NotADirectoryError:
        raise BlockedError(Reason.DAMAGED_CLUSTER, f"PGDATA {pgdata} is not a directory; move it away") from None
    except PermissionError:
        raise _not_ours(pgdata) from None
    if owner != os.geteuid():
        # Before the content counts: an empty directory of another user's could not be renamed over either.
        raise _not_ours(pgdata)
    if not names:
        return Inspection(Found.NOTHING, None)
    if "PG_VERSION" not in names:
        raise BlockedError(
            Reason.DAMAGED_CLUSTER,
            f"PGDATA {pgdata} holds {len(names)} entries ({', '.join(sorted(names)[:3])}) and no PG_VERSION; it is not a "
            "whole cluster and not ours to delete: move it away, or restore it",
        )
    return Inspection(Found.CLUSTER if MARKER in names else Found.FOREIGN, _major(pgdata))


def _not_ours(pgdata: Path) -> BlockedError:
    status = pgdata.stat()
    return BlockedError(
        Reason.PERMISSIONS,
        f"PGDATA {pgdata} belongs to {status.st_uid}:{status.st_gid} with mode {status.st_mode & 0o7777:04o}, and this is uid "
        f"{os.geteuid()}; PostgreSQL needs to own it: set securityContext.runAsUser: {status.st_uid} "
        f"(or HINDSIGHT_SIDECAR_RUN_AS={status.st_uid} as root), or `chown -R {os.geteuid()} {pgdata}`",
    )


def _major(pgdata: Path) -> int:
    path = pgdata / "PG_VERSION"
    try:
        return int(path.read_text(encoding="ascii").strip().split(".")[0])
    except (OSError, ValueError) as error:
        raise BlockedError(
            Reason.DAMAGED_CLUSTER, f"{path} does not name a major version ({error}); restore the cluster from a copy"
        ) from error


def clear_stale_socket_lock(socket_dir: Path) -> None:
    """Remove the lock file that a killed postmaster left beside its socket: its number may by now be any process' of ours.

    Only for the holder of the run directory's lock, before its own postmaster is started there.
    """
    (socket_dir / f"{POSTGRES_SOCKET}.lock").unlink(missing_ok=True)


class ServerLock:
    """The flock on a cluster's mark that every process of its server holds, as the postmaster inherits it.

    /proc tells of the processes in our own pid namespace; this tells of those in any. A sidecar that was killed there left
    the volume's lock, and its Postgres, in the middle of its shutdown, holds this one.
    """

    def __init__(self, pgdata: Path) -> None:
        self._mark = pgdata / MARKER
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take it for a postmaster to come; where there is no cluster of ours yet, there is nothing to take.

        Raises:
            StillRunningError: processes of a server that runs have it.
            BlockedError: `permissions`.
            OSError: it cannot be locked now.

        """
        try:
            descriptor = os.open(self._mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # NFS locks what can be written
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _NO_PLAIN_FILE_OF_OURS:
                raise
            raise BlockedError(
                Reason.PERMISSIONS,
                f"{self._mark} cannot be opened ({error.strerror}); it has to be a plain file of uid {os.geteuid()}, which may write it",
            ) from error
        with contextlib.ExitStack() as unless_kept:
            unless_kept.callback(os.close, descriptor)
            if self._descriptor is not None:
                if os.path.sameopenfile(self._descriptor, descriptor):  # of a start that got no postmaster
                    return
                self.release()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StillRunningError(
                    f"PostgreSQL processes of another pid namespace still work in {self._mark.parent}; they are left to end by "
                    "themselves (if they do not: stop the container that has them)"
                ) from None
            unless_kept.pop_all()
            self._descriptor = descriptor

    def release(self) -> None:
        """Give it back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[tuple[int, ...]]:
        """Yield what a postmaster has to inherit. Afterwards it is the server's alone, until its last process ends."""
        yield () if self._descriptor is None else (self._descriptor,)
        self.release()


def clear_stale_pid_file(pgdata: Path, lock: ServerLock, proc: Path = processes.PROC) -> bool:
    """Remove the pid file of a postmaster that is gone, with `lock` taken; return whether there was one.

    Only for the holder of the volume's lock. The number in the file proves nothing, as it may by now be one of our own
    threads or any other process.

    Raises:
        StillRunningError: PostgreSQL processes still work in the directory, in this pid namespace or in another one.
        BlockedError: `permissions`.

    """
    if not pgdata.is_dir():
        return False
    alive = processes.postgres_in(pgdata, proc)
    if alive:
        raise StillRunningError(
            f"PostgreSQL process {alive[0]} still works in {pgdata}; it is left to end by itself "
            f"(if it does not: stop whatever started it, or `kill -INT {alive[0]}`)"
        )
    lock.acquire()
    path = pgdata / PID_FILE
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise BlockedError(
            Reason.PERMISSIONS, f"cannot remove the stale {path} ({error.strerror}); remove it"
        ) from error
    return True
