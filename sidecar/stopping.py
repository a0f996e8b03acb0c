"""The end, within one declared budget: hindsight-api first, Postgres with a fast shutdown, and hard only at the last."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import psycopg

from sidecar import processes

_API_SHARE = 5.0  # seconds, or half of the budget; with an LLM call outstanding it would take over 35
_API_KILLED = 1.0  # seconds, or half of what is left, to reap it; one that waits for a disk in the kernel is not to cost Postgres its time
_LAST = 1.0  # seconds before the end of the budget at which Postgres gets SIGQUIT
_FLUSH_PATIENCE = 0.2  # seconds; the connection of a checkpoint that was cut off is nobody's loss
# Seconds to reap what was killed. One that waits for a disk in the kernel ends once that answers, whoever waits for it;
# an engine that gives us a second more than the budget is told how it went, and does not kill us.
_AFTER_HARD = 0.5


class Stoppable(Protocol):
    """What stopping needs of a child."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Its exit status, None while it runs."""

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""

    async def wait(self, timeout: float | None = None) -> int | None:  # noqa: ASYNC109 - None is an answer here
        """Wait for its end."""


@dataclass(frozen=True)
class Stop:
    """How the end came about.

    Attributes:
        clean: Postgres shut down by itself, or was not running.
        seconds: how long it took.

    """

    clean: bool
    seconds: float


async def stop_children(
    api: Stoppable | None,
    postgres: Stoppable | None,
    budget: float,
    *,
    checkpoint: Callable[[], Awaitable[None]],
    shut_down: Callable[[], Awaitable[bool]],
    tell: Callable[..., object],
) -> Stop:
    """Stop both children within `budget` seconds and reap them; Postgres is never left behind without its SIGKILL.

    Postgres never gets SIGTERM: that shutdown waits for every client that is still connected. One that had not come as
    far as handling a signal ends with that signal; `shut_down` tells whether its data directory is in order. After a hard
    stop those of its processes are killed that did not even notice that it is gone, as they are stopped or wait for a disk.
    """
    began = time.monotonic()
    deadline = began + budget
    last = min(_LAST, budget / 4)  # of the shortest budget, all would be too late for a fast shutdown

    def left() -> float:
        return max(deadline - time.monotonic(), 0.0)

    flush = asyncio.ensure_future(_quietly(checkpoint, tell)) if postgres is not None else None
    if api is not None:
        api.send(signal.SIGTERM)
        if await api.wait(min(_API_SHARE, budget / 2)) is None:
            tell("hindsight-api takes too long to end and is killed; its tasks are taken up again at the next start")
            api.send(signal.SIGKILL)
            await api.wait(min(_API_KILLED, left() / 2))
    clean = True
    if postgres is not None:
        postgres.send(signal.SIGINT)
        if await postgres.wait(max(left() - last, 0.0)) is None:
            tell("Postgres takes too long to shut down and is stopped at once; the next start recovers from its log")
            clean = False
            helpers = processes.children(postgres.pid)
            postgres.send(signal.SIGQUIT)
            if await postgres.wait(left()) is None:
                postgres.send(signal.SIGKILL)
                await postgres.wait(_AFTER_HARD)
            processes.kill(helpers)
        else:
            clean = postgres.returncode == 0 or await shut_down()
    if flush is not None:
        flush.cancel()
        await asyncio.wait({flush}, timeout=_FLUSH_PATIENCE)
    return Stop(clean, time.monotonic() - began)


async def _quietly(checkpoint: Callable[[], Awaitable[None]], tell: Callable[..., object]) -> None:
    """Write dirty pages out while hindsight-api ends, so that the shutdown has less to write; a failure costs only time."""
    try:
        await checkpoint()
    except (psycopg.Error, OSError) as error:
        tell("no checkpoint before the stop", error=str(error).strip())
