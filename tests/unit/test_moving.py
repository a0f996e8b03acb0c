"""What is brought in is looked at once more after hindsight-api's start, and what that does not prove is said."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar import migrated, moving, verification
from sidecar.contents import Contents, Table
from sidecar.errors import RefusedError, TransientError, VerificationError
from sidecar.migrated import Found
from sidecar.moving import Move
from sidecar.operations import Kind, Operation
from sidecar.rehearsal import RehearsalError

NOWHERE = Path("/nowhere")
OLD, NEW = Found({"public": 2}, {"public": ["old"]}), Found({"public": 2}, {"public": ["head"]})


class Served:
    """What is asked of a supervisor, done at once and noted."""

    heads = frozenset({"head"})

    def __init__(self, schema: str | None = "public") -> None:
        self.schema = schema
        self.asked: list[str] = []

    async def take_api_down(self, _: str) -> None:
        self.asked.append("down")

    async def bring_api_up(self) -> None:
        self.asked.append("up")

    async def bring_api_back(self) -> None:
        self.asked.append("back")

    async def take_postgres_down(self, _: str) -> None:
        raise NotImplementedError

    async def bring_postgres_up(self) -> None:
        raise NotImplementedError

    def over(self) -> None:
        self.asked.append("over")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says what is found before and after the start, and which memories may be recalled."""

    def said(before: Found, after: Found, *memories: tuple[str, str]) -> None:
        found = iter([before, after])
        monkeypatch.setattr(migrated, "look", lambda _: asyncio.sleep(0, next(found)))
        monkeypatch.setattr(moving, "look", lambda *_: asyncio.sleep(0, None))
        monkeypatch.setattr(moving, "sample", lambda *_: asyncio.sleep(0, list(memories)))
        monkeypatch.setattr(verification, "compare", lambda *_: SimpleNamespace(faults=[]))

    return said


def verify(served: Served, recall: Any) -> Operation:
    operation = Operation(Kind.RESTORE, report={"unproved": ["before"]})
    contents = SimpleNamespace(memories=2, unchanged=lambda: None)
    staged: Any = SimpleNamespace(contents=contents, verified=None)
    asyncio.run(Move(NOWHERE, served, recall).verify_served(staged, operation))
    return operation


async def recalls(_: str, __: str) -> float:
    return 0.9


def test_what_was_recalled_leaves_nothing_unproved(looks: Callable[..., None]) -> None:
    looks(OLD, NEW, ("book", "One."), ("book", "Another."))
    report = verify(Served(), recalls).report
    assert report == {"unproved": ["before"], "recalled": {"memories": 2, "median_similarity": 0.9}}


@pytest.mark.parametrize("schema", ["public", None])
def test_where_nothing_could_be_recalled_that_is_said(schema: str | None, looks: Callable[..., None]) -> None:
    looks(OLD, NEW, *([("book", "Not asked for.")] if schema is None else []))
    report = verify(Served(schema), recalls).report
    assert "recalled" not in report
    assert [sentence[:33] for sentence in report["unproved"]] == ["before", "none of its memories was recalled"]


def test_what_may_have_gone_rightly_is_said(looks: Callable[..., None]) -> None:
    looks(
        Found(OLD.memories, OLD.revisions, frozenset({"public"})), Found({"public": 1}, NEW.revisions), ("book", "One.")
    )
    report = verify(Served(), recalls).report
    assert [sentence[:25] for sentence in report["unproved"]] == ["before", "schema public had 2 memor"]


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (Found({"public": 1}, NEW.revisions), "schema public had 2 memories before hindsight-api was started, and has 1 now"),
        (OLD, "hindsight-api runs, and schema public is at revision old; expected head, to which it migrates what it serves"),
    ],
)  # fmt: skip
def test_what_the_start_lost_or_left_behind_is_a_fault(after: Found, told: str, looks: Callable[..., None]) -> None:
    looks(OLD, after, ("book", "One."))
    with pytest.raises(VerificationError) as error:
        verify(Served(), recalls)
    assert str(error.value) == told


def test_a_recall_that_is_answered_with_a_fault_is_a_failed_check(looks: Callable[..., None]) -> None:
    async def fails(_: str, __: str) -> float:
        raise RehearsalError("POST answered 500")

    looks(OLD, NEW, ("book", "One."), ("book", "Another."))
    with pytest.raises(VerificationError, match=r"^asked for by their own texts: POST answered 500$"):
        verify(Served(), fails)


def test_what_was_served_before_is_brought_back_and_not_given_up() -> None:
    served, operation = Served(), Operation(Kind.RESTORE)

    async def fail() -> None:
        async with moving.served_again(served, operation):
            raise VerificationError("no")

    with pytest.raises(VerificationError, match=r"^no$"):
        asyncio.run(fail())
    assert served.asked == ["back", "over"]


@pytest.mark.parametrize("error", [VerificationError("other rows"), TransientError("not now"), ValueError("a defect")])
def test_what_went_wrong_first_is_told_also_where_nobody_waits_for_what_was_served_before(error: Exception) -> None:
    class Slow(Served):
        waits: asyncio.Event

        async def bring_api_back(self) -> None:
            await super().bring_api_back()
            self.waits.set()
            await asyncio.Event().wait()

    async def work() -> None:
        served, operation = Slow(), Operation(Kind.RESTORE)
        served.waits = asyncio.Event()

        async def fails() -> None:
            async with moving.served_again(served, operation):
                raise error

        task = asyncio.create_task(fails())
        await served.waits.wait()
        task.cancel()
        with pytest.raises(type(error), match=str(error)):
            await task
        assert served.asked == ["back", "over"]

    asyncio.run(work())


@pytest.mark.parametrize("allowed", [False, True])
def test_what_was_stored_meanwhile_is_refused_unless_it_may_stay_in_the_old_database(
    *, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: Any = SimpleNamespace(contents=Contents({"public.memory_units": Table(2, "")}), moment=None)
    now = Contents({"public.memory_units": Table(3, "since")})
    monkeypatch.setattr(moving, "look", lambda *_: asyncio.sleep(0, now))
    operation = Operation(Kind.RESTORE)
    move = Move(NOWHERE, Served(), recalls, discard_newer=allowed)
    if allowed:
        asyncio.run(move._compare_with(before, operation))
    else:
        with pytest.raises(RefusedError, match=r"public\.memory_units: \+1 .*--discard-newer"):
            asyncio.run(move._compare_with(before, operation))
    assert [told.partition(":")[0] for told in operation.report["newer"]] == ["public.memory_units"]
