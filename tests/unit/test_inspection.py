"""`hindsight-sidecar verify`: whole, damaged and foreign files."""

import io
import json
import os
import tarfile
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidecar import archive, commands, inspection
from sidecar.archive import DUMP, MANIFEST, Manifest
from sidecar.contents import Contents, Table
from sidecar.errors import VerificationError

CONTENT = os.urandom(2 * 2**20 + 5)
MODEL = {"id": "BAAI/bge-small-en-v1.5", "revision": "5c38ec7c405e", "precision": "float32", "dimension": 384}
# As pg_dump 17 begins a file: magic, version 1.16.0, sizes of integers and offsets, custom format, gzip, time, names.
HEADER = (
    b"PGDMP\x01\x10\x00\x04\x08\x01\x01"
    + b"\x00\x00\x00\x00\x00" * 7
    + b"".join(b"\x00" + len(text).to_bytes(4, "little") + text for text in (b"hindsight", b"17.2", b"17.4"))
)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """Return an archive's bytes."""
    directory = tmp_path / "made"
    directory.mkdir()
    (directory / DUMP).write_bytes(CONTENT)
    tables = {"public.memory_units": Table(369, "ab"), "public.banks": Table(3, "cd")}
    manifest = Manifest(
        id="20261129T210300Z-ab12",
        made=datetime(2026, 11, 29, 21, 3, tzinfo=UTC),
        versions={"sidecar": "0.1.0", "hindsight-api": "1.1.0", "postgres": "18.6", "vector": None},
        compression="gzip",
        model=MODEL,
        contents=Contents(
            tables=tables,
            columns={"public.memory_units.embedding": "vector(384)"},
            indexes={"public.i": "x"},
            dimensions={"public": 384},
        ),
        size=len(CONTENT),
        sha256=sha256(CONTENT).hexdigest(),
    )
    return b"".join(archive.finish(directory, manifest).read())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "memory.tar"


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(commands.app, ["verify", *map(str, arguments)])


def test_a_whole_archive(whole: bytes, file: Path) -> None:
    file.write_bytes(whole)
    before = sorted(file.parent.rglob("*"))
    done = run(file)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"file      memory.tar, 2.0 MiB, sha256 {sha256(whole).hexdigest()}",
        "archive   20261129T210300Z-ab12, made 2026-11-29 21:03 UTC, by sidecar 0.1.0, hindsight-api 1.1.0, postgres 18.6, gzip",
        "memories  369",
        "model     BAAI/bge-small-en-v1.5@5c38ec7c405e float32, 384 dimensions",
        "",
        "table                rows",
        "public.banks            3",
        "public.memory_units   369",
        "",
        "whole: 2 tables, 1 indexes, 0 constraints, as they left their database",
    ]
    assert sorted(file.parent.rglob("*")) == before


def test_a_whole_archive_as_json(whole: bytes, file: Path) -> None:
    file.write_bytes(whole)
    told = json.loads(run(file, "--json").stdout)
    assert (told["proved"], told["size"], told["sha256"]) == (True, len(whole), sha256(whole).hexdigest())
    assert told["archive"]["tables"] == {"public.banks": 3, "public.memory_units": 369}
    assert (told["archive"]["memories"], told["archive"]["model"]) == (369, MODEL)


def test_a_cut_archive_at_any_length(whole: bytes, file: Path) -> None:
    data_end = len(whole) - 1024 - (-len(CONTENT) % 512)
    lengths = [0, 1, 511, 512, 600, 2000, 2048, 2500, 2560, len(whole) // 2, data_end - 1]
    for length in lengths:
        file.write_bytes(whole[:length])
        with pytest.raises(VerificationError) as caught:
            inspection.inspect(file)
        assert "\n" not in str(caught.value)
    done = run(file)
    assert (done.exit_code, done.stdout) == (5, "")
    assert "cut short" in done.stderr


def test_a_changed_byte_anywhere_in_the_dump(whole: bytes, file: Path) -> None:
    begin = whole.index(CONTENT[:64])
    for offset in (0, 1, len(CONTENT) // 2, len(CONTENT) - 1):
        changed = bytearray(whole)
        changed[begin + offset] ^= 1
        file.write_bytes(changed)
        with pytest.raises(VerificationError, match="its manifest says"):
            inspection.inspect(file)


def tar(*members: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as out:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def test_archives_that_nothing_of_ours_made(whole: bytes, file: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        found = opened.extractfile(MANIFEST)
        assert found
        manifest = found.read()
    newer = json.dumps(json.loads(manifest) | {"format": 99}).encode()
    for content, sentence in [
        (tar((MANIFEST, b"{}")), "cannot be read"),
        (tar((MANIFEST, newer), (DUMP, CONTENT)), "format 99"),
        (tar((MANIFEST, manifest)), f"the archive's header of {DUMP} cannot be read"),
        (tar((MANIFEST, manifest), ("other", CONTENT)), f"the archive has 'other' where {DUMP} was expected"),
        (tar((MANIFEST, manifest), (DUMP, CONTENT[:-1])), f"has {len(CONTENT) - 1} bytes"),
        (tar((MANIFEST, manifest), (DUMP, CONTENT + b"x")), f"has {len(CONTENT) + 1} bytes"),
        (tar(("other", b"")), "is a tar, and not one of ours"),
        (b"<!DOCTYPE html><title>502</title>", "is an HTML page"),
        (b"PGDMP\x01", "its header cannot be read"),
        (HEADER[:-3], "its header cannot be read"),
    ]:
        file.write_bytes(content)
        done = run(file)
        assert (done.exit_code, done.stdout) == (5, ""), sentence
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_file_of_pg_dump_proves_nothing(file: Path) -> None:
    content = HEADER + b"whatever follows"
    file.write_bytes(content)
    done = run(file)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1] == "dump      of database hindsight of PostgreSQL 17.2, by pg_dump 17.4, gzip"
    assert "NOT PROVED" in done.stdout
    assert json.loads(run(file, "--json").stdout) == {
        "file": "memory.tar",
        "size": len(content),
        "sha256": sha256(content).hexdigest(),
        "proved": False,
        "dump": {"database": "hindsight", "postgres": "17.2", "pg_dump": "17.4", "compression": "gzip"},
    }


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    done = run(tmp_path / "absent")
    assert (done.exit_code, done.stderr) == (1, f"{tmp_path / 'absent'}: No such file or directory\n")
    assert run(tmp_path).exit_code == 1
