"""What is brought in and cannot be proved is given up after some tries; what was served before is tried for as long as it takes."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sidecar import maintenance
from sidecar.backoff import End
from sidecar.errors import Reason, TransientError, VerificationError
from sidecar.machine import Fault, OperationName, Server, World
from sidecar.maintenance import Maintenance

RESTORE = OperationName("restore 1")
LONG = maintenance._PATIENCE + 1
Looks = list[Callable[[World], None]]


def complete(**changes: Any) -> World:
    """Return a world in which nothing is missing."""
    world = World(
        volume_held=True, cluster_prepared=True, postgres=Server.UP, database_checked=True, api=Server.UP, proved=True
    )
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def made(world: World) -> Maintenance:
    return Maintenance(world, lambda: None, "public", lambda: frozenset({"head"}))


def run(world: World, asked: Callable[[Maintenance], Coroutine[Any, Any, None]], looks: Looks) -> bool:
    """Ask, let the supervisor see one thing after the other, and tell whether what was asked for is over then."""

    async def work() -> bool:
        one = made(world)
        task = asyncio.create_task(asked(one))
        for look in [*looks, lambda _: None]:
            for _ in range(3):
                await asyncio.sleep(0)
            if task.done():
                break
            look(world)
            await one.tell_looked()
        for _ in range(3):
            await asyncio.sleep(0)
        over = task.done()
        task.cancel()
        await asyncio.wait({task})
        if over:
            task.result()
        return over

    return asyncio.run(work())


def fails(tries: int, seconds: float, detail: str = "could not recall a memory: POST answered 500") -> Looks:
    """Let a step fail so often in a row, over so many seconds."""

    def fail(world: World) -> None:
        world.step_failed(detail, time.monotonic() - seconds, 0.0)  # of several, the first one's time counts

    return [fail] * tries


def succeed(world: World) -> None:
    world.fault = None


def prove(world: World) -> None:
    world.fault, world.proved = None, True


def end_api(world: World) -> None:
    world.api_restarts.record(time.monotonic(), End.FAILED)


def end_postgres(world: World) -> None:
    world.postgres_restarts.record(time.monotonic(), End.FAILED)


def test_new_data_that_cannot_be_proved_is_given_up_with_the_steps_own_words() -> None:
    told = "could not recall a memory:\n  POST answered 500"
    with pytest.raises(VerificationError) as error:
        run(complete(), Maintenance.bring_api_up, fails(3, LONG, told))
    assert str(error.value) == "it cannot be served (3 tries): could not recall a memory: POST answered 500"


@pytest.mark.parametrize(
    "looks",
    [fails(2, LONG), fails(30, 5.0), [*fails(2, LONG), succeed, *fails(2, LONG)], [end_api], [end_postgres]],
    ids=["two tries", "thirty in five seconds", "not in a row", "hindsight-api ended once", "Postgres ended once"],
)
def test_what_may_pass_by_itself_is_waited_for(looks: Looks) -> None:
    assert not run(complete(), Maintenance.bring_api_up, looks)
    assert run(complete(), Maintenance.bring_api_up, [*looks, prove])


def test_what_was_served_before_is_tried_for_as_long_as_it_takes() -> None:
    looks = fails(30, 10 * LONG)
    assert not run(complete(), Maintenance.bring_api_back, looks)
    assert run(complete(), Maintenance.bring_api_back, [*looks, prove])


@pytest.mark.parametrize("asked", [Maintenance.bring_api_up, Maintenance.bring_api_back])
@pytest.mark.parametrize(
    ("look", "told"),
    [
        (lambda world: setattr(world, "fault", Fault(Reason.SCHEMA_NEWER, "too new", 0.0)), "it cannot be served (schema-newer): too new"),
        (end_api, "hindsight-api ends again and again with this database; its log lines say why"),
        (end_postgres, "Postgres ends again and again with this database; its log lines say why"),
    ],
)  # fmt: skip
def test_what_does_not_pass_by_itself_ends_either(
    asked: Callable[[Maintenance], Coroutine[Any, Any, None]], look: Callable[[World], None], told: str
) -> None:
    with pytest.raises(VerificationError) as error:
        run(complete(), asked, [look, look])
    assert str(error.value) == told


@pytest.mark.parametrize("asked", [Maintenance.bring_api_up, Maintenance.bring_api_back])
def test_what_takes_all_the_space_is_given_up_so_that_it_can_be_dropped(
    asked: Callable[[Maintenance], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(world: World) -> None:
        world.no_space = "0 MiB free"

    def freed(world: World) -> None:
        world.no_space = None

    assert not run(complete(), asked, [full, full, freed, full])
    monkeypatch.setattr(maintenance, "_PATIENCE", 0.0)
    with pytest.raises(VerificationError, match=r"^it cannot be served \(no-space\): 0 MiB free$"):
        run(complete(), asked, [full])


def test_a_data_directory_that_cannot_be_prepared_is_given_up() -> None:
    with pytest.raises(VerificationError, match=r"3 tries\): could not prepare the cluster$"):
        run(complete(), Maintenance.bring_postgres_up, fails(3, LONG, "could not prepare the cluster"))


@pytest.mark.parametrize("api", [Server.DOWN, Server.UP])
def test_nothing_is_exchanged_before_what_was_begun_is_over(api: Server) -> None:
    """A step that is under way ends before the next look, whether hindsight-api ran or not."""

    def ask(one: Maintenance) -> Coroutine[Any, Any, None]:
        return one.take_api_down(RESTORE)

    def end(world: World) -> None:
        world.api_ended()

    world = complete(api=api)

    async def at_once() -> bool:
        task = asyncio.create_task(ask(made(world)))
        for _ in range(5):
            await asyncio.sleep(0)
        over = task.done()
        task.cancel()
        return over

    assert not asyncio.run(at_once())
    assert (world.maintenance, world.api_wanted) == (RESTORE, False)
    assert run(world, ask, [end])
    with pytest.raises(TransientError, match="Postgres is not up"):
        run(complete(api=Server.DOWN, postgres=Server.STARTING), ask, [])
    with pytest.raises(TransientError, match="the sidecar is stopping"):
        run(complete(stopping=True), ask, [])
