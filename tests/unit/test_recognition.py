"""Whether stored vectors are compared, what comes of it, and what is noted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar import agreement, database
from sidecar.agreement import Agreement
from sidecar.errors import BlockedError, Reason, TransientError
from sidecar.model import Model, read
from sidecar.recognition import FORCED, Embedder, Recognition, fault_of, is_known, may_be_noted, note_of

EMBEDDER = Embedder("c0ffee", "onnx", "1.1.0")
AGREE, DIFFER = Agreement(10, 0.97), Agreement(10, 0.05)


@pytest.mark.parametrize(
    ("noted", "known"),
    [
        (None, False),
        (EMBEDDER.to_json(), True),
        (Embedder("decaf", "onnx", "1.1.0").to_json(), False),
        (Embedder("c0ffee", "torch", "1.1.0").to_json(), False),
        (Embedder("c0ffee", "onnx", "0.8.4").to_json(), False),
        (FORCED, True),
        ("c0ffee", False),
    ],
)
def test_nothing_is_compared_where_the_same_embedder_is_noted(noted: object, *, known: bool) -> None:
    assert is_known(noted, EMBEDDER) is known


@pytest.mark.parametrize(
    ("found", "memories", "noted"),
    [(AGREE, 10, True), (DIFFER, 10, False), (None, 0, True), (None, 7, False)],
)
def test_an_embedder_is_noted_where_vectors_agree_or_none_are_there(
    found: Agreement | None, memories: int, *, noted: bool
) -> None:
    assert may_be_noted(found, memories) is noted


@pytest.mark.parametrize(
    ("found", "forced", "noted"),
    [
        (AGREE, False, EMBEDDER.to_json()),
        (AGREE, True, EMBEDDER.to_json()),
        (None, False, None),
        (None, True, FORCED),
        (DIFFER, True, FORCED),
    ],
)
def test_what_is_noted_of_memories_that_are_brought_in(found: Agreement | None, *, forced: bool, noted: object) -> None:
    assert note_of(found, EMBEDDER, forced=forced) == noted


def test_a_fault_says_what_was_seen_what_was_expected_and_what_to_do(bake: Callable[..., Path]) -> None:
    model = read(bake(), "onnx")
    assert fault_of(None, model) is None
    assert fault_of(AGREE, model) is None
    fault = fault_of(DIFFER, model)
    assert fault is not None
    assert fault.reason is Reason.MODEL_MISMATCH
    assert "agree with the model at hand by 0.05 (expected 0.6 or more)" in fault.detail
    assert f"{model.directory} has the same name and revision, and other weights" in fault.detail
    assert "set HINDSIGHT_SIDECAR_MODEL_DIR" in fault.detail


class Database:
    """What of a database is looked at, and how often it was compared."""

    def __init__(self, found: Agreement | Exception | None, noted: object = None, memories: int = 10) -> None:
        self.found, self.noted, self.memories = found, noted, memories
        self.stored = [("A text.", [1.0])]
        self.compared = 0

    async def compare(self, *_: object) -> Agreement | None:
        self.compared += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        yield

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        async def note(_: Path, embedder: object) -> None:
            self.noted = embedder

        answers: dict[str, Callable[..., Any]] = {
            "connect": self._connected,
            "noted_embedder": lambda: self.noted,
            "memory_schemas": dict,
            "count_memories": lambda: self.memories,
        }
        for name, answer in answers.items():
            patch.setattr(database, name, lambda *_, answer=answer, **__: asyncio.sleep(0, answer()))
        patch.setattr(database, "note_embedder", note)
        patch.setattr(agreement, "sample", lambda _: asyncio.sleep(0, self.stored))
        patch.setattr(agreement, "compare", self.compare)


@pytest.fixture
def model(bake: Callable[..., Path]) -> Model:
    return read(bake(), "onnx")


async def _embed(_: object) -> list[float]:
    raise AssertionError("compare is stood in for")


def check(one: Recognition, model: Model, embedder: Embedder = EMBEDDER) -> None:
    asyncio.run(one.check(model, embedder, _embed))


def test_what_agrees_is_compared_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Database(AGREE)
    held.stand_in(monkeypatch)
    check(Recognition(Path("/")), model)
    check(Recognition(Path("/")), model)
    assert (held.compared, held.noted) == (1, EMBEDDER.to_json())


def test_a_refusal_is_remembered_for_those_memories_and_that_embedder(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, one = Database(DIFFER), Recognition(Path("/"))
    held.stand_in(monkeypatch)
    for _ in range(3):
        with pytest.raises(BlockedError, match="embedded with another model"):
            check(one, model)
    assert (held.compared, held.noted) == (1, None)
    held.found = AGREE
    held.stored = [("Another one.", [1.0])]
    check(one, model)
    assert held.compared == 2
    held.stored, held.noted = [("A text.", [1.0])], None
    check(one, model, Embedder("decaf", "onnx", "1.1.0"))
    assert held.compared == 3


@pytest.mark.parametrize("found", [None, TransientError("no memory for a model")])
def test_what_could_not_be_compared_is_served_and_not_noted(
    found: Exception | None, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Database(found)
    held.stand_in(monkeypatch)
    check(Recognition(Path("/")), model)
    assert held.noted is None


def test_other_weights_that_could_not_be_compared_are_not_served(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Database(TransientError("no memory for a model"))
    held.stand_in(monkeypatch)
    held.noted = Embedder("decaf", "onnx", "1.1.0").to_json()
    with pytest.raises(BlockedError, match=r"could not be found out \(no memory") as caught:
        check(Recognition(Path("/")), model)
    assert caught.value.reason is Reason.MODEL_MISMATCH
    held.stored = []
    check(Recognition(Path("/")), model)


def test_an_empty_database_is_noted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Database(None, memories=0)
    held.stand_in(monkeypatch)
    check(Recognition(Path("/")), model)
    assert held.noted == EMBEDDER.to_json()
