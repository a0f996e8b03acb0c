"""What a database holds, as far as a move has to keep it: rows, definitions, sequences, extensions, revisions.

Read with the rights of whoever connects, through names of `pg_catalog` alone, so that nothing a foreign database
defines is run with more rights than its owner's.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from psycopg import sql

from sidecar.database import SCHEMA, Connection, alembic_revisions, memory_schemas

# Made anew by hindsight-api from the rest: named in an archive, not compared, and not counted as memories.
DERIVED = frozenset({"bank_stats_cache"})
# Types whose binary form says what their text says, in every version, and is had much faster. Not of arrays (it tells
# whether there once was a NULL) and of floats (there is more than one NaN).
_BINARY = frozenset({
    "bool", "bpchar", "date", "int2", "int4", "int8", "json", "jsonb", "text", "timestamp", "timestamptz", "tsvector", "uuid",
    "varchar",
})  # fmt: skip
_VECTORS = frozenset({"vector", "halfvec", "sparsevec"})
# Texts mean the same whatever the server's and the role's settings are.
_TEXT_SETTINGS = {
    "DateStyle": "ISO, YMD",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "search_path": "pg_catalog",
    "row_security": "off",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
}
_NOT_OURS = (
    "n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', %(own)s) AND NOT EXISTS "
    "(SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass AND e.objid = c.oid AND e.deptype = 'e')"
)


@dataclass(frozen=True)
class Table:
    """Rows of one table and a hash over all of them, in no order; `derived` ones are not compared."""

    rows: int
    content: str
    derived: bool = False


@dataclass(frozen=True)
class Sequence:
    """Where a sequence stands: the last value, whether it was given out, and how it goes on from there."""

    last_value: int
    is_called: bool
    definition: str


@dataclass(frozen=True)
class Contents:
    """What a database holds. Names are qualified by schema, and quoted where SQL needs it: `public.memory_units`.

    Attributes:
        tables: by name.
        columns: type, nullability, default and generation of each column, by `schema.table.column`.
        indexes: definition by name.
        constraints: definition by `schema.table.constraint`; NOT NULL is part of a column.
        sequences: by name.
        views: kind and definition by name, materialised ones too.
        routines: hash of the definition by signature.
        triggers: definition by `schema.table.trigger`.
        extensions: version by name.
        dimensions: of the embeddings, by schema with memories.
        revisions: alembic's, by schema.

    """

    tables: dict[str, Table] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    indexes: dict[str, str] = field(default_factory=dict)
    constraints: dict[str, str] = field(default_factory=dict)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)
    routines: dict[str, str] = field(default_factory=dict)
    triggers: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)
    dimensions: dict[str, int] = field(default_factory=dict)
    revisions: dict[str, list[str]] = field(default_factory=dict)

    @property
    def memories(self) -> int:
        """Rows of memory_units over all tenants."""
        return sum(
            table.rows
            for name, table in self.tables.items()
            if name.endswith(".memory_units") and f"{name}.embedding" in self.columns
        )

    @property
    def rows(self) -> int:
        """Rows of every table that counts."""
        return sum(table.rows for table in self.tables.values() if not table.derived)

    def unchanged(self) -> Self:
        """Return what a look at changes has to find where there are none."""
        return replace(self, tables={name: replace(table, content="") for name, table in self.tables.items()})

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, sorted by name."""
        kept: dict[str, Any] = {name: dict(sorted(getattr(self, name).items())) for name in self.__dataclass_fields__}
        kept["tables"] = {name: vars(table) for name, table in kept["tables"].items()}
        kept["sequences"] = {name: vars(sequence) for name, sequence in kept["sequences"].items()}
        return kept

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Read it back. Raises KeyError, TypeError or ValueError where it is none."""
        values = {name: dict(found[name]) for name in cls.__dataclass_fields__}
        values["tables"] = {name: Table(**table) for name, table in values["tables"].items()}
        values["sequences"] = {name: Sequence(**sequence) for name, sequence in values["sequences"].items()}
        return cls(**values)


def unknown(revisions: Mapping[str, Iterable[str]], known: Collection[str]) -> list[str]:
    """Return those schema revisions, of whichever schema, that the hindsight-api here does not know: a newer one's."""
    return sorted({name for names in revisions.values() for name in names} - set(known))


@dataclass(frozen=True)
class Moment:
    """A moment in the life of one database, after which changes can be looked for.

    Attributes:
        database: its oid, which a new name does not change.
        transaction: the first one that may not have ended yet.

    """

    database: int
    transaction: int


async def moment(connection: Connection) -> Moment:
    """Return the moment that it is. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT oid::bigint AS database, pg_snapshot_xmin(pg_current_snapshot())::text AS transaction FROM pg_database "
        "WHERE datname = current_database()"
    )
    row = await cursor.fetchone()
    if row is None:
        raise ValueError("the database is not in pg_database")
    return Moment(int(str(row["database"])), int(str(row["transaction"])))


async def read(
    connection: Connection, since: Moment | None = None, *, passed: Callable[[int], object] = lambda _: None
) -> Contents:
    """Read all of it in the connection's transaction, so that it belongs to one snapshot; `passed` hears of each table's rows.

    With `since`, a moment before some earlier read, rows are counted and not hashed: a table's `content` is empty where
    every row was written before that moment. With the count of that read they are the very same rows, as rows are
    never changed in their place; so this tells the same as the hash, and reads no values. A table that was being written
    in that very moment may be taken for a changed one.

    Raises:
        psycopg.Error: the server went away, or the role may not read a table.

    """
    for name, value in _TEXT_SETTINGS.items():
        await connection.execute("SELECT set_config(%s, %s, true)", (name, value))
    # A parallel worker has the server's encoding, whatever the client's is.
    await connection.execute(
        "SELECT set_config('max_parallel_workers_per_gather', '0', true) WHERE current_setting('server_encoding') <> 'UTF8'"
    )
    return Contents(
        tables=await _tables(connection, since, passed),
        columns=await _columns(connection),
        indexes=await _texts(
            connection,
            "SELECT format('%%I.%%I', n.nspname, i.relname) AS name, pg_get_indexdef(i.oid) AS text FROM pg_index x "
            "JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class c ON c.oid = x.indrelid "
            f"JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {_NOT_OURS}",
        ),
        constraints=await _texts(
            connection,
            "SELECT format('%%I.%%I.%%I', n.nspname, c.relname, k.conname) AS name, pg_get_constraintdef(k.oid) AS text "
            "FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
            f"WHERE k.contype IN ('c', 'f', 'p', 'u', 'x') AND {_NOT_OURS}",
        ),
        sequences=await _sequences(connection),
        views=await _texts(
            connection,
            "SELECT format('%%I.%%I', n.nspname, c.relname) AS name, c.relkind::text || ' ' || pg_get_viewdef(c.oid) AS text "
            f"FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('v', 'm') AND {_NOT_OURS}",
        ),
        routines=await _texts(
            connection,
            "SELECT format('%%I.%%I', n.nspname, p.proname) || '(' || pg_get_function_identity_arguments(p.oid) || ')' AS name, "
            "md5(pg_get_functiondef(p.oid)) AS text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
            "WHERE p.prokind IN ('f', 'p') AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', %(own)s) "
            "AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_proc'::regclass AND e.objid = p.oid AND e.deptype = 'e')",
        ),
        triggers=await _texts(
            connection,
            "SELECT format('%%I.%%I.%%I', n.nspname, c.relname, t.tgname) AS name, "
            "pg_get_triggerdef(t.oid) || ' ' || t.tgenabled::text AS text "
            "FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
            f"WHERE NOT t.tgisinternal AND {_NOT_OURS}",
        ),
        extensions=await _texts(connection, "SELECT extname AS name, extversion AS text FROM pg_extension"),
        dimensions=await memory_schemas(connection),
        revisions=await alembic_revisions(connection),
    )


async def _texts(connection: Connection, query: str) -> dict[str, str]:
    cursor = await connection.execute(query, {"own": SCHEMA})
    return {str(row["name"]): str(row["text"]) for row in await cursor.fetchall()}


async def _columns(connection: Connection) -> dict[str, str]:
    return await _texts(
        connection,
        "SELECT format('%%I.%%I.%%I', n.nspname, c.relname, a.attname) AS name, format_type(a.atttypid, a.atttypmod) "
        "|| CASE WHEN a.attcollation IN (0, y.typcollation) THEN '' ELSE ' collate ' || a.attcollation::regcollation::text END "
        "|| CASE WHEN a.attnotnull THEN ' not null' ELSE '' END "
        "|| CASE a.attidentity WHEN '' THEN '' ELSE ' identity ' || a.attidentity::text END "
        "|| CASE a.attgenerated WHEN '' THEN ' default ' ELSE ' generated ' END || coalesce(pg_get_expr(d.adbin, d.adrelid), '') "
        "AS text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_type y ON y.oid = a.atttypid LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum "
        f"WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p') AND {_NOT_OURS}",
    )


async def _tables(connection: Connection, since: Moment | None, passed: Callable[[int], object]) -> dict[str, Table]:
    cursor = await connection.execute(
        "SELECT n.nspname AS schema, c.relname AS name, format('%%I.%%I', n.nspname, c.relname) AS qualified, array_agg(a.attname::text ORDER BY a.attname) AS columns, "
        "array_agg(t.typname::text ORDER BY a.attname) AS types, array_agg(s.nspname::text ORDER BY a.attname) AS type_schemas "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped "
        "LEFT JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_namespace s ON s.oid = t.typnamespace "
        f"WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND {_NOT_OURS} GROUP BY 1, 2 ORDER BY 1, 2",
        {"own": SCHEMA},
    )
    found = {}
    for row in await cursor.fetchall():
        schema, name = str(row["schema"]), str(row["name"])
        columns: list[Any] = [column for column in list(row["columns"]) if column is not None]  # type: ignore[call-overload]
        kinds = zip(list(row["types"]), list(row["type_schemas"]), strict=True)  # type: ignore[call-overload]
        typed = [(column, *kind) for column, kind in zip(columns, kinds, strict=False)]
        found[str(row["qualified"])] = table = (
            await _hash(connection, schema, name, typed)
            if since is None
            else await _look(connection, schema, name, since)
        )
        passed(table.rows)
    return found


def _row(columns: Iterable[tuple[str, str, str]]) -> sql.Composable:
    """Return a row as bytes: in binary what has one form there, the others as text. Columns are name, type, its schema."""
    binary: list[sql.Composable] = []
    text: list[sql.Composable] = []
    for column, kind, schema in columns:
        name = sql.Identifier(column)
        if kind in _VECTORS:
            binary.append(sql.SQL("{}({})").format(sql.Identifier(schema, f"{kind}_send"), name))
        elif (schema, kind) == ("pg_catalog", "bytea"):
            binary.append(sql.SQL("md5({})").format(name))  # a file may be there, which is not copied for this
        elif schema == "pg_catalog" and kind in _BINARY:
            binary.append(name)
        else:
            text.append(name)
    # Not `column::text`: that would run a cast, if somebody made one.
    binary.append(sql.SQL("ROW({})::text").format(sql.SQL(", ").join(text)))
    return sql.SQL("record_send(ROW({}))").format(sql.SQL(", ").join(binary))


async def _hash(connection: Connection, schema: str, name: str, columns: list[tuple[str, str, str]]) -> Table:
    # Sums of hashes, as rows have no order; two halves of 64 bits each. OFFSET keeps the hash from being computed for
    # each of them, and several workers may still read the table.
    query = sql.SQL(
        "SELECT count(*) AS n, coalesce(sum(substring(h, 1, 64)::bigint), 0) AS a, "
        "coalesce(sum(substring(h, 65, 64)::bigint), 0) AS b "
        "FROM (SELECT ('x' || md5({}))::bit(128) AS h FROM ONLY {} OFFSET 0) AS rows"
    ).format(_row(columns), sql.Identifier(schema, name))
    row = await (await connection.execute(query)).fetchone()
    if row is None:
        raise ValueError("count(*) gave no row")
    text = "\n".join([*(column for column, *_ in columns), str(row["n"]), str(row["a"]), str(row["b"])])
    return Table(int(str(row["n"])), hashlib.sha256(text.encode()).hexdigest(), derived=name in DERIVED)


async def _look(connection: Connection, schema: str, name: str, since: Moment) -> Table:
    query = sql.SQL(
        "SELECT count(*) AS n, count(*) FILTER (WHERE age(xmin) <= (SELECT age({}::xid8::xid))) AS newer, "
        "(SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS database FROM ONLY {}"
    ).format(sql.Literal(str(since.transaction)), sql.Identifier(schema, name))
    row = await (await connection.execute(query)).fetchone()
    if row is None:
        raise ValueError("count(*) gave no row")
    rows, newer = int(str(row["n"])), int(str(row["newer"]))
    content = f"{newer} rows are newer" if newer else ""
    if int(str(row["database"])) != since.database:
        content = "of another database"
    return Table(rows, content, derived=name in DERIVED)


async def _sequences(connection: Connection) -> dict[str, Sequence]:
    cursor = await connection.execute(
        "SELECT n.nspname AS schema, c.relname AS name, format('%%I.%%I', n.nspname, c.relname) AS qualified, "
        "format('%%s by %%s from %%s in %%s..%%s cache %%s cycle %%s', q.seqtypid::regtype, q.seqincrement, q.seqstart, "
        "q.seqmin, q.seqmax, q.seqcache, q.seqcycle) AS definition FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_sequence q ON q.seqrelid = c.oid "
        f"WHERE c.relkind = 'S' AND {_NOT_OURS}",
        {"own": SCHEMA},
    )
    found = {}
    for row in await cursor.fetchall():
        schema, name = str(row["schema"]), str(row["name"])
        query = sql.SQL("SELECT last_value, is_called FROM {}").format(sql.Identifier(schema, name))
        seen = await (await connection.execute(query)).fetchone()
        if seen is not None:
            last, called = int(str(seen["last_value"])), bool(seen["is_called"])
            found[str(row["qualified"])] = Sequence(last, called, str(row["definition"]))
    return found
