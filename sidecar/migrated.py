"""Whether hindsight-api's start left the memories that it found: it migrates an older schema, after all of it was verified."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from psycopg import sql

from sidecar import database
from sidecar.agreement import own_schemas
from sidecar.database import Connection
from sidecar.rehearsal import CANARY_BANK

# Observations come and go with what hindsight-api works out by itself, and it has no other kind any more.
_KINDS = ["world", "experience"]
_REPLACING = "retain|import"  # in the names of tasks that may store a document anew, with fewer memories than before


@dataclass(frozen=True)
class Found:
    """What is looked at before and after a start.

    Attributes:
        memories: by schema, how many there are that nothing but a call or a task of retain takes away.
        revisions: alembic's, by schema.
        replacing: the schemas in which such a task waits, or is under way.

    """

    memories: dict[str, int] = field(default_factory=dict)
    revisions: Mapping[str, list[str]] = field(default_factory=dict)
    replacing: frozenset[str] = frozenset()


async def look(socket_dir: Path) -> Found:
    """Look at what is served, with its owner's rights. Raises psycopg.Error."""
    async with await database.connect(socket_dir) as connection, connection.transaction():
        memories, replacing = {}, set()
        for schema in await own_schemas(connection):
            query = sql.SQL("SELECT count(*) AS n FROM {} WHERE fact_type = ANY (%s) AND bank_id <> %s").format(
                sql.Identifier(schema, "memory_units")
            )
            if await _has_table(connection, schema, "banks"):
                # Not those of a bank that is no more: a migration deletes them, and nobody could ask for them.
                query += sql.SQL(" AND bank_id IN (SELECT bank_id FROM {})").format(sql.Identifier(schema, "banks"))
            memories[schema] = await _number(connection, query, [_KINDS, CANARY_BANK])
            if await has_tasks(connection, schema):
                query = sql.SQL(
                    "SELECT count(*) AS n FROM {} WHERE status IN ('pending', 'processing') AND operation_type ~ %s"
                ).format(sql.Identifier(schema, "async_operations"))
                if await _number(connection, query, [_REPLACING]):
                    replacing.add(schema)
        return Found(memories, await database.alembic_revisions(connection), frozenset(replacing))


async def _number(connection: Connection, query: sql.Composed, values: list[object]) -> int:
    row = await (await connection.execute(query, values)).fetchone()
    return int(str(row["n"])) if row else 0


async def has_tasks(connection: Connection, schema: str) -> bool:
    """Tell whether a schema has hindsight-api's table of tasks."""
    return await _has_table(connection, schema, "async_operations")


async def _has_table(connection: Connection, schema: str, name: str) -> bool:
    cursor = await connection.execute(
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'r'",
        (schema, name),
    )
    return await cursor.fetchone() is not None


def compare(before: Found, after: Found, served: str | None, heads: frozenset[str]) -> tuple[list[str], list[str]]:
    """Compare what was found before a start and after it; return faults and doubts, a sentence each.

    Migrated are the schema that is `served` (None: not known which) and each that has another revision than before.
    """
    faults, doubts = [], []
    for schema, memories in before.memories.items():
        left = after.memories.get(schema, 0)
        if left < memories:
            told = f"schema {schema} had {memories} memories before hindsight-api was started, and has {left} now"
            if schema in before.replacing:
                doubts.append(f"{told}; tasks were waiting in it that may have replaced some")
            else:
                faults.append(told)
    migrated = {schema for schema, names in after.revisions.items() if before.revisions.get(schema) != names}
    for schema in sorted({*migrated, *([served] if served is not None else [])}):
        names = after.revisions.get(schema, [])
        if not names or not set(names) <= heads:
            faults.append(
                f"hindsight-api runs, and schema {schema} is at revision {', '.join(names) or 'none'}; expected "
                f"{', '.join(sorted(heads))}, to which it migrates what it serves"
            )
    return faults, doubts
