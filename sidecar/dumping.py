"""Makes an archive of a database: its dump and what it held, both in one snapshot."""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import dict_row

from sidecar import archive, contents, dump_file, volume
from sidecar.archive import DUMP, Archive, Manifest, Passed
from sidecar.database import SCHEMA, Connection
from sidecar.errors import RefusedError, VerificationError
from sidecar.operations import Operation, to_its_end
from sidecar.programs import Programs
from sidecar.sizing import MIB
from sidecar.threads import off_loop

Compression = Literal["gzip", "zstd", "none"]
PARTIAL = ".partial-"  # prefix of a directory that is not finished; swept at the next start
_LEVELS: dict[Compression, str] = {"gzip": "gzip:1", "zstd": "zstd:1", "none": "none"}
_MARGIN = 64 * MIB  # bytes of a volume that a dump leaves free
# A role's own limits, which pg_dump lifts for itself too.
_LIMITS = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"]
_LOOK = 0.5  # seconds between looks at how much is written


@dataclass(frozen=True)
class Address:
    """Where a database is, as libpq takes it.

    Attributes:
        parameters: connection parameters but the password.
        environment: what programs need besides, such as PGPASSFILE or PGPASSWORD.

    """

    parameters: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def conninfo(self) -> str:
        """Return it as one connection string, without any secret."""
        return psycopg.conninfo.make_conninfo(**self.parameters)

    @property
    def option(self) -> str:
        """Return it as an option of pg_dump and pg_restore."""
        return f"--dbname={self.conninfo}"

    async def connect(self) -> Connection:
        """Connect, in autocommit.

        Raises:
            psycopg.OperationalError: it cannot be reached.

        """
        # An empty password keeps libpq from taking the one of our own environment, which is meant for somewhere else.
        secret = {"password": self.environment.get("PGPASSWORD", "")}
        connection: Connection = await psycopg.AsyncConnection.connect(
            **{"connect_timeout": "10", **self.parameters, **secret},  # type: ignore[arg-type]
            autocommit=True,
            row_factory=dict_row,
        )
        # Some poolers refuse them at the connection, and old servers do not know them all.
        await connection.execute(
            "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = ANY (%s)", (_LIMITS,)
        )
        return connection


def local(socket_dir: Path, database: str, user: str, **settings: str) -> Address:
    """Return the address of a database of our own, with settings of the sessions there: beside these libpq takes no PGOPTIONS."""
    parameters = {"host": str(socket_dir), "port": "5432", "dbname": database, "user": user}
    options = " ".join(f"-c {name}={value}" for name, value in {"transaction_timeout": "0", **settings}.items())
    return Address({**parameters, "options": options})


async def dump(
    address: Address,
    programs: Programs,
    dumps: Path,
    operation: Operation,
    *,
    versions: Mapping[str, str | None],
    model: dict[str, Any] | None,
    compression: Compression = "gzip",
    scheduled: bool = False,
) -> Archive:
    """Dump a database into a new directory below `dumps`, which appears there whole or not at all.

    One that is scheduled, which nobody may look at before it is needed, is read again before it appears.

    Raises:
        RefusedError: there is not enough space.
        VerificationError: what was written is not what is there now.
        ProgramError, psycopg.Error, OSError: it failed; nothing is left but a directory that the next start sweeps.

    """
    identifier = archive.new_id()
    partial = dumps / f"{PARTIAL}{identifier}"
    await off_loop(_make, partial)
    try:
        async with await address.connect() as connection:
            database_size = await _check_space(connection, dumps)
            found, made = await _both(address, connection, programs, partial / DUMP, operation, compression)
            version = str(connection.info.parameter_status("server_version") or "").split()[0]
        if version != programs.binaries.version:
            await off_loop(dump_file.blank_options, partial / DUMP)
        size = (await off_loop((partial / DUMP).stat)).st_size
        operation.enter("hash", 2 * size, "bytes")  # of the dump, and then of the tar with it
        manifest = Manifest(
            id=identifier,
            made=made,
            versions={**versions, "postgres": version, "vector": found.extensions.get("vector")},
            compression=compression,
            model=model,
            contents=found,
            size=size,
            sha256=await off_loop(archive.hash_file, partial / DUMP, operation.advance),
            scheduled=scheduled,
            database_size=database_size,
        )
        await off_loop(_finish, partial, manifest, operation.advance)
        if scheduled:
            operation.enter("verify", 2 * manifest.size, "bytes")
            await verify(partial, programs, operation.advance)
    except BaseException:
        await off_loop(shutil.rmtree, partial, ignore_errors=True)
        raise
    finished = dumps / identifier
    await to_its_end(off_loop(_show, partial, finished))
    return Archive(finished, manifest)


def _make(partial: Path) -> None:
    partial.parent.mkdir(mode=0o700, exist_ok=True)
    partial.mkdir(mode=0o700)


def _show(partial: Path, finished: Path) -> None:
    partial.rename(finished)
    volume.sync(finished.parent)


def _finish(partial: Path, manifest: Manifest, passed: Passed) -> None:
    (partial / DUMP).chmod(0o600)
    volume.sync(partial / DUMP)
    archive.finish(partial, manifest, passed)


async def verify(directory: Path, programs: Programs, passed: Passed) -> None:
    """Read a dump that was just written again: its bytes against the manifest, and all of it as a restore would.

    Raises:
        VerificationError: it is not whole, or not what was written.
        OSError: it cannot be read.

    """
    try:
        await off_loop(archive.read_back, directory, passed)
        await off_loop(dump_file.read_header, directory / DUMP)
        await dump_file.read_through(directory / DUMP, programs)
    except RefusedError as error:
        raise VerificationError(
            f"the dump was written, and what is on the disk is not what was written, so it was removed ({error}); look at "
            "the volume's disk"
        ) from error


async def _check_space(connection: Connection, dumps: Path) -> int:
    """Refuse where the dump may not fit; return the bytes that all of the database takes.

    It has vectors as text, compressed: some one and a half times the tables, without their indexes.
    """
    row = await (
        await connection.execute(
            "SELECT coalesce(sum(pg_table_size(c.oid)), 0)::bigint AS bytes, pg_database_size(current_database()) AS whole FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'm') AND n.nspname !~ '^pg_'"
        )
    ).fetchone()
    wanted = int(str(row["bytes"])) * 3 // 2 + _MARGIN if row else _MARGIN
    free = await off_loop(volume.free_bytes, dumps)
    if free < wanted:
        raise RefusedError(
            f"{dumps} has {free // MIB} MiB free, and a dump of this database may take {wanted // MIB} MiB; "
            "delete old dumps, or grow the volume"
        )
    return int(str(row["whole"])) if row else 0


async def _both(
    address: Address,
    connection: Connection,
    programs: Programs,
    file: Path,
    operation: Operation,
    compression: Compression,
) -> tuple[contents.Contents, datetime]:
    """Run pg_dump and read the contents at the same time, in the same snapshot."""
    await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
    await connection.set_read_only(True)
    async with connection.transaction():
        row = await (await connection.execute("SELECT pg_export_snapshot() AS snapshot, now() AS now")).fetchone()
        if row is None:
            raise RefusedError("the server gave no snapshot; is it a PostgreSQL server?")
        arguments = [
            address.option,
            "--no-password",
            "--format=custom",
            f"--compress={_LEVELS[compression]}",
            f"--snapshot={row['snapshot']}",
            f"--exclude-schema={SCHEMA}",
            "--no-publications",
            "--no-subscriptions",
            "--no-security-labels",
            f"--file={file}",
        ]
        operation.enter("dump", None, "bytes")
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(contents.read(connection))
                dumping = group.create_task(programs.run("pg_dump", arguments, more=address.environment))
                group.create_task(_follow(file, dumping, operation))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several  # what failed first; the other was ended for it
        made = row["now"]
        moment = made.astimezone(UTC) if isinstance(made, datetime) else datetime.now(UTC)
        return reading.result(), moment.replace(microsecond=moment.microsecond // 1000 * 1000)


async def _follow(file: Path, until: asyncio.Task[None], operation: Operation) -> None:
    while not until.done():
        operation.done = await off_loop(_size, file)
        await asyncio.wait({until}, timeout=_LOOK)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def kept(dumps: Path) -> list[Archive]:
    """Return the finished dumps, the latest first. One that cannot be read is left out here, and refused by name."""
    found = []
    for path in sorted(dumps.iterdir(), reverse=True) if dumps.is_dir() else []:
        if path.name.startswith("."):
            continue
        try:
            one = Archive.open(path)
            one.checksum  # noqa: B018 - it has one, or is refused
        except (RefusedError, OSError):
            continue
        found.append(one)
    return found


def delete(dumps: Path, identifier: str) -> None:
    """Delete a finished dump; what an end in the middle of it leaves is swept at the next start. Raises OSError."""
    going = dumps / f"{PARTIAL}{identifier}"
    (dumps / identifier).rename(going)
    volume.sync(dumps)
    shutil.rmtree(going)
