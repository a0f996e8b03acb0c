"""The archive: what a dump is on the volume, and one portable tar of it in transit.

On the volume a dump is a directory with `manifest.json` and `memory.dump`; the tar is made while it is sent, with the
same bytes each time, so that its length, its hash and any range of it are known beforehand.
"""

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

from sidecar import volume
from sidecar.contents import Contents
from sidecar.errors import RefusedError

FORMAT = 2  # 1 had another hash of tables' contents, and was never released
KIND = "hindsight-sidecar-archive"
MANIFEST = "manifest.json"
DUMP = "memory.dump"
CHECKSUM = "archive.sha256"
MANIFEST_MAX = 64 * 2**20  # bytes; 2,000 tenants' definitions are about 20 MB
_CHUNK = 2**20
BLOCK = tarfile.BLOCKSIZE
_CHECKSUM_LINE = re.compile(rb"[0-9a-f]{64}  [^\n]+\n")
_END = 2 * BLOCK  # two empty blocks close a tar
Passed = Callable[[int], object]


def _nobody(_: int) -> None:
    """Hear of it, and do nothing."""


@dataclass(frozen=True)
class Manifest:
    """What an archive says of itself.

    Attributes:
        id: its name, a time and a random part.
        made: when its snapshot was taken.
        versions: of sidecar, hindsight-api, postgres and vector.
        compression: of the dump: gzip, zstd or none.
        model: identity of the embedding model; None where the database had none recorded.
        contents: what the database held in that snapshot.
        size, sha256: of the dump.
        scheduled: whether a schedule made it, and may delete it again.
        database_size: bytes that the database took there, indexes and all; None of archives that do not say.

    """

    id: str
    made: datetime
    versions: dict[str, str | None]
    compression: str
    model: dict[str, Any] | None
    contents: Contents
    size: int
    sha256: str
    scheduled: bool = False
    database_size: int | None = None

    def to_bytes(self) -> bytes:
        """Return the manifest's file."""
        told = {
            "format": FORMAT,
            "kind": KIND,
            "id": self.id,
            "made": self.made.isoformat(timespec="milliseconds"),
            "versions": self.versions,
            "compression": self.compression,
            "scheduled": self.scheduled,
            "model": self.model,
            "memories": self.contents.memories,
            "database_size": self.database_size,
            "contents": self.contents.to_json(),
            "dump": {"name": DUMP, "size": self.size, "sha256": self.sha256},
        }
        told["checksum"] = _checksum(told)
        return json.dumps(told, indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Read it back.

        Raises:
            RefusedError: it is no manifest, or one of another format.

        """
        try:
            told = json.loads(text)
            kind, version = str(told["kind"])[:60], int(told["format"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _unreadable(error) from error
        if kind != KIND:
            raise _unreadable(f"its kind is {kind!r}")
        if version != FORMAT:
            how = "use the newer sidecar that made it" if version > FORMAT else "dump the memories again with this one"
            raise RefusedError(f"the archive has format {version}, and this sidecar reads format {FORMAT}; {how}")
        if told.pop("checksum", None) != _checksum(told):
            raise _unreadable("its checksum is another one: it was damaged or changed")
        try:
            return cls._from_json(told)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RefusedError) as error:
            raise _unreadable(error) from error

    @classmethod
    def _from_json(cls, told: dict[str, Any]) -> Self:
        made = datetime.fromisoformat(told["made"])
        size = int(told["dump"]["size"])
        there = told.get("database_size")  # older archives do not say
        if size < 0 or made.tzinfo is None or made.timestamp() < 0:
            raise ValueError(f"a dump of {size} bytes, made {told['made']!r}")
        return cls(
            id=check_id(str(told["id"])),
            made=made,
            versions=dict(told["versions"]),
            compression=str(told["compression"]),
            model=told["model"],
            contents=Contents.from_json(told["contents"]),
            size=size,
            sha256=str(told["dump"]["sha256"]),
            scheduled=told.get("scheduled") is True,  # archives of before there were schedules do not say
            database_size=None if there is None else int(there),
        )


def _checksum(told: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its checksum, however it is laid out."""
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unreadable(why: object) -> RefusedError:
    return RefusedError(
        f"the archive's {MANIFEST} cannot be read ({why}); use an archive that `hindsight-sidecar dump` made"
    )


def _header(name: str, size: int, made: datetime) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(made.timestamp())
    return entry.tobuf(tarfile.USTAR_FORMAT if size < 8 * 2**30 else tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


@dataclass(frozen=True)
class Archive:
    """A dump on the volume.

    Attributes:
        directory: with its two files and the checksum of the tar.
        manifest: of it.

    """

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a finished dump. Raises RefusedError where the directory holds none, OSError where it cannot be read."""
        manifest = Manifest.from_bytes((directory / MANIFEST).read_bytes())
        size = (directory / DUMP).stat().st_size
        if size != manifest.size:
            raise RefusedError(
                f"{directory / DUMP} has {size} bytes, and its manifest says {manifest.size}; delete this dump, it is not whole"
            )
        return cls(directory, manifest)

    @property
    def size(self) -> int:
        """Bytes of the tar."""
        return sum(size for size, _ in self._parts())

    @property
    def checksum(self) -> str:
        """Hexadecimal sha256 of the tar. RefusedError where the dump has none."""
        path = self.directory / CHECKSUM
        line = path.read_bytes() if path.is_file() else b""
        if _CHECKSUM_LINE.fullmatch(line) is None:
            raise RefusedError(
                f"{path} says {line[:80]!r}, and expected is a sha256; delete this dump, it is not whole"
            )
        return line[:64].decode("ascii")

    def _parts(self) -> list[tuple[int, bytes | Path]]:
        manifest = self.manifest
        text = (self.directory / MANIFEST).read_bytes()
        before = _header(MANIFEST, len(text), manifest.made) + text + _padding(len(text))
        before += _header(DUMP, manifest.size, manifest.made)
        after = _padding(manifest.size) + bytes(_END)
        return [(len(before), before), (manifest.size, self.directory / DUMP), (len(after), after)]

    def read(self, start: int = 0, end: int | None = None) -> Generator[bytes]:
        """Yield the bytes of the tar from `start` up to and without `end`, in pieces of at most 1 MiB.

        Raises:
            OSError: the dump cannot be read, or is shorter than its manifest says.

        """
        end = self.size if end is None else end
        offset = 0
        for size, part in self._parts():
            first, last = max(start - offset, 0), min(end - offset, size)
            if first < last:
                yield from _slice(part, first, last)
            offset += size

    def hash(self, passed: Passed = _nobody) -> str:
        """Return the hexadecimal sha256 of the whole tar; reads all of it, and `passed` hears of how many bytes went by."""
        seen = hashlib.sha256()
        for piece in self.read():
            seen.update(piece)
            passed(len(piece))
        return seen.hexdigest()

    def check(self, passed: Passed = _nobody) -> None:
        """Read the dump, and compare it with the manifest: its list of contents alone can be read of a damaged one too.

        Raises:
            RefusedError: it is another one.
            OSError: it cannot be read.

        """
        seen = hash_file(self.directory / DUMP, passed)
        if seen != self.manifest.sha256:
            raise RefusedError(f"{DUMP} has sha256 {seen}, and its manifest says {self.manifest.sha256}")


def _slice(part: bytes | Path, first: int, last: int) -> Iterator[bytes]:
    with io.BytesIO(part) if isinstance(part, bytes) else part.open("rb") as file:
        file.seek(first)
        while first < last:
            piece = file.read(min(_CHUNK, last - first))
            if not piece:
                raise OSError(f"{part if isinstance(part, Path) else 'the manifest'} ended {last - first} bytes early")
            first += len(piece)
            yield piece


def finish(directory: Path, manifest: Manifest, passed: Passed = _nobody) -> Archive:
    """Write manifest and checksum beside a dump that is there, all of it on disk before this returns.

    Reads all of it once, and `passed` hears of how many bytes went by.

    Raises:
        OSError: it cannot be written.

    """
    volume.write(directory / MANIFEST, manifest.to_bytes())
    archive = Archive.open(directory)
    volume.write(directory / CHECKSUM, _checksum_line(archive, passed))
    volume.sync(directory)
    return archive


def _checksum_line(archive: Archive, passed: Passed) -> bytes:
    """Return what sha256sum would say of the tar; reads all of it."""
    return f"{archive.hash(passed)}  {archive.manifest.id}.tar\n".encode()


def read_back(directory: Path, passed: Passed = _nobody) -> Archive:
    """Read a dump that was just written once more, all of it and from the disk, and compare it with what was to be written.

    It is read twice, and `passed` hears of how many bytes went by.

    Raises:
        RefusedError: it is another one.
        OSError: it cannot be read.

    """
    for name in (MANIFEST, DUMP, CHECKSUM):
        _forget(directory / name)
    found = Archive.open(directory)
    found.check(passed)
    line = _checksum_line(found, passed)
    if (said := (directory / CHECKSUM).read_bytes()) != line:
        raise RefusedError(f"{CHECKSUM} says {said[:80]!r}, and the archive's is {line!r}")
    return found


def _forget(path: Path) -> None:
    """Let the system forget what it has of a file in memory, so that it is read from the disk; some filesystems do not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def hash_file(path: Path, passed: Passed = _nobody) -> str:
    """Return the hexadecimal sha256 of a file; `passed` hears of how many bytes went by."""
    seen = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            seen.update(piece)
            passed(len(piece))
    return seen.hexdigest()


def is_tar(first_block: bytes) -> bool:
    """Tell whether a file that begins like this is a tar whose first member is a manifest."""
    return first_block[:100].rstrip(b"\0") == MANIFEST.encode() and first_block[257:262] == b"ustar"


def unpack(file: Path, into: Path, passed: Passed = _nobody) -> Archive:
    """Unpack an archive's tar into a new directory, both members checked against the manifest.

    `passed` hears of how many bytes of the dump went by.

    Raises:
        RefusedError: it is not an archive, or not whole, or not what it says.
        OSError: it cannot be read or written.

    """
    descriptor = os.open(into / DUMP, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with file.open("rb") as source, os.fdopen(descriptor, "wb") as target:

        def take(piece: bytes) -> None:
            passed(target.write(piece))

        text, manifest = read_through(source, take)
    volume.write(into / MANIFEST, text)
    return Archive(into, manifest)


def read_through(source: BinaryIO, sink: Callable[[bytes], object]) -> tuple[bytes, Manifest]:
    """Read an archive's tar once from its beginning, hand the dump to `sink` piece by piece, and check all of it.

    The two headers are read here and not by tarfile, which follows other members' names and sizes wherever they lead.
    Returns the manifest's text, and what it says.

    Raises:
        RefusedError: it is not an archive, or not whole, or not what it says; the sink may have had a part of the dump.
        OSError: it cannot be read.

    """
    size = manifest_size(_exactly(source, BLOCK, MANIFEST))
    text = _exactly(source, size, MANIFEST)
    _nothing(source, len(_padding(size)), f"the padding of {MANIFEST}")
    manifest = Manifest.from_bytes(text)
    size = _member(source, DUMP)
    if size != manifest.size:
        raise RefusedError(f"{DUMP} has {size} bytes, and the manifest says {manifest.size}; fetch the archive again")
    seen = hashlib.sha256()
    left = size
    while left > 0:
        piece = _exactly(source, min(_CHUNK, left), DUMP)
        seen.update(piece)
        sink(piece)
        left -= len(piece)
    if seen.hexdigest() != manifest.sha256:
        raise RefusedError(
            f"{DUMP} has sha256 {seen.hexdigest()}, and its manifest says {manifest.sha256}; it was damaged on the way, "
            "fetch it again"
        )
    _nothing(source, len(_padding(size)) + _END, "its end")
    return text, manifest


def manifest_size(header: bytes) -> int:
    """Return the size in bytes of the manifest, whose header is the first block of an archive.

    Raises:
        RefusedError: it is none of an archive's.

    """
    size = _member(io.BytesIO(header), MANIFEST)
    if not 0 < size <= MANIFEST_MAX:
        raise RefusedError(f"{MANIFEST} would have {size} bytes; use an archive that `hindsight-sidecar dump` made")
    return size


def _member(source: BinaryIO, name: str) -> int:
    """Read the header of the member that has to follow, and return its size in bytes."""
    header = _exactly(source, BLOCK, name)
    try:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise RefusedError(f"the archive's header of {name} cannot be read ({error}); fetch it again") from error
    if member.name != name or not member.isreg():
        raise RefusedError(
            f"the archive has {member.name[:60]!r} where {name} was expected; use one that `hindsight-sidecar dump` made"
        )
    return member.size


def _nothing(source: BinaryIO, size: int, what: str) -> None:
    """Read what is empty in a tar, so that whoever cut or damaged it there is told too."""
    if any(_exactly(source, size, what)):
        raise RefusedError(
            f"the archive has other bytes than zeros in {what}; it was damaged on the way, fetch it again"
        )


def _exactly(source: BinaryIO, size: int, what: str) -> bytes:
    pieces = []
    while size:
        piece = source.read(size)
        if not piece:
            raise RefusedError(f"the archive is cut short in {what}; fetch it again")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def new_id(now: datetime | None = None) -> str:
    """Return a name for something made now: it sorts by time, and two of one second differ."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{os.urandom(2).hex()}"


def check_id(text: str) -> str:
    """Return a dump's name that came from outside, if it can be one.

    Raises:
        RefusedError: it cannot; nothing is looked up in the file system for it.

    """
    time, _, rest = text.partition("-")
    if len(text) > 40 or not (text.isascii() and time.replace("T", "").replace("Z", "").isdigit() and rest.isalnum()):  # noqa: PLR2004
        raise RefusedError(
            f"{text[:60]!r} is not the name of a dump; `hindsight-sidecar operations` and GET /v1/dumps list them"
        )
    return text


def as_mapping(archive: Archive) -> Mapping[str, Any]:
    """Return what a list of dumps says of one."""
    manifest = archive.manifest
    return {
        "id": manifest.id,
        "made": manifest.made.isoformat(timespec="milliseconds"),
        "size": archive.size,
        "sha256": archive.checksum,
        "memories": manifest.contents.memories,
        "versions": manifest.versions,
        "model": manifest.model,
        "compression": manifest.compression,
        "scheduled": manifest.scheduled,
    }
