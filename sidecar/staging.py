"""Fills a new database beside the live one, and verifies it. The live one is not touched, whatever happens here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from sidecar import contents, database, dump_file, dumping, log, swapping, verification
from sidecar.agreement import Agreement
from sidecar.api_environment import ROLE
from sidecar.archive import Manifest
from sidecar.contents import Contents, Moment
from sidecar.database import SUPERUSER
from sidecar.dump_file import Entry, Header
from sidecar.errors import RefusedError, VerificationError
from sidecar.operations import Operation, to_its_end
from sidecar.programs import Programs
from sidecar.sizing import MIB, Machine
from sidecar.threads import off_loop
from sidecar.verification import Comparison

left: set[str] = set()  # databases that were not dropped when they should have been; no name comes twice
STAGING = "hindsight_staging_"  # prefix of a database that is being filled; dropped at the next start
MADE_HERE = ("vector", "pg_trgm", "btree_gin")  # by the superuser, before anything else is in the database
_IN_PUBLIC = "public"
_LOOK = 0.5  # seconds between looks at how far a load is
_DROP_PATIENCE = 20.0  # seconds
_FAULTS_NAMED = 5
_JOBS = 4  # at most, of one pg_restore
_LEAST = 64 * MIB  # bytes for an index build


@dataclass(frozen=True)
class Staged:
    """A database that was filled and verified.

    Attributes:
        name: of it.
        contents: what it holds.
        comparison: with what its source held; None where the source does not say.
        verified: when; what is written later is no part of `contents`.
        agreement: of its vectors with the model at hand; None where nothing was compared.

    """

    name: str
    contents: Contents
    comparison: Comparison | None
    verified: Moment
    agreement: Agreement | None = None


@dataclass(frozen=True)
class Checked:
    """A dump that may be loaded; `same_major` tells whether PostgreSQL was of the same major there."""

    file: Path
    header: Header
    entries: list[Entry]
    manifest: Manifest | None
    same_major: bool


async def preflight(
    file: Path, manifest: Manifest | None, programs: Programs, socket_dir: Path, known_revisions: frozenset[str]
) -> Checked:
    """Look at a dump without touching anything.

    One without a manifest is read through, since nothing else says that it is whole.

    Raises:
        RefusedError: it cannot be loaded here; the sentence says why.

    """
    header = await off_loop(dump_file.read_header, file)
    local = programs.binaries.major
    newest = max(header.server_major, header.pg_dump_major)
    if newest > local:
        raise RefusedError(
            f"the dump is of PostgreSQL {header.server}, made by pg_dump {header.pg_dump}, and this is PostgreSQL "
            f"{programs.binaries.version}; restore it with an image that has {newest} or newer"
        )
    entries = await dump_file.list_entries(file, programs)
    if not any(entry.is_memories for entry in entries):
        raise RefusedError("the dump has no table memory_units; expected one of a database of hindsight-api")
    await _check_extensions(entries, manifest, socket_dir)
    if manifest is None:
        await dump_file.read_through(file, programs)
    elif newer := contents.unknown(manifest.contents.revisions, known_revisions):
        raise RefusedError(
            f"the archive's schema is at revision {', '.join(newer)} (hindsight-api {manifest.versions.get('hindsight-api')}), "
            "which the hindsight-api here does not know; use an image with that version or a newer one"
        )
    return Checked(file, header, entries, manifest, header.server_major == local)


async def _check_extensions(entries: list[Entry], manifest: Manifest | None, socket_dir: Path) -> None:
    wanted = set(dump_file.extensions(entries)) | set(manifest.contents.extensions if manifest else ())
    async with await database.connect(socket_dir, SUPERUSER) as connection:
        cursor = await connection.execute("SELECT name FROM pg_available_extensions")
        available = {str(row["name"]) for row in await cursor.fetchall()}
    missing = sorted(wanted - available)
    if missing:
        raise RefusedError(
            f"the dump needs extensions that are not installed here: {', '.join(missing)}; drop them at the source, or use "
            "an image that has them"
        )
    check_extensions(wanted, "the dump")


def check_extensions(names: Iterable[str], where: str) -> None:
    """Refuse memories that come with other extensions than hindsight-api's."""
    foreign = sorted(set(names) - {*MADE_HERE, "plpgsql"})
    if foreign:
        raise RefusedError(
            f"{where} has extensions that hindsight-api does not use, and making them needs the superuser: "
            f"{', '.join(foreign)}; drop them at the source"
        )


def check_dimensions(found: Mapping[str, int], dimension: int) -> None:
    """Refuse memories whose vectors have another dimension than the model at hand; `found` is by schema, -1 not fixed."""
    others = {schema: one for schema, one in found.items() if one not in (dimension, -1)}
    if others:
        told = ", ".join(f"{one} in schema {schema}" for schema, one in others.items())
        raise RefusedError(
            f"the memories have {told} dimensions, and the model at hand {dimension}; use the model they were made with"
        )


async def stage(
    checked: Checked, programs: Programs, socket_dir: Path, scratch: Path, machine: Machine, operation: Operation
) -> Staged:
    """Load a dump into a new database, as its unprivileged owner, and verify what came of it.

    Raises:
        VerificationError: it is not what the dump's source held, or not whole; the database is dropped again.
        ProgramError, psycopg.Error: it could not be loaded; likewise.

    """
    name = f"{STAGING}{operation.id.replace('-', '_').lower()}"
    await create(socket_dir, name)
    try:
        await _load(checked, name, programs, socket_dir, scratch, machine, operation)
        staged = await verify(socket_dir, name, checked, operation)
    except BaseException:
        await drop_whatever_happens(socket_dir, name)
        raise
    return staged


async def create(socket_dir: Path, name: str) -> None:
    """Make an empty database with the extensions that hindsight-api uses, made by the superuser while it is empty."""
    async with await database.connect(socket_dir, SUPERUSER, "postgres") as connection:
        await connection.execute(
            sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE template0").format(sql.Identifier(name), sql.Identifier(ROLE))
        )
    async with await database.connect(socket_dir, SUPERUSER, name) as connection:
        for extension in MADE_HERE:
            await connection.execute(
                sql.SQL("CREATE EXTENSION {} SCHEMA {}").format(sql.Identifier(extension), sql.Identifier(_IN_PUBLIC))
            )


async def _load(
    checked: Checked,
    name: str,
    programs: Programs,
    socket_dir: Path,
    scratch: Path,
    machine: Machine,
    operation: Operation,
) -> None:
    lines = scratch / f"{name}.list"
    lines.write_text("".join(f"{entry.line}\n" for entry in dump_file.selected(checked.entries)), encoding="utf-8")
    there = dumping.local(socket_dir, name, ROLE)
    common = [
        "--no-password",
        "--no-owner",
        "--no-privileges",
        "--no-comments",
        "--no-publications",
        "--no-subscriptions",
        "--no-security-labels",
        "--exit-on-error",
        f"--use-list={lines}",
        str(checked.file),
    ]
    jobs = max(1, min(machine.cores, _JOBS))
    builds, memory = builds_of(machine)
    try:
        operation.enter("load", _rows(checked), "rows")
        async with _followed(socket_dir, name, operation, _ROWS):
            await programs.run("pg_restore", ["--section=pre-data", there.option, *common])
            await programs.run("pg_restore", ["--section=data", f"--jobs={jobs}", there.option, *common])
        indexes = sum(entry.kind in {"INDEX", "CONSTRAINT"} for entry in checked.entries)
        operation.enter("index", indexes, "indexes")
        async with _followed(socket_dir, name, operation, _INDEXES):
            building = dumping.local(socket_dir, name, ROLE, maintenance_work_mem=f"{memory // MIB}MB")
            await programs.run("pg_restore", ["--section=post-data", f"--jobs={builds}", building.option, *common])
    finally:
        lines.unlink()
    operation.enter("analyze")
    async with await database.connect(socket_dir, ROLE, name) as connection:
        await connection.execute("ANALYZE")


def _rows(checked: Checked) -> int | None:
    """Return how many rows a dump has; None where it does not say."""
    return sum(table.rows for table in checked.manifest.contents.tables.values()) if checked.manifest else None


def builds_of(machine: Machine) -> tuple[int, int]:
    """Return how many indexes are built at a time, and the bytes that each may take.

    All of them together an eighth of the memory, since hindsight-api runs beside them. An HNSW build that does not fit into
    its part takes many times as long, so where there is little, fewer are built at a time.
    """
    share = machine.memory // 8
    builds = max(1, min(machine.cores, _JOBS, share // _LEAST))
    return builds, max(_LEAST, min(share // builds, 1024 * MIB))


_ROWS = (
    "SELECT (SELECT coalesce(sum(n_tup_ins), 0) FROM pg_stat_user_tables) "
    "+ (SELECT coalesce(sum(tuples_processed), 0) FROM pg_stat_progress_copy WHERE datname = %s) AS n"
)
_INDEXES = "SELECT count(*) AS n FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace WHERE c.relkind = 'i' AND s.nspname !~ '^pg_' AND %s <> ''"


@contextlib.asynccontextmanager
async def _followed(socket_dir: Path, name: str, operation: Operation, query: str) -> AsyncIterator[None]:
    async def look() -> None:
        async with await database.connect(socket_dir, ROLE, name) as connection:
            while True:
                row = await (await connection.execute(query, (name,))).fetchone()
                operation.done = max(operation.done, int(str(row["n"])) if row else 0)
                await asyncio.sleep(_LOOK)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def verify(socket_dir: Path, name: str, checked: Checked, operation: Operation) -> Staged:
    """Read all of a database with its owner's rights, and compare it with what it has to be.

    Raises:
        VerificationError: naming what differs.

    """
    operation.enter("verify", _rows(checked), "rows")
    async with await database.connect(socket_dir, ROLE, name) as connection, connection.transaction():
        verified = await contents.moment(connection)
        found = await contents.read(connection, passed=operation.advance)
        faults = await verification.faults_of(connection, checked.manifest.contents if checked.manifest else None)
        if checked.manifest is None and found.dimensions:
            faults += await verification.missing_of(connection, dump_file.selected(checked.entries))
    comparison = None
    if checked.manifest is not None:
        comparison = verification.compare(checked.manifest.contents, found, same_major=checked.same_major)
        faults = [*comparison.faults, *faults]
        operation.report["comparison"] = comparison.to_json()
    if not found.dimensions:
        faults = ["there is no table memory_units with embeddings", *faults]
    if faults:
        more = f" (and {len(faults) - _FAULTS_NAMED} more)" if len(faults) > _FAULTS_NAMED else ""
        raise VerificationError("; ".join(faults[:_FAULTS_NAMED]) + more)
    return Staged(name, found, comparison, verified)


async def drop_whatever_happens(socket_dir: Path, name: str) -> None:
    """Drop it, also while this is being cancelled; what cannot be dropped now is named, and dropped when it can be."""
    await to_its_end(_drop_or_note(socket_dir, name))


async def _drop_or_note(socket_dir: Path, name: str) -> None:
    try:
        await asyncio.wait_for(drop(socket_dir, name), _DROP_PATIENCE)
    except (psycopg.Error, OSError, TimeoutError) as error:
        log.get("staging").warning("a staged database was not dropped", database=name, error=str(error).strip())
        left.add(name)


async def drop_left(socket_dir: Path) -> None:
    """Drop those that could not be dropped before, such as where Postgres had ended for want of space."""
    for name in sorted(left):
        try:
            await drop(socket_dir, name)
        except (psycopg.Error, OSError) as error:
            log.get("staging").warning("a staged database was not dropped", database=name, error=str(error).strip())
            return
        left.discard(name)
        log.get("staging").info("dropped a staged database", database=name)


async def drop(socket_dir: Path, name: str) -> None:
    """Drop a database, and end who is connected to it."""
    async with await database.connect(socket_dir, SUPERUSER, "postgres") as connection:
        await connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


async def sweep(socket_dir: Path, tell: Callable[..., object]) -> None:
    """Drop databases that an earlier sidecar did not finish filling or dropping, each named in the log.

    What a crash of Postgres leaves of a CREATE DATABASE is files that belong to no database. These are named alone: with
    a damaged catalog they could be memories.
    """
    async with await database.connect(socket_dir, SUPERUSER, "postgres") as connection:
        cursor = await connection.execute(
            "SELECT datname AS name FROM pg_database WHERE starts_with(datname, %s) "
            "OR starts_with(datname, %s) AND datconnlimit = -2",  # of which a DROP DATABASE has begun
            (STAGING, swapping.KEPT),
        )
        names = [str(row["name"]) for row in await cursor.fetchall()]
        cursor = await connection.execute(
            "SELECT current_setting('data_directory') || '/base/' || name AS path FROM pg_ls_dir('base') AS name "
            "WHERE name ~ '^[0-9]+$' AND NOT EXISTS (SELECT FROM pg_database WHERE oid::text = name) ORDER BY 1"
        )
        strays = [str(row["path"]) for row in await cursor.fetchall()]
    for name in names:
        tell("dropping a database that was not finished", database=name)
        await drop(socket_dir, name)
    for path in strays:
        tell("a crash left files that belong to no database; delete them while the sidecar is stopped", path=path)
