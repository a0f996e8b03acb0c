"""Exchanges the served database for another one by renaming both in one transaction, and keeps the old one."""

import asyncio
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from psycopg import sql

from sidecar import database, volume
from sidecar.api_environment import DATABASE, ROLE
from sidecar.database import SUPERUSER
from sidecar.errors import BlockedError, Reason, RefusedError, TransientError
from sidecar.sizing import MIB
from sidecar.threads import off_loop

KEPT = "hindsight_kept_"  # prefix of a database that was served before
_MAINTENANCE_DATABASE = "postgres"
_MARGIN = 64 * MIB  # bytes that a copy leaves free
_NAME_MAX = 63  # bytes of a name in PostgreSQL
_TRIES = 6  # PostgreSQL waits 5 s each time for whoever is still connected
_PAUSE = 0.25  # seconds between them
_CRASHES = 3  # of Postgres in the middle of an exchange, after which it is given up
_AWAY = 60.0  # seconds for Postgres to come back after one


@dataclass(frozen=True)
class Kept:
    """A database that was served before. `size` is in bytes."""

    name: str
    size: int


def kept_name(now: datetime | None = None) -> str:
    """Return a name for the database that is served now, once it is not any more."""
    return f"{KEPT}{now or datetime.now(UTC):%Y%m%dt%H%M%Sz}"


async def exchange(socket_dir: Path, incoming: str, outgoing: str) -> None:
    """Give the served database the name `outgoing`, and the database `incoming` the served name, both or neither.

    Whoever is connected to either is disconnected. hindsight-api has to be down. Where Postgres ends meanwhile, its
    next start is waited for: it may have committed before it could say so, and otherwise it is tried again. Cancelled,
    both have the names of before.

    Raises:
        TransientError: someone connects again and again; nothing was renamed.
        psycopg.OperationalError: Postgres does not come back, or ends each time.

    """
    work = asyncio.ensure_future(_exchange(socket_dir, incoming, outgoing))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})  # a COMMIT that was sent is not called back, and its answer is not heard
        if work.exception() is None:
            await _exchange(socket_dir, outgoing, incoming)
        raise


async def _exchange(socket_dir: Path, incoming: str, outgoing: str) -> None:
    served, one, other = sql.Identifier(DATABASE), sql.Identifier(incoming), sql.Identifier(outgoing)
    for crash in range(1, _CRASHES + 1):
        try:
            async with await database.connect(socket_dir, SUPERUSER, _MAINTENANCE_DATABASE) as connection:
                await _alone(
                    connection,
                    [DATABASE, incoming],
                    sql.SQL("ALTER DATABASE {} RENAME TO {}").format(served, other),
                    sql.SQL("ALTER DATABASE {} RENAME TO {}").format(one, served),
                    # What is kept is not written to by accident.
                    sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(other),
                    sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(served),
                    sql.SQL("COMMENT ON DATABASE {} IS {}").format(
                        served, sql.Literal(incoming)
                    ),  # until it was served
                )
        except psycopg.OperationalError:
            if await _exists_after_a_crash(socket_dir, outgoing):
                return
            if crash == _CRASHES:
                raise
        else:
            return


async def _exists_after_a_crash(socket_dir: Path, name: str) -> bool:
    """Tell whether there is a database of this name, once Postgres answers. Raises psycopg.OperationalError where it does not."""
    deadline = time.monotonic() + _AWAY
    while True:
        try:
            async with await database.connect(socket_dir, SUPERUSER, _MAINTENANCE_DATABASE) as connection:
                cursor = await connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
                return await cursor.fetchone() is not None
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_PAUSE)


def copy_name(version: str, back: str | None, taken: Collection[str]) -> str:
    """Return a name for a copy from before a version of hindsight-api: of now, or of the kept database that is brought `back`.

    What was served until a rollback is the later one then, and is what another rollback serves.
    """
    was = kept_name() if back is None else back[: len(kept_name())]
    name = f"{was}_before_{re.sub('[^0-9a-z]', '_', version.lower())}"
    endings = ("", *(f"_{number}" for number in range(2, len(taken) + 3)))
    return next(one for end in endings if (one := f"{name[: _NAME_MAX - len(end)]}{end}") not in taken)


async def copy(socket_dir: Path, volume_directory: Path, version: str) -> str:
    """Keep a copy of the served database from before this version of hindsight-api migrates it, and return its name.

    Only with hindsight-api down: nobody may be connected meanwhile.

    Raises:
        BlockedError: `no-space`.
        TransientError: someone connects again and again.

    """
    async with await database.connect(socket_dir, SUPERUSER, _MAINTENANCE_DATABASE) as connection:
        row = await (await connection.execute("SELECT pg_database_size(%s) AS size", (DATABASE,))).fetchone()
        wanted = int(str(row["size"])) + _MARGIN if row else _MARGIN
        free = await off_loop(volume.free_bytes, volume_directory)
        if free < wanted:
            raise BlockedError(
                Reason.NO_SPACE,
                f"the schema is to be migrated, a copy from before takes {wanted // MIB} MiB, and {volume_directory} has "
                f"{free // MIB} MiB free; free some, or set HINDSIGHT_SIDECAR_UPGRADE_COPY=false",
                retry_after=10,
            )
        cursor = await connection.execute(
            "SELECT datname AS name, shobj_description(oid, 'pg_database') AS was FROM pg_database"
        )
        names = {str(row["name"]): str(row["was"] or "") for row in await cursor.fetchall()}
        # Its name until it was brought back, also where the sidecar that did so was killed since.
        back = was if re.match(rf"{KEPT}\d{{8}}t\d{{6}}z", was := names.get(DATABASE, "")) else None
        name = copy_name(version, back, {back or "", *names})
        # First: CREATE DATABASE is whole or nothing, and one that nothing names would be made again at the next start.
        await database.record_copy(socket_dir, name)
        await _alone(
            connection,
            [DATABASE],
            # By files: with the log it would be written twice.
            sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {} STRATEGY file_copy ALLOW_CONNECTIONS false").format(
                sql.Identifier(name), sql.Identifier(DATABASE), sql.Identifier(ROLE)
            ),
        )
    return name


async def _alone(connection: database.Connection, names: list[str], *statements: sql.Composed) -> None:
    """Run statements while nobody is connected to these databases, in one transaction if they are several."""
    for _ in range(_TRIES):
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = ANY (%s)", (names,)
        )
        try:
            if len(statements) == 1:  # CREATE DATABASE cannot be in a transaction
                await connection.execute(statements[0])
            else:
                async with connection.transaction():
                    for statement in statements:
                        await connection.execute(statement)
        except psycopg.errors.ObjectInUse:
            await asyncio.sleep(_PAUSE)
        else:
            return
    raise TransientError(f"someone connects to {' or '.join(names)} again and again; end that session, and try again")


async def kept(socket_dir: Path) -> list[Kept]:
    """Return the databases that were served before, the latest first."""
    async with await database.connect(socket_dir, SUPERUSER, _MAINTENANCE_DATABASE) as connection:
        cursor = await connection.execute(
            "SELECT datname AS name, pg_database_size(oid) AS size FROM pg_database WHERE starts_with(datname, %s) "
            "ORDER BY datname DESC",
            (KEPT,),
        )
        return [Kept(str(row["name"]), int(str(row["size"]))) for row in await cursor.fetchall()]


async def drop_kept(socket_dir: Path, name: str) -> None:
    """Drop one of the kept databases.

    Raises:
        RefusedError: there is none of that name.

    """
    if name not in {one.name for one in await kept(socket_dir)}:
        raise RefusedError(f"{name[:80]!r} is no kept database; `hindsight-sidecar databases` lists them")
    async with await database.connect(socket_dir, SUPERUSER, _MAINTENANCE_DATABASE) as connection:
        await connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
