"""Uploads: what does not fit is refused in one sentence, before anything of it is on the volume."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import structlog

from sidecar import archive, volume
from sidecar.administration import INCOMING, Administration
from sidecar.archive import DUMP, Archive, Manifest
from sidecar.contents import Contents
from sidecar.errors import RefusedError
from sidecar.kinds import Outcome
from sidecar.operations import Operation
from sidecar.restoring import Restoring, Wish
from sidecar.settings import Settings
from sidecar.sizing import MIB

REST = 64 * MIB  # stays free


@pytest.fixture
def administration(tmp_path: Path) -> Administration:
    nobody: Any = None
    return Administration(Settings(PGDATA=tmp_path / "pgdata", run_dir=tmp_path), nobody, nobody)


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(volume, "free_bytes", lambda _: count)


async def body(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def nothing_is_taken() -> AsyncIterator[bytes]:
    pytest.fail("the body was taken")
    yield b""


def made(dumps: Path, content: bytes) -> Archive:
    now = datetime.now(UTC)
    directory = dumps / archive.new_id(now)
    directory.mkdir(parents=True)
    (directory / DUMP).write_bytes(content)
    manifest = Manifest(directory.name, now, {}, "none", None, Contents(), len(content), sha256(content).hexdigest())
    return archive.finish(directory, manifest)


def left(administration: Administration) -> list[str]:
    return [path.name for path in administration.dumps_directory.iterdir() if path.name.startswith(INCOMING)]


async def ended(administration: Administration, operation: Operation) -> Operation:
    while administration.operations.current is not None:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0)
    return operation


def test_an_upload_that_does_not_fit_twice_is_refused_before_it_is_taken(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unpacked beside itself: with room for it alone, that filled the volume which the memories live on."""
    free(monkeypatch, REST + 200 * MIB - 1)
    with pytest.raises(RefusedError) as refused:
        asyncio.run(administration.receive(nothing_is_taken(), 100 * MIB))
    assert str(refused.value) == (
        f"the upload and what is unpacked of it take 200 MiB, and {administration.dumps_directory} has 263 MiB free, of which 64 stay "
        "free; delete old dumps or kept databases, or grow the volume"
    )
    assert left(administration) == []


def test_one_that_fits_twice_is_taken(administration: Administration, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, REST + 12)
    identifier = asyncio.run(administration.receive(body(b"abc", b"def"), 6))
    assert left(administration) == [f"{INCOMING}{identifier}"]


def test_one_without_a_length_is_ended_where_the_space_ends(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([REST, REST, REST - 1])
    monkeypatch.setattr(volume, "free_bytes", lambda _: next(sizes))
    monkeypatch.setattr("sidecar.administration.MIB", 1024)  # it is looked at every 64 of them
    with pytest.raises(RefusedError, match=r"^128 MiB of the upload came, and more comes, and "):
        asyncio.run(administration.receive(body(*[bytes(64 * 1024)] * 3), None))
    assert left(administration) == []


@pytest.mark.parametrize("place", [0, 1000, 1999])
def test_a_dump_that_changed_on_the_disk_is_refused_before_anything_is_staged(
    place: int, administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pg_restore reads the list of one whose rows were damaged, and loads what it can of them."""
    found = made(administration.dumps_directory, os.urandom(2000))
    content = bytearray((found.directory / DUMP).read_bytes())
    content[place] ^= 1
    (found.directory / DUMP).write_bytes(content)
    monkeypatch.setattr(Restoring, "restore", pytest.fail)

    async def restored() -> Operation:
        return await ended(administration, await administration.restore_dump(found.manifest.id, Wish()))

    operation = asyncio.run(restored())
    assert operation.outcome is Outcome.REFUSED
    assert (operation.error or "").startswith(
        f"dump {found.manifest.id} was damaged on the disk (memory.dump has sha256 "
    )
    assert (operation.phase, operation.done, operation.total) == ("hash", 2000, 2000)
    assert found.directory.is_dir()


def test_one_that_did_not_is_restored(administration: Administration, monkeypatch: pytest.MonkeyPatch) -> None:
    found, restored = made(administration.dumps_directory, os.urandom(2000)), []

    async def restore(_: object, file: Path, *__: object) -> None:
        restored.append(file)

    monkeypatch.setattr(Restoring, "restore", restore)

    async def work() -> Operation:
        return await ended(administration, await administration.restore_dump(found.manifest.id, Wish()))

    assert asyncio.run(work()).outcome is Outcome.DONE
    assert restored == [found.directory / DUMP]


def test_an_upload_that_changed_on_the_disk_since_its_dry_run_is_refused(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"".join(made(administration.dumps_directory, os.urandom(2000)).read())

    async def restore(*_: object) -> None:
        pass

    async def restored(*, damaged: bool) -> Operation:
        identifier = await administration.receive(body(whole), len(whole))
        await ended(administration, await administration.restore_upload(identifier, Wish(dry_run=True)))
        path = administration.dumps_directory / f"{INCOMING}{identifier}" / DUMP
        if damaged:
            content = bytearray(path.read_bytes())
            content[0] ^= 1
            path.write_bytes(content)
        return await ended(administration, await administration.restore_upload(identifier, Wish()))

    monkeypatch.setattr(Restoring, "restore", restore)
    assert asyncio.run(restored(damaged=False)).outcome is Outcome.DONE
    operation = asyncio.run(restored(damaged=True))
    assert operation.outcome is Outcome.REFUSED
    assert (operation.error or "").startswith("the upload was damaged on the disk (memory.dump has sha256 ")
    assert left(administration) == []


def test_what_a_dry_run_kept_goes_after_a_while(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was killed at its question left it until the next start of the sidecar."""

    async def restore(*_: object) -> None:
        pass

    async def rehearsed() -> None:
        identifier = await administration.receive(body(b"PGDMP"), 5)
        timers = []
        for _ in range(2):
            (administration.dumps_directory / f"{INCOMING}{identifier}" / DUMP).write_bytes(b"PGDMP")
            operation = await ended(administration, await administration.restore_upload(identifier, Wish(dry_run=True)))
            assert operation.outcome is Outcome.DONE
            assert operation.report["upload"] == identifier
            assert left(administration) == [f"{INCOMING}{identifier}"]
            timers.append(administration._expiring[identifier])
        assert [timer.cancelled() for timer in timers] == [True, False], "the latest one counts"
        administration._expire(identifier, administration.dumps_directory / f"{INCOMING}{identifier}")
        deadline = asyncio.get_running_loop().time() + 5
        while left(administration):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        with pytest.raises(RefusedError, match="is kept; send the file again"):
            await administration.restore_upload(identifier, Wish())

    monkeypatch.setattr(Restoring, "restore", restore)
    asyncio.run(rehearsed())


def test_one_that_is_restored_or_discarded_is_forgotten(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def restore(*_: object) -> None:
        pass

    async def both() -> None:
        for discards in (False, True):
            identifier = await administration.receive(body(b"PGDMP"), 5)
            (administration.dumps_directory / f"{INCOMING}{identifier}" / DUMP).write_bytes(b"PGDMP")
            await ended(administration, await administration.restore_upload(identifier, Wish(dry_run=True)))
            assert list(administration._expiring) == [identifier]
            if discards:
                await administration.discard_upload(identifier)
            else:
                await ended(administration, await administration.restore_upload(identifier, Wish()))
            assert (administration._expiring, left(administration)) == ({}, [])

    monkeypatch.setattr(Restoring, "restore", restore)
    asyncio.run(both())


def test_one_that_cannot_be_unpacked_for_want_of_space_is_refused_before_it_is(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(administration.dumps_directory, os.urandom(2000))
    whole = b"".join(found.read())

    async def restored() -> Operation:
        identifier = await administration.receive(body(whole), None)  # without a length nobody could tell before
        free(monkeypatch, REST + len(whole) - 1)
        monkeypatch.setattr(archive, "unpack", lambda *_: pytest.fail("it was unpacked"))
        return await ended(administration, await administration.restore_upload(identifier, Wish()))

    operation = asyncio.run(restored())
    assert operation.outcome is Outcome.REFUSED
    assert (operation.error or "").startswith("unpacking the upload takes 0 MiB, and ")
    assert left(administration) == []


def test_a_note_of_a_freeze_that_was_torn_ends_no_start(administration: Administration) -> None:
    found = made(administration.dumps_directory, b"a dump")
    torn = administration.dumps_directory / f"{INCOMING}{found.manifest.id}"
    torn.mkdir()
    (torn / "frozen.json").write_bytes(b'{"source": "postg')
    with structlog.testing.capture_logs() as lines:
        administration.sweep_files()
    assert [line["event"] for line in lines] == [
        "the source of an unfinished migration may still accept no writes, and the note of it cannot be read",
        "removing what was not finished",
    ]
    assert left(administration) == []
    assert administration.last_dump == found.manifest.made
