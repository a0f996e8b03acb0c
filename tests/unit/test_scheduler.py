"""The scheduler with real operations and real archives; the time is given, and what a dump does is as short as it can be."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sidecar import archive, dumping
from sidecar.administration import Administration
from sidecar.archive import DUMP, Archive, Manifest
from sidecar.contents import Contents
from sidecar.errors import RefusedError, TransientError, VerificationError
from sidecar.operations import Kind, Operation, Operations, Outcome
from sidecar.schedule import Made, Retention, Times
from sidecar.scheduler import Scheduler
from sidecar.settings import Settings

NOW = datetime(2026, 11, 29, 12, 0, 5, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
Work = Callable[[Operation], Awaitable[None]]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


def good(at: datetime) -> Work:
    async def work(operation: Operation) -> None:
        operation.report["dump"] = {"id": archive.new_id(at), "made": at.isoformat(timespec="milliseconds")}

    return work


def failing(error: Exception, at: datetime | None = None) -> Work:
    async def work(operation: Operation) -> None:
        if at is not None:
            await good(at)(operation)
        raise error

    return work


async def for_ever(_: Operation) -> None:
    await asyncio.Event().wait()


class Dumps:
    """Begins real operations, whose work the test gives beforehand."""

    def __init__(self, *works: Work, there: list[Made] | None = None) -> None:
        self.operations = Operations()
        self.works = list(works)
        self.there = there or []
        self.begun: list[Retention] = []

    @property
    def busy(self) -> bool:
        return self.operations.current is not None

    def dump(self, *, retention: Retention) -> Operation:
        operation = self.operations.start(Kind.DUMP, self.works.pop(0))
        self.begun.append(retention)
        return operation

    def scheduled_dumps(self) -> list[Made]:
        return self.there

    async def over(self) -> None:
        while self.operations.current is not None:  # noqa: ASYNC110 - the deadline is `run`'s
            await asyncio.sleep(0)


def make(dumps: Dumps, expression: str = "0 * * * *", *, start: datetime = NOW) -> Scheduler:
    scheduler = Scheduler(Times(expression), Retention(3), dumps)
    scheduler.read_volume(start)
    return scheduler


# When one is begun ---------------------------------------------------------------------------------------------


def test_one_is_made_at_each_time_and_one_for_all_that_were_missed() -> None:
    async def work() -> None:
        dumps = Dumps(good(NOW), good(NOW + HOUR), there=[Made("old", NOW - 9 * HOUR)])
        scheduler = make(dumps)
        for seconds in range(60):
            scheduler.look(NOW + timedelta(seconds=seconds), ready=True)
            await dumps.over()
        assert len(dumps.begun) == 1
        scheduler.look(NOW + HOUR, ready=True)
        await dumps.over()
        scheduler.look(NOW + HOUR, ready=True)
        assert dumps.begun == [Retention(3), Retention(3)]
        assert scheduler.record.outcomes["done"] == 2

    run(work())


def test_none_is_made_where_the_volume_has_it_already() -> None:
    async def work() -> None:
        dumps = Dumps(there=[Made("old", NOW - HOUR), Made("new", NOW - timedelta(seconds=4))])
        scheduler = make(dumps)
        scheduler.look(NOW, ready=True)
        assert dumps.operations.all() == []
        assert scheduler.record.success == dumps.there[1]
        assert scheduler.record.next == NOW.replace(second=0) + HOUR

    run(work())


def test_it_waits_until_the_sidecar_is_ready() -> None:
    async def work() -> None:
        dumps = Dumps(good(NOW))
        scheduler = make(dumps)
        for minutes in range(59):
            scheduler.look(NOW + timedelta(minutes=minutes), ready=False)
        assert dumps.operations.all() == []
        scheduler.look(NOW + 3 * HOUR, ready=True)
        await dumps.over()
        scheduler.look(NOW + 3 * HOUR, ready=True)
        assert len(dumps.operations.all()) == 1

    run(work())


def test_it_waits_for_the_end_of_another_operation_and_does_not_pile_up() -> None:
    async def work() -> None:
        dumps = Dumps(good(NOW + 5 * HOUR))
        scheduler = make(dumps)
        other = dumps.operations.start(Kind.RESTORE, for_ever)
        for hours in range(5):
            scheduler.look(NOW + hours * HOUR, ready=True)
        assert dumps.operations.all() == [other]
        await dumps.operations.cancel(other.id)
        for _ in range(3):
            scheduler.look(NOW + 5 * HOUR, ready=True)
            await dumps.over()
        assert len(dumps.begun) == 1
        assert scheduler.record.outcomes == {outcome.value: 0 for outcome in Outcome if outcome != "running"} | {
            "done": 1
        }

    run(work())


def test_what_is_not_so_now_is_tried_at_the_next_look() -> None:
    async def work() -> None:
        class NotYet(Dumps):
            tries = 0

            def dump(self, *, retention: Retention) -> Operation:
                self.tries += 1
                if self.tries < 3:
                    raise TransientError("Postgres is not ready")
                return super().dump(retention=retention)

        dumps = NotYet(good(NOW))
        scheduler = make(dumps)
        for _ in range(3):
            scheduler.look(NOW, ready=True)
        await dumps.over()
        scheduler.look(NOW, ready=True)
        assert (scheduler.record.outcomes["done"], scheduler.record.failure) == (1, None)

    run(work())


def test_an_upload_that_comes_is_not_turned_away_for_a_dump_that_began_meanwhile(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("sidecar.administration.time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = []

    async def pieces() -> AsyncIterator[bytes]:
        for seconds in (0.0, 30.0, 61.0):
            yield b"piece"
            now[0] += seconds
            seen.append(administration.busy)

    async def work() -> None:
        administration.dumps_directory.parent.mkdir(exist_ok=True)
        assert not administration.busy
        await administration.receive(pieces(), 15)
        assert not administration.busy  # from here on it is an operation
        with pytest.raises(RefusedError):
            await administration.receive(pieces(), 16)
        assert not administration.busy

    run(work())
    assert seen == [True, True, False] * 2  # one that has stalled holds nobody up


# How it went ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RefusedError("too little space"), "refused"),
        (VerificationError("it was removed"), "verification-failed"),
        (OSError("cannot be written"), "failed"),
    ],
)
def test_a_failure_is_told_and_not_tried_again_before_the_next_time(error: Exception, outcome: str) -> None:
    async def work() -> None:
        old = Made("old", NOW - 2 * HOUR)
        dumps = Dumps(failing(error), good(NOW + HOUR), there=[old])
        scheduler = make(dumps)
        for seconds in range(50):
            scheduler.look(NOW + timedelta(seconds=seconds), ready=True)
            await dumps.over()
        (operation,) = dumps.operations.all()
        assert scheduler.record.failure == (operation.ended, str(error))
        assert scheduler.record.success == old
        assert scheduler.record.outcomes[outcome] == 1
        for _ in range(2):
            scheduler.look(NOW + HOUR, ready=True)
            await dumps.over()
        assert scheduler.record.failure == (operation.ended, str(error))  # both are told; the times say which is later
        assert scheduler.record.success is not None
        assert scheduler.record.success.made == NOW + HOUR

    run(work())


def test_one_that_was_cancelled_is_a_failure() -> None:
    async def work() -> None:
        dumps = Dumps(for_ever)
        scheduler = make(dumps)
        scheduler.look(NOW, ready=True)
        (operation,) = dumps.operations.all()
        await dumps.operations.cancel(operation.id)
        scheduler.look(NOW, ready=True)
        assert scheduler.record.outcomes["cancelled"] == 1
        assert scheduler.record.failure is not None
        assert "it was cancelled" in scheduler.record.failure.reason

    run(work())


def test_one_whose_predecessors_could_not_be_deleted_is_good_and_the_failure_is_told() -> None:
    async def work() -> None:
        dumps = Dumps(failing(TransientError("the old one cannot be deleted"), NOW))
        scheduler = make(dumps)
        for _ in range(2):
            scheduler.look(NOW, ready=True)
            await dumps.over()
        assert scheduler.record.success is not None
        assert scheduler.record.success.made == NOW
        assert scheduler.record.failure is not None
        assert scheduler.record.failure.reason == "the old one cannot be deleted"

    run(work())


def test_a_directory_that_cannot_be_listed_does_not_keep_the_sidecar_from_starting() -> None:
    class Unreadable(Dumps):
        def scheduled_dumps(self) -> list[Made]:
            raise PermissionError(13, "Permission denied", "/volume/dumps")

    scheduler = make(Unreadable())
    assert scheduler.record.success is None


# What is deleted -----------------------------------------------------------------------------------------------


def write(dumps: Path, made: datetime, *, scheduled: bool) -> Archive:
    """Write a finished dump of that time."""
    identifier, content = archive.new_id(made), os.urandom(600)
    directory = dumps / identifier
    directory.mkdir(parents=True)
    (directory / DUMP).write_bytes(content)
    manifest = Manifest(identifier, made, {}, "none", None, Contents(), 600, sha256(content).hexdigest(), scheduled)
    return archive.finish(directory, manifest)


@pytest.fixture
def administration(tmp_path: Path) -> Administration:
    """Return one whose volume is there, and nothing else."""
    nobody = cast("Any", SimpleNamespace())
    return Administration(Settings(PGDATA=tmp_path / "pgdata"), nobody, nobody)


def names(administration: Administration) -> set[str]:
    return {path.name for path in administration.dumps_directory.iterdir()}


def test_old_ones_of_the_schedule_are_deleted_and_none_that_was_made_by_hand(administration: Administration) -> None:
    dumps, now = administration.dumps_directory, datetime.now(UTC)
    by_hand = [write(dumps, now - age * DAY, scheduled=False) for age in (0, 2, 400)]
    made = [write(dumps, now - age * DAY, scheduled=True) for age in (0, 1, 2, 3, 50)]
    operation = Operation(Kind.DUMP)
    administration._retain(Retention(3), made[0], operation)
    assert names(administration) == {one.manifest.id for one in [*by_hand, *made[:3]]}
    assert operation.report["deleted"] == [made[4].manifest.id, made[3].manifest.id]  # the oldest first
    administration._retain(Retention(7, 1.5), made[0], operation)
    assert names(administration) == {one.manifest.id for one in [*by_hand, *made[:2]]}


def test_one_that_was_damaged_since_counts_for_nothing_and_is_left_alone(administration: Administration) -> None:
    dumps, now = administration.dumps_directory, datetime.now(UTC)
    newest, damaged, old = [write(dumps, now - age * DAY, scheduled=True) for age in range(3)]
    with (damaged.directory / DUMP).open("ab") as file:
        file.truncate(10)
    administration._retain(Retention(2), newest, Operation(Kind.DUMP))
    assert names(administration) == {one.manifest.id for one in (newest, damaged, old)}


def test_what_the_end_in_the_middle_of_a_deletion_leaves_is_swept(administration: Administration) -> None:
    dumps = administration.dumps_directory
    one = write(dumps, NOW, scheduled=True)
    one.directory.rename(dumps / f"{dumping.PARTIAL}{one.manifest.id}")  # as far as it came
    assert administration.dumps() == []
    administration.sweep_files()
    assert names(administration) == set()


def test_leftovers_that_cannot_be_removed_keep_nobody_from_serving(
    administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = administration.dumps_directory / f"{dumping.PARTIAL}x"
    left.mkdir(parents=True)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    administration.sweep_files()
    assert left.is_dir()


def test_one_that_cannot_be_deleted_is_named(administration: Administration) -> None:
    dumps, now = administration.dumps_directory, datetime.now(UTC)
    newest, old = [write(dumps, now - age * DAY, scheduled=True) for age in range(2)]
    (dumps / f"{dumping.PARTIAL}{old.manifest.id}" / "in the way").mkdir(parents=True)
    operation = Operation(Kind.DUMP)
    with pytest.raises(
        TransientError, match=f"new dump {newest.manifest.id} is good, and the old one {old.manifest.id}"
    ):
        administration._retain(Retention(1), newest, operation)
    assert operation.report["deleted"] == []
    assert old.directory.is_dir()
