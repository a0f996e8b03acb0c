"""Looks at Postgres and hindsight-api in the background, so that no probe ever waits for either."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import psycopg

from sidecar import database, postgres_log, processes
from sidecar.machine import Server
from sidecar.recovery import Recovery, end_of_log
from sidecar.threads import off_loop

INTERVAL = 0.5  # seconds between looks at what is up
_EAGER = 0.1  # seconds between looks at what is starting
TIMEOUT = 2.0  # seconds; with the interval, a hang is known within 3 s
_TITLE_PATIENCE = 0.3  # seconds; a name is worth no more
_GLANCE = 0.25  # seconds between looks at whether one that does not answer is at work
_BUSY = 25.0  # seconds that it may leave its health unanswered since it is at work
_REINITIALIZED = "LOG:  all server processes terminated; reinitializing"
_LOCK_TIMEOUT = 1.0  # seconds for a lock on the memories; less than `TIMEOUT`, so that it is not taken for a hang


def postgres_state(error: Exception) -> Server:
    """Tell from a failed connection what Postgres is doing."""
    text = str(error)
    recovering = "in recovery mode" in text or "not yet accepting connections" in text
    return Server.RECOVERING if recovering else Server.STARTING


class Watch(ABC):
    """Looks at one server again and again.

    Attributes:
        server: what was seen last.
        fault: why it was not `UP`, as one sentence.

    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.server = Server.DOWN
        self.fault: str | None = None

    @abstractmethod
    async def run(self) -> None:
        """Watch until cancelled."""

    def end(self) -> None:
        """Note that there is nothing to look at any more."""
        self.server, self.fault = Server.DOWN, None

    def _see(self, server: Server, fault: str | None) -> None:
        changed = (server, fault) != (self.server, self.fault)
        self.server, self.fault = server, fault
        if changed:
            self._changed()


class PostgresWatch(Watch):
    """Asks one query of our own database over one connection, again and again, and listens to what Postgres logs.

    A server that replays its log after a crash refuses connections with the same words as one that just starts; only
    its own lines tell the two apart.

    Attributes:
        schemas: those that hold memories, as it was seen last.
        reinitialized: how often Postgres began again with all of its processes, since one of them ended badly.
        no_space_at: monotonic seconds of the last time that Postgres said it found no space, None where it did not.
        recovery: of this start, None where there is none.
        locked: why the memories cannot even be counted, as one sentence; None where they can.
        postmaster: its pid, None where none runs.

    """

    def __init__(self, socket_dir: Path, pgdata: Path, changed: Callable[[], None]) -> None:
        super().__init__(changed)
        self._socket_dir = socket_dir
        self._pgdata = pgdata
        self._measuring: asyncio.Task[int | None] | None = None
        self._titled: tuple[int, asyncio.Task[str]] | None = None  # a stopped process, and what it calls itself
        self.recovery: Recovery | None = None
        self.locked: str | None = None
        self.postmaster: int | None = None
        self._connection: database.Connection | None = None
        self.no_space_at: float | None = None
        self.schemas: frozenset[str] = frozenset()
        self.reinitialized = 0

    def hear(self, line: str) -> None:
        """Take one line of Postgres' log."""
        said = postgres_log.said(line)
        if said and postgres_log.no_space(said):
            self.no_space_at = time.monotonic()
            self._changed()
        if said == _REINITIALIZED:
            self.reinitialized += 1
            self.recovery = self._measuring = None
        if self.server is Server.DOWN:
            return
        # Whatever was seen last of it: a server whose backend was killed recovers before the next look.
        recovery = self.recovery or Recovery.begun(said)
        if recovery is not None and recovery.hear(said):
            self.recovery = recovery
            self._see(Server.RECOVERING, recovery.sentence)
            self._measure(recovery)

    def _measure(self, recovery: Recovery) -> None:
        """Find out, once, where the log ends that is replayed."""
        if self._measuring is not None or recovery.begins is None:
            return

        def take(measuring: "asyncio.Task[int | None]") -> None:
            # It is told for what it is worth: a log that cannot be read, Postgres itself will complain of.
            if not measuring.cancelled() and measuring.exception() is None and recovery.ends is None:
                recovery.ends = measuring.result()

        self._measuring = asyncio.create_task(off_loop(end_of_log, self._pgdata))
        self._measuring.add_done_callback(take)

    async def run(self) -> None:
        """Watch until cancelled."""
        self._forget()
        self._see(Server.STARTING, None)
        look: asyncio.Task[None] | None = None
        try:
            while True:
                look = look or asyncio.create_task(self._look())
                # Not cancelled when it is late: ending a query asks the same server that does not answer.
                await asyncio.wait({look}, timeout=TIMEOUT)
                if look.done():
                    error, look = look.exception(), None
                    self._take(error, await self._stopped() if error is None else None)
                elif self.server in (Server.UP, Server.UNRESPONSIVE):
                    self._see(Server.UNRESPONSIVE, f"no answer to a query within {TIMEOUT:g} s")
                await asyncio.sleep(INTERVAL if self.server is Server.UP else _EAGER)
        finally:
            if look is not None:
                look.cancel()
            if self._connection is not None:
                self._connection.pgconn.finish()
            if self._measuring is not None:
                self._measuring.cancel()
            if self._titled is not None:
                self._titled[1].cancel()

    def _forget(self) -> None:
        self.recovery = self.locked = self._measuring = self._titled = None

    def end(self) -> None:
        """Note that there is nothing to look at any more."""
        super().end()
        self._forget()
        self.postmaster = None

    async def _stopped(self) -> str | None:
        """Name a process of Postgres that is stopped: what it was to do, or holds, all others wait for sooner or later."""
        if self.postmaster is None:
            return None
        own = processes.member(self.postmaster)
        stopped = [one for one in (own, *processes.children(self.postmaster)) if one is not None and one.state == "T"]
        if not stopped:
            self._titled = None
            return None
        pid = stopped[0].pid
        if self._titled is None or self._titled[0] != pid:
            self._titled = pid, asyncio.ensure_future(off_loop(processes.title, pid))
        asked = self._titled[1]
        await asyncio.wait({asked}, timeout=_TITLE_PATIENCE)
        title = asked.result() if asked.done() else "its memory does not answer"
        return f"PostgreSQL process {pid} ({title}) is stopped; `kill -CONT {pid}` lets it go on"

    def _take(self, error: BaseException | None, stopped: str | None) -> None:
        if error is None:
            self.recovery = None
            self._see(Server.UP if stopped is None else Server.UNRESPONSIVE, stopped)
        elif isinstance(error, psycopg.Error | OSError):
            self._drop()
            seen = Server.RECOVERING if self.recovery else postgres_state(error)
            if self.server in (Server.UP, Server.UNRESPONSIVE) and seen is Server.STARTING:
                seen = Server.UNRESPONSIVE
            said = str(error).strip().splitlines()
            fault = self.recovery.sentence if self.recovery else said[-1] if said else type(error).__name__
            self._see(seen, fault)
        else:
            raise error

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.pgconn.finish()
            self._connection = None
        self.locked = None

    async def _look(self) -> None:
        if self._connection is None:
            self._connection = await database.connect(self._socket_dir, lock_timeout=_LOCK_TIMEOUT)
        self.schemas = frozenset(await database.memory_schemas(self._connection))
        try:
            await database.touch_memories(self._connection, self.schemas)
        except psycopg.errors.LockNotAvailable:
            # By hindsight-api itself, as it migrates, or by somebody at work.
            holder = await database.holder_of_memories(self._connection)
            self.locked = f"PostgreSQL process {holder or 'unknown'} holds a lock on memory_units that every memory call waits for"
        else:
            self.locked = None


class ApiWatch(Watch):
    """Asks hindsight-api for its health, again and again.

    One that is at work meanwhile is busy and not hung: many questions at once, on few cores, or one call with much to store
    keep it from its health for longer than one that hangs may take. But not for ever: what it answers may not need what its
    health asks for, such as a connection to the database, and one that turns in circles uses a core as well.

    Nothing is asked before it is known that hindsight-api itself is who listens: what is asked carries its key, and another
    program in the network namespace may have taken the port.

    Attributes:
        process: its pid, None where none runs.

    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        at_work: Callable[[], float],
        not_there: Callable[[], Awaitable[str | None]],
        changed: Callable[[], None],
    ) -> None:
        """`at_work` returns the monotonic seconds at which it was last known to do something; `not_there` says why it cannot be asked now."""
        super().__init__(changed)
        self._client = client
        self._at_work = at_work
        self._not_there = not_there
        self.process: int | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        self._see(Server.STARTING, None)
        while True:
            if (fault := await self._not_there()) is not None:
                self._failed(fault)
            else:
                await self._ask()
            await asyncio.sleep(INTERVAL if self.server is Server.UP else _EAGER)

    async def _ask(self) -> None:
        asking = asyncio.ensure_future(self._client.get("/health"))
        try:
            await self._wait(asking)
            if asking.done():
                self._answered(asking.result())
            else:
                self._failed(f"no answer to /health within {TIMEOUT:g} s")
        except httpx2.HTTPError as error:
            self._failed(str(error) or type(error).__name__)
        finally:
            asking.cancel()
            await asyncio.wait({asking})

    async def _wait(self, asking: "asyncio.Future[httpx2.Response]") -> None:
        """Wait for its answer, for as long as it may be busy."""
        asked = time.monotonic()
        while not asking.done():
            left = min(max(asked, self._at_work()) + TIMEOUT, asked + _BUSY) - time.monotonic()
            if left <= 0:
                return
            await asyncio.wait({asking}, timeout=min(left, _GLANCE))

    def _answered(self, response: httpx2.Response) -> None:
        if response.is_success:
            self._see(Server.UP, None)
        else:
            self._failed(f"/health answered {response.status_code}: {response.text[:200]}")

    def _failed(self, fault: str) -> None:
        # Before it was up once, it is still importing, loading its model or migrating: that may take its time.
        seen = Server.STARTING if self.server is Server.STARTING else Server.UNRESPONSIVE
        self._see(seen, self._stopped() or fault)

    def _stopped(self) -> str | None:
        """Name it where it is stopped: before its first answer nobody would replace it, however long that lasts."""
        own = None if self.process is None else processes.member(self.process)
        if own is None or own.state != "T":
            return None
        return f"hindsight-api (process {own.pid}) is stopped; `kill -CONT {own.pid}` lets it go on"

    def end(self) -> None:
        """Note that there is nothing to look at any more."""
        super().end()
        self.process = None
