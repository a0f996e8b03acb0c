"""A directory that appears under its name complete and durable, or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bake.errors import BakeError
from bake.layout import walk

FILE_MODE = 0o644
DIRECTORY_MODE = 0o755


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Give a directory beside ``target``, kept from an interrupted run if there was one, to one process at a time.

    Raises BakeError when another process is at work on the same target.
    """
    staged = target.with_name(f".{target.name}.staging")
    if not target.parent.is_dir():
        target.parent.mkdir(parents=True)
        # Made by us, so any uid has to get through it, whatever the umask says.
        target.parent.chmod(DIRECTORY_MODE)
    descriptor = _lock(staged)
    try:
        restore(target)
        yield staged
    finally:
        os.close(descriptor)


def _lock(staged: Path) -> int:
    # The directory itself is what is locked: no lock file stays behind, and a killed process releases it.
    while True:
        staged.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        descriptor = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BakeError(f"{staged} is in use: another hindsight-bake makes the same model directory") from None
        try:
            if os.path.samestat(os.fstat(descriptor), staged.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # its holder published it between our open and our lock
        os.close(descriptor)


def restore(target: Path) -> None:
    """Undo the first half of a replacement that was killed between its two renames."""
    replaced = _replaced(target)
    if not replaced.is_dir():
        return
    if target.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(target)


def empty(directory: Path, *, keep: frozenset[str] = frozenset()) -> None:
    """Remove everything below the directory but the files named in ``keep``, and directories left empty."""
    for path in reversed(list(walk(directory))):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(directory).as_posix() not in keep:
            path.unlink()


def publish(staged: Path, target: Path) -> None:
    """Settle modes, make the content durable, and give it the final name; a former directory is removed after that.

    Raises OSError.
    """
    paths = [staged, *walk(staged)]
    for path in paths:
        path.chmod(DIRECTORY_MODE if path.is_dir() else FILE_MODE)
        _sync(path)
    replaced = _replaced(target)
    if target.is_dir() and any(target.iterdir()):
        target.rename(replaced)
    staged.rename(target)
    _sync(target.parent)
    if replaced.is_dir():
        shutil.rmtree(replaced)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
