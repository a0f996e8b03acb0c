import gzip
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar import archive, dumping
from sidecar.archive import CHECKSUM, DUMP, MANIFEST, Archive, Manifest, check_id, finish, is_tar, new_id, unpack
from sidecar.contents import Contents, Sequence, Table
from sidecar.errors import RefusedError

ID = "20240301T101112Z-ab12"
MADE = datetime(2024, 3, 1, 10, 11, 12, 345000, tzinfo=UTC)
CONTENTS = Contents(
    tables={
        "public.memory_units": Table(7, "ab" * 32),
        "tenant.memory_units": Table(2, "cd" * 32),
        "public.bank_stats_cache": Table(1, "ef" * 32, derived=True),
    },
    columns={
        "public.memory_units.embedding": "public.vector(384) default ",
        "tenant.memory_units.embedding": "public.vector(384) default ",
        'public.memory_units."na""me"': "text not null default 'é'::text",
    },
    indexes={"public.idx": "CREATE INDEX idx ON public.memory_units USING btree (id)"},
    constraints={"public.memory_units.pk": "PRIMARY KEY (id)"},
    sequences={"public.log_id_seq": Sequence(7, is_called=True, definition="bigint by 1")},
    views={"public.v": "v SELECT 1"},
    routines={"public.f(integer)": "0" * 32},
    triggers={"public.memory_units.t": "CREATE TRIGGER t ..."},
    extensions={"vector": "0.8.1"},
    dimensions={"public": 384, "tenant": 384},
    revisions={"public": ["f00d", "beef"]},
)
# A tar is made of blocks of 512 bytes, and read in pieces of 1 MiB.
SIZES = [0, 1, 511, 512, 513, 2**20 - 1, 2**20, 2**20 + 1]
SMALL = 700  # neither member ends with its block
LARGE = 3 * 2**20  # 0.1 % of it is more than the blocks that close a tar


def manifest(dump: bytes = b"", **changes: Any) -> Manifest:
    made = Manifest(
        id=ID,
        made=MADE,
        versions={"sidecar": "0.1.0", "hindsight-api": None, "postgres": "18.6", "vector": "0.8.1"},
        compression="gzip",
        model={"id": "BAAI/bge-small-en-v1.5", "dimension": 384},
        contents=CONTENTS,
        size=len(dump),
        sha256=sha256(dump).hexdigest(),
    )
    return replace(made, **changes)


def make(directory: Path, dump: bytes = b"a dump") -> Archive:
    directory.mkdir(parents=True)
    (directory / DUMP).write_bytes(dump)
    return finish(directory, manifest(dump))


def whole(made: Archive) -> bytes:
    return b"".join(made.read())


Kept = dict[int, tuple[Archive, bytes]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return an archive of each size with its bytes."""
    directory = tmp_path_factory.mktemp("kept")
    archives = {size: make(directory / str(size), os.urandom(size)) for size in [*SIZES, SMALL, LARGE]}
    return {size: (made, whole(made)) for size, made in archives.items()}


def sentence(refused: "pytest.ExceptionInfo[RefusedError]") -> str:
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


# The manifest --------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_back_as_it_was() -> None:
    made = manifest(b"a dump")
    assert Manifest.from_bytes(made.to_bytes()) == made
    bare = manifest(model=None, contents=Contents(), compression="none")
    assert Manifest.from_bytes(bare.to_bytes()) == bare


def test_a_manifest_is_json_that_people_can_read() -> None:
    text = manifest(b"a dump").to_bytes()
    told = json.loads(text)
    assert (told["format"], told["kind"]) == (2, "hindsight-sidecar-archive")
    assert told["made"] == "2024-03-01T10:11:12.345+00:00"
    assert told["memories"] == 9
    assert told["dump"] == {"name": "memory.dump", "size": 6, "sha256": sha256(b"a dump").hexdigest()}
    assert told["contents"]["tables"]["public.bank_stats_cache"] == {"rows": 1, "content": "ef" * 32, "derived": True}
    assert text.endswith(b"\n}\n")
    assert "'é'".encode() in text


def changed(**changes: Any) -> bytes:
    return again({**json.loads(manifest().to_bytes()), **changes})


def again(told: dict[str, Any]) -> bytes:
    """Return a manifest whose checksum fits what it says."""
    told.pop("checksum", None)
    return json.dumps({**told, "checksum": archive._checksum(told)}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<!DOCTYPE html><title>502 Bad Gateway</title>",
        b"\x1f\x8b\x08\x00",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"7",
        b'"kind"',
        b"{}",
        manifest().to_bytes()[:-3],
        manifest().to_bytes() + b"{}",
        changed(format=None),
        changed(format="one"),
        changed(made="yesterday"),
        changed(made=7),
        changed(versions=7),
        changed(contents=[]),
        changed(contents={**CONTENTS.to_json(), "tables": {"public.banks": 7}}),
        changed(contents={**CONTENTS.to_json(), "sequences": {"public.s": {"last_value": 7, "odd": 1}}}),
        changed(dump=None),
        changed(dump={"size": "many", "sha256": ""}),
    ],
)
def test_what_is_no_manifest_is_refused_in_a_sentence(text: bytes) -> None:
    with pytest.raises(RefusedError, match=r"manifest\.json cannot be read") as refused:
        Manifest.from_bytes(text)
    assert sentence(refused).endswith("use an archive that `hindsight-sidecar dump` made")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param(changed(format=float("inf")), id="format"),
        pytest.param(changed(dump={"size": float("inf"), "sha256": ""}), id="size"),
        pytest.param(changed(dump={"size": -1, "sha256": ""}), id="negative"),
        pytest.param(changed(made="2024-03-01T10:11:12"), id="no zone"),
        pytest.param(changed(made="0001-01-01T00:00:00+00:00"), id="before tar"),
    ],
)
def test_what_is_json_and_cannot_be_meant_is_refused_too(text: bytes) -> None:
    with pytest.raises(RefusedError, match=r"manifest\.json cannot be read"):
        Manifest.from_bytes(text)


@pytest.mark.parametrize("kind", ["hindsight-bake-manifest", None, 7, ["hindsight-sidecar-archive"]])
def test_another_kind_is_refused(kind: object) -> None:
    with pytest.raises(RefusedError) as refused:
        Manifest.from_bytes(changed(kind=kind))
    assert f"its kind is {str(kind)!r}" in sentence(refused)


@pytest.mark.parametrize(
    ("version", "told"), [(1, "dump the memories again with this one"), (3, "use the newer sidecar that made it")]
)
def test_another_format_is_refused_whatever_else_is_in_it(version: int, told: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Manifest.from_bytes(b'{"kind": "hindsight-sidecar-archive", "format": %d}' % version)
    assert sentence(refused) == f"the archive has format {version}, and this sidecar reads format 2; {told}"


@pytest.mark.parametrize(
    "key",
    ["format", "kind", "id", "made", "versions", "compression", "model", "contents", "dump", "dump.size", "dump.sha256",
     *(f"contents.{name}" for name in CONTENTS.to_json())],
)  # fmt: skip
def test_a_missing_key_is_named(key: str) -> None:
    told = json.loads(manifest().to_bytes())
    *above, last = key.split(".")
    holder = told[above[0]] if above else told
    del holder[last]
    with pytest.raises(RefusedError) as refused:
        Manifest.from_bytes(again(told))
    assert f"manifest.json cannot be read ('{last}')" in sentence(refused)


# The tar -------------------------------------------------------------------------------------------------------


def test_it_is_a_plain_tar(tmp_path: Path) -> None:
    made = make(tmp_path / "it", b"x" * 700)
    with tarfile.open(fileobj=io.BytesIO(whole(made)), mode="r:") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == ["manifest.json", "memory.dump"]
        assert {(member.mode, member.uid, member.gid, member.mtime) for member in members} == {
            (0o600, 0, 0, int(MADE.timestamp()))
        }
        assert all(member.type == tarfile.REGTYPE for member in members)
        assert [tar.extractfile(member).read() for member in members] == [  # type: ignore[union-attr]
            manifest(b"x" * 700).to_bytes(),
            b"x" * 700,
        ]


@pytest.mark.parametrize("size", SIZES)
def test_the_systems_tar_reads_it(size: int, tmp_path: Path) -> None:
    made = make(tmp_path / "it", b"x" * size)
    (tmp_path / "it.tar").write_bytes(whole(made))
    tar = ["/usr/bin/tar", "--utc", "-f", str(tmp_path / "it.tar")]
    listed = subprocess.run([*tar, "-tv"], capture_output=True, text=True, check=True)
    assert listed.stderr == ""
    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["-rw-------", "0/0", str((made.directory / MANIFEST).stat().st_size), "2024-03-01", "10:11", "manifest.json"],
        ["-rw-------", "0/0", str(size), "2024-03-01", "10:11", "memory.dump"],
    ]
    subprocess.run([*tar, "-x", "-C", str(tmp_path)], check=True)
    assert (tmp_path / DUMP).read_bytes() == b"x" * size


def test_it_is_the_same_bytes_each_time_and_wherever_it_lies(tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other")
    os.utime(other.directory / DUMP, (0, 0))
    (other.directory / DUMP).chmod(0o644)
    assert whole(one) == whole(one) == whole(other) == whole(Archive.open(other.directory))


@pytest.mark.parametrize("size", SIZES)
def test_size_and_checksum_agree_with_the_bytes(size: int, tmp_path: Path) -> None:
    made = make(tmp_path / "it", b"x" * size)
    data = whole(made)
    assert made.size == len(data)
    assert made.checksum == made.hash() == sha256(data).hexdigest()
    assert (made.directory / CHECKSUM).read_text() == f"{made.checksum}  {ID}.tar\n"


@settings(max_examples=200)
@given(st.data())
def test_any_range_is_a_slice_of_the_whole(kept: Kept, data: st.DataObject) -> None:
    made, expected = kept[data.draw(st.sampled_from(SIZES))]
    begin = len(expected) - made.manifest.size - 1024
    edges = [0, 512, begin // 512 * 512, len(expected) - 1024, 2**20, 2**20 + 512, len(expected)]
    near = st.builds(int.__add__, st.sampled_from(edges), st.integers(-2, 2)).map(abs)
    place = near | st.integers(0, len(expected) + 5)
    start, end = data.draw(place), data.draw(place | st.none())
    pieces = list(made.read(start, end))
    assert b"".join(pieces) == expected[start:end]
    assert all(0 < len(piece) <= 2**20 for piece in pieces)


@pytest.mark.parametrize("size", [8 * 2**30 - 1, 8 * 2**30, 2**40])
def test_a_large_dump_is_in_it_whole(size: int, tmp_path: Path) -> None:
    (tmp_path / DUMP).touch()
    os.truncate(tmp_path / DUMP, size)  # takes no space
    (tmp_path / MANIFEST).write_bytes(manifest(size=size).to_bytes())
    made = Archive.open(tmp_path)
    begin = b"".join(made.read(0, 16384))
    with tarfile.open(fileobj=io.BytesIO(begin), mode="r:") as tar:
        assert tar.next() is not None
        member = tar.next()
        assert member is not None
        assert (member.name, member.size) == ("memory.dump", size)
    assert made.size == member.offset_data + -(-size // 512) * 512 + 1024
    assert b"".join(made.read(made.size - 2000)) == bytes(2000)


@pytest.mark.parametrize("start", [0, 5000])
def test_a_dump_that_became_shorter_fails_and_does_not_end_early(start: int, tmp_path: Path) -> None:
    made = make(tmp_path / "it", b"x" * 10_000)
    os.truncate(made.directory / DUMP, 9_999)
    with pytest.raises(OSError, match=r"memory.dump ended 1 bytes early"):
        list(made.read(start))
    with pytest.raises(OSError, match="ended 1 bytes early"):
        made.hash()
    with pytest.raises(RefusedError, match="has 9999 bytes, and its manifest says 10000; delete this dump") as refused:
        Archive.open(made.directory)
    assert sentence(refused)


def test_a_directory_without_a_dump_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Archive.open(tmp_path)


def test_whether_a_schedule_made_it_is_kept_and_an_older_archive_does_not_say() -> None:
    assert Manifest.from_bytes(manifest(scheduled=True).to_bytes()).scheduled is True
    assert Manifest.from_bytes(manifest().to_bytes()).scheduled is False
    told = json.loads(manifest().to_bytes())
    del told["scheduled"], told["checksum"]
    told["checksum"] = archive._checksum(told)
    assert Manifest.from_bytes(json.dumps(told).encode()) == manifest()


def test_how_large_the_database_was_is_kept_and_an_older_archive_does_not_say() -> None:
    assert Manifest.from_bytes(manifest(database_size=7 * 2**30).to_bytes()).database_size == 7 * 2**30
    told = json.loads(manifest().to_bytes())
    del told["database_size"]
    assert Manifest.from_bytes(again(told)).database_size is None


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    made = make(tmp_path / "it", os.urandom(SMALL))
    assert archive.read_back(tmp_path / "it") == made


@pytest.mark.parametrize("name", [DUMP, archive.CHECKSUM, archive.MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_what_is_not_what_was_written_is_found(name: str, damage: str, tmp_path: Path) -> None:
    make(tmp_path / "it", os.urandom(SMALL))
    path = tmp_path / "it" / name
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes({"flip": bytes(content), "cut": bytes(content[:-1]), "empty": b""}[damage])
    with pytest.raises(RefusedError):
        archive.read_back(tmp_path / "it")


def test_what_a_list_says_of_one(tmp_path: Path) -> None:
    made = make(tmp_path / "it")
    assert archive.as_mapping(made) == {
        "id": ID,
        "made": "2024-03-01T10:11:12.345+00:00",
        "size": made.size,
        "sha256": made.hash(),
        "memories": 9,
        "versions": {"sidecar": "0.1.0", "hindsight-api": None, "postgres": "18.6", "vector": "0.8.1"},
        "model": {"id": "BAAI/bge-small-en-v1.5", "dimension": 384},
        "compression": "gzip",
        "scheduled": False,
    }


@pytest.mark.parametrize("line", [None, b"", b"abc", b"0" * 63 + b"  x.tar\n", b"0" * 64])
def test_one_without_a_checksum_is_not_whole(line: bytes | None, tmp_path: Path) -> None:
    made = make(tmp_path / "it")
    assert dumping.kept(tmp_path) == [made]
    (made.directory / CHECKSUM).unlink()
    if line is not None:
        (made.directory / CHECKSUM).write_bytes(line)
    with pytest.raises(RefusedError, match=f"{CHECKSUM} says .*delete this dump, it is not whole"):
        made.checksum  # noqa: B018
    assert dumping.kept(tmp_path) == []


# Unpacking -----------------------------------------------------------------------------------------------------


def unpacked(data: bytes) -> tuple[Archive, bytes, bytes]:
    """Unpack bytes into a directory that is gone again; return the archive with its manifest's text and its dump."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        file, into = Path(directory) / "it.tar", Path(directory) / "into"
        file.write_bytes(data)
        into.mkdir()
        try:
            found = unpack(file, into)
            return found, (into / MANIFEST).read_bytes(), (into / DUMP).read_bytes()
        finally:
            assert {path.name for path in Path(directory).iterdir()} == {"it.tar", "into"}
            assert {path.name for path in into.iterdir()} <= {MANIFEST, DUMP}


@pytest.mark.parametrize("size", SIZES)
def test_what_was_packed_is_unpacked(size: int, kept: Kept, tmp_path: Path) -> None:
    made, data = kept[size]
    (tmp_path / "it.tar").write_bytes(data)
    found = unpack(tmp_path / "it.tar", tmp_path)
    assert found == Archive(tmp_path, made.manifest)
    assert (tmp_path / DUMP).read_bytes() == (made.directory / DUMP).read_bytes()
    assert found.hash() == made.checksum
    assert Archive.open(tmp_path) == found


def test_one_that_the_systems_tar_made_is_unpacked_as_well(tmp_path: Path) -> None:
    made = make(tmp_path / "it")
    tar = ["/usr/bin/tar", "-cf", str(tmp_path / "it.tar"), "-C", str(made.directory), MANIFEST, DUMP]
    subprocess.run(tar, check=True)
    assert unpacked((tmp_path / "it.tar").read_bytes())[0].manifest == made.manifest


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_every_file_is_ours_alone_whatever_the_umask(mask: int, umask: Callable[[int], int], tmp_path: Path) -> None:
    umask(mask)
    made = make(tmp_path / "it")
    (tmp_path / "it.tar").write_bytes(whole(made))
    (tmp_path / "into").mkdir()
    unpack(tmp_path / "it.tar", tmp_path / "into")
    files = [
        made.directory / MANIFEST,
        made.directory / CHECKSUM,
        tmp_path / "into" / MANIFEST,
        tmp_path / "into" / DUMP,
    ]
    assert [mode(file) for file in files] == [0o600] * 4


def layout(made: Archive) -> dict[str, range]:
    """Return where the parts of a tar are."""
    text, size = (made.directory / MANIFEST).stat().st_size, made.manifest.size
    second = 512 + -(-text // 512) * 512
    ends = {
        "first header": 512,
        "manifest": 512 + text,
        "first padding": second,
        "second header": second + 512,
        "dump": second + 512 + size,
        "end": made.size,
    }
    starts = [0, *ends.values()]
    return {name: range(start, end) for (name, end), start in zip(ends.items(), starts, strict=False)}


def test_one_that_is_cut_anywhere_before_its_end_is_refused(kept: Kept) -> None:
    made, data = kept[LARGE]
    parts = layout(made)
    edges = [place for part in parts.values() for place in (part.start, part.stop)]
    cuts = {0, 1, len(data) // 2, len(data) * 999 // 1000, *edges, *(edge - 1 for edge in edges if edge)}
    assert len(data) * 999 // 1000 < parts["dump"].stop
    for cut in sorted(cuts - {len(data)}):
        with pytest.raises(RefusedError) as refused:
            unpacked(data[:cut])
        assert sentence(refused).endswith("; fetch it again")
    assert unpacked(data + bytes(8192))[0].manifest == made.manifest, "as tar fills its last record"


@settings(max_examples=300)
@given(st.data())
def test_one_flipped_bit_is_refused_or_changes_nothing_or_is_told_by_the_hash(kept: Kept, data: st.DataObject) -> None:
    made, good = kept[SMALL]
    name, part = data.draw(st.sampled_from([(name, part) for name, part in layout(made).items() if part]))
    place, bit = data.draw(st.sampled_from(part)), data.draw(st.integers(0, 7))
    bad = good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :]
    try:
        found, text, dump = unpacked(bad)
    except RefusedError:
        return
    assert dump == (made.directory / DUMP).read_bytes()
    if text == (made.directory / MANIFEST).read_bytes():
        # A header's own checksum has digits and fillers that may be written in several ways.
        assert name.endswith("header")
        assert 148 <= place % 512 < 156
        assert found.manifest == made.manifest
    else:
        assert name == "manifest"
        assert sha256(bad).hexdigest() != made.checksum


def member(name: str, content: bytes = b"", **changes: Any) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for key, value in changes.items():
        setattr(entry, key, value)
    return entry.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


END = bytes(1024)
TEXT = manifest(b"a dump").to_bytes()
FIRST, SECOND = member(MANIFEST, TEXT), member(DUMP, b"a dump")
LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
HARD = {"type": tarfile.LNKTYPE, "linkname": MANIFEST}


def lying(size: int) -> bytes:
    """Return an archive whose manifest and header agree on a size that is not the dump's."""
    return member(MANIFEST, manifest(b"a dump", size=size).to_bytes()) + member(DUMP, size=size) + b"a dump" + END


def test_the_parts_of_the_next_test_are_an_archive() -> None:
    assert unpacked(FIRST + SECOND + END)[2] == b"a dump"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        pytest.param(b"", "is cut short in manifest.json", id="empty"),
        pytest.param(bytes(10240), "header of manifest.json cannot be read", id="zeros"),
        pytest.param(b"<!DOCTYPE html><title>502</title>" * 99, "header of manifest.json cannot be read", id="HTML"),
        pytest.param(b"<!DOCTYPE html><title>502</title>", "is cut short in manifest.json", id="short HTML"),
        pytest.param(gzip.compress(FIRST + os.urandom(5000)), "header of manifest.json cannot be read", id="gzip"),
        pytest.param(b"PGDMP\x01\x10\x00" + bytes(5000), "header of manifest.json cannot be read", id="dump"),
        pytest.param(member("README", b"hello") + FIRST, "has 'README' where manifest.json was", id="other first"),
        pytest.param(SECOND + FIRST + END, "has 'memory.dump' where manifest.json was", id="dump first"),
        pytest.param(member("./manifest.json", TEXT) + SECOND, "has './manifest.json' where", id="below"),
        pytest.param(member("../manifest.json", TEXT) + SECOND, "has '../manifest.json' where", id="above"),
        pytest.param(member("x" * 90 + "/" + "y" * 99) + FIRST, "has '././@LongLink' where", id="a long name"),
        pytest.param(member(MANIFEST, **LINK) + SECOND, "where manifest.json was expected", id="manifest is a link"),
        pytest.param(member(MANIFEST, type=tarfile.DIRTYPE), "where manifest.json was", id="manifest is a directory"),
        pytest.param(member(MANIFEST, size=2**40) + TEXT, f"manifest.json would have {2**40} bytes", id="absurd"),
        pytest.param(member(MANIFEST, size=2**70) + TEXT, f"manifest.json would have {2**70} bytes", id="more absurd"),
        pytest.param(member(MANIFEST, size=64 * 2**20 + 1), "would have 67108865 bytes", id="too large"),
        pytest.param(member(MANIFEST, size=64 * 2**20) + TEXT, "is cut short in manifest.json", id="not there"),
        pytest.param(member(MANIFEST, size=-512) + TEXT, "would have -512 bytes", id="negative"),
        pytest.param(member(MANIFEST) + SECOND + END, "would have 0 bytes", id="empty manifest"),
        pytest.param(member(MANIFEST, b"{}") + SECOND + END, "manifest.json cannot be read", id="other manifest"),
        pytest.param(FIRST + END, "header of memory.dump cannot be read", id="no dump"),
        pytest.param(FIRST + FIRST + SECOND, "has 'manifest.json' where memory.dump was expected", id="two manifests"),
        pytest.param(FIRST + member("other", b"a dump"), "has 'other' where memory.dump was", id="other second"),
        pytest.param(FIRST + member(DUMP, **LINK), "where memory.dump was expected", id="dump is a link"),
        pytest.param(FIRST + member(DUMP, **HARD), "where memory.dump was expected", id="dump is a hard link"),
        pytest.param(FIRST + member(DUMP, type=tarfile.FIFOTYPE), "where memory.dump was", id="dump is a pipe"),
        pytest.param(FIRST + member(DUMP, b"a dumb"), "was damaged on the way", id="other dump"),
        pytest.param(FIRST + member(DUMP, b"a dump."), "has 7 bytes, and the manifest says 6", id="longer dump"),
        pytest.param(FIRST + member(DUMP, size=-6), "has -6 bytes, and the manifest says 6", id="negative dump"),
        pytest.param(lying(-6), "", id="negative in both"),
        pytest.param(lying(2**40), "is cut short in memory.dump", id="absurd in both"),
    ],
)
def test_what_is_no_archive_of_ours_is_refused_in_a_sentence(data: bytes, told: str) -> None:
    with pytest.raises(RefusedError) as refused:
        unpacked(data)
    assert told in sentence(refused)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE], ids=["L", "x", "g"])
@pytest.mark.parametrize("size", [2**62, 2**70, -512], ids=["memory", "overflow", "negative"])
def test_a_long_name_of_absurd_size_is_not_followed(kind: bytes, size: int) -> None:
    for before in (b"", FIRST):
        with pytest.raises(RefusedError, match="was expected"):
            unpacked(before + member("x", type=kind, size=size) + bytes(4096))


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (FIRST[:512], True),
        (FIRST, True),
        (SECOND[:512], False),
        (member("manifest.json.bak", b"{}")[:512], False),
        (b"manifest.json", False),
        (MANIFEST.encode().ljust(512, b"\0"), False),
        (b"PGDMP".ljust(512, b"\0"), False),
        (b"", False),
    ],
)
def test_a_tar_of_ours_is_known_by_its_first_block(begin: bytes, expected: bool) -> None:  # noqa: FBT001
    assert is_tar(begin) is expected


def test_what_is_made_is_known_by_its_first_block(tmp_path: Path) -> None:
    assert is_tar(next(make(tmp_path / "it").read(0, 512)))


# Names ---------------------------------------------------------------------------------------------------------


def test_a_name_sorts_by_time_and_two_of_one_second_differ() -> None:
    names = {new_id(MADE) for _ in range(20)}
    assert len(names) > 15
    assert all(re.fullmatch(r"20240301T101112Z-[0-9a-f]{4}", name) for name in names)
    assert max(names) < new_id(MADE.replace(second=13))


@given(st.datetimes(timezones=st.just(UTC), min_value=datetime(2000, 1, 1)))  # noqa: DTZ001 - the zone is given beside
def test_every_name_that_is_given_is_one_that_is_taken(now: datetime) -> None:
    name = new_id(now)
    assert check_id(name) == name


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "../20240301T101112Z-ab12", "20240301T101112Z-ab12/..", "20240301T101112Z-../x", "/etc/passwd",
     ".partial-20240301T101112Z-ab12", "20240301T101112Z", "20240301T101112Z-", "-ab12", "TZ-ab12",
     "20240301T101112Z-ab12\n", "20240301T101112Z-ab\0", "\x1b[2J20240301T101112Z-ab12", "20240301T101112Z-ab 12",
     "%2e%2e%2f", "20240301T101112Z-é", "\uff12\uff10-ab12", "\ud800", "1" * 10_000, "1-" + "a" * 10_000, "x" * 10_000],
)  # fmt: skip
def test_what_can_be_no_name_is_refused_and_shown_harmlessly(text: str) -> None:
    with pytest.raises(RefusedError, match="is not the name of a dump") as refused:
        check_id(text)
    told = sentence(refused)
    assert told.isprintable()
    assert len(told) < 300


def test_a_files_hash_is_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    assert archive.hash_file(tmp_path / "file") == sha256(b"x" * 3_000_000).hexdigest()
