"""What must hold in the running Postgres before hindsight-api may touch it."""

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import errors, sql
from psycopg.rows import dict_row

from sidecar.api_environment import DATABASE, ROLE
from sidecar.errors import BlockedError, Reason
from sidecar.model import Identity, Model
from sidecar.rehearsal import CANARY_BANK

SUPERUSER = "postgres"
SCHEMA = "hindsight_sidecar"
_EXTENSIONS = ("vector", "pg_trgm", "btree_gin")
_COPY = "upgrade-copy"  # name of a fact
_UNCOPIED = "needs-no-upgrade-copy"  # of another
_EMBEDDER = "embedder"  # and of one more
_CONNECT_TIMEOUT = 5  # seconds
# What an operator keeps beside the memories, such as a copy in a schema of their own, is not hindsight-api's. Its own
# that it may not read is: that is a fault, and is told as one.
_OWN = "pg_has_role(c.relowner, 'USAGE')"
OURS = f"(n.nspname = 'public' OR {_OWN} OR (has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')))"
LOCK_TIMEOUT = 5.0  # seconds; a check that waits for somebody's lock says so rather than nothing

Connection = psycopg.AsyncConnection[dict[str, object]]


async def connect(
    socket_dir: Path, user: str = ROLE, database: str = DATABASE, *, lock_timeout: float | None = None
) -> Connection:
    """Connect over the private socket, in autocommit, with nothing taken from the environment but the address.

    A statement waits for a lock for at most `lock_timeout` seconds, where that is given.
    """
    limit = "" if lock_timeout is None else f" -c lock_timeout={round(lock_timeout * 1000)}"
    return await psycopg.AsyncConnection.connect(
        host=str(socket_dir),
        port=5432,
        user=user,
        dbname=database,
        connect_timeout=_CONNECT_TIMEOUT,
        autocommit=True,
        application_name="hindsight-sidecar",
        # Our statements must mean the same whatever a restored database put into its public schema.
        options=f"-c search_path=pg_catalog{limit}",
        row_factory=dict_row,
    )


async def memory_schemas(connection: Connection) -> dict[str, int]:
    """Return the schemas that hold memories of this connection's role, one a tenant, and what others let it read.

    Each has the dimension of its embeddings (-1: not fixed).
    """
    rows = await connection.execute(
        "SELECT n.nspname AS schema, a.atttypmod AS dimension FROM pg_class c "  # noqa: S608 - a constant
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'embedding' AND NOT a.attisdropped "
        "WHERE c.relname = 'memory_units' AND c.relkind = 'r' AND c.relpersistence <> 't' "
        f"AND {OURS} ORDER BY n.nspname"
    )
    return {str(row["schema"]): int(str(row["dimension"])) for row in await rows.fetchall()}


async def touch_memories(connection: Connection, schemas: Collection[str]) -> None:
    """Take and give back the lock that every memory call needs; with a lock timeout, it tells where nobody can have it."""
    for schema in schemas:
        # Dropped since it was listed: the next look lists what is there.
        with contextlib.suppress(errors.UndefinedTable, errors.InvalidSchemaName):
            await connection.execute(sql.SQL("SELECT FROM {} LIMIT 0").format(sql.Identifier(schema, "memory_units")))


async def count_memories(connection: Connection, schemas: Collection[str]) -> int:
    """Count the rows of memory_units over the given schemas, but for those of our own bank, which is there for a moment."""
    total = 0
    for schema in schemas:
        query = sql.SQL("SELECT count(*) AS n FROM {} WHERE bank_id <> %s").format(
            sql.Identifier(schema, "memory_units")
        )
        row = await (await connection.execute(query, (CANARY_BANK,))).fetchone()
        total += int(str(row["n"])) if row else 0
    return total


async def sizes(connection: Connection) -> tuple[int, int]:
    """Return how many bytes the files of this database take, and those of the log. Postgres looks at each of them."""
    query = "SELECT pg_database_size(current_database()) AS data, (SELECT sum(size) FROM pg_ls_waldir()) AS log"
    row = await (await connection.execute(query)).fetchone()
    return (int(str(row["data"])), int(str(row["log"]))) if row else (0, 0)


async def holder_of_memories(connection: Connection) -> int | None:
    """Return the pid of the process that holds a lock on a table of memories which keeps all others out; None for none."""
    rows = await connection.execute(
        "SELECT l.pid AS pid FROM pg_locks l JOIN pg_class c ON c.oid = l.relation "
        "WHERE c.relname = 'memory_units' AND l.mode = 'AccessExclusiveLock' AND l.granted LIMIT 1"
    )
    row = await rows.fetchone()
    return int(str(row["pid"])) if row else None


async def alembic_revisions(connection: Connection) -> dict[str, list[str]]:
    """Return the schema revisions of every schema of this connection's role, and of those that others let it read."""
    rows = await connection.execute(
        "SELECT n.nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "  # noqa: S608 - a constant
        f"WHERE c.relname = 'alembic_version' AND c.relkind = 'r' AND {OURS} ORDER BY n.nspname"
    )
    found = {}
    for row in await rows.fetchall():
        schema = str(row["schema"])
        query = sql.SQL("SELECT version_num FROM {} ORDER BY 1").format(sql.Identifier(schema, "alembic_version"))
        found[schema] = [str(r["version_num"]) for r in await (await connection.execute(query)).fetchall()]
    return found


async def check(socket_dir: Path, model: Model, known_revisions: Collection[str]) -> None:
    """Check that this database is ours, whole, not newer than the code, and embedded with the model at hand.

    Raises:
        BlockedError: `damaged-cluster`, `schema-newer` or `model-mismatch`.
        psycopg.Error: Postgres went away meanwhile.

    """
    try:
        connection = await connect(socket_dir, SUPERUSER, lock_timeout=LOCK_TIMEOUT)
    except psycopg.OperationalError as error:
        if "does not exist" not in str(error):
            raise
        raise BlockedError(
            Reason.DAMAGED_CLUSTER,
            f"the cluster runs and is not as this sidecar made it ({str(error).strip()}); put a copy of the volume back, or "
            "move PGDATA away and restore a dump into the new one",
            retry_after=10,
        ) from error
    # What belongs to others is read with their own rights: a cast or a view there runs whatever they like.
    async with connection, await connect(socket_dir, lock_timeout=LOCK_TIMEOUT) as owner:
        await _check_extensions(connection)
        await _check_revisions(owner, known_revisions)
        await _check_memories(connection)
        await _check_identity(connection, owner, model.identity)


async def _check_extensions(connection: Connection) -> None:
    rows = await connection.execute(
        "SELECT e.extname AS name, n.nspname AS schema FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
    )
    installed = {str(row["name"]): str(row["schema"]) for row in await rows.fetchall()}
    misplaced = installed.get("vector", "public")
    if misplaced != "public":
        # hindsight 0.8 would drop the extension there with every embedding column, to make it anew in public.
        raise BlockedError(
            Reason.DAMAGED_CLUSTER,
            f"the extension vector is in schema {misplaced}, and hindsight-api needs it in public; run "
            f"ALTER EXTENSION vector SET SCHEMA public in database {DATABASE}",
        )
    for name in _EXTENSIONS:
        if name not in installed:
            await connection.execute(sql.SQL("CREATE EXTENSION {} SCHEMA public").format(sql.Identifier(name)))


async def _check_revisions(connection: Connection, known: Collection[str]) -> None:
    for schema, revisions in (await alembic_revisions(connection)).items():
        newer = [revision for revision in revisions if revision not in known]
        if newer:
            # hindsight-api itself would warn, serve and write.
            raise BlockedError(
                Reason.SCHEMA_NEWER,
                f"schema {schema} is at revision {', '.join(newer)}, which the installed hindsight-api does not know; "
                "run the newer version that made it, or restore a dump from before",
                retry_after=10,
            )


async def _check_memories(connection: Connection) -> None:
    await _make_facts(connection)
    was_ready = await _fact(connection, "first-ready")
    if was_ready is not None and not await memory_schemas(connection):
        raise BlockedError(
            Reason.DAMAGED_CLUSTER,
            f"this database was ready before ({was_ready}) and has no table memory_units any more; "
            "nothing is migrated from zero over it: restore a dump, or put a copy of the volume back",
            retry_after=10,
        )


async def _fact(connection: Connection, name: str) -> object | None:
    cursor = await connection.execute(f"SELECT value FROM {SCHEMA}.facts WHERE name = %s", (name,))  # noqa: S608 - a constant
    row = await cursor.fetchone()
    return row["value"] if row else None


async def _record(connection: Connection, name: str, value: object) -> None:
    await connection.execute(
        f"INSERT INTO {SCHEMA}.facts (name, value) VALUES (%s, %s) "  # noqa: S608 - a constant
        "ON CONFLICT (name) DO UPDATE SET value = excluded.value, recorded = now()",
        (name, json.dumps(value)),
    )


async def _check_identity(connection: Connection, owner: Connection, identity: Identity) -> None:
    recorded = await _fact(connection, "embedding-model")
    if recorded == identity.to_json():
        return
    if recorded is not None and await count_memories(owner, await memory_schemas(owner)):
        differences = "; ".join(identity.differences(Identity.from_json(dict(recorded))))  # type: ignore[call-overload]
        raise BlockedError(
            Reason.MODEL_MISMATCH,
            f"the memories were embedded with another model than the one at hand ({differences}); recall would return "
            "noise with everything healthy: set HINDSIGHT_SIDECAR_MODEL_DIR and HINDSIGHT_SIDECAR_FLAVOR to the model they were made with",
            retry_after=10,
        )
    await _record(connection, "embedding-model", identity.to_json())


async def noted_embedder(connection: Connection) -> object | None:
    """Return what the stored vectors were seen to be of (`recognition.Embedder`), None where that is not noted."""
    return await _fact(connection, _EMBEDDER)


async def note_embedder(socket_dir: Path, embedder: dict[str, object]) -> None:
    """Note what the stored vectors are of."""
    async with await connect(socket_dir, SUPERUSER) as connection:
        await _record(connection, _EMBEDDER, embedder)


@dataclass(frozen=True)
class Facts:
    """What is noted in a database that is about to be served.

    Attributes:
        origin: where its memories came from.
        identity: of the model that they were embedded with, None where it is not known.
        embedder: what their vectors were seen to be of, None where they were not compared.
        uncopied: revisions by schema, of which no copy is kept before they are migrated: their source has them, and the
            database that is served until then is kept as well.

    """

    origin: dict[str, object]
    identity: dict[str, object] | None = None
    embedder: dict[str, object] | None = None
    uncopied: Mapping[str, list[str]] = field(default_factory=dict)


async def prepare(socket_dir: Path, name: str, facts: Facts) -> None:
    """Write the sidecar's own facts into a database that is about to be served.

    Raises:
        psycopg.Error: Postgres went away meanwhile.

    """
    async with await connect(socket_dir, SUPERUSER, name) as connection:
        # Whatever has the name came with the memories, and could run code of its own with our rights.
        await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        await _make_facts(connection)
        if facts.identity is not None:
            await _record(connection, "embedding-model", facts.identity)
        if facts.embedder is not None:
            await _record(connection, _EMBEDDER, facts.embedder)
        await _record(connection, "origin", facts.origin)
        if facts.uncopied:
            await _record(connection, _UNCOPIED, {"tenancy": None, "schemas": dict(facts.uncopied)})


def _older(revisions: Mapping[str, list[str]], heads: Collection[str]) -> dict[str, list[str]]:
    """Return those of the schemas that hindsight-api would bring to another revision, if it serves them."""
    return {schema: names for schema, names in revisions.items() if not set(names) <= set(heads)}


def not_covered(
    revisions: Mapping[str, list[str]], heads: Collection[str], noted: object, tenancy: str
) -> dict[str, list[str]]:
    """Return the older schemas that may be migrated now, of which a copy is wanted.

    `noted` is what the database says needs none: what a hindsight-api that served left as it was, for as long as that is
    told to serve the same schemas (`tenant.tenancy`); or what was brought in and not served yet (no tenancy).
    """
    found = noted if isinstance(noted, dict) else {}
    left = found.get("schemas", {}) if found.get("tenancy") in (None, tenancy) else {}
    return {schema: names for schema, names in _older(revisions, heads).items() if left.get(schema) != names}


async def wants_copy(socket_dir: Path, heads: Collection[str], tenancy: str) -> bool:
    """Tell whether hindsight-api would migrate a schema of which a copy is wanted, and none from before this start is kept."""
    async with await connect(socket_dir) as connection:
        revisions = await alembic_revisions(connection)
        if not _older(revisions, heads) or not await memory_schemas(connection):
            return False
        if not not_covered(revisions, heads, await _fact(connection, _UNCOPIED), tenancy):
            return False
        kept = await _fact(connection, _COPY)
        cursor = await connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (str(kept),))
        return await cursor.fetchone() is None


async def record_copy(socket_dir: Path, name: str) -> None:
    """Note a copy that is about to be made: one that is there is whole, so whatever ends early does not make another one."""
    async with await connect(socket_dir, SUPERUSER) as connection:
        await _record(connection, _COPY, name)


async def origin(socket_dir: Path) -> dict[str, object] | None:
    """Return where the served memories came from, as noted when they were brought in; None where they grew here."""
    async with await connect(socket_dir) as connection:
        found = await _fact(connection, "origin")
        return found if isinstance(found, dict) else None


async def _make_facts(connection: Connection) -> None:
    """Make the table of our own facts, unless it is there, and is ours.

    Raises:
        BlockedError: `damaged-cluster`, where someone else owns it: a trigger of theirs would run with our rights.

    """
    cursor = await connection.execute(
        "SELECT n.nspowner::regrole::text AS schema_owner, c.relowner::regrole::text AS owner FROM pg_namespace n "
        "LEFT JOIN pg_class c ON c.relnamespace = n.oid WHERE n.nspname = %s",
        (SCHEMA,),
    )
    owners = {str(owner) for row in await cursor.fetchall() for owner in row.values() if owner is not None}
    if owners - {SUPERUSER}:
        raise BlockedError(
            Reason.DAMAGED_CLUSTER,
            f"schema {SCHEMA} of database {DATABASE} belongs to {', '.join(sorted(owners))}, and expected is {SUPERUSER} alone; "
            f"look at what is in it, and drop it: DROP SCHEMA {SCHEMA} CASCADE",
            retry_after=10,
        )
    await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    await connection.execute(
        f"CREATE TABLE IF NOT EXISTS {SCHEMA}.facts (name text PRIMARY KEY, value jsonb NOT NULL, "
        "recorded timestamptz NOT NULL DEFAULT now())"
    )
    await connection.execute(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {ROLE}")
    await connection.execute(f"GRANT SELECT ON {SCHEMA}.facts TO {ROLE}")


async def record_first_ready(
    socket_dir: Path, versions: dict[str, str | None], heads: Collection[str], tenancy: str
) -> None:
    """Note once that this database was ready, so that an empty one in its place is noticed later; and each time what is older."""
    async with await connect(socket_dir, lock_timeout=LOCK_TIMEOUT) as owner:
        left = _older(await alembic_revisions(owner), heads)
    async with await connect(socket_dir, SUPERUSER) as connection:
        if await _fact(connection, "first-ready") is None:
            await _record(connection, "first-ready", versions)
        # It served: what is migrated next is worth a copy of its own, and what it left as it is, such as a tenant that is
        # no more, is not.
        await _record(connection, _UNCOPIED, {"tenancy": tenancy, "schemas": left})
        await connection.execute(f"DELETE FROM {SCHEMA}.facts WHERE name = %s", (_COPY,))  # noqa: S608 - a constant
        await connection.execute(f"COMMENT ON DATABASE {DATABASE} IS NULL")  # the name that it had before


async def sweep_traces(connection: Connection, bank: str) -> int:
    """Delete what hindsight-api's tracing kept of one of our own banks; return how many rows that were."""
    cursor = await connection.execute(
        "SELECT n.nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "  # noqa: S608 - a constant
        f"WHERE c.relname = 'llm_requests' AND c.relkind IN ('r', 'p') AND {_OWN}"
    )
    deleted = 0
    for row in await cursor.fetchall():
        query = sql.SQL("DELETE FROM {} WHERE bank_id = %s").format(sql.Identifier(str(row["schema"]), "llm_requests"))
        deleted += (await connection.execute(query, (bank,))).rowcount
    return deleted
