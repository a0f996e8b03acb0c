"""How many memories there are, and what their database and its log take: asked for in the background, and waited for by nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TypeVar

import psycopg

from sidecar import database

_INTERVAL = 0.5  # seconds between counts
_SIZE_INTERVAL = 30.0  # seconds between looks at the sizes, for which Postgres looks at every file
# Either takes time that grows with the memories, so it is done the more rarely the longer it took.
_SHARE = 50
T = TypeVar("T")


class Measurement:
    """Counts and measures over a connection of its own: a count that takes long is no sign of a Postgres that hangs.

    Attributes:
        memory_count: rows in memory_units over all schemas, None before the first count and while there is no such table.
        database_bytes: what the files of the served database take, None before the first look.
        wal_bytes: what the files of the write-ahead log take, None before the first look.

    """

    def __init__(self, socket_dir: Path, schemas: Callable[[], Collection[str] | None]) -> None:
        """`schemas` returns those that hold memories, None while Postgres does not answer."""
        self.memory_count: int | None = None
        self.database_bytes: int | None = None
        self.wal_bytes: int | None = None
        self._socket_dir = socket_dir
        self._schemas = schemas
        self._connection: database.Connection | None = None
        self._count_due = self._size_due = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        try:
            while True:
                schemas = self._schemas()
                if schemas is not None:
                    try:
                        await self._measure(schemas)
                    except (psycopg.Error, OSError):  # the watch tells why
                        self._drop()
                await asyncio.sleep(_INTERVAL)
        finally:
            self._drop()

    async def _measure(self, schemas: Collection[str]) -> None:
        if self._connection is None:
            self._connection = await database.connect(self._socket_dir)
            self._count_due = self._size_due = 0.0  # it may be another database by the same name
        connection, now = self._connection, time.monotonic()
        if not schemas:
            self.memory_count = None
        elif now >= self._count_due:
            self.memory_count, took = await _timed(database.count_memories(connection, schemas))
            self._count_due = time.monotonic() + _SHARE * took
        if now >= self._size_due:
            (self.database_bytes, self.wal_bytes), took = await _timed(self._sizes())
            self._size_due = time.monotonic() + max(_SIZE_INTERVAL, _SHARE * took)

    async def _sizes(self) -> tuple[int, int]:
        # The log's files are listed for nobody but the superuser, who is asked nothing else.
        async with await database.connect(self._socket_dir, database.SUPERUSER) as connection:
            return await database.sizes(connection)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.pgconn.finish()
            self._connection = None


async def _timed(work: Awaitable[T]) -> tuple[T, float]:
    """Return a result, and how many seconds it took."""
    began = time.monotonic()
    return await work, time.monotonic() - began
