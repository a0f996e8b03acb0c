import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import pytest
import structlog

from sidecar.errors import RefusedError, SidecarError, VerificationError
from sidecar.operations import SERVE, BusyError, Kind, Operation, Operations, Outcome

T = TypeVar("T")
WITHIN = 20.0  # seconds, for what takes none
CANCELLED = "it was cancelled; nothing was replaced"


@pytest.fixture(autouse=True)
def told() -> Iterator[list[Any]]:
    """Return the log lines."""
    with structlog.testing.capture_logs() as lines:
        yield lines


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(WITHIN):
            result = await work
        assert complaints == []
        return result

    return asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until a condition holds; the deadline is `run`'s."""
    while not condition():  # noqa: ASYNC110 - of the operation, which has no event
        await asyncio.sleep(0)


async def ended(operation: Operation) -> Operation:
    await until(lambda: operation.ended)
    return operation


async def nothing(_: Operation) -> None:
    pass


async def for_ever(_: Operation) -> None:
    await asyncio.Event().wait()


async def begun(operations: Operations, work: Callable[[Operation], Coroutine[Any, Any, None]]) -> Operation:
    """Start an operation and let it come to its first wait."""
    operation = operations.start(Kind.DUMP, work)
    await asyncio.sleep(0)
    return operation


# One at a time -------------------------------------------------------------------------------------------------


def test_while_one_runs_another_is_not_begun_and_hears_which_one_it_is() -> None:
    async def work() -> None:
        operations = Operations()
        first = await begun(operations, for_ever)
        assert operations.current is first
        with pytest.raises(BusyError) as busy:
            operations.start(Kind.RESTORE, nothing)
        assert busy.value.operation is first
        assert str(busy.value) == (
            f"dump {first.id} runs since {first.started:%H:%M:%S} UTC; wait for its end, or cancel it"
        )
        assert operations.all() == [first]
        await operations.end()

    run(work())


def test_after_its_end_the_next_one_is_begun() -> None:
    async def work() -> None:
        operations = Operations()
        for kind in Kind:
            operation = await ended(operations.start(kind, nothing))
            assert operations.current is None
            assert (operation.outcome, operation.error) == (Outcome.DONE, None)
        assert [operation.kind for operation in operations.all()] == list(reversed(Kind))

    run(work())


# How it ends ---------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Callable[[Operation], Coroutine[Any, Any, None]]:
    async def work(operation: Operation) -> NoReturn:
        operation.enter("half way", 10, "rows")
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "outcome", "sentence"),
    [
        (RefusedError("too little space"), "refused", "too little space"),
        (VerificationError("other rows"), "verification-failed", "other rows"),
        (SidecarError("pg_dump ended"), "failed", "pg_dump ended"),
        (OSError(28, "No space left on device"), "failed", "[Errno 28] No space left on device"),
        (RuntimeError("boom"), "failed", "boom"),
        (KeyError(), "failed", "KeyError"),
        (ExceptionGroup("several", [ValueError("one")]), "failed", "several (1 sub-exception)"),
    ],
)
def test_what_it_raises_is_its_outcome(error: Exception, outcome: str, sentence: str) -> None:
    async def work() -> None:
        operations = Operations()
        operation = await ended(operations.start(Kind.MIGRATE, failing(error)))
        assert (operation.outcome, operation.error, operation.phase) == (outcome, sentence, "half way")
        assert operation.ended is not None
        assert operation.ended >= operation.started
        assert operations.current is None

    run(work())


@pytest.mark.parametrize("error", [RuntimeError("boom"), ExceptionGroup("several", [ValueError("one")])])
def test_an_error_that_nobody_foresaw_is_logged_with_its_trace(error: Exception, told: list[Any]) -> None:
    async def work() -> None:
        operation = await ended(Operations().start(Kind.DUMP, failing(error)))
        [line] = [line for line in told if line["event"] == "an operation failed unexpectedly"]
        assert (line["operation"], line["log_level"], line["exc_info"]) == (operation.name, "error", error)

    run(work())


@pytest.mark.parametrize("error", [RefusedError("x"), VerificationError("x"), SidecarError("x"), OSError("x")])
def test_an_error_with_a_sentence_is_logged_without_a_trace(error: Exception, told: list[Any]) -> None:
    async def work() -> None:
        operation = await ended(Operations().start(Kind.DUMP, failing(error)))
        assert [(line["event"], line["log_level"]) for line in told] == [
            ("operation", "info"),
            ("operation ended", "warning"),
        ]
        assert told[-1]["operation"] == operation.name
        assert told[-1]["outcome"] == operation.outcome
        assert told[-1]["error"] == "x"

    run(work())


def test_its_begin_of_each_phase_and_its_good_end_are_logged(told: list[Any]) -> None:
    async def two_phases(operation: Operation) -> None:
        operation.enter("dump", None, "bytes")
        operation.enter("hash", 10, "bytes")

    async def work() -> str:
        return (await ended(Operations().start(Kind.DUMP, two_phases))).name

    name = run(work())
    assert [(line["event"], line["operation"], line.get("phase"), line["log_level"]) for line in told] == [
        ("operation", name, "dump", "info"),
        ("operation", name, "hash", "info"),
        ("operation ended", name, None, "info"),
    ]


# Ending it early -----------------------------------------------------------------------------------------------


class Careful:
    """Work that needs a moment to clean up."""

    def __init__(self) -> None:
        self.turns = 0

    async def __call__(self, _: Operation) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
                self.turns += 1


def test_cancelling_waits_for_the_clean_up() -> None:
    async def work() -> None:
        operations, careful = Operations(), Careful()
        operation = await begun(operations, careful)
        assert await operations.cancel(operation.id) is operation
        assert careful.turns == 100
        assert (operation.outcome, operation.error) == (Outcome.CANCELLED, CANCELLED)
        assert operation.ended is not None
        assert operations.current is None

    run(work())


def test_while_it_cleans_up_it_still_runs() -> None:
    async def work() -> None:
        operations, careful = Operations(), Careful()
        operation = await begun(operations, careful)
        cancelling = asyncio.create_task(operations.cancel(operation.id))
        await until(lambda: careful.turns)
        assert (operations.current, operation.outcome, operation.cancelling) == (operation, Outcome.RUNNING, True)
        with pytest.raises(BusyError):
            operations.start(Kind.DUMP, nothing)
        await cancelling

    run(work())


def test_cancelling_twice_does_not_interrupt_the_clean_up() -> None:
    async def work() -> None:
        operations, careful = Operations(), Careful()
        operation = await begun(operations, careful)
        first = asyncio.create_task(operations.cancel(operation.id))
        await until(lambda: careful.turns)
        await operations.end()  # the sidecar stops meanwhile
        await first
        assert careful.turns == 100

    run(work())


def test_cancelling_twice_ends_the_wait_for_what_is_served_again() -> None:
    async def waits(operation: Operation) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            operation.enter(SERVE)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def work() -> None:
        operations = Operations()
        operation = operations.start(Kind.RESTORE, waits)
        await asyncio.sleep(0)
        first = asyncio.create_task(operations.cancel(operation.id))
        await until(lambda: operation.phase == SERVE)
        assert not first.done()
        await operations.cancel(operation.id)
        assert await first is operation
        assert (operation.outcome, operation.error) == (Outcome.CANCELLED, CANCELLED)

    run(work())


def test_who_cancels_may_go_away_and_the_clean_up_goes_on() -> None:
    async def work() -> None:
        operations, careful = Operations(), Careful()
        operation = await begun(operations, careful)
        cancelling = asyncio.create_task(operations.cancel(operation.id))
        await until(lambda: careful.turns)
        cancelling.cancel()  # a client that hung up
        await ended(operation)
        assert careful.turns == 100

    run(work())


def test_one_that_did_not_have_its_first_turn_is_cancelled_too() -> None:
    async def work() -> None:
        operations = Operations()
        operation = operations.start(Kind.DUMP, for_ever)
        await operations.cancel(operation.id)
        assert (operation.outcome, operations.current) == (Outcome.CANCELLED, None)

    run(work())


def test_one_that_fails_while_it_cleans_up_has_failed() -> None:
    async def clumsy(_: Operation) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the directory is gone")

    async def work() -> None:
        operations = Operations()
        operation = await begun(operations, clumsy)
        await operations.cancel(operation.id)
        assert (operation.outcome, operation.error) == (Outcome.FAILED, "the directory is gone")

    run(work())


def test_one_that_is_past_the_point_of_no_return_is_done() -> None:
    async def stubborn(_: Operation) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async def work() -> None:
        operations = Operations()
        operation = await begun(operations, stubborn)
        await operations.cancel(operation.id)
        assert (operation.outcome, operation.error) == (Outcome.DONE, None)

    run(work())


def test_what_does_not_run_cannot_be_cancelled() -> None:
    async def work() -> None:
        operations = Operations()
        over = await ended(operations.start(Kind.DUMP, nothing))
        with pytest.raises(RefusedError, match=f"no operation '{over.id}' runs; GET /v1/operations lists what does"):
            await operations.cancel(over.id)
        running = await begun(operations, for_ever)
        for text in (over.id, "", "x" * 10_000, "\n"):
            with pytest.raises(RefusedError) as refused:
                await operations.cancel(text)
            assert len(str(refused.value)) < 150
            assert str(refused.value).isprintable()
        assert running.outcome is Outcome.RUNNING
        await operations.end()

    run(work())


def test_the_sidecars_end_ends_what_runs_and_is_quiet_where_nothing_does() -> None:
    async def work() -> None:
        operations, careful = Operations(), Careful()
        await operations.end()
        operation = await begun(operations, careful)
        await operations.end()
        assert (operation.outcome, careful.turns) == (Outcome.CANCELLED, 100)
        await operations.end()

    run(work())


# What is told of it --------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sidecar.operations.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def progress(operation: Operation) -> tuple[float | None, float | None, float | None]:
    told = operation.to_json()
    return told["percent"], told["rate"], told["remaining_seconds"]


def test_percent_rate_and_remaining_time_follow_from_what_is_done(clock: Clock) -> None:
    operation = Operation(Kind.DUMP)
    operation.enter("hash", 1000, "bytes")
    assert progress(operation) == (0.0, None, None)
    clock.now += 4
    assert progress(operation) == (0.0, None, None)
    operation.done = 250
    assert progress(operation) == (25.0, 62.5, 12.0)
    operation.done = 1000
    assert progress(operation) == (100.0, 250.0, 0.0)
    operation.done = 1200  # the total was an estimate
    assert progress(operation) == (100.0, 300.0, 0.0)


def test_without_a_total_there_is_a_rate_alone(clock: Clock) -> None:
    operation = Operation(Kind.DUMP)
    operation.enter("dump", None, "bytes")
    operation.done = 10
    assert progress(operation) == (None, None, None)
    clock.now += 3
    assert progress(operation) == (None, 3.3, None)
    operation.enter("empty", 0, "rows")
    operation.done = 1
    clock.now += 1
    assert progress(operation) == (None, 1.0, None)


def test_a_phase_begins_at_zero(clock: Clock) -> None:
    operation = Operation(Kind.DUMP)
    operation.enter("dump", 100, "bytes")
    operation.done = 100
    clock.now += 100
    operation.enter("hash", 10, "rows")
    assert (operation.phase, operation.done, operation.total, operation.unit) == ("hash", 0, 10, "rows")
    clock.now += 1
    operation.done = 5
    assert progress(operation) == (50.0, 5.0, 1.0)


def test_what_has_ended_has_no_rate(clock: Clock) -> None:
    operation = Operation(Kind.DUMP)
    operation.enter("hash", 10, "bytes")
    operation.done = 5
    clock.now += 1
    operation.ended = operation.started
    assert progress(operation) == (50.0, None, None)


def test_it_is_told_as_json(clock: Clock) -> None:  # noqa: ARG001
    operation = Operation(Kind.ADOPT)
    operation.report["rows"] = 7
    told = json.loads(json.dumps(operation.to_json()))
    assert told == {
        "id": operation.id,
        "kind": "adopt",
        "outcome": "running",
        "phase": "beginning",
        "done": 0,
        "total": None,
        "unit": "",
        "percent": None,
        "rate": None,
        "remaining_seconds": None,
        "started": operation.started.isoformat(timespec="milliseconds"),
        "ended": None,
        "error": None,
        "report": {"rows": 7},
    }
    operation.ended = operation.started
    assert operation.to_json()["ended"] == told["started"]
    assert operation.name == f"adopt {operation.id}"


def test_it_is_found_by_its_id_and_the_latest_is_listed_first() -> None:
    async def work() -> None:
        operations = Operations()
        assert operations.all() == []
        assert operations.find("x") is None
        made = [await ended(operations.start(Kind.DUMP, nothing)) for _ in range(3)]
        made.append(await begun(operations, for_ever))
        assert operations.all() == made[::-1]
        assert [operations.find(operation.id) for operation in made] == made
        assert operations.find(made[0].id[:-1]) is None
        await operations.end()

    run(work())


def test_the_last_fifty_are_remembered() -> None:
    async def work() -> None:
        operations = Operations()
        made = [await ended(operations.start(Kind.DUMP, nothing)) for _ in range(53)]
        assert operations.all() == made[:2:-1]
        assert len(operations.all()) == 50
        assert operations.find(made[2].id) in (None, *made[3:])  # two of one second may have one name

    run(work())
