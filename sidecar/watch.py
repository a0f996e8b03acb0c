"""Looks at Postgres and hindsight-api in the background, so that no probe ever waits for either."""

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import httpx2
import psycopg

from sidecar import database
from sidecar.machine import Server

INTERVAL = 0.5  # seconds between looks at what is up
_EAGER = 0.1  # seconds between looks at what is starting
TIMEOUT = 2.0  # seconds; with the interval, a hang is known within 3 s
NO_SPACE = "No space left on device"
_REINITIALIZED = "all server processes terminated; reinitializing"
# "LOG:  database system was not properly shut down; automatic recovery in progress", then every ten seconds
# "LOG:  redo in progress, elapsed time: 10.00 s, current LSN: 0/5A3F2C8" (PostgreSQL 15 and later).
_RECOVERY = re.compile(r"LOG: +.*?(automatic recovery in progress|redo in progress, .*)$")


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

    """

    def __init__(self, socket_dir: Path, changed: Callable[[], None]) -> None:
        super().__init__(changed)
        self._socket_dir = socket_dir
        self._connection: database.Connection | None = None
        self._recovering: str | None = None
        self.no_space_at: float | None = None
        self.schemas: frozenset[str] = frozenset()
        self.reinitialized = 0

    def hear(self, line: str) -> None:
        """Take one line of Postgres' log."""
        if NO_SPACE in line:
            self.no_space_at = time.monotonic()
            self._changed()
        self.reinitialized += _REINITIALIZED in line
        if self.server in (Server.STARTING, Server.RECOVERING) and (found := _RECOVERY.search(line)):
            self._recovering = found[1]
            self._see(Server.RECOVERING, found[1])

    async def run(self) -> None:
        """Watch until cancelled."""
        self._recovering = None
        self._see(Server.STARTING, None)
        look: asyncio.Task[None] | None = None
        try:
            while True:
                look = look or asyncio.create_task(self._look())
                # Not cancelled when it is late: ending a query asks the same server that does not answer.
                await asyncio.wait({look}, timeout=TIMEOUT)
                if look.done():
                    self._take(look.exception())
                    look = None
                elif self.server in (Server.UP, Server.UNRESPONSIVE):
                    self._see(Server.UNRESPONSIVE, f"no answer to a query within {TIMEOUT:g} s")
                await asyncio.sleep(INTERVAL if self.server is Server.UP else _EAGER)
        finally:
            if look is not None:
                look.cancel()
            if self._connection is not None:
                self._connection.pgconn.finish()

    def _take(self, error: BaseException | None) -> None:
        if error is None:
            self._see(Server.UP, None)
        elif isinstance(error, psycopg.Error | OSError):
            self._drop()
            seen = Server.RECOVERING if self._recovering else postgres_state(error)
            if self.server in (Server.UP, Server.UNRESPONSIVE) and seen is Server.STARTING:
                seen = Server.UNRESPONSIVE
            said = str(error).strip().splitlines()
            self._see(seen, self._recovering or (said[-1] if said else type(error).__name__))
        else:
            raise error

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.pgconn.finish()
            self._connection = None

    async def _look(self) -> None:
        if self._connection is None:
            self._connection = await database.connect(self._socket_dir)
        self.schemas = frozenset(await database.memory_schemas(self._connection))


class ApiWatch(Watch):
    """Asks hindsight-api for its health, again and again."""

    def __init__(self, client: httpx2.AsyncClient, changed: Callable[[], None]) -> None:
        super().__init__(changed)
        self._client = client

    async def run(self) -> None:
        """Watch until cancelled."""
        self._see(Server.STARTING, None)
        while True:
            try:
                async with asyncio.timeout(TIMEOUT):
                    response = await self._client.get("/health")
                self._answered(response)
            except TimeoutError:
                self._failed(f"no answer to /health within {TIMEOUT:g} s")
            except httpx2.HTTPError as error:
                self._failed(str(error) or type(error).__name__)
            await asyncio.sleep(INTERVAL if self.server is Server.UP else _EAGER)

    def _answered(self, response: httpx2.Response) -> None:
        if response.is_success:
            self._see(Server.UP, None)
        else:
            self._failed(f"/health answered {response.status_code}: {response.text[:200]}")

    def _failed(self, fault: str) -> None:
        # Before it was up once, it is still importing, loading its model or migrating: that may take its time.
        self._see(Server.STARTING if self.server is Server.STARTING else Server.UNRESPONSIVE, fault)
