"""A Postgres elsewhere that memories come from: whether it can be one, and what it has that did not come along."""

import asyncio
from pathlib import Path

import psycopg
from psycopg import IsolationLevel

from sidecar import contents, dumping, moving, source_url, staging
from sidecar.archive import Archive
from sidecar.contents import Contents
from sidecar.database import Connection, alembic_revisions, memory_schemas
from sidecar.dumping import Address
from sidecar.errors import RefusedError, SidecarError
from sidecar.operations import Operation
from sidecar.programs import Programs

OLDEST_MAJOR = 13  # what a database holds is read from catalogs that this major has, and so is pgvector


class SourceError(SidecarError):
    """The source could not be used, and nothing was touched, here or there."""


async def check(
    address: Address, operation: Operation, major: int, known_revisions: frozenset[str], dimension: int
) -> None:
    """Look at a source before anything is read from it, or kept from writing there meanwhile.

    `major` is that of PostgreSQL here, `dimension` of the vectors of the model here.

    Raises:
        SourceError: it cannot be reached, or it does not let us in; the operation's report tells which.
        RefusedError: it is no database of hindsight-api that can be served here.

    """
    operation.enter("look at the source")
    where = source_url.shown(address)
    async with await _connected(address, operation) as connection:
        theirs = connection.info.server_version // 10000
        check_major(theirs, major, where)
        try:
            if not (dimensions := await memory_schemas(connection)):
                raise RefusedError(await _foreign(connection, where))
            found = await alembic_revisions(connection)
            cursor = await connection.execute("SELECT extname AS name FROM pg_extension")
            extensions = [str(row["name"]) for row in await cursor.fetchall()]
        except psycopg.Error as error:
            raise _unreadable(where, error) from error
    staging.check_extensions(extensions, where)
    staging.check_dimensions(dimensions, dimension)
    if newer := contents.unknown(found, known_revisions):
        raise RefusedError(
            f"the schema of {where} is at revision {', '.join(newer)}, which the hindsight-api here does not know; use an "
            "image with the version that runs there, or a newer one"
        )


async def _connected(address: Address, operation: Operation) -> Connection:
    where = source_url.shown(address)
    try:
        return await address.connect()
    except (psycopg.Error, OSError) as error:
        text = said(error)
        # libpq gives no code for what fails this early; these are the server's words, and its own about a password.
        if "FATAL" not in text and "password" not in text:
            operation.report["unreachable"] = where
            raise SourceError(f"{where} cannot be reached ({text})") from error
        given = "the password that was sent" if address.environment else "no password, since none was found or sent"
        how = f", with {given}" if "password" in text else ""
        raise SourceError(f"{where} does not let us in{how} ({text})") from error


def _unreadable(where: str, error: psycopg.Error) -> SourceError:
    allowed = not isinstance(error, psycopg.errors.InsufficientPrivilege)
    return SourceError(
        f"{where} cannot be read ({said(error)})" + ("" if allowed else "; connect as the role that owns it")
    )


def said(error: BaseException) -> str:
    """Return an error's first line, without libpq's name for where it came from."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first.removeprefix("connection failed: ").strip()


def check_major(theirs: int, ours: int, where: str) -> None:
    """Refuse a PostgreSQL that cannot be read here.

    Raises:
        RefusedError: it is newer than ours, whose pg_dump would refuse it, or very old.

    """
    if theirs > ours:
        raise RefusedError(
            f"{where} is PostgreSQL {theirs}, and this is {ours}, which cannot read a newer one; use an image that has "
            f"{theirs} or newer"
        )
    if theirs < OLDEST_MAJOR:
        raise RefusedError(
            f"{where} is PostgreSQL {theirs}, and what it holds can be proved from {OLDEST_MAJOR} on; upgrade it, or restore "
            "a file of pg_dump -Fc"
        )


async def _foreign(connection: Connection, where: str) -> str:
    cursor = await connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'")
    seen = "has no table memory_units with embeddings"
    if await cursor.fetchone() is None:
        seen += ", nor the extension vector (pgvector)"
    return f"{where} {seen}; expected a database of hindsight-api, is another one of that server meant?"


async def fetch(address: Address, programs: Programs, directory: Path, operation: Operation) -> Archive:
    """Dump a source into a directory, in one snapshot.

    Raises:
        SourceError: the role may not read all of it, or the server went away.
        RefusedError, ProgramError, OSError: as `dumping.dump`.

    """
    try:
        return await dumping.dump(address, programs, directory, operation, versions={}, model=None)
    except psycopg.Error as error:
        raise _unreadable(source_url.shown(address), error) from error


async def look_again(address: Address, before: Contents, operation: Operation) -> None:
    """Compare a source with what was read of it: what was written there since is named, and is not here.

    What cannot be seen is told: by now the memories are served, so this fails no more.
    """
    operation.enter("look at the source again")
    try:
        async with await address.connect() as connection:
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            async with connection.transaction():
                now = await contents.read(connection)
    except (psycopg.Error, OSError) as error:
        tell_unseen(operation, said(error))
        return
    operation.report["written_there_since"] = moving.newer_than(before, now)


def tell_unseen(operation: Operation, why: str) -> None:
    """Note that nobody looked whether anything was written at the source since it was read."""
    sentence = f"whether anything was written at the source since it was read is not known ({why})"
    operation.report["unproved"] = [*operation.report.get("unproved", []), sentence]


def check_served(operation: Operation, error: asyncio.CancelledError) -> None:
    """Go on where what was cancelled came after the exchange: the memories are served, and cancelling undoes that no more.

    Raises:
        CancelledError: they are not.

    """
    if "kept" not in operation.report:
        raise error
    if "written_there_since" not in operation.report:
        tell_unseen(operation, "it was cancelled before that")
