"""What may wait for the disk runs here: a volume that hangs holds one thread up, and no probe and no stop.

A thread that waits for a network volume or a FUSE file system cannot be ended. asyncio's own ones would keep the process
from ending as well, so these are daemons.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], None]

_jobs: "queue.SimpleQueue[Job]" = queue.SimpleQueue()
_idle = threading.Semaphore(0)  # threads that wait for a job


def _work(job: Job) -> None:
    while True:
        job()
        _idle.release()
        job = _jobs.get()


def _begin(job: Job) -> None:
    if _idle.acquire(blocking=False):
        _jobs.put(job)
    else:
        threading.Thread(target=_work, args=(job,), name="disk", daemon=True).start()


async def off_loop(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call this in a thread and wait for what it returns or raises. Cancelled, it goes on there, and nobody waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def returned(value: T) -> None:
        if not future.done():
            future.set_result(value)

    def raised(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def job() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it hung for longer than the process was to run
            try:
                value = work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it is waited for
                loop.call_soon_threadsafe(raised, error)
            else:
                loop.call_soon_threadsafe(returned, value)

    _begin(job)
    return await future


async def iterate_off_loop(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Take each of the pieces in a thread."""
    while (piece := await off_loop(next, pieces, None)) is not None:
        yield piece
