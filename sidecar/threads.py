"""What may wait for the disk runs here: a volume that hangs holds one thread up, and no probe and no stop.

A thread that waits for a network volume or a FUSE file system cannot be ended. asyncio's own ones would keep the process
from ending as well, so these are daemons.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], None]

_MOST = 64


class Threads:
    """Threads that take jobs, made as they are needed.

    Where `most` of them are at work, a job waits for one of them: if all hang, it would hang as well.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # Threads that wait for a job. Once all are made it may count some that found one waiting: then another does.
        self._idle = threading.Semaphore(0)

    def begin(self, job: Job) -> None:
        """Have a job done. To be called from one thread alone, that of the event loop."""
        if self._idle.acquire(blocking=False) or self._made >= self._most:
            self._jobs.put(job)
        else:
            threading.Thread(target=self._work, args=(job,), name="disk", daemon=True).start()
            self._made += 1

    def _work(self, job: Job) -> None:
        while True:
            job()
            self._idle.release()
            job = self._jobs.get()


_threads = Threads(_MOST)


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

    _threads.begin(job)
    return await future


async def iterate_off_loop(pieces: Generator[bytes]) -> AsyncIterator[bytes]:
    """Take each of the pieces in a thread; and in one is closed what they come from, where nobody wants the rest."""
    one_at_a_time = threading.Lock()

    def take() -> bytes | None:
        with one_at_a_time:
            return next(pieces, None)

    def close() -> None:
        with one_at_a_time, contextlib.suppress(OSError):  # nothing was written to it
            pieces.close()

    try:
        while (piece := await off_loop(take)) is not None:
            yield piece
    finally:
        # Nobody waits for it: closing a file waits for its disk as reading does.
        _threads.begin(close)
