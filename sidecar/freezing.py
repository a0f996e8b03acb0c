"""Lets a database elsewhere accept no writes while memories come from it, and accept them again afterwards."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psycopg
from psycopg import sql

from sidecar import log, source, source_url, volume
from sidecar.database import Connection
from sidecar.dumping import Address
from sidecar.errors import RefusedError
from sidecar.operations import Operation
from sidecar.threads import off_loop

_SETTING = "default_transaction_read_only"
_TRUE = ("on", "t", "y", "1")  # how PostgreSQL's words for it begin; it is kept as it was typed
_NOTE = "frozen.json"  # in the operation's directory, which the next start sweeps
_SESSIONS_GONE = 10.0  # seconds in which ended sessions have to be gone
_UNDONE = 5.0  # seconds in which it has to be undone, since the sidecar may be stopping
_PAUSE = 0.1
_SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND "
    # What another role's session is for is hidden from all but superusers; those of the server itself have no user.
    "(backend_type = 'client backend' OR (backend_type IS NULL AND usesysid IS NOT NULL))"
)


@contextlib.asynccontextmanager
async def frozen(address: Address, directory: Path, operation: Operation) -> AsyncIterator[None]:
    """Let a database accept no writes meanwhile: by its default for new sessions; those that are there are ended.

    A database that was so before stays so. Should this process be killed meanwhile, a note in `directory` lets the next
    one say how to undo it.

    Raises:
        RefusedError: the role may not do this; nothing was changed there.
        SourceError, psycopg.Error: it cannot be done there, or the server went away.

    """
    where = source_url.shown(address)
    undo = by_hand(address.parameters["dbname"])
    operation.enter("freeze the source")
    async with await address.connect() as connection:
        was_so = await _is_frozen(connection)
    if was_so:
        operation.report["still_frozen"] = undo
        yield
        return
    log.get("freezing").warning("the source accepts no writes until the memories are here", source=where, undo=undo)
    await off_loop(volume.replace, directory / _NOTE, json.dumps({"source": where, "undo": undo}).encode())
    try:
        async with await address.connect() as connection:
            await _freeze(connection, where)
        yield
    finally:
        undoing = asyncio.create_task(_undo(address, operation, undo))
        cancelled = False
        while not undoing.done():
            try:
                await asyncio.shield(undoing)
            except asyncio.CancelledError:
                cancelled = True
        await off_loop((directory / _NOTE).unlink, missing_ok=True)
        if cancelled:
            raise asyncio.CancelledError


def by_hand(database: str) -> str:
    """Return what undoes it, for psql: the session that does it must not be read-only itself."""
    name = sql.Identifier(database).as_string(None)
    return f"SET {_SETTING} = off; ALTER DATABASE {name} RESET {_SETTING};"


def warn_of_frozen(directory: Path, tell: Callable[..., object]) -> None:
    """Say how to undo it, where an earlier process could not; of a note that cannot be read, that there was one."""
    note = directory / _NOTE
    try:
        told = json.loads(note.read_bytes())
        where, undo = str(told["source"]), str(told["undo"])
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        tell(
            "the source of an unfinished migration may still accept no writes, and the note of it cannot be read",
            undo=by_hand("DATABASE"),
            path=str(note),
            error=str(error),
        )
        return
    tell("the source of an unfinished migration may still accept no writes: undo it there", source=where, undo=undo)


async def _is_frozen(connection: Connection) -> bool:
    """Tell whether this database's own setting lets new sessions be read-only, whatever a role's, which wins, says."""
    cursor = await connection.execute(
        "SELECT split_part(one, '=', 2) AS value FROM pg_db_role_setting s, unnest(s.setconfig) AS one WHERE s.setrole = 0 "
        "AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database()) AND split_part(one, '=', 1) = %s",
        (_SETTING,),
    )
    row = await cursor.fetchone()
    return row is not None and str(row["value"]).lower().startswith(_TRUE)


async def _freeze(connection: Connection, where: str) -> None:
    name = sql.Identifier(connection.info.dbname)
    try:
        await connection.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
        # Those that come from now on are read-only. Whoever reconnects at once does not hold this up.
        rows = await (await connection.execute(_SESSIONS)).fetchall()
        pids = [int(str(row["pid"])) for row in rows]
        await connection.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS s (pid)", (pids,))
        async with asyncio.timeout(_SESSIONS_GONE):
            while await _any_of(connection, pids):  # noqa: ASYNC110 - they are another server's processes
                await asyncio.sleep(_PAUSE)
    except psycopg.errors.InsufficientPrivilege as error:
        raise RefusedError(
            f"{where} cannot be frozen ({source.said(error)}); connect as its owner, with pg_signal_backend where other roles use it, "
            "or stop the writers and leave freezing out"
        ) from error
    except TimeoutError as error:
        raise RefusedError(
            f"{where} cannot be frozen: sessions that were told to end are still there after {_SESSIONS_GONE:g} s; stop "
            "what writes there, and try again"
        ) from error
    except psycopg.Error as error:  # a standby, or the server went away
        raise source.SourceError(f"{where} cannot be frozen ({source.said(error)})") from error


async def _any_of(connection: Connection, pids: list[int]) -> bool:
    cursor = await connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = ANY (%s) LIMIT 1", (pids,))
    return await cursor.fetchone() is not None


async def _undo(address: Address, operation: Operation, undo: str) -> None:
    """Undo it over a connection of its own, as the first may be gone; what cannot be undone is told, and fails nothing."""
    name = sql.Identifier(address.parameters["dbname"])
    try:
        async with asyncio.timeout(_UNDONE), await address.connect() as connection:
            if not await _is_frozen(connection):  # the role could not do it
                return
            await connection.execute("SET default_transaction_read_only = off")  # it is frozen for us too
            await connection.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    except (psycopg.Error, OSError, TimeoutError) as error:
        operation.report["still_frozen"] = undo
        log.get("freezing").error(
            "the source still accepts no writes: undo it there",
            source=source_url.shown(address),
            undo=undo,
            error=str(error).strip() or type(error).__name__,
        )
