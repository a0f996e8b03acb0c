"""The volume: whether it can be used, and the lock that keeps every other sidecar off it."""

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import NamedTuple, Self

from sidecar.errors import BlockedError, Reason
from sidecar.processes import PROC
from sidecar.sizing import MIB

LOCK = ".lock"
_ENOUGH = 32 * MIB  # two segments of Postgres' log
_ENOUGH_INODES = 16
# What a container keeps here is gone with the container.
_VANISHING = frozenset({"overlay", "aufs", "tmpfs", "ramfs"})


class Mount(NamedTuple):
    """One line of mountinfo."""

    point: Path
    filesystem: str


def _unescape(text: str) -> str:
    return (
        text.encode("utf-8", "surrogateescape")
        .decode("unicode_escape")
        .encode("latin-1")
        .decode("utf-8", "surrogateescape")
    )


def mounts(mountinfo: Path = PROC / "self/mountinfo") -> list[Mount]:
    """Read what is mounted where, in the order of mounting."""
    found = []
    for line in mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        found.append(Mount(Path(_unescape(before.split()[4])), after.split()[0]))
    return found


def mount_of(path: Path, table: list[Mount]) -> Mount:
    """Return the mount that holds `path`: the deepest one, and of several on one point the last."""
    holding = [mount for mount in table if path.is_relative_to(mount.point)]
    return max(enumerate(holding), key=lambda item: (len(item[1].point.parts), item[0]))[1]


def check_layout(pgdata: Path, *, ephemeral: bool, table: list[Mount] | None = None) -> None:
    """Check that PGDATA is a subdirectory of something that outlives the container.

    Raises:
        BlockedError: `volume-layout`, with the line to change.

    """
    table = mounts() if table is None else table
    real = Path(os.path.realpath(pgdata))
    if any(mount.point == real for mount in table):
        raise BlockedError(
            Reason.VOLUME_LAYOUT,
            f"PGDATA {pgdata} is itself a mount point, and nothing can be renamed into place there; "
            f"mount the volume at {pgdata.parent} instead (mountPath: {pgdata.parent})",
        )
    mount = mount_of(real.parent, table)
    if mount.filesystem in _VANISHING and not ephemeral:
        raise BlockedError(
            Reason.VOLUME_LAYOUT,
            f"{pgdata.parent} lies on {mount.filesystem} ({mount.point}), which is gone with the container; mount a volume "
            f"at {pgdata.parent}, or set HINDSIGHT_SIDECAR_EPHEMERAL=true to keep nothing",
        )


def _who() -> str:
    return f"uid {os.geteuid()}, gid {os.getegid()}"


def _owner(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return f"owner {status.st_uid}:{status.st_gid}, mode {status.st_mode & 0o7777:04o}"


def _free(path: Path) -> str:
    try:
        return str(space(path))
    except OSError as error:
        return f"what is free cannot be told: {error.strerror}"


def _denied(path: Path, deed: str, error: OSError) -> BlockedError:
    """Turn a failed deed into the reason it stands for."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BlockedError(
            Reason.NO_SPACE,
            f"cannot {deed} {path}: {error.strerror} ({_free(path)}); free some, or grow the volume",
            retry_after=10,
        )
    return BlockedError(
        Reason.PERMISSIONS,
        f"cannot {deed} {path} as {_who()} ({error.strerror}; {path} {_owner(path)}); give the volume to this user: "
        f"securityContext.fsGroup: {os.getegid()}, or runAsUser: the owner's uid, or `chown {os.geteuid()} {path}`",
    )


def check_access(volume: Path) -> None:
    """Check, step by step, that we can enter the volume and make things in it.

    Raises:
        BlockedError: `permissions` or `no-space`, naming the step that failed.

    """
    if not volume.exists():
        try:
            volume.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise _denied(volume.parent, f"make {volume.name} in", error) from error
    if not volume.is_dir():
        raise BlockedError(Reason.VOLUME_LAYOUT, f"{volume} is not a directory; mount the volume there")
    try:
        os.scandir(volume).close()
    except OSError as error:
        raise _denied(volume, "enter", error) from error
    probe = volume / f".probe-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise _denied(volume, "make a directory in", error) from error


class VolumeLock:
    """The flock on the volume, held for the sidecar's life.

    It excludes across containers and pid namespaces, which Postgres' own lock file cannot do. The descriptor is
    close-on-exec: a child that outlives us must not keep the next sidecar out.
    """

    def __init__(self, volume: Path) -> None:
        self.path = volume / LOCK
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> Self:
        """Take the lock, or find that another sidecar has it.

        Raises:
            BlockedError: `volume-locked`, `permissions` or `no-space`.

        """
        if self._descriptor is not None:
            return self
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise BlockedError(
                    Reason.VOLUME_LAYOUT,
                    f"{self.path} is a directory or a link, and has to be the sidecar's own plain file; move it away",
                ) from error
            raise _denied(self.path, "open", error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BlockedError(
                Reason.VOLUME_LOCKED,
                f"another sidecar holds {self.path}; it goes on untouched and this one takes over when it ends "
                "(a Deployment needs strategy: Recreate, and one replica)",
                retry_after=1,
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise BlockedError(
                Reason.VOLUME_LAYOUT,
                f"{self.path} cannot be locked ({error.strerror}); the volume's filesystem must support flock",
            ) from error
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Give the lock back; the process' end does the same."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Space(NamedTuple):
    """What an unprivileged process can still have of a file system.

    Attributes:
        free: bytes that can still be written.
        inodes: files that can still be made, None where it does not count them.
        size: bytes of the file system, free or not.

    """

    free: int
    inodes: int | None
    size: int

    def __str__(self) -> str:
        return f"{self.free // MIB} MiB" + ("" if self.inodes is None else f" and {self.inodes} inodes") + " free now"

    @property
    def enough(self) -> bool:
        """Whether Postgres can go on with it."""
        return self.free >= _ENOUGH and (self.inodes is None or self.inodes >= _ENOUGH_INODES)


def space(volume: Path) -> Space:
    """Look at what is free on the volume."""
    status = os.statvfs(volume)
    return Space(
        free=status.f_bavail * status.f_frsize,
        inodes=status.f_favail if status.f_files else None,
        size=status.f_blocks * status.f_frsize,
    )


def free_bytes(volume: Path) -> int:
    """Return how many bytes an unprivileged process can still write to the volume."""
    return space(volume).free


def sync(path: Path) -> None:
    """Bring a file or a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Write a private file, all of it on disk before this returns; a kill may leave half of it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, whenever this is killed and wherever the power goes."""
    written = path.with_name(f"{path.name}.new")
    write(written, content)
    written.rename(path)
    sync(path.parent)


def size(directory: Path) -> int:
    """Return the bytes of all files below a directory, which may come and go meanwhile."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(path) / name).lstat().st_size
    return total
