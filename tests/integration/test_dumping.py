"""Dumps of a real database: what it held, the archive of it, and what is left when it cannot be made."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from harness import reachable_directory, wait_for
from postgres_server import WITHIN, Server, run, running_server
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from sidecar import archive, contents, dump_file, dumping, processes, verification
from sidecar.archive import DUMP, Archive
from sidecar.contents import Contents, Sequence
from sidecar.dumping import Address, Compression
from sidecar.errors import RefusedError, VerificationError
from sidecar.operations import Kind, Operation
from sidecar.programs import ProgramError

SCRIPT = Path(__file__).parents[1] / "fixtures/hindsight_like.sql"
OURS = """
CREATE SCHEMA hindsight_sidecar;
CREATE TABLE hindsight_sidecar.facts (id serial PRIMARY KEY, name text CHECK (name <> ''));
CREATE INDEX ours ON hindsight_sidecar.facts (name);
CREATE VIEW hindsight_sidecar.named AS SELECT name FROM hindsight_sidecar.facts;
CREATE FUNCTION hindsight_sidecar.act() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER act BEFORE INSERT ON hindsight_sidecar.facts FOR EACH ROW EXECUTE FUNCTION hindsight_sidecar.act();
"""
WEIRD = '"We ird.Na""me"'
WEIRD_TABLE = f'{WEIRD}."Ta""b.le %s"'
BIGINT = f"bigint by 1 from 1 in 1..{2**63 - 1} cache 1 cycle f"
INTEGER = f"integer by 1 from 1 in 1..{2**31 - 1} cache 1 cycle f"
VERSIONS = {"sidecar": "0.1.0", "hindsight-api": "1.1.0"}
MODEL = {"id": "BAAI/bge-small-en-v1.5", "dimension": 384}
LOOK = 0.01  # seconds between looks at another process
T = TypeVar("T")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return a server whose database `hindsight` nobody changes."""
    with running_server() as server:
        server.execute(SCRIPT.read_text(encoding="utf-8"), user="hindsight")
        server.execute(OURS)
        yield server


@pytest.fixture
def dumps() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory / "dumps"


@pytest.fixture
def operation() -> Operation:
    return Operation(Kind.DUMP)


async def until(condition: Callable[[], T]) -> T:
    """Return the first true value of a condition; the deadline is `run`'s."""
    while not (value := condition()):  # noqa: ASYNC110 - of other processes, which have no event
        await asyncio.sleep(LOOK)
    return value


def look(server: Server, *statements: Any, database: str = "hindsight", user: str = "postgres") -> Contents:
    """Return what a database would hold after some statements, which are rolled back."""

    async def work() -> Contents:
        connection = await server.address(database, user).connect()
        async with connection, connection.transaction(force_rollback=True):
            for statement in statements:
                await connection.execute(statement)
            return await contents.read(connection)

    return run(work())


def differences(one: Contents, other: Contents) -> list[str]:
    """Return what is not the same, as `part name`."""
    pairs = [(part.name, getattr(one, part.name), getattr(other, part.name)) for part in fields(Contents)]
    return [
        f"{part} {name}"
        for part, left, right in pairs
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


@pytest.fixture(scope="module")
def before(server: Server) -> Contents:
    """Return what the database holds that nobody changes."""
    return look(server)


# What is in it -------------------------------------------------------------------------------------------------


def test_every_kind_of_thing_is_found(before: Contents) -> None:
    assert {name: (table.rows, table.derived) for name, table in before.tables.items()} == {
        "public.alembic_version": (1, False),
        "public.audit_log": (7, False),
        "public.bank_stats_cache": (1, True),
        "public.banks": (3, False),
        "public.documents": (5, False),
        "public.graph_maintenance_queue": (0, False),
        "public.memory_links": (199, False),
        "public.memory_units": (200, False),
        "public.webhooks": (0, False),
        "tenant_two.alembic_version": (1, False),
        "tenant_two.memory_units": (66, False),
        WEIRD_TABLE: (2, False),
        f"{WEIRD}.nothing": (0, False),
    }
    assert before.columns["public.memory_units.embedding"] == "public.vector(384) default "
    assert before.columns["public.audit_log.id"] == "bigint not null identity a default "
    assert before.columns[f'{WEIRD_TABLE}."Col ""umn"'] == "text default "
    assert before.indexes["tenant_two.idx_mu_emb_world_second"] == (
        "CREATE INDEX idx_mu_emb_world_second ON tenant_two.memory_units USING hnsw "
        "(embedding public.vector_cosine_ops) WHERE (bank_id = 'second'::text)"
    )
    assert {"public.idx_mu_emb_world_first", "public.idx_units_of_banks", f'{WEIRD}."In dex"'} < set(before.indexes)
    assert before.constraints["public.memory_units.memory_units_document_fkey"] == (
        "FOREIGN KEY (document_id, bank_id) REFERENCES public.documents(id, bank_id) ON DELETE CASCADE"
    )
    assert before.sequences == {
        "public.audit_log_id_seq": Sequence(7, is_called=True, definition=BIGINT),
        "public.graph_maintenance_queue_id_seq": Sequence(1, is_called=False, definition=BIGINT),
        "public.tickets": Sequence(
            100, is_called=False, definition=f"bigint by -5 from 100 in {-(2**63)}..100 cache 1 cycle f"
        ),
        "public.webhooks_id_seq": Sequence(1, is_called=False, definition=INTEGER),
        f'{WEIRD}."Ta""b.le %s_%(own)s_seq"': Sequence(2, is_called=True, definition=INTEGER),
    }
    assert {name: text[0] for name, text in before.views.items()} == {
        "public.worlds": "v",
        "public.units_of_banks": "m",
        f"""{WEIRD}."Vi'ew\"""": "v",
    }
    assert set(before.routines) == {
        "public.forget()",
        "public.note_change()",
        "public.shout(word text, times integer)",
        f"""{WEIRD}."fun'c"("a b" public.vector)""",
    }
    assert set(before.triggers) == {"public.banks.banks_keep_their_date"}
    assert set(before.extensions) == {"btree_gin", "pg_trgm", "plpgsql", "vector"}
    assert before.dimensions == {"public": 384, "tenant_two": 384}


def test_the_sums_count_every_tenant_and_nothing_that_is_derived(before: Contents) -> None:
    assert before.memories == 266
    assert before.rows == 484


def test_what_is_ours_or_an_extensions_is_not_in_it(before: Contents, server: Server) -> None:
    told = json.dumps(before.to_json())
    assert "hindsight_sidecar" not in told
    assert "cosine_distance" not in told
    # pg_buffercache has a view, and all three have functions.
    added = [f"CREATE EXTENSION {name} SCHEMA public" for name in ("pg_buffercache", "hstore", "citext")]
    assert differences(before, look(server, *added)) == [
        "extensions citext",
        "extensions hstore",
        "extensions pg_buffercache",
    ]


def test_it_is_told_as_json_and_read_back(before: Contents) -> None:
    told = json.loads(json.dumps(before.to_json()))
    assert Contents.from_json(told) == before
    assert list(told["tables"]) == sorted(before.tables)
    assert told["sequences"]["public.webhooks_id_seq"] == {"last_value": 1, "is_called": False, "definition": INTEGER}


def test_its_owner_sees_what_the_superuser_sees(before: Contents, server: Server) -> None:
    assert look(server, user="hindsight") == before


def test_an_empty_database_holds_nothing(server: Server) -> None:
    assert look(server, database=server.make_database()) == Contents(extensions={"plpgsql": "1.0"})


@pytest.mark.parametrize(
    "statement",
    ["CREATE TEMPORARY TABLE memory_units (embedding vector(3))",
     "CREATE SCHEMA x CREATE TABLE memory_units (bank_id text, embedding vector(3)) PARTITION BY LIST (bank_id)"],
    ids=["temporary", "partitioned"],
)  # fmt: skip
def test_another_table_of_the_same_name_does_not_matter(statement: str, server: Server) -> None:
    assert look(server, statement).memories == 266


# What changes it, and what does not ----------------------------------------------------------------------------

COMPONENT = (
    "(SELECT array_agg(v + CASE WHEN i = 200 THEN 1e-6 ELSE 0 END ORDER BY i)::vector(384) "
    "FROM unnest(embedding::real[]) WITH ORDINALITY AS of (v, i))"
)


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(["UPDATE memory_units SET text = text", "CLUSTER banks USING banks_pkey"], id="rewritten"),
        pytest.param(
            ["CREATE TEMPORARY TABLE kept AS SELECT * FROM memory_links ORDER BY weight", "TRUNCATE memory_links",
             "INSERT INTO memory_links SELECT * FROM kept"], id="other order",
        ),
        pytest.param(["ALTER TABLE banks ADD gone integer DEFAULT 7", "ALTER TABLE banks DROP gone"], id="dropped column"),
        pytest.param(
            ["ALTER TABLE memory_links ADD other text", "UPDATE memory_links SET other = link_type",
             "ALTER TABLE memory_links ALTER other SET NOT NULL", "ALTER TABLE memory_links DROP link_type",
             "ALTER TABLE memory_links RENAME other TO link_type",
             "ALTER TABLE memory_links ADD CONSTRAINT memory_links_type_check CHECK (link_type <> '')"],
            id="other order of columns",
        ),
        pytest.param(["REINDEX TABLE memory_units", "REFRESH MATERIALIZED VIEW units_of_banks"], id="made anew"),
        pytest.param(
            [r"""UPDATE banks SET disposition = '{"nested": {"list":[1,2.50,null]},  "empathy": 3}'"""], id="equal JSON"
        ),
    ],
)  # fmt: skip
def test_the_same_data_in_another_shape_is_equal(statements: list[str], before: Contents, server: Server) -> None:
    assert differences(before, look(server, *statements)) == []


def changes(*pairs: tuple[str, str]) -> Any:
    return pytest.mark.parametrize(
        ("statement", "expected"), [pytest.param(*pair, id=f"{number}") for number, pair in enumerate(pairs)]
    )


@changes(
    ("INSERT INTO banks (bank_id) VALUES ('fourth')", "tables public.banks"),
    ("DELETE FROM audit_log WHERE id = 7", "tables public.audit_log"),
    ("INSERT INTO memory_links SELECT * FROM memory_links LIMIT 1", "tables public.memory_links"),
    ("TRUNCATE memory_links", "tables public.memory_links"),
    ("INSERT INTO bank_stats_cache VALUES ('x', '{}')", "tables public.bank_stats_cache"),
    ("UPDATE audit_log SET what = CASE id WHEN 1 THEN '2' WHEN 2 THEN '1' ELSE what END", "tables public.audit_log"),
    ("UPDATE memory_links SET from_unit_id = to_unit_id, to_unit_id = from_unit_id", "tables public.memory_links"),
    ("UPDATE alembic_version SET version_num = 'x'", "tables public.alembic_version, revisions public"),
)
def test_a_change_of_rows_changes_its_table(statement: str, expected: str, before: Contents, server: Server) -> None:
    assert ", ".join(differences(before, look(server, statement))) == expected


@pytest.mark.parametrize(
    ("unit", "change"),
    [
        (76, f"embedding = {COMPONENT}"),
        (76, "embedding = NULL"),
        (76, "text = text || ' '"),
        (76, "context = NULL"),
        (77, "context = ''"),  # it was null
        (76, "document_id = NULL"),
        (76, "tags = ARRAY['a,b \"c\"']"),
        (76, "tags = '{}'"),
        (76, "event_date = event_date + interval '1 microsecond'"),
        (76, "weight = weight + 1e-15"),
        (76, "confidence = confidence + 1e-8::real"),
        (76, "metadata = '{\"a\": null}'"),
        (76, "metadata = NULL"),
    ],
)
def test_a_change_of_one_value_in_one_memory_is_seen(unit: int, change: str, before: Contents, server: Server) -> None:
    statement = f"UPDATE memory_units SET {change} WHERE id = md5('unit {unit}')::uuid"
    assert differences(before, look(server, statement)) == ["tables public.memory_units"]


@changes(
    ("UPDATE documents SET raw = set_bit(raw, 77, 1 - get_bit(raw, 77)) WHERE id = 'doc 3'", "public.documents"),
    ("UPDATE documents SET raw = '' WHERE raw IS NULL", "public.documents"),
    ("UPDATE documents SET original_text = '' WHERE original_text IS NULL", "public.documents"),
    ("UPDATE audit_log SET took = took + interval '1 microsecond' WHERE id = 1", "public.audit_log"),
    ("UPDATE banks SET disposition = jsonb_set(disposition, '{nested,list,2}', '0')", "public.banks"),
    ("UPDATE banks SET disposition = jsonb_set(disposition, '{nested,list,1}', '2.5')", "public.banks"),
    ("UPDATE tenant_two.memory_units SET text = lower(text)", "tenant_two.memory_units"),
)
def test_a_change_of_one_value_elsewhere_is_seen_too(
    statement: str, expected: str, before: Contents, server: Server
) -> None:
    assert differences(before, look(server, statement)) == [f"tables {expected}"]


TYPE_OF_EMBEDDING = """
DROP INDEX tenant_two.idx_mu_emb_world_second;
ALTER TABLE tenant_two.memory_units ALTER embedding TYPE vector
"""
OTHER_WEIGHT = """
ALTER TABLE memory_links DROP CONSTRAINT memory_links_weight_check;
ALTER TABLE memory_links ADD CONSTRAINT memory_links_weight_check
"""
OTHER_DATE = """
DROP INDEX idx_memory_units_bank_date;
CREATE INDEX idx_memory_units_bank_date ON memory_units (bank_id, event_date)
"""
ALL_OF_ALEMBIC = (
    "tables public.alembic_version, columns public.alembic_version.version_num, indexes public.alembic_version_pkey, "
    "constraints public.alembic_version.alembic_version_pkey, revisions public"
)
OTHER_TRIGGER = """
CREATE OR REPLACE TRIGGER banks_keep_their_date AFTER UPDATE ON banks FOR EACH ROW EXECUTE FUNCTION note_change()
"""


@changes(
    ("ALTER SEQUENCE audit_log_id_seq RESTART 8", "sequences public.audit_log_id_seq"),
    ("ALTER SEQUENCE tickets INCREMENT BY -1", "sequences public.tickets"),
    ("ALTER SEQUENCE tickets RESTART 95", "sequences public.tickets"),
    ("DROP SEQUENCE tickets", "sequences public.tickets"),
    ("DROP INDEX idx_mu_emb_world_second", "indexes public.idx_mu_emb_world_second"),
    ("ALTER INDEX idx_mu_emb_world_second SET (m = 17)", "indexes public.idx_mu_emb_world_second"),
    ("ALTER INDEX idx_memory_units_text RENAME TO x", "indexes public.idx_memory_units_text, indexes public.x"),
    (OTHER_DATE, "indexes public.idx_memory_units_bank_date"),
    ("CREATE INDEX more ON banks (background)", "indexes public.more"),
    (
        "ALTER TABLE memory_units DROP CONSTRAINT memory_units_document_fkey",
        "constraints public.memory_units.memory_units_document_fkey",
    ),
    (f"{OTHER_WEIGHT} CHECK (weight < 2)", "constraints public.memory_links.memory_links_weight_check"),
    (
        f"{OTHER_WEIGHT} CHECK (weight BETWEEN 0 AND 1) NOT VALID",
        "constraints public.memory_links.memory_links_weight_check",
    ),
    (
        "ALTER TABLE banks DROP CONSTRAINT banks_internal_id_key",
        "indexes public.banks_internal_id_key, constraints public.banks.banks_internal_id_key",
    ),
    ("ALTER TABLE banks ADD more text", "tables public.banks, columns public.banks.more"),
    (
        "ALTER TABLE webhooks RENAME url TO link",
        "tables public.webhooks, columns public.webhooks.link, columns public.webhooks.url",
    ),
    ("ALTER TABLE banks ALTER background DROP NOT NULL", "columns public.banks.background"),
    ("ALTER TABLE banks ALTER background SET DEFAULT 'x'", "columns public.banks.background"),
    ('ALTER TABLE webhooks ALTER url TYPE text COLLATE "C"', "columns public.webhooks.url"),
    ("ALTER TABLE webhooks ALTER url TYPE varchar(99)", "columns public.webhooks.url"),
    ("ALTER TABLE audit_log ALTER id SET GENERATED BY DEFAULT", "columns public.audit_log.id"),
    ("ALTER TABLE memory_units ALTER search_vector DROP EXPRESSION", "columns public.memory_units.search_vector"),
    (
        TYPE_OF_EMBEDDING,
        "columns tenant_two.memory_units.embedding, indexes tenant_two.idx_mu_emb_world_second, dimensions tenant_two",
    ),
    ("DROP VIEW worlds", "views public.worlds"),
    ("CREATE OR REPLACE VIEW worlds AS SELECT id, text FROM memory_units", "views public.worlds"),
    ("DROP MATERIALIZED VIEW units_of_banks", "indexes public.idx_units_of_banks, views public.units_of_banks"),
    ("DROP FUNCTION shout", "routines public.shout(word text, times integer)"),
    ("ALTER FUNCTION shout STRICT", "routines public.shout(word text, times integer)"),
    ("CREATE OR REPLACE PROCEDURE forget() LANGUAGE sql AS ''", "routines public.forget()"),
    ("DROP TRIGGER banks_keep_their_date ON banks", "triggers public.banks.banks_keep_their_date"),
    ("ALTER TABLE banks DISABLE TRIGGER banks_keep_their_date", "triggers public.banks.banks_keep_their_date"),
    (OTHER_TRIGGER, "triggers public.banks.banks_keep_their_date"),
    ("DROP EXTENSION pg_trgm CASCADE", "indexes public.idx_memory_units_text, extensions pg_trgm"),
    (
        "DROP TABLE hindsight_sidecar.facts CASCADE; DROP TABLE alembic_version",
        ALL_OF_ALEMBIC,
    ),
    ("CREATE SCHEMA empty", ""),
)
def test_each_change_of_a_definition_changes_its_part_and_no_other(
    statement: str, expected: str, before: Contents, server: Server
) -> None:
    assert ", ".join(differences(before, look(server, statement))) == expected


def test_two_names_with_dots_do_not_hide_one_another(server: Server) -> None:
    after = look(
        server,
        'CREATE SCHEMA a CREATE TABLE "b.c" (x integer)',
        'CREATE SCHEMA "a.b" CREATE TABLE c (x integer)',
        'INSERT INTO a."b.c" VALUES (1)',
        'INSERT INTO "a.b".c VALUES (1), (2)',
    )
    assert sorted(table.rows for name, table in after.tables.items() if name.startswith(("a.", '"a.b".'))) == [1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DateStyle", "SQL, DMY"),
        ("TimeZone", "Asia/Kathmandu"),
        ("IntervalStyle", "iso_8601"),
        ("extra_float_digits", "-15"),
        ("bytea_output", "escape"),
        ("search_path", "tenant_two, public"),
        ("row_security", "on"),
        ("default_transaction_read_only", "on"),
        ("client_encoding", "LATIN1"),
        ("quote_all_identifiers", "on"),
        ("standard_conforming_strings", "off"),
    ],
)
def test_settings_of_the_role_and_the_database_do_not_matter(
    name: str, value: str, before: Contents, server: Server
) -> None:
    setting = sql.SQL("SET {} TO {}").format(sql.Identifier(name), sql.Literal(value))
    if name == "search_path":
        setting = sql.SQL("SET search_path TO tenant_two, public")
    server.execute(
        # A constant with a backslash is written in two ways.
        r"CREATE VIEW escaped AS SELECT 'back\slash' AS text",
        sql.SQL("ALTER ROLE hindsight IN DATABASE hindsight ") + setting,
    )
    try:
        after = look(server, user="hindsight")
    finally:
        server.execute("ALTER ROLE hindsight IN DATABASE hindsight RESET ALL", "DROP VIEW escaped")
    [escaped] = [after.views.pop("public.escaped")]
    assert escaped == r"v  SELECT 'back\slash'::text AS text;"
    assert differences(before, after) == []


# The archive ---------------------------------------------------------------------------------------------------


async def dump(
    server: Server, dumps: Path, operation: Operation, database: str = "hindsight", **options: Any
) -> Archive:
    address = options.pop("address", server.address(database))
    return await dumping.dump(address, server.programs, dumps, operation, versions=VERSIONS, model=MODEL, **options)


def entries(server: Server, file: Path) -> str:
    return server.run("pg_restore", "--list", str(file))


def restored(server: Server, file: Path) -> str:
    """Restore a dump as the sidecar would, into a new database; return its name."""
    database = server.make_database()
    server.execute(
        *(f"CREATE EXTENSION {name} SCHEMA public" for name in ("vector", "pg_trgm", "btree_gin")), database=database
    )
    chosen = [line for line in entries(server, file).splitlines() if " EXTENSION " not in line]
    (file.parent / "list").write_text("\n".join(chosen))
    server.run(
        "pg_restore",
        f"--use-list={file.parent / 'list'}",
        "--exit-on-error",
        "--no-owner",
        "--no-privileges",
        "--no-comments",
        f"--dbname={database}",
        str(file),
    )
    return database


def pg_dumps() -> list[int]:
    """Return the pids of our children that are pg_dump, dead ones too."""
    found = []
    for process in processes.all_processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            if process.name == "pg_dump" and int(stat[stat.rindex(")") + 2 :].split()[1]) == os.getpid():
                found.append(process.pid)
    return found


def nothing_left(dumps: Path) -> bool:
    return list(dumps.iterdir()) == []


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o7777 for path in [directory, *directory.iterdir()]}


def test_an_archive_is_whole_and_says_what_the_database_held(
    server: Server, dumps: Path, operation: Operation, before: Contents
) -> None:
    made = run(dump(server, dumps, operation))
    assert made.directory == dumps / made.manifest.id
    assert archive.check_id(made.manifest.id)
    assert dumps.stat().st_mode & 0o7777 == 0o700
    assert modes(made.directory) == {
        made.manifest.id: 0o700,
        "manifest.json": 0o600,
        "memory.dump": 0o600,
        "archive.sha256": 0o600,
    }
    assert list(dumps.iterdir()) == [made.directory]
    manifest = made.manifest
    assert manifest.contents == before
    assert manifest.versions == {
        "sidecar": "0.1.0",
        "hindsight-api": "1.1.0",
        "postgres": server.binaries.version,
        "vector": before.extensions["vector"],
    }
    assert (manifest.model, manifest.compression) == (MODEL, "gzip")
    assert abs((manifest.made - operation.started).total_seconds()) < WITHIN
    assert manifest.size == (made.directory / DUMP).stat().st_size
    assert manifest.sha256 == archive.hash_file(made.directory / DUMP)
    assert made.checksum == made.hash()
    opened = Archive.open(made.directory)
    assert opened.manifest.contents == before
    assert opened.checksum == made.checksum
    assert (operation.phase, operation.total, operation.unit) == ("hash", 2 * manifest.size, "bytes")
    assert operation.done == manifest.size + made.size, "it tells how far it is"


def test_its_dump_has_everything_but_what_is_ours(server: Server, dumps: Path, operation: Operation) -> None:
    made = run(dump(server, dumps, operation))
    listed = entries(server, made.directory / DUMP)
    assert ";     Compression: gzip" in listed
    assert ";     Format: CUSTOM" in listed
    for name in (
        "TABLE DATA public memory_units",
        "TABLE DATA tenant_two memory_units",
        "INDEX public idx_mu_emb_world_first",
        "FK CONSTRAINT public memory_units memory_units_document_fkey",
        "SEQUENCE SET public audit_log_id_seq",
        "TRIGGER public banks banks_keep_their_date",
        "EXTENSION - vector",
        'TABLE We ird.Na"me ',
    ):
        assert f" {name}" in listed, listed
    assert "hindsight_sidecar" not in listed


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_what_is_restored_from_it_is_what_was_there(
    compression: Any, server: Server, dumps: Path, operation: Operation, before: Contents
) -> None:
    made = run(dump(server, dumps, operation, compression=compression))
    assert made.manifest.compression == compression
    assert f";     Compression: {compression}" in entries(server, made.directory / DUMP)
    database = restored(server, made.directory / DUMP)
    assert differences(before, look(server, database=database)) == []
    # And once more from there, as the restored database's first own dump.
    again = run(dump(server, dumps, operation, database, compression=compression))
    assert differences(before, again.manifest.contents) == []


def test_a_database_with_a_name_that_needs_quoting(server: Server, dumps: Path, operation: Operation) -> None:
    database = server.make_database(name="We ird.Na\"me's \\ %s")
    server.execute("CREATE TABLE kept AS SELECT 1 AS one", database=database, user="hindsight")
    made = run(dump(server, dumps, operation, database))
    assert made.manifest.contents.tables["public.kept"].rows == 1
    assert made.manifest.versions["vector"] is None
    assert " TABLE DATA public kept " in entries(server, made.directory / DUMP)


def test_an_address_is_told_without_its_password() -> None:
    address = Address({"host": "/run/a b", "dbname": "it's", "user": "x"}, {"PGPASSWORD": "secret"})
    assert conninfo_to_dict(address.conninfo) == address.parameters


def test_compression_that_this_pg_dump_cannot_do_is_told_in_a_sentence(
    server: Server, dumps: Path, operation: Operation
) -> None:
    with pytest.raises(ProgramError) as error:
        run(dump(server, dumps, operation, compression="zstd"))
    assert str(error.value) == (
        "pg_dump ended with exit code 1: pg_dump: error: invalid compression specification: "
        "this build does not support compression with ZSTD"
    )
    assert nothing_left(dumps)


# One snapshot --------------------------------------------------------------------------------------------------


class Writer:
    """Changes rows without a pause, from a thread."""

    def __init__(self, server: Server, database: str) -> None:
        self.rounds = 0
        self._server, self._database = server, database
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._server.connect(self._database) as connection:
            while not self._end.is_set():
                connection.execute(
                    "INSERT INTO audit_log (what) VALUES ('more');"
                    "INSERT INTO memory_units (bank_id, text, embedding, event_date) "
                    "SELECT bank_id, 'More', embedding, now() FROM memory_units LIMIT 1;"
                    "UPDATE banks SET background = background || '.';"
                    "DELETE FROM memory_links WHERE ctid IN (SELECT ctid FROM memory_links LIMIT 1)"
                )
                self.rounds += 1

    @contextlib.contextmanager
    def writing(self) -> Iterator["Writer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._end.set()
            self._thread.join()

    def wait_for_more(self, count: int) -> None:
        target = self.rounds + count
        wait_for(lambda: self.rounds >= target, WITHIN, f"{count} more rounds", LOOK)


def test_a_writer_does_not_come_between_the_dump_and_what_is_told_of_it(
    server: Server, dumps: Path, operation: Operation
) -> None:
    database = server.make_database("hindsight")
    with Writer(server, database).writing() as writer:
        writer.wait_for_more(3)
        began = writer.rounds
        made = run(dump(server, dumps, operation, database))
        assert writer.rounds > began + 3
    found = made.manifest.contents
    assert found.tables["public.audit_log"].rows >= 10
    again = restored(server, made.directory / DUMP)
    # A sequence belongs to no snapshot: the program and we read it at two times.
    assert set(differences(found, look(server, database=again))) <= {"sequences public.audit_log_id_seq"}
    [(used, last)] = server.rows("SELECT (SELECT max(id) FROM audit_log), last_value FROM audit_log_id_seq", again)
    assert used == found.tables["public.audit_log"].rows
    assert last >= used
    server.execute("INSERT INTO audit_log (what) VALUES ('the next one')", database=again)


def test_a_sequence_that_moves_meanwhile_is_no_fault_of_what_is_restored(
    server: Server, dumps: Path, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = server.make_database("hindsight")
    read = contents.read

    async def read_late(connection: Any) -> Contents:
        await until(lambda: list(dumps.glob(f".partial-*/{DUMP}")) and not pg_dumps())
        server.execute("INSERT INTO audit_log (what) VALUES ('one more')", database=database)
        return await read(connection)

    monkeypatch.setattr("sidecar.contents.read", read_late)
    made = run(dump(server, dumps, operation, database))
    monkeypatch.undo()
    again = look(server, database=restored(server, made.directory / DUMP))
    assert verification.compare(made.manifest.contents, again).faults == []


# When it cannot be made ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(server: Server) -> str:
    """Return a database whose dump takes a second: 32 MB that hardly compress."""
    database = server.make_database("hindsight")
    server.execute(
        "CREATE TABLE large (text text STORAGE plain)",
        "INSERT INTO large SELECT string_agg(md5(i::text), '') FROM generate_series(1, 32000) AS i GROUP BY i / 64",
        "INSERT INTO large SELECT text FROM large, generate_series(1, 31)",
        database=database,
        user="hindsight",
    )
    return database


def written(dumps: Path) -> bool:
    """Whether pg_dump has written more than its list of contents."""
    return any(file.stat().st_size > 2**20 for file in dumps.glob(f".partial-*/{DUMP}"))


def sessions(server: Server, database: str) -> int:
    query = sql.SQL("SELECT count(*) FROM pg_stat_activity WHERE datname = {}").format(sql.Literal(database))
    [(count,)] = server.rows(query, "postgres")
    return int(count)


def test_pg_dump_killed_while_it_writes_is_an_error_and_leaves_nothing(
    large: str, server: Server, dumps: Path, operation: Operation
) -> None:
    async def work() -> None:
        task = asyncio.create_task(dump(server, dumps, operation, large))
        await until(lambda: written(dumps))
        [pid] = pg_dumps()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProgramError, match="pg_dump was ended by signal 9"):
            await task

    run(work())
    assert nothing_left(dumps)
    assert pg_dumps() == []
    wait_for(lambda: sessions(server, large) == 0, WITHIN, "no session left")
    run(dump(server, dumps, operation, large))  # and the next one is made


def test_a_cancelled_one_leaves_nothing(large: str, server: Server, dumps: Path, operation: Operation) -> None:
    async def work() -> None:
        task = asyncio.create_task(dump(server, dumps, operation, large))
        await until(lambda: written(dumps))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nothing_left(dumps)
        assert pg_dumps() == []

    run(work())
    wait_for(lambda: sessions(server, large) == 0, WITHIN, "no session left")


def test_one_that_waits_for_a_lock_is_cancelled_at_once(
    server: Server, dumps: Path, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = server.make_database("hindsight")

    def waiting() -> bool:
        query = sql.SQL("SELECT application_name FROM pg_stat_activity WHERE datname = {} AND wait_event_type = 'Lock'")
        seen = server.rows(query.format(sql.Literal(database)), "postgres")
        return sorted(seen) == [("",), ("pg_dump",)]

    async def work() -> None:
        task = asyncio.create_task(dump(server, dumps, operation, database))
        await until(waiting)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nothing_left(dumps)
        assert pg_dumps() == []

    with server.connect(database) as locker, locker.transaction():

        def lock_meanwhile(_: Path) -> int:
            locker.execute("LOCK TABLE memory_units")
            return 2**40

        monkeypatch.setattr("sidecar.volume.free_bytes", lock_meanwhile)
        run(work())


def test_one_that_is_cancelled_while_it_is_hashed_leaves_nothing(
    server: Server, dumps: Path, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        going_on = threading.Event()
        monkeypatch.setattr("sidecar.archive.hash_file", lambda *_: str(going_on.wait(WITHIN)))
        task = asyncio.create_task(dump(server, dumps, operation))
        try:
            await until(lambda: operation.phase == "hash")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert nothing_left(dumps)
        finally:
            going_on.set()

    run(work())


def test_a_table_that_the_role_may_not_read_is_an_error_and_leaves_nothing(
    server: Server, dumps: Path, operation: Operation
) -> None:
    database = server.make_database("hindsight")
    server.execute("CREATE TABLE theirs (x integer)", database=database)
    with pytest.raises(
        (ProgramError, psycopg.errors.InsufficientPrivilege), match="permission denied for table theirs"
    ):
        run(dump(server, dumps, operation, database))
    assert nothing_left(dumps)
    assert pg_dumps() == []


def test_a_server_that_is_not_there_is_an_error_and_leaves_nothing(
    server: Server, dumps: Path, operation: Operation
) -> None:
    with pytest.raises(psycopg.OperationalError):
        run(dump(server, dumps, operation, address=dumping.local(dumps.parent, "hindsight", "hindsight")))
    assert nothing_left(dumps)


@pytest.mark.parametrize(
    ("whose", "name"),
    [
        ("ours", "statement_timeout"),
        ("ours", "idle_in_transaction_session_timeout"),
        ("ours", "transaction_timeout"),
        ("theirs", "statement_timeout"),
        ("theirs", "idle_in_transaction_session_timeout"),
        ("theirs", "transaction_timeout"),
    ],
)
def test_timeouts_of_the_database_do_not_end_it(
    whose: str, name: str, server: Server, dumps: Path, operation: Operation
) -> None:
    database = server.make_database("hindsight")
    server.execute(f"ALTER DATABASE {database} SET {name} TO '20ms'")
    theirs = Address({"host": str(server.directory), "dbname": database, "user": "hindsight"})
    address = theirs if whose == "theirs" else server.address(database)
    assert run(dump(server, dumps, operation, address=address)).manifest.contents.memories == 266


@contextlib.contextmanager
def small_volume(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(path)], check=True)


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small volume")


@only_root
def test_too_little_space_is_refused_before_anything_is_written(
    server: Server, dumps: Path, operation: Operation
) -> None:
    with small_volume(dumps, "32m"):
        with pytest.raises(RefusedError) as refused:
            run(dump(server, dumps, operation))
        assert str(refused.value).startswith(f"{dumps} has 32 MiB free, and a dump of this database may take ")
        assert str(refused.value).endswith("; delete old dumps, or grow the volume")
        assert nothing_left(dumps)
    assert operation.phase == "beginning"


@only_root
def test_space_that_runs_out_is_an_error_and_leaves_nothing(
    large: str, server: Server, dumps: Path, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.volume.free_bytes", lambda _: 2**40)
    with small_volume(dumps, "4m"):
        with pytest.raises(ProgramError, match=r"pg_dump ended with exit code 1: .*No space left on device"):
            run(dump(server, dumps, operation, large))
        assert nothing_left(dumps)


# When it is read again -----------------------------------------------------------------------------------------


class Damaging(Operation):
    """Damages what was written once that is to be verified, as a disk would."""

    damage: Callable[[bytearray], object]
    directory: Path

    def enter(self, phase: str, total: int | None = None, unit: str = "") -> None:
        super().enter(phase, total, unit)
        if phase == "verify":
            [partial] = self.directory.glob(f"{dumping.PARTIAL}*")
            content = bytearray((partial / DUMP).read_bytes())
            self.damage(content)
            (partial / DUMP).write_bytes(content)


def test_a_scheduled_one_is_verified_and_says_so(server: Server, dumps: Path, operation: Operation) -> None:
    made = run(dump(server, dumps, operation, scheduled=True))
    assert operation.phase == "verify"
    assert made.manifest.scheduled
    assert dumping.kept(dumps) == [made]
    assert not run(dump(server, dumps, operation)).manifest.scheduled


@pytest.mark.parametrize("place", [0, 10, 2000, -1])
def test_a_scheduled_one_that_is_damaged_on_the_disk_is_removed(place: int, server: Server, dumps: Path) -> None:
    def flip(content: bytearray) -> None:
        content[place] ^= 1

    damaging = Damaging(Kind.DUMP)
    damaging.damage, damaging.directory = flip, dumps
    with pytest.raises(
        VerificationError, match=r"so it was removed \(memory.dump has sha256 .*\); look at the volume's disk"
    ):
        run(dump(server, dumps, damaging, scheduled=True))
    assert list(dumps.iterdir()) == []


def test_one_that_is_cut_on_the_disk_is_removed(server: Server, dumps: Path) -> None:
    damaging = Damaging(Kind.DUMP)
    damaging.damage, damaging.directory = lambda content: content.pop(), dumps
    with pytest.raises(VerificationError, match="its manifest says"):
        run(dump(server, dumps, damaging, scheduled=True))
    assert list(dumps.iterdir()) == []


def test_what_pg_restore_cannot_read_is_found_even_where_its_bytes_are_as_the_manifest_says(
    server: Server, dumps: Path, operation: Operation
) -> None:
    made = run(dump(server, dumps, operation))
    file = made.directory / DUMP
    half = file.read_bytes()[: made.manifest.size // 2]
    file.write_bytes(half)
    archive.finish(made.directory, replace(made.manifest, size=len(half), sha256=sha256(half).hexdigest()))
    with pytest.raises(VerificationError, match="the dump is cut short or damaged"):
        run(dumping.verify(made.directory, server.programs, Operation(Kind.DUMP).advance))


# What lies in the directory ------------------------------------------------------------------------------------


def test_finished_ones_are_listed_the_latest_first_and_broken_ones_left_out(
    server: Server, dumps: Path, operation: Operation
) -> None:
    assert dumping.kept(dumps) == []
    made = [run(dump(server, dumps, operation)) for _ in range(3)]
    (dumps / ".partial-x").mkdir()
    (dumps / "99999999T000000Z-empty").mkdir()
    (dumps / "99999999T000000Z-file").touch()
    listed = [one.directory for one in dumping.kept(dumps)]
    assert listed == sorted((one.directory for one in made), reverse=True)
    os.truncate(listed[0] / DUMP, 100)
    assert [one.directory for one in dumping.kept(dumps)] == listed[1:]


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_options_that_a_server_keeps_for_itself_are_not_loaded_elsewhere(
    compression: Compression, server: Server, dumps: Path, operation: Operation
) -> None:
    """`n_distinct` stands for one of them here: this server knows no other."""
    database = server.make_database()
    server.execute(
        'CREATE TABLE "a; b" (one integer, "Two, )" text, three text)',
        'ALTER TABLE "a; b" ALTER one SET (n_distinct=5), ALTER "Two, )" SET (n_distinct=-0.5, n_distinct_inherited=7)',
        'ALTER TABLE "a; b" ALTER three SET (n_distinct_inherited=7, n_distinct=3)',
        "CREATE TABLE plain (one integer)",
        "ALTER TABLE plain ALTER one SET (n_distinct=5)",
        "INSERT INTO plain VALUES (42)",
        database=database,
        user="hindsight",
    )
    made = run(dump(server, dumps, operation, address=server.address(database), compression=compression))
    file = made.directory / DUMP
    before = file.stat().st_size
    assert dump_file.blank_options(file, ("n_distinct",)) == 3  # a name with a semicolon is not touched
    assert file.stat().st_size == before
    into = server.make_database()
    server.run("pg_restore", f"--dbname={into}", str(file))
    found = server.rows("SELECT attname, attoptions FROM pg_attribute WHERE attoptions IS NOT NULL ORDER BY 1", into)
    assert found == [
        ("Two, )", ["n_distinct_inherited=7"]),
        ("one", ["n_distinct=5"]),
        ("three", ["n_distinct_inherited=7"]),
    ]
    assert server.rows("SELECT one FROM plain", into) == [(42,)]
