"""Reads the memories out of a cluster that lies at PGDATA and that others made: from a copy, so that it stays as it is."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from psycopg import sql

from sidecar import cluster, database, dumping, processes, volume
from sidecar.archive import Archive
from sidecar.child import Child
from sidecar.errors import RefusedError, SidecarError
from sidecar.operations import Operation
from sidecar.side_server import SideServer, SideServerError
from sidecar.sizing import MIB
from sidecar.threads import off_loop

_MARGIN = 256 * MIB  # bytes for the new cluster's own log and catalogs
_LOOK = 0.5  # seconds between looks at how much is copied
_NAMED = 3
# Of the directories that PostgreSQL itself writes to; what is configured elsewhere may well be linked to.
_DATA = ("base", "global", "pg_*")
_NOT_DATA = frozenset({"pg_hba.conf", "pg_ident.conf", "pg_log", "pg_stat_tmp"})
# On the copy alone: a superuser whose name is known, and that gets in with nothing set for it. In one line, as
# single-user mode reads it.
_OPEN_UP = (
    "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'postgres') THEN CREATE ROLE postgres; END IF; "
    "ALTER ROLE postgres SUPERUSER LOGIN CONNECTION LIMIT -1 VALID UNTIL 'infinity'; DELETE FROM pg_catalog.pg_db_role_setting; "
    "UPDATE pg_catalog.pg_database SET datallowconn = true WHERE datname = 'template1'; END $$"
)


@dataclass(frozen=True)
class Foreign:
    """A cluster that others made.

    Attributes:
        pgdata: where it lies.
        major: of its PostgreSQL.
        size: in bytes, of all its files.
        files: size and time of the last change (ns) of each, by its path in the cluster.

    """

    pgdata: Path
    major: int
    size: int
    files: Mapping[str, tuple[int, int]] = field(repr=False)

    @classmethod
    def seen(cls, pgdata: Path, major: int) -> Self:
        """Look at all of its files. Raises OSError."""
        files = _files(pgdata)
        return cls(pgdata, major, sum(size for size, _ in files.values()), files)


def _files(pgdata: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for directory, _, names in os.walk(pgdata):
        for path in (Path(directory, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found[str(path.relative_to(pgdata))] = (status.st_size, status.st_mtime_ns)
    return found


def check(pgdata: Path, *, crashed: bool) -> Foreign:
    """Look whether the cluster at PGDATA can be adopted, without touching anything.

    `crashed` says that its server was killed, and that nothing runs on it: a copy is recovered then.

    Raises:
        RefusedError: it cannot, and the sentence says why.
        BlockedError: it cannot be looked at.

    """
    seen = cluster.look(pgdata)
    if seen.found is not cluster.Found.FOREIGN or seen.major is None:
        what = "no cluster" if seen.found is cluster.Found.NOTHING else "this sidecar's own cluster"
        raise RefusedError(f"PGDATA {pgdata} holds {what}; there is nothing to adopt")
    alive = processes.postgres_in(pgdata)
    if alive:
        raise RefusedError(
            f"PostgreSQL process {alive[0]} works in {pgdata}; stop that server first (pg_ctl stop -m fast)"
        )
    if (pgdata / cluster.PID_FILE).exists() and not crashed:
        raise RefusedError(
            f"{pgdata / cluster.PID_FILE} is there: its last server runs in another container, or was killed; stop it, and if "
            "it is gone already, say so with --crashed (a copy is recovered; the original stays as it is)"
        )
    _check_one_directory(pgdata)
    signals = [name for name in ("standby.signal", "recovery.signal") if (pgdata / name).exists()]
    if signals:
        raise RefusedError(
            f"{pgdata / signals[0]} is there, so it is a standby or in the middle of a recovery; promote it first, or adopt its primary"
        )
    return Foreign.seen(pgdata, seen.major)


def check_unchanged(foreign: Foreign) -> None:
    """Refuse where anything was written to a cluster since it was looked at, as by a server in another container.

    Raises:
        RefusedError: it was; what is read from a copy of it lacks that, or makes no sense.

    """
    now = _files(foreign.pgdata)
    changed = sorted({name for name, _ in {*now.items()} ^ {*foreign.files.items()}})
    if changed:
        raise RefusedError(
            f"{len(changed)} files of {foreign.pgdata} were written since this began ({', '.join(changed[:_NAMED])}): a server "
            "works in it, in another container perhaps; stop it, and try again"
        )


def _check_one_directory(pgdata: Path) -> None:
    """Refuse a cluster that has a part elsewhere: a server on the copy would write to that part of the original."""
    if pgdata.is_symlink():
        raise RefusedError(
            f"PGDATA {pgdata} is a link to {pgdata.readlink()}, and a cluster is adopted in a directory of that very name; set "
            "PGDATA to where it leads"
        )
    elsewhere = (
        "and a cluster is copied as one directory; dump it with pg_dump -Fc where it runs, and restore that file"
    )
    link = next(_links(pgdata), None)
    if link is not None:
        raise RefusedError(f"{link} is a link to {link.readlink()}, {elsewhere}")
    if (pgdata / "tablespace_map").exists():
        raise RefusedError(f"{pgdata / 'tablespace_map'} names tablespaces in other directories, {elsewhere}")
    real = Path(os.path.realpath(pgdata))
    mounted = next((mount.point for mount in volume.mounts() if real in mount.point.parents), None)
    if mounted is not None:
        raise RefusedError(f"{mounted} is a mount of its own, {elsewhere}")


def _links(pgdata: Path) -> Iterator[Path]:
    """Yield the links among the files that PostgreSQL writes to."""
    for part in (path for pattern in _DATA for path in sorted(pgdata.glob(pattern)) if path.name not in _NOT_DATA):
        if part.is_symlink():
            yield part
        for directory, directories, files in os.walk(part):
            yield from (path for name in (*directories, *files) if (path := Path(directory, name)).is_symlink())


def check_room(foreign: Foreign) -> None:
    """Refuse where copy, dump and new cluster may not fit. Raises RefusedError."""
    wanted, free = foreign.size * 5 // 2 + _MARGIN, volume.free_bytes(foreign.pgdata.parent)
    if free < wanted:
        raise RefusedError(
            f"a copy of {foreign.pgdata} and a new cluster may take {wanted // MIB} MiB, and {foreign.pgdata.parent} has "
            f"{free // MIB} MiB free; free some or grow the volume"
        )


async def fetch(
    foreign: Foreign, aside: SideServer, directory: Path, wanted: str | None, operation: Operation
) -> Archive:
    """Dump the memories of a foreign cluster into a new directory below `directory`, from a copy at `aside.pgdata`.

    `wanted` names the database; None where it is the only one with memories.

    Raises:
        RefusedError: no database has memories, or several have and none is named; or its server cannot run on the copy.
        SidecarError, psycopg.Error, OSError: it failed.

    """
    await _copy(foreign, aside, operation)
    await off_loop(check_unchanged, foreign)
    operation.enter("recover the copy")
    try:
        await aside.run_alone(_OPEN_UP)
    except SideServerError as error:
        raise RefusedError(
            f"{error}; nothing was touched: mend that where it runs, or dump it there with pg_dump -Fc and restore that file"
        ) from error
    async with aside.running(foreign=True):
        name = await _choose(aside.socket_dir, wanted)
        operation.report["database"] = name
        address = dumping.local(aside.socket_dir, name, database.SUPERUSER)
        return await dumping.dump(address, aside.programs, directory, operation, versions={}, model=None)


async def _copy(foreign: Foreign, aside: SideServer, operation: Operation) -> None:
    operation.enter("copy", foreign.size, "bytes")
    # With reflinks, where the filesystem has them, this takes neither time nor space.
    child = Child.start(
        "cp",
        ["/bin/cp", "-a", "--reflink=auto", "-T", "--", str(foreign.pgdata), str(aside.pgdata)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        cwd=aside.programs.cwd,
        death_signal=signal.SIGKILL,
        hear=lambda _: None,
    )
    try:
        async with _followed(aside.pgdata, operation):
            code = await child.wait()
    finally:
        child.kill_session()
        await child.wait()
    if code != 0:
        raise SidecarError(f"{foreign.pgdata} could not be copied: {' '.join(list(child.tail)[-3:])}")
    await off_loop(_make_startable, aside.pgdata)


def _make_startable(pgdata: Path) -> None:
    for name in (cluster.PID_FILE, "postmaster.opts", "postgresql.auto.conf"):  # of the server that it was
        (pgdata / name).unlink(missing_ok=True)
    (pgdata / "postgresql.auto.conf").touch()
    for slot in (pgdata / "pg_replslot").glob("*/"):  # the cluster's own, and its server may not start with them
        shutil.rmtree(slot)
    pgdata.chmod(0o700)


@contextlib.asynccontextmanager
async def _followed(directory: Path, operation: Operation) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            await asyncio.sleep(_LOOK)
            operation.done = await off_loop(volume.size, directory)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _choose(socket_dir: Path, wanted: str | None) -> str:
    """Return the database that has the memories."""
    async with await database.connect(socket_dir, database.SUPERUSER, "template1") as connection:
        cursor = await connection.execute(
            "SELECT datname AS name FROM pg_database WHERE NOT datistemplate AND datallowconn "
            "AND datconnlimit <> -2 ORDER BY datname"  # of which a DROP DATABASE has begun
        )
        names = [str(row["name"]) for row in await cursor.fetchall()]
    if wanted is not None and wanted not in names:
        raise RefusedError(f"the cluster has no database {wanted[:80]!r}; it has {', '.join(names) or 'none'}")
    counted = {name: await _memories(socket_dir, name) for name in ([wanted] if wanted is not None else names)}
    found = {name: count for name, count in counted.items() if count is not None}
    # An empty one is somebody's first try beside the real one.
    best = {name: count for name, count in found.items() if count} or found
    if len(best) == 1:
        return next(iter(best))
    if best:
        told = ", ".join(f"{name} ({count})" for name, count in best.items())
        raise RefusedError(f"several databases have memories: {told}; name one with --database")
    raise RefusedError(
        f"no database of the cluster has a table memory_units with embeddings (looked at: {', '.join(counted)}); "
        "expected one of hindsight-api"
    )


async def _memories(socket_dir: Path, name: str) -> int | None:
    """Count the memories of one database; None where it has no table for them."""
    total: int | None = None
    async with await database.connect(socket_dir, database.SUPERUSER, name) as connection:
        for schema in await database.memory_schemas(connection):
            query = sql.SQL("SELECT count(*) AS n FROM ONLY {}").format(sql.Identifier(schema, "memory_units"))
            row = await (await connection.execute(query)).fetchone()
            total = (total or 0) + (int(str(row["n"])) if row else 0)
    return total
