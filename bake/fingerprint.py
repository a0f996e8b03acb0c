"""What a file is, in numbers: size, sha256, and the id git and the hub would give it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20
# The text git has in place of a large file that was never fetched.
LFS_POINTER_START = b"version https://git-lfs"
LFS_POINTER_MAX = 1024


@dataclass(frozen=True)
class Fingerprint:
    """One file's content.

    Attributes:
        size: bytes.
        sha256: hexadecimal.
        blob_id: git's own sha1 of the content, which the hub advertises for files that are not in LFS.

    """

    size: int
    sha256: str
    blob_id: str


def fingerprint(path: Path) -> Fingerprint:
    """Read the whole file once. Raises OSError."""
    size = path.stat().st_size
    sha256 = hashlib.sha256()
    # S324 is about trust: git defines this name as sha1, and sha256 is compared besides wherever one is known.
    blob = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            sha256.update(chunk)
            blob.update(chunk)
    return Fingerprint(size=size, sha256=sha256.hexdigest(), blob_id=blob.hexdigest())


def is_lfs_pointer(path: Path) -> bool:
    """Tell whether the file is git-lfs' stand-in text and not the content it stands for."""
    if path.stat().st_size > LFS_POINTER_MAX:
        return False
    with path.open("rb") as stream:
        return stream.read(len(LFS_POINTER_START)) == LFS_POINTER_START


def differences(path: str, seen: Fingerprint, *, size: int | None, sha256: str | None, by: str) -> list[str]:
    """Sentences for what differs from the expected size and sha256 (None: not known to ``by``)."""
    if size is not None and seen.size != size:
        return [f"{path}: {seen.size} bytes, {by} says {size}"]
    if sha256 is not None and seen.sha256 != sha256:
        return [f"{path}: sha256 {seen.sha256}, {by} says {sha256}"]
    return []
