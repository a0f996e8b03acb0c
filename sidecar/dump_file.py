"""A file in pg_dump's custom format: what its header and its list of contents say, before anything is loaded."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sidecar.errors import RefusedError
from sidecar.programs import ProgramError, Programs

MAGIC = b"PGDMP"
_CUSTOM = 1  # archCustom in pg_backup_archiver.h
_WITH_ALGORITHM = (1, 15)  # from this version of the format the header names the compression
_ALGORITHMS = {0: "none", 1: "gzip", 2: "lz4", 3: "zstd"}
_STRING_MAX = 4096
_PIECE = 1024**2  # bytes searched at once
_LONGEST = 64 * 1024  # bytes of a statement with an option
_TAR_MAGIC = slice(257, 262)
# "215; 1259 16390 TABLE public memory_units hindsight": names are not quoted there, and may have spaces and capitals.
_KINDS = (
    "TABLE DATA", "TABLE ATTACH", "TABLE", "SEQUENCE SET", "SEQUENCE OWNED BY", "SEQUENCE", "INDEX ATTACH", "INDEX",
    "FK CONSTRAINT", "CHECK CONSTRAINT", "CONSTRAINT", "DEFAULT ACL", "DEFAULT", "ACL", "COMMENT", "EVENT TRIGGER", "TRIGGER",
    "MATERIALIZED VIEW DATA", "MATERIALIZED VIEW", "VIEW", "EXTENSION", "SCHEMA", "PUBLICATION TABLES IN SCHEMA",
    "PUBLICATION TABLE", "PUBLICATION", "SUBSCRIPTION TABLE", "SUBSCRIPTION",
)  # fmt: skip
_ENTRY = re.compile(rf"^(\d+); \d+ \d+ (?P<kind>{'|'.join(_KINDS)}|[A-Z]+) (?P<rest>.*)$")
OTHER_SCHEMA = "hindsight_sidecar"
# PostgreSQL 17.12 keeps a column's version among the column's options, and a pg_dump that does not know of it takes it for
# one that somebody set; a server that does not know of it refuses it.
INTERNAL_OPTIONS = ("pg_attver",)


@dataclass(frozen=True)
class Header:
    """What the beginning of a dump says.

    Attributes:
        format: version of the archive format.
        compression: none, gzip, lz4 or zstd.
        database: its name.
        server: version of the server that it was dumped from.
        pg_dump: version of the program that made it.

    """

    format: tuple[int, int, int]
    compression: str
    database: str
    server: str
    pg_dump: str

    @property
    def server_major(self) -> int:
        """Return the server's major version."""
        return int(re.split(r"\D", self.server, maxsplit=1)[0])

    @property
    def pg_dump_major(self) -> int:
        """Return the major version of the program that made it."""
        return int(re.split(r"\D", self.pg_dump, maxsplit=1)[0])


def read_header(path: Path) -> Header:
    """Read the header (pg_backup_archiver.c, ReadHead).

    Raises:
        RefusedError: the file is no dump in custom format; the sentence says what it looks like.

    """
    with path.open("rb") as file:
        begin = file.read(512)
        if not begin.startswith(MAGIC):
            raise RefusedError(
                f"{path.name} {_looks_like(begin)}; expected an archive of `hindsight-sidecar dump`, or a file of `pg_dump -Fc`"
            )
        file.seek(len(MAGIC))
        try:
            return _parse(file)
        except (IndexError, ValueError, UnicodeDecodeError) as error:
            raise RefusedError(
                f"{path.name} begins like a dump, and its header cannot be read ({error}); fetch it again"
            ) from error


def _parse(file: BinaryIO) -> Header:
    version = (_byte(file), _byte(file), _byte(file))
    int_size, _ = _byte(file), _byte(file)
    kind = _byte(file)
    if kind != _CUSTOM:
        raise ValueError(f"its format is number {kind}, and custom is {_CUSTOM}: use pg_dump -Fc")
    if version[:2] >= _WITH_ALGORITHM:
        compression = _ALGORITHMS.get(_byte(file), "unknown")
    else:
        compression = "gzip" if _integer(file, int_size) else "none"
    for _ in range(7):  # the time of the dump
        _integer(file, int_size)
    header = Header(version, compression, _string(file, int_size), _string(file, int_size), _string(file, int_size))
    if not (header.server[:1].isdigit() and header.pg_dump[:1].isdigit()):
        raise ValueError(f"versions {header.server!r} and {header.pg_dump!r}")
    return header


def _byte(file: BinaryIO) -> int:
    return file.read(1)[0]


def _integer(file: BinaryIO, size: int) -> int:
    negative = _byte(file)
    value = int.from_bytes(bytes(_byte(file) for _ in range(size)), "little")
    return -value if negative else value


def _string(file: BinaryIO, int_size: int) -> str:
    length = _integer(file, int_size)
    if not 0 <= length <= _STRING_MAX:
        raise ValueError(f"a name of {length} bytes")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("it is cut short")
    return text.decode()


def _looks_like(begin: bytes) -> str:
    text = begin.lstrip()[:64].lower()
    if not begin:
        return "is empty"
    if begin.startswith(b"\x1f\x8b"):
        return "is a gzip file; unpack it first (gunzip)"
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        return "is a zstd file; unpack it first (unzstd)"
    if begin.startswith(b"PK"):
        return "is a zip file (of hindsight-admin perhaps: restore it with a hindsight-api of its version, and migrate from that)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is an HTML page, an error of the server that it came from perhaps"
    if text.startswith((b"--", b"set ", b"create ", b"\\restrict")) or b"postgresql database dump" in begin.lower():
        return "is plain SQL, which loads without any error when it is cut short; make it with pg_dump -Fc"
    if begin[_TAR_MAGIC] == b"ustar":
        return "is a tar, and not one of ours"
    return f"begins with {begin[:8]!r}"


@dataclass(frozen=True)
class Entry:
    """One entry of a dump's list of contents: `rest` is schema, name and owner; `line` is as pg_restore wrote it."""

    kind: str
    rest: str
    line: str

    @property
    def is_memories(self) -> bool:
        """Whether it is a table of memories, of whichever tenant."""
        return self.kind == "TABLE" and " memory_units " in self.rest

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to the sidecar's own schema, which is written anew."""
        return self.rest.startswith((f"{OTHER_SCHEMA} ", f"- {OTHER_SCHEMA} "))


async def list_entries(path: Path, programs: Programs) -> list[Entry]:
    """Return what a dump has in it.

    Raises:
        RefusedError: pg_restore cannot read the list: of a newer PostgreSQL, or cut short.

    """
    lines: list[str] = []
    try:
        await programs.run("pg_restore", ["--list", str(path)], hear=lines.append)
    except ProgramError as error:
        raise RefusedError(_worded(error, programs)) from error
    found = (_ENTRY.match(line) for line in lines)
    return [Entry(one["kind"], one["rest"], one.string) for one in found if one]


async def read_through(path: Path, programs: Programs) -> None:
    """Read every byte of a dump as a restore would, and load nothing: the list alone is there in half a file too.

    Raises:
        RefusedError: it is cut short, damaged, or compressed in a way that this build cannot read.

    """
    try:
        await programs.run("pg_restore", ["--file=/dev/null", str(path)])
    except ProgramError as error:
        raise RefusedError(_worded(error, programs)) from error


def _worded(error: ProgramError, programs: Programs) -> str:
    said = str(error)
    if "unsupported version" in said:
        return f"the dump was made by a newer PostgreSQL than the {programs.binaries.version} here ({said}); use an image with that one"
    if "compression" in said:
        return f"the dump's compression cannot be read by this PostgreSQL ({said}); make it with pg_dump -Fc -Z gzip:1"
    return f"the dump is cut short or damaged ({said}); fetch it again"


def selected(entries: list[Entry]) -> list[Entry]:
    """Return the entries that are loaded: extensions are made beforehand, and what is the sidecar's own is written anew."""
    return [
        entry
        for entry in entries
        if entry.kind not in {"EXTENSION", "COMMENT", "ACL", "DEFAULT ACL", "PUBLICATION", "SUBSCRIPTION"}
        and not entry.is_ours
        and not (entry.kind == "SCHEMA" and entry.rest.startswith("- public "))
    ]


def blank_options(path: Path, names: tuple[str, ...] = INTERNAL_OPTIONS) -> int:
    """Blank column options that a server keeps for itself, in their place, so that nothing else moves; return how many.

    They stand in the list of contents, as text and under no checksum.

    Raises:
        OSError: the file cannot be written.

    """
    option = rb"(?:%b)='?[\w.+-]+'?" % b"|".join(re.escape(name.encode()) for name in names)
    alone = rb"ALTER TABLE ONLY [^\n;]+ ALTER COLUMN [^\n;]+ SET \(%b\);" % option
    pattern = re.compile(rb"%b|(?<=\()%b, |, %b(?=[,)])" % (alone, option, option))
    blanked = start = 0
    # In pieces: a search in all of a large file, or a mapped one on a disk that hangs, would hold every thread up.
    with path.open("r+b") as file:
        while True:
            before = min(start, 1)  # what an option follows
            file.seek(start - before)
            content = file.read(before + _PIECE + _LONGEST)
            for found in pattern.finditer(content, before):
                if found.start() < before + _PIECE:
                    file.seek(start - before + found.start())
                    file.write(b" " * (found.end() - found.start()))
                    blanked += 1
            if len(content) < before + _PIECE + _LONGEST:
                return blanked
            start += _PIECE


def extensions(entries: list[Entry]) -> list[str]:
    """Return the names of the extensions that a dump wants."""
    return sorted({entry.rest.split(" ")[1] for entry in entries if entry.kind == "EXTENSION"})
