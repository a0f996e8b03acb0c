"""Children that behave as told, in real time and short budgets; `stopping` itself is the real one."""

import asyncio
import signal
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import psycopg
import pytest

from sidecar import stopping
from sidecar.processes import Member
from sidecar.stopping import stop_children

T = TypeVar("T")
Log = list[tuple[str, signal.Signals]]
NOBODY = 2**22 + 1  # more than a pid can be


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())


class Fake:
    """A child that ends some seconds after a signal, with an exit status; or never."""

    def __init__(self, name: str, log: Log, ends: dict[signal.Signals, tuple[float, int]]) -> None:
        self.name = name
        self.pid = NOBODY
        self._log = log
        self.ends = ends
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._exited.result() if self._exited.done() else None

    def send(self, number: signal.Signals) -> None:
        if self._exited.done():
            return
        self._log.append((self.name, number))
        if number in self.ends:
            after, status = self.ends[number]
            asyncio.get_running_loop().call_later(after, self._end, status)

    def _end(self, status: int) -> None:
        if not self._exited.done():
            self._exited.set_result(status)

    async def wait(self, timeout: float | None = None) -> int | None:  # noqa: ASYNC109
        done, _ = await asyncio.wait({self._exited}, timeout=timeout)
        return self._exited.result() if done else None


KILLED = {signal.SIGKILL: (0.0, -9)}
POLITE_API = {signal.SIGTERM: (0.01, 0), **KILLED}
POLITE_POSTGRES = {signal.SIGINT: (0.01, 0), signal.SIGQUIT: (0.01, 2), **KILLED}
HUNG_POSTGRES = {signal.SIGQUIT: (0.0, 2), **KILLED}


async def no_checkpoint() -> None:
    pass


async def stop(
    log: Log,
    api: Fake | None,
    postgres: Fake | None,
    budget: float,
    checkpoint: Any = no_checkpoint,
    *,
    shut_down: bool = False,
) -> tuple[stopping.Stop, list[str]]:
    told: list[str] = []
    swept: list[list[Member]] = []

    async def is_shut_down() -> bool:
        return shut_down

    def children(pid: int) -> list[Member]:
        assert pid == NOBODY
        return [Member(NOBODY, 0, "T", 0.0)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping.processes, "children", children)
        patch.setattr(stopping.processes, "kill", swept.append)
        result = await stop_children(
            api,
            postgres,
            budget,
            checkpoint=checkpoint,
            shut_down=is_shut_down,
            tell=lambda text, **_: told.append(text),
        )
    killable = [child for child in (api, postgres) if child is not None and child.ends]
    assert all(child.returncode is not None for child in killable), "not reaped"
    assert ("postgres", signal.SIGTERM) not in log
    assert bool(swept) == (("postgres", signal.SIGQUIT) in log), "after a hard stop, and only then"
    return result, told


def test_the_api_ends_first_and_postgres_is_shut_down_fast() -> None:
    async def work() -> None:
        log: Log = []
        result, told = await stop(log, Fake("api", log, POLITE_API), Fake("postgres", log, POLITE_POSTGRES), 5.0)
        assert log == [("api", signal.SIGTERM), ("postgres", signal.SIGINT)]
        assert result.clean
        assert result.seconds < 2
        assert told == []

    run(work())


def test_nothing_running_is_a_clean_stop() -> None:
    async def work() -> None:
        result, _ = await stop([], None, None, 5.0)
        assert result.clean

    run(work())


def test_an_api_that_does_not_end_is_killed_after_half_of_the_budget() -> None:
    async def work() -> None:
        log: Log = []
        began = time.monotonic()
        result, told = await stop(log, Fake("api", log, KILLED), Fake("postgres", log, POLITE_POSTGRES), 1.0)
        assert log == [("api", signal.SIGTERM), ("api", signal.SIGKILL), ("postgres", signal.SIGINT)]
        assert result.clean
        assert 0.5 <= time.monotonic() - began < 1.0
        assert "its tasks are taken up again" in told[0]

    run(work())


def test_an_api_never_gets_more_than_its_share_of_a_long_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_API_SHARE", 0.1)

    async def work() -> None:
        log: Log = []
        result, _ = await stop(log, Fake("api", log, KILLED), Fake("postgres", log, POLITE_POSTGRES), 60.0)
        assert result.seconds < 5

    run(work())


@pytest.mark.parametrize("budget", [2.0, 6.0])
def test_an_api_that_not_even_a_kill_ends_leaves_postgres_its_time(
    budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in the kernel, which waits for a disk there."""
    monkeypatch.setattr(stopping, "_API_SHARE", 0.1)

    async def work() -> None:
        log: Log = []
        result, told = await stop(log, Fake("api", log, {}), Fake("postgres", log, POLITE_POSTGRES), budget)
        assert log == [("api", signal.SIGTERM), ("api", signal.SIGKILL), ("postgres", signal.SIGINT)]
        assert result.clean
        assert result.seconds < 0.1 + 1.0 + 0.5
        assert len(told) == 1

    run(work())


def test_a_postgres_that_does_not_end_is_stopped_hard_within_the_budget() -> None:
    async def work() -> None:
        log: Log = []
        result, told = await stop(log, None, Fake("postgres", log, HUNG_POSTGRES), 1.0)
        assert log == [("postgres", signal.SIGINT), ("postgres", signal.SIGQUIT)]
        assert not result.clean
        assert 0.5 <= result.seconds <= 1.1
        assert "the next start recovers from its log" in told[0]

    run(work())


def test_a_postgres_that_ignores_even_that_is_killed_and_reaped() -> None:
    async def work() -> None:
        log: Log = []
        result, _ = await stop(log, None, Fake("postgres", log, KILLED), 0.4)
        assert [number for _, number in log] == [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL]
        assert not result.clean
        assert result.seconds < 1.5

    run(work())


def test_a_postgres_that_not_even_a_kill_ends_is_not_waited_for() -> None:
    """As one in the kernel, which waits for a disk there."""

    async def work() -> None:
        log: Log = []
        postgres = Fake("postgres", log, {})
        result, _ = await stop(log, Fake("api", log, KILLED), postgres, 1.0)
        assert log[-1] == ("postgres", signal.SIGKILL)
        assert not result.clean
        assert result.seconds < 1.0 + 1.0

    run(work())


@pytest.mark.parametrize("budget", [1.0, 2.0])
def test_also_the_shortest_budget_leaves_time_for_a_fast_shutdown(budget: float) -> None:
    async def work() -> None:
        log: Log = []
        postgres = Fake("postgres", log, {**HUNG_POSTGRES, signal.SIGINT: (budget / 8, 0)})
        result, _ = await stop(log, Fake("api", log, KILLED), postgres, budget)
        assert result.clean
        assert result.seconds <= budget

    run(work())


@pytest.mark.parametrize("status", [1, 2, -2, -9])
@pytest.mark.parametrize("shut_down", [False, True])
def test_a_postgres_that_ends_otherwise_than_well_is_clean_where_its_data_is(status: int, shut_down: bool) -> None:  # noqa: FBT001
    async def work() -> None:
        log: Log = []
        postgres = Fake("postgres", log, {signal.SIGINT: (0.0, status)})
        result, _ = await stop(log, None, postgres, 5.0, shut_down=shut_down)
        assert result.clean is shut_down

    run(work())


def test_one_that_had_to_be_stopped_hard_is_never_clean() -> None:
    async def work() -> None:
        log: Log = []
        result, _ = await stop(log, None, Fake("postgres", log, HUNG_POSTGRES), 0.4, shut_down=True)
        assert not result.clean

    run(work())


@pytest.mark.parametrize("error", [psycopg.OperationalError("gone"), OSError("no socket")])
def test_a_checkpoint_that_fails_costs_only_time(error: Exception) -> None:
    async def work() -> None:
        async def checkpoint() -> None:
            await asyncio.sleep(0)
            raise error

        log: Log = []
        result, told = await stop(
            log, Fake("api", log, POLITE_API), Fake("postgres", log, POLITE_POSTGRES), 5.0, checkpoint
        )
        assert result.clean
        assert told == ["no checkpoint before the stop"]

    run(work())


def test_a_checkpoint_runs_while_the_api_ends_and_does_not_hold_the_stop_up() -> None:
    async def work() -> None:
        log: Log = []
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def checkpoint() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        api = Fake("api", log, POLITE_API)
        result, _ = await stop(log, api, Fake("postgres", log, POLITE_POSTGRES), 5.0, checkpoint)
        assert began.is_set()
        assert cancelled.is_set()
        assert result.clean
        assert result.seconds < 2

    run(work())


def test_children_that_ended_before_get_no_signal() -> None:
    async def work() -> None:
        log: Log = []
        api, postgres = Fake("api", log, {}), Fake("postgres", log, {})
        api._end(1)
        postgres._end(0)
        result, _ = await stop(log, api, postgres, 5.0)
        assert log == []
        assert result.clean

    run(work())
