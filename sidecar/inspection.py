"""`hindsight-sidecar verify`: what a file says of itself and whether it is whole, with no server and no sidecar.

An archive is read once, as a stream: nothing is unpacked, however large it is.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from sidecar import archive, dump_file
from sidecar.archive import Manifest
from sidecar.dump_file import Header
from sidecar.errors import RefusedError, VerificationError

_BLOCK = 512  # bytes of a tar's header
_CHUNK = 2**20


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        name: of the file.
        size, sha256: of the whole file.
        manifest: of an archive; None where the file is a plain dump.
        header: of a plain dump; None where the file is an archive.

    """

    name: str
    size: int
    sha256: str
    manifest: Manifest | None = None
    header: Header | None = None

    @property
    def proved(self) -> bool:
        """Whether the file is shown to be whole."""
        return self.manifest is not None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        found: dict[str, Any] = {"file": self.name, "size": self.size, "sha256": self.sha256, "proved": self.proved}
        if self.manifest is not None:
            contents = self.manifest.contents
            found["archive"] = {
                "id": self.manifest.id,
                "made": self.manifest.made.isoformat(timespec="milliseconds"),
                "versions": self.manifest.versions,
                "compression": self.manifest.compression,
                "model": self.manifest.model,
                "memories": contents.memories,
                "tables": {name: table.rows for name, table in sorted(contents.tables.items())},
                "indexes": len(contents.indexes),
                "constraints": len(contents.constraints),
            }
        if self.header is not None:
            found["dump"] = {
                "database": self.header.database,
                "postgres": self.header.server,
                "pg_dump": self.header.pg_dump,
                "compression": self.header.compression,
            }
        return found


def inspect(path: Path) -> Inspection:
    """Look at a file.

    Raises:
        VerificationError: it is damaged, cut short, or no archive and no dump at all.
        OSError: it cannot be read.

    """
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_BLOCK)
        file.seek(0)
        try:
            if archive.is_tar(begin):
                hashing = _Hashing(file)
                _, manifest = archive.read_through(cast("BinaryIO", hashing), lambda _: None)
                return Inspection(path.name, size, hashing.drain(), manifest=manifest)
            header = dump_file.read_header(path)
        except RefusedError as error:
            raise VerificationError(str(error)) from error
        return Inspection(path.name, size, hashlib.file_digest(file, "sha256").hexdigest(), header=header)


class _Hashing:
    """A file that is read once from its beginning, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._seen = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read, and hash what was read."""
        piece = self._file.read(size)
        self._seen.update(piece)
        return piece

    def drain(self) -> str:
        """Read the rest, and return the hexadecimal sha256 of all."""
        while self.read(_CHUNK):
            pass
        return self._seen.hexdigest()
