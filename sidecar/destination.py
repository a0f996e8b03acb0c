"""Where an archive is written to: a file that appears whole or not at all, or standard output."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from sidecar.errors import RefusedError, SidecarError
from sidecar.volume import sync

STDIO = "-"


@contextlib.contextmanager
def destination(output: str, *, force: bool) -> Iterator[Callable[[bytes], object]]:
    """Have a place to write to: standard output, or a file that appears under its name whole or not at all.

    Raises:
        RefusedError: the file is there already.
        SidecarError, OSError: it cannot be written.

    """
    if output == STDIO:
        if sys.stdout.isatty():
            raise SidecarError("an archive is not for a terminal; redirect the output, or name a FILE with -o")
        yield _write_to_stdout
        return
    path = Path(output)
    _check_absent(path, force=force)
    partial = path.with_name(f"{path.name}.partial")
    with _only_writer(partial) as file:
        try:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
            _check_absent(path, force=force)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync(path.absolute().parent)


def _check_absent(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise SidecarError(f"{path} is a directory; name a file in it")
    if not force and (path.exists() or path.is_symlink()):
        raise RefusedError(f"{path} is there already; nothing was written: name another file, or add --force")


@contextlib.contextmanager
def _only_writer(partial: Path) -> Iterator[BinaryIO]:
    """Open a partial file that no other command writes, private from its first byte on."""
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SidecarError(f"another command writes {partial}; wait for it, or name another file") from None
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 0)
        yield file


def _write_to_stdout(piece: bytes) -> None:
    # Past Python's own buffer, which would be written once more as the interpreter ends, and hide that it failed.
    left = memoryview(piece)
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]
