"""Work in threads that nobody has to wait for."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator

import pytest

from sidecar import threads
from sidecar.threads import iterate_off_loop, off_loop


def job(work: Callable[[], object]) -> threads.Job:
    def run() -> Callable[[], object]:
        work()
        return lambda: None

    return run


def test_what_it_returns_and_raises_comes_back() -> None:
    async def work() -> None:
        assert await off_loop(divmod, 7, 2) == (3, 1)
        with pytest.raises(FileNotFoundError):
            await off_loop(open, "/nowhere/at/all")
        assert await off_loop(threading.get_ident) != threading.get_ident()

    asyncio.run(work())


def test_an_idle_thread_is_used_again_and_a_hung_one_holds_nobody_up() -> None:
    free = threading.Event()

    async def work() -> None:
        hung = [asyncio.ensure_future(off_loop(free.wait)) for _ in range(50)]
        await asyncio.sleep(0)
        assert await off_loop(lambda: "done") == "done"
        before = threading.active_count()
        for _ in range(20):
            await off_loop(time.monotonic)
        assert threading.active_count() <= before + 1
        for one in hung:
            one.cancel()
        done, waiting = await asyncio.wait(hung, timeout=5)
        assert (len(done), len(waiting)) == (50, 0)

    try:
        asyncio.run(work())
    finally:
        free.set()


def test_pieces_come_one_by_one() -> None:
    def pieces() -> Generator[bytes]:
        assert threading.current_thread().name == "disk"
        yield b"one"
        yield b"two"

    async def work() -> list[bytes]:
        return [piece async for piece in iterate_off_loop(pieces())]

    assert asyncio.run(work()) == [b"one", b"two"]


def test_so_many_threads_at_the_most_and_what_waits_for_them_is_done() -> None:
    free, done = threading.Event(), threading.Semaphore(0)
    made = threads.Threads(3)
    before = threading.active_count()
    for _ in range(20):
        made.begin(job(lambda: (free.wait(20), done.release())))
    assert threading.active_count() == before + 3
    free.set()
    for _ in range(2):
        assert all(done.acquire(timeout=10) for _ in range(20))
        for _ in range(20):
            made.begin(job(done.release))


def test_where_the_system_has_no_more_of_them_one_that_is_there_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    free, done = threading.Event(), threading.Semaphore(0)
    made = threads.Threads(3)
    made.begin(job(lambda: (free.wait(20), done.release())))
    before = threading.active_count()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.Threads(3).begin(job(done.release))
        for _ in range(5):
            made.begin(job(done.release))
        free.set()
        assert all(done.acquire(timeout=10) for _ in range(6))
    free.clear()
    for _ in range(2):  # more can be had again, and what hangs holds nobody up
        made.begin(job(lambda: free.wait(20)))
    made.begin(job(done.release))
    assert done.acquire(timeout=10)
    assert threading.active_count() == before + 2
    free.set()


def test_what_pieces_come_from_is_closed_in_a_thread_also_where_a_piece_is_waited_for() -> None:
    free, closed = threading.Event(), threading.Event()
    where: list[str] = []

    def pieces() -> Generator[bytes]:
        try:
            yield b"one"
            free.wait(20)
            yield b"two"
        finally:
            where.append(threading.current_thread().name)
            closed.set()

    async def work(taken: int) -> None:
        async def take() -> None:
            count = 0
            async for _ in iterate_off_loop(pieces()):
                count += 1
                if count == taken:
                    await asyncio.Event().wait()

        taking = asyncio.ensure_future(take())
        await asyncio.wait({taking}, timeout=0.1)
        taking.cancel()
        await asyncio.wait({taking})
        free.set()
        assert await off_loop(closed.wait, 10)

    for taken in (1, 2):
        free.clear()
        closed.clear()
        asyncio.run(work(taken))
    assert where == ["disk", "disk"]


def test_a_process_ends_while_a_thread_of_it_hangs() -> None:
    program = (
        "import asyncio, threading\n"
        "from sidecar.threads import off_loop\n"
        "async def work():\n"
        "    task = asyncio.ensure_future(off_loop(threading.Event().wait))\n"
        "    await asyncio.wait({task}, timeout=0.1)\n"
        "asyncio.run(work())\n"
    )
    root = threads.__file__.rpartition("/sidecar/")[0]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20, env={"PYTHONPATH": root})
