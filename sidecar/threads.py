"""What may wait for the disk runs here: a volume that hangs holds one thread up, and no probe and no stop.

A thread that waits for a network volume or a FUSE file system cannot be ended. asyncio's own ones would keep the process
from ending as well, so these are daemons.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], Callable[[], object]]  # returns what delivers its result

_MOST = 64


class Threads:
    """Threads that take jobs, made as they are needed.

    Where `most` of them are at work, or the system has no more of them, a job waits for one: if all hang, it would hang as well.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._idle = 0
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()

    def begin(self, job: Job) -> None:
        """Have a job done. To be called from one thread alone, that of the event loop.

        Raises:
            RuntimeError: the system has no thread for it, and had none before.

        """
        with self._changed:
            if len(self._jobs) < self._idle or self._made >= self._most or not self._makes_one_for(job):
                self._jobs.append(job)
                self._changed.notify()

    def _makes_one_for(self, job: Job) -> bool:
        try:
            threading.Thread(target=self._work, args=(job,), name="disk", daemon=True).start()
        except RuntimeError:  # a limit of processes
            if self._made == 0:
                raise
            return False
        self._made += 1
        return True

    def _work(self, job: Job) -> None:
        while True:
            deliver = job()
            with self._changed:
                self._idle += 1  # before it is delivered: whoever hears of it and has another job finds this one idle
            deliver()
            with self._changed:
                while not self._jobs:
                    self._changed.wait()
                job = self._jobs.popleft()
                self._idle -= 1


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

    def job() -> Callable[[], object]:
        try:
            value = work(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it is waited for
            return partial(deliver, raised, error)
        return partial(deliver, returned, value)

    def deliver(how: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it hung for longer than the process was to run
            loop.call_soon_threadsafe(how, what)

    _threads.begin(job)
    return await future


async def iterate_off_loop(pieces: Generator[bytes]) -> AsyncIterator[bytes]:
    """Take each of the pieces in a thread; and in one is closed what they come from, where nobody wants the rest."""
    one_at_a_time = threading.Lock()

    def take() -> bytes | None:
        with one_at_a_time:
            return next(pieces, None)

    def close() -> Callable[[], object]:
        with one_at_a_time, contextlib.suppress(OSError):  # nothing was written to it
            pieces.close()
        return lambda: None  # nobody waits for it

    try:
        while (piece := await off_loop(take)) is not None:
            yield piece
    finally:
        # Nobody waits for it: closing a file waits for its disk as reading does.
        _threads.begin(close)
