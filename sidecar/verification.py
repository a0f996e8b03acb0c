"""Whether what arrived is what was sent: two databases' contents side by side, and what must hold in any database."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from sidecar.contents import Contents, Sequence
from sidecar.database import SCHEMA, Connection
from sidecar.dump_file import Entry

# A definition that PostgreSQL wrote, read and wrote again gains, loses and moves casts, and parentheses around what
# is one thing anyway: `(ARRAY['a'])::text[]` becomes `ARRAY[('a')::text]`. Literals stay as they are.
_LITERAL = r"'(?:[^']|'')*'"
_CAST = re.compile(
    rf"({_LITERAL})|::(?:character varying|timestamp with time zone|double precision|[a-z_]+)(?:\(\d+\))?(?:\[\])?"
)
_ATOM = re.compile(rf"(?<![\w\"])\(({_LITERAL}|ARRAY\[[^()\[\]]*\]|[\w.]+)\)")
_NAMED_KINDS = frozenset({"INDEX", "CONSTRAINT", "FK CONSTRAINT"})
_NAMED = 5  # names of a kind that a sentence gives; it counts the others


@dataclass(frozen=True)
class TableLine:
    """One table on both sides; `equal` is None where it is derived, and so not compared."""

    name: str
    there: int | None
    here: int | None
    equal: bool | None


@dataclass(frozen=True)
class Comparison:
    """What was compared.

    Attributes:
        tables: a line each.
        counts: by kind (indexes, constraints, ...): how many there, here, and how many equal.
        faults: a sentence each; empty where everything is the same.
        notes: differences that are none of the data, such as versions of extensions.

    """

    tables: list[TableLine]
    counts: dict[str, tuple[int, int, int]]
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "tables": [vars(line) for line in self.tables],
            "counts": {
                kind: {"there": there, "here": here, "equal": equal}
                for kind, (there, here, equal) in self.counts.items()
            },
            "faults": self.faults,
            "notes": self.notes,
        }


def compare(there: Contents, here: Contents, *, same_major: bool = True) -> Comparison:
    """Compare what a database held where it came from with what it holds here.

    Between majors of PostgreSQL the texts of views and routines are worded anew, so there only their names count.
    """
    tables = [_line(name, there, here) for name in sorted({*there.tables, *here.tables})]
    faults = [_table_fault(line) for line in tables if line.equal is False]
    counts = {}
    for kind in (
        "columns",
        "indexes",
        "constraints",
        "sequences",
        "views",
        "routines",
        "triggers",
        "revisions",
        "dimensions",
    ):
        by_name = kind in {"views", "routines"} and not same_major
        counts[kind], found = _compare_kind(kind, getattr(there, kind), getattr(here, kind), by_name=by_name)
        faults += found
    missing = sorted(set(there.extensions) - set(here.extensions))
    faults += [f"extensions missing here: {', '.join(missing)}"] if missing else []
    # A sequence belongs to no snapshot, so where it stood exactly is known to nobody; `faults_of` finds what matters.
    notes = [
        f"extension {name} was {version}, and is {here.extensions[name]} here"
        for name, version in sorted(there.extensions.items())
        if here.extensions.get(name, version) != version
    ]
    return Comparison(tables, counts, faults, notes)


def _line(name: str, there: Contents, here: Contents) -> TableLine:
    one, other = there.tables.get(name), here.tables.get(name)
    derived = (one or other) is not None and all(table is None or table.derived for table in (one, other))
    # An older archive may call a table derived that is not, and has its hash all the same.
    same = one is not None and other is not None and (one.rows, one.content) == (other.rows, other.content)
    equal = None if derived else same
    return TableLine(name, one.rows if one else None, other.rows if other else None, equal)


def _table_fault(line: TableLine) -> str:
    if line.there is None:
        return f"table {line.name} is here ({line.here} rows) and was not there"
    if line.here is None:
        return f"table {line.name} was there ({line.there} rows) and is not here"
    if line.there != line.here:
        return f"table {line.name} had {line.there} rows there, and has {line.here} here"
    return f"table {line.name} has {line.here} rows on both sides, and their content differs"


def _compare_kind(
    kind: str, there: Mapping[str, Any], here: Mapping[str, Any], *, by_name: bool
) -> tuple[tuple[int, int, int], list[str]]:
    missing = sorted(set(there) - set(here))
    added = sorted(set(here) - set(there))
    common = sorted(set(there) & set(here))
    other = [] if by_name else [name for name in common if not _same(there[name], here[name])]
    faults = [f"{kind} missing here: {_names(missing)}"] if missing else []
    faults += [f"{kind} here that were not there: {_names(added)}"] if added else []
    faults += [f"{kind} that differ: {_names(other)} ({there[other[0]]} there, {here[other[0]]} here)"] if other else []
    return (len(there), len(here), len(common) - len(other)), faults


def _same(one: object, other: object) -> bool:
    if isinstance(one, Sequence) and isinstance(other, Sequence):
        return one.definition == other.definition
    if isinstance(one, str) and isinstance(other, str):
        return one == other or _plain(one) == _plain(other)
    return one == other


def _plain(definition: str) -> str:
    plain = _CAST.sub(lambda found: found[1] or "", definition)
    while (shorter := _ATOM.sub(r"\1", plain)) != plain:
        plain = shorter
    return plain


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


async def faults_of(connection: Connection, there: Contents | None = None) -> list[str]:
    """Return what must not be in any database, wherever it came from: a sentence each.

    Invalid indexes, constraints that were never checked (but for those that were not where it comes from), sequences
    behind the column that they number. Needs no more rights than the owner's.
    """
    unchecked = [name for name, text in (there.constraints if there else {}).items() if text.endswith(" NOT VALID")]
    return [
        *await _listed(
            connection,
            "SELECT x.indexrelid::regclass::text AS name FROM pg_index x JOIN pg_class c ON c.oid = x.indrelid "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE NOT (x.indisvalid AND x.indisready AND x.indislive) "
            "AND n.nspname !~ '^pg_'",
            "index {} is not valid",
        ),
        *await _listed(
            connection,
            "SELECT name FROM (SELECT format('%%I.%%I.%%I', n.nspname, c.relname, k.conname) AS name FROM pg_constraint k "
            "JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE NOT k.convalidated AND n.nspname !~ '^pg_') AS unchecked WHERE name <> ALL (%s)",
            "constraint {} was never checked against its table (NOT VALID)",
            unchecked,
        ),
        *await _sequences_behind(connection, there),
    ]


async def missing_of(connection: Connection, entries: Iterable[Entry]) -> list[str]:
    """Return which indexes and constraints of a dump's list are not here: a sentence each. It says no more of them than names."""
    cursor = await connection.execute(
        "SELECT 'INDEX ' || n.nspname || ' ' || c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.relkind IN ('i', 'I') UNION ALL SELECT CASE k.contype WHEN 'f' THEN 'FK ' ELSE '' END || 'CONSTRAINT ' || "
        "n.nspname || ' ' || c.relname || ' ' || k.conname FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace"
    )
    # A list has one entry a line, and names are not quoted in it: one may have spaces, and so may the owner behind it.
    here = {str(row["name"]).replace("\n", " ").replace("\r", " ") for row in await cursor.fetchall()}
    faults = []
    for entry in entries:
        words = f"{entry.kind} {entry.rest}".split(" ")
        if entry.kind in _NAMED_KINDS and not any(" ".join(words[:count]) in here for count in range(len(words))):
            faults.append(f"the dump has {' '.join(words[:-1])}, which is not here")
    return faults


async def _listed(connection: Connection, query: str, sentence: str, *values: list[str]) -> list[str]:
    cursor = await connection.execute(query, values or None)
    return [sentence.format(row["name"]) for row in await cursor.fetchall()]


async def _sequences_behind(connection: Connection, there: Contents | None) -> list[str]:
    cursor = await connection.execute(
        "SELECT n.nspname AS schema, s.relname AS sequence, format('%%I.%%I', n.nspname, s.relname) AS qualified, "
        "m.nspname AS table_schema, c.relname AS table_name, a.attname AS column_name, q.seqincrement AS step FROM pg_class s JOIN pg_namespace n ON n.oid = s.relnamespace "
        "JOIN pg_sequence q ON q.seqrelid = s.oid JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = s.oid "
        "AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i') JOIN pg_class c ON c.oid = d.refobjid "
        "JOIN pg_namespace m ON m.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid "
        "WHERE s.relkind = 'S' AND n.nspname <> %s AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)",
        (SCHEMA,),
    )
    faults = []
    for row in await cursor.fetchall():
        query = sql.SQL("SELECT (SELECT {}({}) FROM {}) AS used, last_value, is_called FROM {}").format(
            sql.SQL("max" if int(str(row["step"])) > 0 else "min"),
            sql.Identifier(str(row["column_name"])),
            sql.Identifier(str(row["table_schema"]), str(row["table_name"])),
            sql.Identifier(str(row["schema"]), str(row["sequence"])),
        )
        seen = await (await connection.execute(query)).fetchone()
        if seen is None or seen["used"] is None:
            continue
        used, last, step = int(str(seen["used"])), int(str(seen["last_value"])), int(str(row["step"]))
        if _is_behind(last, used, step, called=bool(seen["is_called"])):
            mend = sql.SQL("SELECT setval(pg_get_serial_sequence({}, {}), {})").format(
                sql.Literal(sql.Identifier(str(row["table_schema"]), str(row["table_name"])).as_string(None)),
                sql.Literal(str(row["column_name"])),
                sql.Literal(used),
            )
            was = there.sequences.get(str(row["qualified"])) if there else None
            at_source = ""
            if there is None:
                at_source = f" (if it is so at the source too, run there: {mend.as_string(None)})"
            elif was is not None and _is_behind(was.last_value, used, step, called=was.is_called):
                at_source = f" (it was so at the source already; run there: {mend.as_string(None)})"
            faults.append(
                f"sequence {row['schema']}.{row['sequence']} stands at {last}, and "
                f"{row['table_name']}.{row['column_name']} has {used} already: the next row would collide{at_source}"
            )
    return faults


def _is_behind(last: int, used: int, step: int, *, called: bool) -> bool:
    """Tell whether a sequence that stands at `last` would give out what is used already, `used` being the furthest of it."""
    return (last < used if step > 0 else last > used) or (last == used and not called)
