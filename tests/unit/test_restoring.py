"""What is looked at before a restore, and what the sample of vectors proves or does not."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar import agreement, database, staging, volume
from sidecar.contents import Contents
from sidecar.errors import RefusedError
from sidecar.model import Identity
from sidecar.operations import Kind, Operation
from sidecar.restoring import Place, Restoring, Wish
from sidecar.sizing import MIB


def checked(file: Path, size: int, database_size: int | None) -> Any:
    """Return a dump of a size that takes no space, of a database of another size; None: nothing says how large it was."""
    file.touch()
    os.truncate(file, size)
    return SimpleNamespace(file=file, manifest=SimpleNamespace(database_size=database_size))


@pytest.mark.parametrize(
    ("size", "database_size", "wanted"),
    [
        (100 * MIB, None, 400 * MIB),
        (100 * MIB, 10 * MIB, 20 * MIB),  # with the log of loading it
        (100 * MIB, 900 * MIB, 1412 * MIB),  # which grows to 512 MiB
        (MIB, 5 * 2**30, 5 * 2**30 + 512 * MIB),  # what compresses well
    ],
)
@pytest.mark.parametrize("without", ["manifest", ""])
def test_a_volume_too_small_is_refused_in_one_sentence(
    without: str, size: int, database_size: int | None, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = checked(tmp_path / "memory.dump", size, database_size)
    if without and database_size is None:
        one.manifest = None
    settings: Any = SimpleNamespace(volume=tmp_path)
    nobody: Any = None
    restoring = Restoring(settings, nobody, nobody)
    free = wanted + 64 * MIB
    monkeypatch.setattr(volume, "free_bytes", lambda _: free)
    restoring._check_room(one)
    free -= 1
    with pytest.raises(RefusedError) as refused:
        restoring._check_room(one)
    assert str(refused.value) == (
        f"restoring {size // MIB} MiB may take {(free + 1) // MIB} MiB beside the live database, and {tmp_path} has {free // MIB} MiB "
        "free; delete old dumps or kept databases, or grow the volume"
        + ("" if database_size is None else " (or dump anew after VACUUM FULL there, where much was deleted)")
    )


def test_room_is_looked_at_before_anything_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def looked_at(*_: Any) -> Any:
        return checked(tmp_path / "memory.dump", 100 * MIB, None)

    monkeypatch.setattr(staging, "preflight", looked_at)
    monkeypatch.setattr(staging, "stage", pytest.fail)
    monkeypatch.setattr(database, "connect", pytest.fail)
    monkeypatch.setattr(volume, "free_bytes", lambda _: 0)
    settings: Any = SimpleNamespace(volume=tmp_path, run_dir=tmp_path)
    parts: Any = SimpleNamespace(programs=None, known_revisions=frozenset())
    nobody: Any = None
    operation = Operation(Kind.RESTORE)
    with pytest.raises(RefusedError, match="may take 464 MiB"):
        asyncio.run(Restoring(settings, parts, nobody).restore(tmp_path, None, Wish(), operation, "a file"))
    assert operation.phase == "check"


IDENTITY = Identity(
    id="model",
    revision="1",
    precision="float32",
    dimension=384,
    pooling="cls",
    normalize=True,
    query_prefix="",
    passage_prefix="",
)


def at_hand(**more: Any) -> Any:
    """Return what is at hand, where nothing is missing."""
    known = {"known_revisions": frozenset({"older", "head"}), "model": SimpleNamespace(identity=IDENTITY)}
    return SimpleNamespace(programs=None, **known | more)


def manifest(model: dict[str, Any] | None = None, **held: Any) -> Any:
    """Return what is looked at of a manifest."""
    return SimpleNamespace(model=model, contents=Contents(**held), database_size=0)


REFUSED = [
    pytest.param(
        {"dimensions": {"public": 384, "tenant": 768, "free": -1}},
        "the memories have 768 in schema tenant dimensions, and the model at hand 384; use the model they were made with",
        id="dimension",
    ),
    pytest.param(
        {"revisions": {"public": ["head"], "tenant": ["older", "newer"]}},
        "the schema is at revision newer, which the hindsight-api here does not know; use an image with the version that made it, "
        "or a newer one",
        id="schema",
    ),
]


def bring_in(one: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, staged: Any = None, **wish: bool) -> list[str]:
    """Restore a file with this manifest, None for none; return what was dropped again."""
    dropped: list[str] = []

    async def looked_at(file: Path, *_: Any) -> Any:
        file.touch()
        return SimpleNamespace(
            file=file, manifest=one, header=SimpleNamespace(compression="gzip", server="18", pg_dump="18")
        )

    async def stage(*_: Any) -> Any:
        assert staged is not None, "it was loaded first"
        return staged

    async def drop(_: Path, name: str) -> None:
        dropped.append(name)

    monkeypatch.setattr(staging, "preflight", looked_at)
    monkeypatch.setattr(staging, "stage", stage)
    monkeypatch.setattr(staging, "drop_whatever_happens", drop)
    settings: Any = SimpleNamespace(volume=tmp_path, run_dir=tmp_path)
    nobody: Any = None
    restoring = Restoring(settings, at_hand(), nobody)
    place, wanted = Place(tmp_path, nobody), Wish(**wish)

    async def work() -> None:
        operation = Operation(Kind.RESTORE)
        checked = await restoring.check(tmp_path / "memory.dump", one, wanted, operation, "a file", place)
        await restoring.stage(checked, wanted, operation, place)

    with pytest.raises(RefusedError) as refused:
        asyncio.run(work())
    return [str(refused.value), *dropped]


@pytest.mark.parametrize(("held", "told"), REFUSED)
def test_what_a_manifest_says_is_refused_before_anything_is_loaded(
    held: Any, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bring_in(manifest(**held), monkeypatch, tmp_path) == [told]
    assert bring_in(manifest(**held), monkeypatch, tmp_path, force_model=True) == [told]


@pytest.mark.parametrize(("held", "told"), REFUSED)
def test_what_a_raw_file_turns_out_to_be_is_refused_before_it_is_served(
    held: Any, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    staged = SimpleNamespace(name="staged", contents=Contents(**held))
    assert bring_in(None, monkeypatch, tmp_path, staged) == [told, "staged"]


@pytest.mark.parametrize(
    ("name", "other"), [("revision", "2"), ("dimension", 768), ("query_prefix", "query: "), ("id", None)]
)
def test_memories_of_another_model_are_refused(
    name: str, other: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = manifest(IDENTITY.to_json() | {name: other})
    [told] = bring_in(one, monkeypatch, tmp_path)
    assert told == (
        f"the memories were embedded with another model than the one at hand ({name}: {IDENTITY.to_json()[name]!r}, not {other!r}); recall "
        "would return noise: use the image with that model (or force it, if the two are the same by another name)"
    )


def test_they_are_taken_where_that_is_forced() -> None:
    nobody: Any = None
    restoring = Restoring(nobody, at_hand(), nobody)
    restoring._check_model(manifest(IDENTITY.to_json() | {"revision": "2"}), Wish(force_model=True))
    restoring._check_model(manifest(IDENTITY.to_json()), Wish())
    restoring._check_model(manifest(IDENTITY.to_json() | {"more": "of a later version"}), Wish())


def test_a_rehearsal_that_is_cancelled_as_it_ends_leaves_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping, dropped = asyncio.Event(), []

    async def looked_at(*_: Any) -> Any:
        return checked(tmp_path / "memory.dump", 0, 0)

    async def staged(*_: Any) -> Any:
        return SimpleNamespace(name="hindsight_staging_1")

    async def drop(_: Path, name: str) -> None:
        dropping.set()
        await asyncio.sleep(0.05)
        dropped.append(name)

    async def work() -> None:
        task = asyncio.create_task(
            restoring.restore(tmp_path, None, Wish(dry_run=True), Operation(Kind.RESTORE), "a file")
        )
        await dropping.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert dropped == ["hindsight_staging_1"]

    monkeypatch.setattr(Restoring, "check", looked_at)
    monkeypatch.setattr(Restoring, "stage", staged)
    monkeypatch.setattr(staging, "drop", drop)
    settings: Any = SimpleNamespace(volume=tmp_path, run_dir=tmp_path)
    nobody: Any = None
    restoring = Restoring(settings, at_hand(), nobody)
    asyncio.run(work())


@contextlib.asynccontextmanager
async def _connected(*_: Any) -> AsyncIterator[None]:
    yield


async def _nothing_to_compare(*_: Any) -> None:
    pass


@pytest.mark.parametrize(("memories", "told"), [(0, []), (3, ["none of its memories could be embedded anew"])])
def test_no_memory_that_could_be_embedded(memories: int, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "connect", lambda *_: asyncio.sleep(0, _connected()))
    monkeypatch.setattr(agreement, "measure", _nothing_to_compare)
    parts: Any = SimpleNamespace(similarities=None)
    staged: Any = SimpleNamespace(name="staged", contents=SimpleNamespace(memories=memories))
    nothing: Any = None
    operation = Operation(Kind.RESTORE, report={"unproved": []})
    place = Place(Path("/nowhere"), nothing)
    asyncio.run(Restoring(nothing, parts, nothing)._check_agreement(staged, Wish(), operation, place))
    assert [sentence.partition(" (")[0] for sentence in operation.report["unproved"]] == told
