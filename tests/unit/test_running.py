"""What becomes of a sidecar one of whose servers ends."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.environment import Sorted
from sidecar.running import Sidecar
from sidecar.settings import Settings


async def fails() -> None:
    raise ValueError("a defect")


async def ends() -> None:
    pass


@pytest.mark.parametrize(("server", "error"), [(fails, ValueError), (ends, RuntimeError)])
def test_a_server_that_ends_unasked_stops_all_and_is_a_fault(
    server: Callable[[], Coroutine[Any, Any, None]], error: type[Exception], tmp_path: Path
) -> None:
    nothing: Any = None
    sidecar = Sidecar(Settings(run_dir=tmp_path), Sorted({}, [], []), nothing)
    asked: list[str] = []

    async def work() -> None:
        stopping = asyncio.Event()

        def request_stop(why: str) -> None:
            asked.append(why)
            stopping.set()

        async def run() -> Any:
            await stopping.wait()
            return SimpleNamespace(clean=True, seconds=0.1)

        supervisor: Any = SimpleNamespace(run=run, request_stop=request_stop, gave_up=None)
        sidecar._supervisor = supervisor
        await sidecar._supervise(supervisor, [asyncio.create_task(server())])

    with pytest.raises(error):
        asyncio.run(work())
    assert asked == ["a server of ours ended"]
