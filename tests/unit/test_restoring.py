"""What the sample of vectors proves is told, and so is where it proves nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar import agreement, database
from sidecar.operations import Kind, Operation
from sidecar.restoring import Place, Restoring, Wish


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
