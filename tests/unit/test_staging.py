"""What a load may take beside the hindsight-api that serves meanwhile, and what is left of a database that is dropped."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import staging, verification
from sidecar.dump_file import Entry
from sidecar.sizing import MIB, Machine
from sidecar.staging import builds_of


@pytest.mark.parametrize(
    ("cores", "memory", "builds", "each"),
    [
        (1, 512, 1, 64),
        (4, 512, 1, 64),
        (4, 1024, 2, 64),
        (2, 2048, 2, 128),
        (4, 2048, 4, 64),  # and not 4 times 256, half of what there is
        (16, 65536, 4, 1024),
        (2, 256, 1, 64),
    ],
)
def test_index_builds_share_an_eighth_of_the_memory(cores: int, memory: int, builds: int, each: int) -> None:
    assert builds_of(Machine(memory=memory * MIB, cores=cores)) == (builds, each * MIB)


@given(st.integers(512 * MIB, 2**42), st.integers(1, 128))
def test_they_never_take_more(memory: int, cores: int) -> None:
    builds, each = builds_of(Machine(memory=memory, cores=cores))
    assert 1 <= builds <= cores
    assert builds * each <= memory // 8


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_could_not_be_dropped_is_dropped_later(cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a parameter
    dropping = asyncio.Event()

    async def drop(*_: object) -> None:
        dropping.set()
        await asyncio.sleep(0.01)
        raise psycopg.OperationalError("no space left on device")

    async def work() -> None:
        task = asyncio.create_task(staging.drop_whatever_happens(Path("/nowhere"), "hindsight_staging_1"))
        await dropping.wait()
        if cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task

    monkeypatch.setattr(staging, "drop", drop)
    monkeypatch.setattr(staging, "left", set())
    asyncio.run(work())
    assert staging.left == {"hindsight_staging_1"}


@pytest.mark.parametrize(
    ("kind", "rest", "missing"),
    [
        ("INDEX", "public idx hindsight", False),
        ("INDEX", "public idx two words", False),  # the owner's name
        ("INDEX", "public id hindsight", True),
        ("INDEX", "other idx hindsight", True),
        ("INDEX", "odd schema odd index hindsight", False),
        ("INDEX", "odd schema of two lines hindsight", False),
        ("CONSTRAINT", "public banks banks_pkey hindsight", False),
        ("CONSTRAINT", "public documents documents_fkey hindsight", True),
        ("FK CONSTRAINT", "public documents documents_fkey hindsight", False),
        ("TABLE", "public absent hindsight", False),
    ],
)
def test_names_in_a_dumps_list_are_found_as_they_stand_there(kind: str, rest: str, missing: bool) -> None:  # noqa: FBT001 - a parameter
    here = [
        "INDEX public idx",
        "INDEX odd schema odd index",
        "INDEX odd schema of\ntwo lines",
        "CONSTRAINT public banks banks_pkey",
        "FK CONSTRAINT public documents documents_fkey",
    ]

    class Connection:
        async def execute(self, _: str) -> Any:
            return SimpleNamespace(fetchall=lambda: asyncio.sleep(0, [{"name": name} for name in here]))

    connection: Any = Connection()
    found = asyncio.run(verification.missing_of(connection, [Entry(kind, rest, "")]))
    assert bool(found) is missing
