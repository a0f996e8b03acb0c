"""Dumps become databases beside the live one: what is refused, loaded, verified and exchanged, and whose code runs."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import reachable_directory, wait_for
from postgres_server import ENV, WITHIN, Server, run, running_server
from psycopg import sql

from sidecar import database, dump_file, dumping, migrated, moving, processes, staging, swapping, verification
from sidecar.archive import DUMP, Archive
from sidecar.contents import Contents, Sequence, Table
from sidecar.database import Facts
from sidecar.errors import BlockedError, Reason, RefusedError, TransientError, VerificationError
from sidecar.migrated import Found
from sidecar.model import Identity, Model
from sidecar.operations import Kind, Operation
from sidecar.programs import ProgramError
from sidecar.sizing import MIB, Machine
from sidecar.staging import Checked, Staged

SCRIPT = Path(__file__).parents[1] / "fixtures/hindsight_like.sql"
REVISIONS = frozenset({"f00df00df00d", "beefbeefbeef"})
VERSIONS = {"sidecar": "0.1.0", "hindsight-api": "1.1.0"}
MACHINE = Machine(memory=1024 * MIB, cores=2)
COMPRESSION, FORMAT, ARCHIVE_MINOR = 11, 10, 6  # where the header of a dump in custom format has them


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return a server whose database `hindsight` nobody changes."""
    with running_server() as server:
        server.execute(SCRIPT.read_text(encoding="utf-8"), user="hindsight")
        server.execute("CREATE SCHEMA hindsight_sidecar CREATE TABLE facts (name text)")
        yield server


@pytest.fixture(scope="module")
def archive(server: Server) -> Iterator[Archive]:
    """Return a dump of it with a manifest."""
    with reachable_directory() as directory:
        yield run(
            dumping.dump(
                server.address(), server.programs, directory, Operation(Kind.DUMP), versions=VERSIONS, model=None
            )
        )


@pytest.fixture(scope="module")
def raw(server: Server) -> Iterator[bytes]:
    """Return what `pg_dump -Fc` makes of it."""
    with reachable_directory() as directory:
        yield pg_dump(server, directory / "raw").read_bytes()


@pytest.fixture
def file() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory / "given"


@pytest.fixture
def operation() -> Operation:
    return Operation(Kind.RESTORE)


def pg_dump(server: Server, file: Path, source: str = "hindsight", kind: str = "custom") -> Path:
    """Dump a database as its superuser would, all of it."""
    subprocess.run(
        [server.binaries.program("pg_dump"), f"--format={kind}", "--compress=gzip:1" if kind == "custom" else "--no-sync",
         f"--file={file}", "--username=postgres", source],
        env={**ENV, "PGHOST": str(server.directory)}, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return file


def databases(server: Server) -> set[str]:
    return {name for (name,) in server.rows("SELECT datname FROM pg_database", "postgres")}


def leftovers(server: Server) -> set[str]:
    return {name for name in databases(server) if name.startswith(staging.STAGING)}


def preflight(server: Server, file: Path, archive: Archive | None = None, known: frozenset[str] = REVISIONS) -> Checked:
    manifest = archive.manifest if archive else None
    return run(staging.preflight(file, manifest, server.programs, server.directory, known))


def refusal(server: Server, file: Path, archive: Archive | None = None, known: frozenset[str] = REVISIONS) -> str:
    """Return the sentence with which a dump is refused; it is as it was, and so are the databases."""
    before, content = databases(server), file.read_bytes()
    with pytest.raises(RefusedError) as refused:
        preflight(server, file, archive, known)
    assert (databases(server), file.read_bytes()) == (before, content)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert "\n" not in str(refused.value)
    return str(refused.value)


# What is refused -----------------------------------------------------------------------------------------------

WANTED = "; expected an archive of `hindsight-sidecar dump`, or a file of `pg_dump -Fc`"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "given is empty"),
        (b"\n <!DOCTYPE html><html>502</html>", "given is an HTML page, an error of the server that it came from perhaps"),
        (b"<?xml version='1.0'?><Error/>", "given is an HTML page, an error of the server that it came from perhaps"),
        (b"\x1f\x8b\x08rest", "given is a gzip file; unpack it first (gunzip)"),
        (b"\x28\xb5\x2f\xfdrest", "given is a zstd file; unpack it first (unzstd)"),
        (
            b"PK\x03\x04rest",
            "given is a zip file (of hindsight-admin perhaps: restore it with a hindsight-api of its version, and migrate from that)",
        ),
        (b"garbage", "given begins with b'garbage'"),
        (b"PGDM", "given begins with b'PGDM'"),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_told_by_what_it_looks_like(content: bytes, told: str, server: Server, file: Path) -> None:
    file.write_bytes(content)
    assert refusal(server, file) == told + WANTED


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("plain", "given is plain SQL, which loads without any error when it is cut short; make it with pg_dump -Fc"),
        ("tar", "given is a tar, and not one of ours"),
    ],
)
def test_a_dump_in_another_format_is_refused(kind: str, told: str, server: Server, file: Path) -> None:
    assert refusal(server, pg_dump(server, file, kind=kind)) == told + WANTED


def test_a_tar_of_something_else_is_refused(server: Server, file: Path) -> None:
    subprocess.run(["/bin/tar", "-cf", file, "-C", SCRIPT.parent, SCRIPT.name], check=True)
    assert refusal(server, file) == "given is a tar, and not one of ours" + WANTED


def test_the_list_of_a_directory_dump_is_refused(server: Server, file: Path) -> None:
    with reachable_directory() as directory:
        made = pg_dump(server, directory / "made", kind="directory")
        file.write_bytes((made / "toc.dat").read_bytes())
    assert refusal(server, file) == (
        "given begins like a dump, and its header cannot be read (its format is number 3, and custom is 1: use "
        "pg_dump -Fc); fetch it again"
    )


def patched(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + bytes([value]) + content[place + 1 :]


def test_a_newer_archive_format_is_refused(raw: bytes, server: Server, file: Path) -> None:
    file.write_bytes(patched(raw, ARCHIVE_MINOR, 99))
    assert refusal(server, file).startswith(
        f"the dump was made by a newer PostgreSQL than the {server.binaries.version} here "
        "(pg_restore ended with exit code 1: pg_restore: error: unsupported version (1.99"
    )


@pytest.mark.parametrize(("which", "told"), [(0, "PostgreSQL 99.6, made by pg_dump {}"), (1, "PostgreSQL {}, made by pg_dump 99.6")])  # fmt: skip
def test_a_newer_major_is_refused(which: int, told: str, raw: bytes, server: Server, file: Path) -> None:
    version = server.binaries.version.encode()
    parts = raw.split(version, 2)
    versions = [version, version]
    versions[which] = b"99" + version[2:]
    file.write_bytes(parts[0] + versions[0] + parts[1] + versions[1] + parts[2])
    assert refusal(server, file) == (
        f"the dump is of {told.format(server.binaries.version)}, and this is PostgreSQL {server.binaries.version}; "
        "restore it with an image that has 99 or newer"
    )


def test_compression_that_this_build_cannot_read_is_refused(raw: bytes, server: Server, file: Path) -> None:
    file.write_bytes(patched(raw, COMPRESSION, 3))
    told = refusal(server, file)
    assert told.startswith("the dump's compression cannot be read by this PostgreSQL (pg_restore ended with exit code ")
    assert told.endswith("); make it with pg_dump -Fc -Z gzip:1")


@pytest.mark.parametrize("compression", [2, 4, 255])
def test_compression_that_the_header_gives_wrongly_is_refused(
    compression: int, raw: bytes, server: Server, file: Path
) -> None:
    file.write_bytes(patched(raw, COMPRESSION, compression))
    assert refusal(server, file).startswith(
        ("the dump's compression cannot be read", "the dump is cut short or damaged")
    )


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_one_that_is_cut_short_is_refused(share: float, raw: bytes, server: Server, file: Path) -> None:
    file.write_bytes(raw[: int(len(raw) * share)])
    told = refusal(server, file)
    assert told.startswith(("the dump is cut short or damaged (", "given begins like a dump, and its header cannot"))
    assert told.endswith("; fetch it again")


@pytest.mark.parametrize("missing", [1, 4, 5, 20])
def test_one_whose_last_bytes_are_missing_is_refused(missing: int, raw: bytes, server: Server, file: Path) -> None:
    file.write_bytes(raw[:-missing])
    assert refusal(server, file).startswith("the dump is cut short or damaged (")


@pytest.mark.parametrize("place", [0.25, 0.4, 0.6, 0.8, 0.95])
def test_one_flipped_bit_in_the_data_is_found(place: float, raw: bytes, server: Server, file: Path) -> None:
    at = int(len(raw) * place)
    file.write_bytes(patched(raw, at, raw[at] ^ 0x10))
    assert refusal(server, file).startswith("the dump is cut short or damaged (")


@pytest.fixture(scope="module")
def with_hstore(server: Server) -> Iterator[bytes]:
    source = server.make_database("hindsight")
    server.execute("CREATE EXTENSION hstore SCHEMA public", database=source)
    with reachable_directory() as directory:
        yield pg_dump(server, directory / "raw", source).read_bytes()


def test_an_extension_that_is_not_installed_is_refused(with_hstore: bytes, server: Server, file: Path) -> None:
    file.write_bytes(with_hstore.replace(b"hstore", b"hstora"))
    assert refusal(server, file) == (
        "the dump needs extensions that are not installed here: hstora; drop them at the source, or use an image that "
        "has them"
    )


def test_an_extension_that_is_not_hindsights_is_refused(with_hstore: bytes, server: Server, file: Path) -> None:
    file.write_bytes(with_hstore)
    assert refusal(server, file) == (
        "the dump has extensions that hindsight-api does not use, and making them needs the superuser: hstore; "
        "drop them at the source"
    )


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE memory_units_old (x integer)", "CREATE VIEW memory_units AS SELECT 1 AS embedding"],
    ids=["another table", "a view"],
)
def test_one_without_memories_is_refused(statement: str, server: Server, file: Path) -> None:
    source = server.make_database()
    server.execute(statement, database=source)
    assert refusal(server, pg_dump(server, file, source)) == (
        "the dump has no table memory_units; expected one of a database of hindsight-api"
    )


def test_a_schema_that_the_code_here_does_not_know_is_refused(archive: Archive, server: Server, file: Path) -> None:
    file.write_bytes((archive.directory / DUMP).read_bytes())
    assert refusal(server, file, archive, frozenset({"f00df00df00d"})) == (
        "the archive's schema is at revision beefbeefbeef (hindsight-api 1.1.0), which the hindsight-api here does "
        "not know; use an image with that version or a newer one"
    )


def test_a_whole_one_is_accepted(raw: bytes, archive: Archive, server: Server, file: Path) -> None:
    before = databases(server)
    file.write_bytes(raw)
    checked = preflight(server, file)
    assert (checked.header.compression, checked.same_major, checked.manifest) == ("gzip", True, None)
    assert checked.header.database == "hindsight"
    assert dump_file.extensions(checked.entries) == ["btree_gin", "pg_trgm", "vector"]
    assert preflight(server, archive.directory / DUMP, archive).manifest is archive.manifest
    assert databases(server) == before


@pytest.mark.parametrize("schema", ["tenant", pytest.param("TENANT"), pytest.param("our tenant")])
def test_memories_of_one_tenant_alone_are_enough(schema: str, server: Server, file: Path) -> None:
    source = server.make_database()
    server.execute(f'CREATE SCHEMA "{schema}" CREATE TABLE memory_units (x integer)', database=source)
    checked = preflight(server, pg_dump(server, file, source))
    assert "TABLE" in {entry.kind for entry in checked.entries}


def test_a_header_with_a_version_that_is_no_number_is_refused(raw: bytes, server: Server, file: Path) -> None:
    file.write_bytes(raw.replace(server.binaries.version.encode(), b"x" * len(server.binaries.version), 1))
    assert "header cannot be read" in refusal(server, file)


# What is not as it was -----------------------------------------------------------------------------------------


def stage(server: Server, checked: Checked, operation: Operation) -> Staged:
    with reachable_directory() as scratch:
        staged = run(staging.stage(checked, server.programs, server.directory, scratch, MACHINE, operation))
        assert list(scratch.iterdir()) == []
    return staged


def renamed(server: Server, staged: Staged, name: str) -> str:
    """Give what is staged another name, so that it is no leftover."""
    server.execute(f"ALTER DATABASE {staged.name} RENAME TO {name}", database="postgres")
    return name


@pytest.fixture(scope="module")
def loaded(server: Server, archive: Archive) -> str:
    """Return a database that a dump was staged in, and nobody changes."""
    staged = stage(server, preflight(server, archive.directory / DUMP, archive), Operation(Kind.RESTORE))
    return renamed(server, staged, "loaded")


@pytest.fixture
def plant(loaded: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets what is staged be a copy of what was loaded, after some statements of its owner's."""

    def plant(*statements: str, user: str = "hindsight") -> None:
        async def create(_: Path, name: str) -> None:
            server.make_database(loaded, name)

        async def load(_: Checked, name: str, *__: Any) -> None:
            server.execute(f"SET ROLE {user}", *statements, database=name)

        monkeypatch.setattr("sidecar.staging.create", create)
        monkeypatch.setattr("sidecar.staging._load", load)

    return plant


INVALID = "UPDATE pg_index SET {} = false WHERE indexrelid = 'idx_memory_units_text'::regclass"
BEHIND = (
    "sequence public.audit_log_id_seq stands at {}, and audit_log.id has {} already: the next row would collide (if it is so at the "
    "source too, run there: SELECT setval(pg_get_serial_sequence('\"public\".\"audit_log\"', 'id'), {}))"
)
VECTOR = "UPDATE memory_units SET embedding = (SELECT array_agg(v + CASE WHEN i = 200 THEN 1e-6 ELSE 0 END ORDER BY i)::vector(384) FROM unnest(embedding::real[]) WITH ORDINALITY AS of (v, i)) WHERE id = md5('unit 76')::uuid"
SO_AT_THE_SOURCE = """ (it was so at the source already; run there: SELECT setval(pg_get_serial_sequence('"public"."audit_log"', 'id'), 7))"""
# With a manifest or without.
ALWAYS = [
    (INVALID.format("indisvalid"), "index public.idx_memory_units_text is not valid"),
    (INVALID.format("indisready"), "index public.idx_memory_units_text is not valid"),
    (
        "ALTER TABLE memory_links ADD CONSTRAINT more CHECK (weight < 2) NOT VALID",
        "constraint public.memory_links.more was never checked against its table (NOT VALID)",
    ),
    (
        "ALTER TABLE webhooks ADD CONSTRAINT more NOT NULL url NOT VALID",
        "constraint public.webhooks.more was never checked against its table (NOT VALID)",
    ),
    ("SELECT setval('audit_log_id_seq', 3)", BEHIND.format(3, 7, 7)),
    ("SELECT setval('audit_log_id_seq', 7, false)", BEHIND.format(7, 7, 7)),
    ("ALTER SEQUENCE audit_log_id_seq INCREMENT BY -1 MINVALUE -9; SELECT setval('audit_log_id_seq', 7)", BEHIND.format(7, 1, 1)),
]  # fmt: skip
NO_MEMORIES = (
    "ALTER TABLE memory_units DROP embedding CASCADE; ALTER TABLE tenant_two.memory_units DROP embedding",
    "there is no table memory_units with embeddings",
)
WITH_A_MANIFEST = [
    ("DROP INDEX idx_mu_emb_world_second", "indexes missing here: public.idx_mu_emb_world_second"),
    ("CREATE INDEX more ON banks (background)", "indexes here that were not there: public.more"),
    (
        "ALTER TABLE memory_units DROP CONSTRAINT memory_units_document_fkey",
        "constraints missing here: public.memory_units.memory_units_document_fkey",
    ),
    ("DELETE FROM audit_log WHERE id = 7", "table public.audit_log had 7 rows there, and has 6 here"),
    ("DROP TABLE webhooks", "table public.webhooks was there (0 rows) and is not here"),
    ("CREATE TABLE more ()", "table public.more is here (0 rows) and was not there"),
    (VECTOR, "table public.memory_units has 200 rows on both sides, and their content differs"),
    ("DROP VIEW worlds", "views missing here: public.worlds"),
    ("DROP FUNCTION shout", "routines missing here: public.shout(word text, times integer)"),
    ("DROP TRIGGER banks_keep_their_date ON banks", "triggers missing here: public.banks.banks_keep_their_date"),
    ("ALTER TABLE banks DISABLE TRIGGER banks_keep_their_date", "triggers that differ: public.banks.banks_keep_their"),
    ("ALTER TABLE banks ALTER background DROP NOT NULL", "columns that differ: public.banks.background ("),
    ("UPDATE alembic_version SET version_num = 'x'", "revisions that differ: public (['f00df00df00d'] there, ['x'] here)"),
    ("DROP EXTENSION pg_trgm CASCADE", "extensions missing here: pg_trgm"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "told"), [*ALWAYS[:1], *WITH_A_MANIFEST])
def test_what_is_not_as_it_was_is_named_and_nothing_is_left(
    statement: str,
    told: str,
    archive: Archive,
    server: Server,
    operation: Operation,
    plant: Callable[..., None],
) -> None:
    plant(*statement.split("; "), user="postgres" if statement.startswith(("UPDATE pg_", "DROP EXT")) else "hindsight")
    with pytest.raises(VerificationError) as error:
        stage(server, preflight(server, archive.directory / DUMP, archive), operation)
    assert told in str(error.value)
    assert leftovers(server) == set()
    assert operation.phase == "verify"
    assert operation.report["comparison"]["counts"]["indexes"]["there"] == 21


@pytest.mark.parametrize(("statement", "told"), [*ALWAYS, NO_MEMORIES])
def test_what_must_not_be_in_any_database_is_named_without_a_manifest_too(
    statement: str,
    told: str,
    raw: bytes,
    file: Path,
    server: Server,
    operation: Operation,
    plant: Callable[..., None],
) -> None:
    plant(*statement.split("; "), user="postgres" if statement.startswith(("UPDATE pg_", "DROP EXT")) else "hindsight")
    file.write_bytes(raw)
    with pytest.raises(VerificationError) as error:
        stage(server, preflight(server, file), operation)
    assert str(error.value) == told
    assert leftovers(server) == set()
    assert operation.report == {}


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("DROP INDEX idx_mu_emb_world_second", "the dump has INDEX public idx_mu_emb_world_second, which is not here"),
        (
            "ALTER TABLE memory_units DROP CONSTRAINT memory_units_document_fkey",
            "the dump has FK CONSTRAINT public memory_units memory_units_document_fkey, which is not here",
        ),
        (
            "ALTER TABLE tenant_two.memory_units DROP CONSTRAINT memory_units_pkey CASCADE",
            "the dump has CONSTRAINT tenant_two memory_units memory_units_pkey, which is not here",
        ),
        ('DROP INDEX "We ird.Na""me"."In dex"', 'the dump has INDEX We ird.Na"me In dex, which is not here'),
    ],
)
def test_what_a_file_of_pg_dump_lists_and_is_not_here_is_named(
    statement: str, told: str, raw: bytes, file: Path, server: Server, operation: Operation, plant: Callable[..., None]
) -> None:
    plant(statement)
    file.write_bytes(raw)
    with pytest.raises(VerificationError) as error:
        stage(server, preflight(server, file), operation)
    assert str(error.value) == told
    assert leftovers(server) == set()


@pytest.mark.parametrize(("there", "told"), [(3, SO_AT_THE_SOURCE), (7, "")])
def test_a_sequence_that_was_behind_at_the_source_says_so(
    there: int,
    told: str,
    archive: Archive,
    server: Server,
    operation: Operation,
    plant: Callable[..., None],
) -> None:
    sequences = archive.manifest.contents.sequences
    [name] = [name for name in sequences if name.endswith("audit_log_id_seq")]
    stood = {**sequences, name: replace(sequences[name], last_value=there, is_called=True)}
    manifest = replace(archive.manifest, contents=replace(archive.manifest.contents, sequences=stood))
    plant("SELECT setval('audit_log_id_seq', 3)")
    with pytest.raises(VerificationError) as error:
        stage(server, preflight(server, archive.directory / DUMP, replace(archive, manifest=manifest)), operation)
    sentence = (
        "sequence public.audit_log_id_seq stands at 3, and audit_log.id has 7 already: the next row would collide"
    )
    assert str(error.value) == sentence + told


def test_a_sequence_of_a_column_that_is_no_number_is_no_fault(
    raw: bytes, file: Path, server: Server, operation: Operation, plant: Callable[..., None]
) -> None:
    plant("CREATE SEQUENCE numbers OWNED BY banks.background")
    file.write_bytes(raw)
    staged = stage(server, preflight(server, file), operation)
    run(staging.drop(server.directory, staged.name))


def test_five_faults_are_named_and_the_others_counted(
    archive: Archive, server: Server, operation: Operation, plant: Callable[..., None]
) -> None:
    plant(*(f"CREATE TABLE more_{number} ()" for number in range(7)))
    with pytest.raises(VerificationError) as error:
        stage(server, preflight(server, archive.directory / DUMP, archive), operation)
    assert "more_4 is here" in str(error.value)
    assert str(error.value).endswith(" (and 2 more)")


# Whose code runs -----------------------------------------------------------------------------------------------

FIRST = """
CREATE EXTENSION vector SCHEMA public;
CREATE TABLE memory_units (bank_id text, embedding vector(3));
CREATE TABLE banks (bank_id text);
INSERT INTO banks VALUES ('first');
CREATE FUNCTION evil() RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION evil_fixed(of text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE
    AS 'BEGIN PERFORM public.evil(); RETURN true; END';
CREATE FUNCTION evil_event() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM public.evil(); END';
CREATE FUNCTION evil_row() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM public.evil(); RETURN NEW; END';
"""
# The server's log tells who ran it, whatever becomes of the database.
EVIL = """
CREATE OR REPLACE FUNCTION evil() RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE LOG 'evil ran as %', current_user;
    BEGIN EXECUTE 'CREATE ROLE evil SUPERUSER'; EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE $run$COPY (SELECT 1) TO PROGRAM 'touch WITNESS'$run$; EXCEPTION WHEN OTHERS THEN NULL; END;
    MORE
    RETURN 1;
END $$
"""
# What the sidecar's own schema must not be when the superuser writes into it.
TRAP = """
IF current_user = 'hindsight' AND to_regnamespace('hindsight_sidecar') IS NULL THEN
    EXECUTE 'CREATE SCHEMA hindsight_sidecar';
    EXECUTE 'CREATE TABLE hindsight_sidecar.facts (name text PRIMARY KEY, value jsonb NOT NULL, recorded timestamptz NOT NULL DEFAULT now())';
    EXECUTE 'CREATE TRIGGER evil BEFORE INSERT ON hindsight_sidecar.facts FOR EACH ROW EXECUTE FUNCTION public.evil_row()';
END IF;
"""


class Evil:
    """A dump with code of somebody else's, and what it did here."""

    def __init__(self, server: Server, file: Path, statements: list[str], more: str = "") -> None:
        self._server, self._file, self._log = server, file, server.directory / "log"
        self._witness = server.directory / "witness"
        source = server.make_database()
        evil = EVIL.replace("WITNESS", str(self._witness)).replace("MORE", more)
        # A server whose own triggers ran as its superuser would prove nothing.
        server.execute(FIRST, *statements, "SET event_triggers = off", evil, database=source)
        pg_dump(server, file, source)
        self._from = self._log.stat().st_size

    def stage(self, operation: Operation) -> Staged:
        return stage(self._server, preflight(self._server, self._file), operation)

    def ran_as(self) -> set[str]:
        """Return who ran it since the dump was made."""
        with self._log.open("rb") as log:
            log.seek(self._from)
            told = log.read().decode()
        ran = {line.split("evil ran as ")[1] for line in told.splitlines() if "LOG:  evil ran as " in line}
        assert not self._witness.exists()
        assert self._server.rows("SELECT FROM pg_roles WHERE rolname = 'evil'") == []
        return ran


NEVER_RUN = [
    "CREATE TRIGGER evil BEFORE INSERT ON banks FOR EACH ROW EXECUTE FUNCTION evil_row()",
    "ALTER TABLE banks ADD x integer DEFAULT evil()",
    "CREATE SCHEMA x CREATE VIEW memory_units AS SELECT evil() AS embedding",
    "CREATE RULE evil AS ON INSERT TO banks DO ALSO SELECT evil()",
    "CREATE SCHEMA hindsight_sidecar CREATE TABLE facts (name text)",
    "INSERT INTO hindsight_sidecar.facts VALUES ('theirs')",
    "CREATE TRIGGER evil BEFORE INSERT ON hindsight_sidecar.facts FOR EACH ROW EXECUTE FUNCTION evil_row()",
    # In the place of what we call ourselves.
    "CREATE FUNCTION md5(text) RETURNS text LANGUAGE sql AS $$ SELECT evil()::text $$",
    "CREATE FUNCTION starts_with(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT evil() = 1 $$",
    "CREATE FUNCTION differ(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT evil() = 1 $$",
    "CREATE OPERATOR <> (FUNCTION = differ, LEFTARG = text, RIGHTARG = text)",
]
RUN_BY_THE_LOAD = [
    "CREATE MATERIALIZED VIEW evils AS SELECT evil()",
    "ALTER TABLE banks ADD CHECK (evil_fixed(bank_id))",
    "CREATE INDEX evils_index ON banks (evil_fixed(bank_id))",
    "ALTER TABLE banks ADD x boolean GENERATED ALWAYS AS (evil_fixed(bank_id)) STORED",
    "ALTER FUNCTION evil_fixed SECURITY DEFINER",
]


@pytest.mark.parametrize(
    ("statements", "ran_as"),
    [(NEVER_RUN, set()), (RUN_BY_THE_LOAD[:1], {"hindsight"}), (RUN_BY_THE_LOAD, {"hindsight"})],
    ids=["never run", "view", "all"],
)  # fmt: skip
def test_code_in_a_dump_has_no_more_rights_than_its_owner(
    statements: list[str], ran_as: set[str], server: Server, file: Path, operation: Operation
) -> None:
    evil = Evil(server, file, statements)
    staged = evil.stage(operation)
    run(database.prepare(server.directory, staged.name, Facts({}, {"id": "a model"})))
    assert evil.ran_as() == ran_as
    owners = "SELECT DISTINCT r.rolname FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner WHERE proname ~ '^evil'"
    assert server.rows(owners, staged.name) == [("hindsight",)]
    assert server.rows("SELECT name FROM hindsight_sidecar.facts ORDER BY 1", staged.name) == [
        ("embedding-model",),
        ("origin",),
    ]
    run(staging.drop(server.directory, staged.name))


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("CREATE EVENT TRIGGER evil ON ddl_command_end EXECUTE FUNCTION evil_event()", "permission denied to create event trigger"),
        ("CREATE FUNCTION untrusted() RETURNS text LANGUAGE internal AS 'pgsql_version'", "permission denied for language internal"),
        ("CREATE FOREIGN DATA WRAPPER evil", "permission denied to create foreign-data wrapper"),
    ],
)  # fmt: skip
def test_what_needs_the_superuser_is_not_loaded(
    statement: str, told: str, server: Server, file: Path, operation: Operation
) -> None:
    evil = Evil(server, file, [statement])
    with pytest.raises(ProgramError, match=told):
        evil.stage(operation)
    assert evil.ran_as() == set()
    assert leftovers(server) == set()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("COPY public.banks FROM PROGRAM 'true'", "permission denied to COPY to or from an external program"),
        ("COPY public.banks FROM '/etc/passwd'", "permission denied to COPY from a file"),
    ],
)
def test_a_load_of_rows_that_would_run_or_read_something_else_is_refused(
    statement: str, told: str, server: Server, file: Path, operation: Operation
) -> None:
    """The statement that loads a table's rows stands in the dump itself, and whoever made it may have put another there."""
    evil = Evil(server, file, [])
    loads = b"COPY public.banks (bank_id) FROM stdin;"
    content = file.read_bytes()
    assert content.count(loads) == 1
    file.write_bytes(content.replace(loads, statement.encode().ljust(len(loads) - 1) + b";"))
    with pytest.raises(ProgramError, match=told):
        evil.stage(operation)
    assert leftovers(server) == set()


def test_rows_that_a_policy_hides_are_an_error_and_not_a_smaller_number(
    server: Server, file: Path, operation: Operation
) -> None:
    evil = Evil(
        server,
        file,
        ["ALTER TABLE banks ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
         "CREATE POLICY evil ON banks USING (evil_fixed(bank_id))"],
    )  # fmt: skip
    with pytest.raises((ProgramError, psycopg.errors.InsufficientPrivilege), match="row-level security policy"):
        evil.stage(operation)
    assert evil.ran_as() == set()
    assert leftovers(server) == set()


@contextlib.contextmanager
def undone(server: Server) -> Iterator[None]:
    """Undo what code of a dump may have done as the superuser."""
    try:
        yield
    finally:
        for name in leftovers(server):
            run(staging.drop(server.directory, name))
        server.execute("DROP ROLE IF EXISTS evil")
        (server.directory / "witness").unlink(missing_ok=True)


def test_a_trap_in_the_sidecars_own_schema_does_not_get_the_superusers_rights(
    server: Server, file: Path, operation: Operation
) -> None:
    evil = Evil(server, file, ["ALTER TABLE banks ADD CHECK (evil_fixed(bank_id))"], TRAP)
    with undone(server):
        with contextlib.suppress(VerificationError, ProgramError, RefusedError):
            staged = evil.stage(operation)
            run(database.prepare(server.directory, staged.name, Facts({}, {"id": "a model"})))
        assert evil.ran_as() == {"hindsight"}


def test_a_cast_in_a_dump_does_not_get_the_superusers_rights(server: Server, file: Path, operation: Operation) -> None:
    evil = Evil(
        server,
        file,
        ["CREATE TYPE named AS (name text)",
         "CREATE FUNCTION evil_cast(named) RETURNS text LANGUAGE plpgsql AS 'BEGIN PERFORM public.evil(); RETURN $1.name; END'",
         "CREATE CAST (named AS text) WITH FUNCTION evil_cast(named) AS IMPLICIT",
         "CREATE SCHEMA x CREATE TABLE memory_units (bank_id public.named, embedding public.vector(3))",
         "INSERT INTO x.memory_units VALUES (ROW('first'), '[1,2,3]')"],
    )  # fmt: skip

    identity = Identity("a/model", "1", "float32", 3, "cls", normalize=True, query_prefix="", passage_prefix="")
    other = Model(
        Path("/"),
        "other",
        "x",
        1,
        stand_in=False,
        files={},
        loaded=frozenset(),
        identity=replace(identity, revision="2"),
    )
    with undone(server):
        staged = evil.stage(operation).name
        run(database.prepare(server.directory, staged, Facts({}, identity.to_json())))
        with served(server, staged), pytest.raises(BlockedError, match="embedded with another model"):
            run(database.check(server.directory, other, REVISIONS))
        assert "postgres" not in evil.ran_as()


def test_facts_that_belong_to_another_are_not_written_to(server: Server) -> None:
    model = Model(Path("/"), "m", "x", 1, stand_in=False, files={}, loaded=frozenset(), identity=Identity("m", "1", "float32", 3, "cls", normalize=True, query_prefix="", passage_prefix=""))  # fmt: skip
    server.execute(
        "DROP SCHEMA IF EXISTS hindsight_sidecar CASCADE", "CREATE SCHEMA hindsight_sidecar AUTHORIZATION hindsight"
    )
    try:
        with pytest.raises(BlockedError, match="belongs to hindsight, and expected is postgres alone") as refused:
            run(database.check(server.directory, model, REVISIONS))
        assert refused.value.reason is Reason.DAMAGED_CLUSTER
    finally:
        server.execute("DROP SCHEMA hindsight_sidecar CASCADE")


@contextlib.contextmanager
def served(server: Server, name: str) -> Iterator[None]:
    """Have a database under the served name for a while."""

    def rename(one: str, other: str) -> None:
        server.execute(f"ALTER DATABASE {one} RENAME TO {other}", database="postgres")

    rename("hindsight", "hindsight_aside")
    rename(name, "hindsight")
    try:
        yield
    finally:
        rename("hindsight", name)
        rename("hindsight_aside", "hindsight")


# What is loaded ------------------------------------------------------------------------------------------------


def check_staged(server: Server, staged: Staged, archive: Archive) -> None:
    assert staged.name in leftovers(server)
    assert staged.contents == archive.manifest.contents
    owner = f"SELECT r.rolname FROM pg_database d JOIN pg_roles r ON r.oid = datdba WHERE datname = '{staged.name}'"
    assert server.rows(owner, "postgres") == [("hindsight",)]
    assert server.rows(
        "SELECT extname, rolname, extnamespace::regnamespace::text FROM pg_extension e JOIN pg_roles r ON r.oid = extowner "
        "WHERE extname <> 'plpgsql' ORDER BY 1",
        staged.name,
    ) == [("btree_gin", "postgres", "public"), ("pg_trgm", "postgres", "public"), ("vector", "postgres", "public")]
    assert server.rows("SELECT FROM pg_index WHERE NOT indisvalid OR NOT indisready", staged.name) == []
    assert server.rows("SELECT FROM pg_namespace WHERE nspname = 'hindsight_sidecar'", staged.name) == []
    superusers = (
        "SELECT relname FROM pg_class c WHERE relowner = 10 AND relnamespace::regnamespace::text !~ '^(pg_|information)' "
        "AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = c.oid AND deptype = 'e')"
    )
    assert server.rows(superusers, staged.name) == []


def test_an_archive_is_staged_as_it_was(archive: Archive, server: Server, operation: Operation) -> None:
    phases = []
    enter = operation.enter
    operation.enter = lambda phase, *more: (phases.append((phase, *more)), enter(phase, *more))[1]  # type: ignore[method-assign]
    staged = stage(server, preflight(server, archive.directory / DUMP, archive), operation)
    check_staged(server, staged, archive)
    assert staged.comparison is not None
    assert (staged.comparison.faults, staged.comparison.notes) == ([], [])
    assert {line.name: line.equal for line in staged.comparison.tables if line.equal is not True} == {
        "public.bank_stats_cache": None
    }, "what hindsight-api has still to do is no less a part of it than its memories"
    assert operation.report["comparison"] == staged.comparison.to_json()
    assert phases == [("load", 485, "rows"), ("index", 21, "indexes"), ("analyze",), ("verify", 485, "rows")]
    assert operation.done == 485, "it tells how far it is"
    run(staging.drop(server.directory, staged.name))
    assert leftovers(server) == set()


def test_a_file_of_pg_dump_is_staged_as_it_was(
    raw: bytes, file: Path, archive: Archive, server: Server, operation: Operation
) -> None:
    file.write_bytes(raw)
    staged = stage(server, preflight(server, file), operation)
    check_staged(server, staged, archive)
    assert staged.comparison is None
    assert file.read_bytes() == raw
    run(staging.drop(server.directory, staged.name))


# What is exchanged ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    """Return a server of which each test uses its own databases and `hindsight`, which it leaves as it was."""
    with running_server() as server:
        statements = [
            "CREATE TABLE memory_units (id uuid, bank_id text, text text, fact_type text, embedding vector(3))",
            "CREATE TABLE alembic_version (version_num text)",
            "INSERT INTO alembic_version VALUES ('old')",
        ]
        server.execute(*statements, user="hindsight")
        yield server


def before(part: str, act: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something just before each statement that has some words in it."""
    execute = psycopg.AsyncConnection.execute

    async def hooked(connection: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        if part in (query.as_string() if isinstance(query, sql.Composable) else str(query)):
            act(connection)
        return await execute(connection, query, *arguments, **options)

    monkeypatch.setattr(psycopg.AsyncConnection, "execute", hooked)


def oids(server: Server) -> dict[str, int]:
    return dict(server.rows("SELECT datname, oid::integer FROM pg_database", "postgres"))


def accepts(server: Server) -> set[str]:
    return {name for (name,) in server.rows("SELECT datname FROM pg_database WHERE datallowconn", "postgres")}


def test_both_names_are_exchanged_and_back_again(other: Server) -> None:
    incoming, was = other.make_database(), oids(other)
    with other.connect(), other.connect(incoming):
        run(swapping.exchange(other.directory, incoming, "hindsight_kept_1"))
    now = oids(other)
    assert (now["hindsight"], now["hindsight_kept_1"]) == (was[incoming], was["hindsight"])
    assert incoming not in now
    assert {"hindsight", "hindsight_kept_1"} & accepts(other) == {"hindsight"}
    run(swapping.exchange(other.directory, "hindsight_kept_1", incoming))
    assert oids(other) == was
    assert {"hindsight", incoming} & accepts(other) == {"hindsight"}


@pytest.mark.parametrize("taken", ["incoming is not there", "outgoing is there"])
def test_names_that_do_not_fit_change_nothing(taken: str, other: Server) -> None:
    incoming, was = other.make_database(), oids(other)
    names = ("nothing", "hindsight_kept_1") if taken.startswith("incoming") else (incoming, "postgres")
    with pytest.raises((psycopg.errors.InvalidCatalogName, psycopg.errors.DuplicateDatabase)):
        run(swapping.exchange(other.directory, *names))
    assert oids(other) == {**was, incoming: oids(other)[incoming]}
    assert "hindsight" in accepts(other)


def test_someone_who_connects_again_and_again_prevents_it(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    incoming = other.make_database()
    was = oids(other)
    monkeypatch.setattr("sidecar.swapping._TRIES", 1)
    with contextlib.ExitStack() as sessions:
        before("ALTER DATABASE", lambda _: sessions.enter_context(other.connect()), monkeypatch)
        with pytest.raises(TransientError) as error:
            run(swapping.exchange(other.directory, incoming, "hindsight_kept_1"))
    assert str(error.value) == (
        f"someone connects to hindsight or {incoming} again and again; end that session, and try again"
    )
    assert oids(other) == was
    assert "hindsight" in accepts(other)


@pytest.mark.parametrize("part", ['RENAME TO "hindsight"', "ALLOW_CONNECTIONS true"])
def test_a_server_that_is_killed_in_the_middle_has_the_names_of_before(
    part: str, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = other.make_database()
    was = oids(other)

    def kill(connection: Any) -> None:
        os.kill(connection.info.backend_pid, signal.SIGKILL)

    before(part, kill, monkeypatch)
    with pytest.raises(psycopg.OperationalError):
        run(swapping.exchange(other.directory, incoming, "hindsight_kept_1"))
    monkeypatch.undo()

    def answers() -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            return oids(other) == was
        return False

    # It takes a moment to notice, and ends who came meanwhile.
    wait_for(answers, WITHIN, "the server up again, with the names of before")

    def both_accept() -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            return {"hindsight", incoming} < accepts(other)
        return False

    wait_for(both_accept, WITHIN, "connections accepted by both")


def test_cancelled_as_it_commits_both_have_the_names_of_before(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    incoming = other.make_database()
    was = oids(other)
    leave, doomed = psycopg.AsyncTransaction.__aexit__, []

    async def left(self: Any, *error: Any) -> Any:
        while doomed:
            doomed.pop().cancel()
        return await leave(self, *error)

    async def work() -> None:
        task = asyncio.create_task(swapping.exchange(other.directory, incoming, "hindsight_kept_1"))
        doomed.append(task)
        await task

    monkeypatch.setattr(psycopg.AsyncTransaction, "__aexit__", left)
    with pytest.raises(asyncio.CancelledError):
        run(work())
    assert oids(other) == was
    assert "hindsight" in accepts(other)


def test_kept_ones_are_listed_the_latest_first_and_nothing_else_is_dropped(other: Server) -> None:
    names = [
        f"hindsight_kept_{when}" for when in ("20240102t030405z", "20250102t030405z_before_1_1_0", "20231231t000000z")
    ]
    for name in [*names, "hindsight_keptnot", "hindsight_staging_kept"]:
        other.make_database(name=name)
    listed = run(swapping.kept(other.directory))
    assert [one.name for one in listed] == [names[1], names[0], names[2]]
    assert all(one.size > 2**20 for one in listed)
    was = databases(other)
    for name in ("hindsight", "postgres", "template1", "hindsight_keptnot", "hindsight_kept_", "hindsight_kept_%", ""):
        with pytest.raises(RefusedError) as refused:
            run(swapping.drop_kept(other.directory, name))
        assert str(refused.value) == f"{name!r} is no kept database; `hindsight-sidecar databases` lists them"
    assert databases(other) == was
    with other.connect(names[0]):
        run(swapping.drop_kept(other.directory, names[0]))
    assert databases(other) == was - {names[0]}
    for name in names[1:]:
        run(swapping.drop_kept(other.directory, name))
    assert run(swapping.kept(other.directory)) == []


@pytest.mark.parametrize(
    "version",
    ["1.1.0", "1.2.0.post1.dev12+g0123abcd"],
)  # fmt: skip
def test_a_copy_is_kept_that_nobody_can_connect_to(version: str, other: Server) -> None:
    run(database.prepare(other.directory, "hindsight", Facts({})))
    assert not wants_copy(other, "old")
    assert wants_copy(other, "new")
    was = databases(other)
    with other.connect():
        name = run(swapping.copy(other.directory, other.directory, version))
    [made] = databases(other) - was
    try:
        assert made not in accepts(other)
        assert not wants_copy(other, "new")
        assert name == made
        assert re.fullmatch(r"hindsight_kept_\d{8}t\d{6}z_before_[0-9a-z_]+", made)
    finally:
        run(swapping.drop_kept(other.directory, made))
    assert wants_copy(other, "new"), "it is gone"


def wants_copy(server: Server, *heads: str, tenancy: str = "public") -> bool:
    return run(database.wants_copy(server.directory, set(heads), tenancy))


class KilledError(BaseException):
    """Ends whatever runs, as a kill does."""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_copy_that_was_ended_early_is_there_and_known_or_not_there(
    moment: str, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(database.prepare(other.directory, "hindsight", Facts({})))
    execute = psycopg.AsyncConnection.execute

    async def killed(connection: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        creates = isinstance(query, sql.Composable) and query.as_string().startswith("CREATE DATABASE")
        if creates and moment == "before":
            raise KilledError
        done = await execute(connection, query, *arguments, **options)
        if creates:
            raise KilledError
        return done

    was = databases(other)
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.AsyncConnection, "execute", killed)
        with pytest.raises(KilledError):
            run(swapping.copy(other.directory, other.directory, "1.1.0"))
    left = databases(other) - was
    try:
        assert len(left) == (moment == "after")
        assert wants_copy(other, "new") == (moment == "before")
    finally:
        for name in left:
            run(swapping.drop_kept(other.directory, name))


def test_what_a_start_left_as_it_was_is_not_copied_at_the_next_one(other: Server) -> None:
    run(database.prepare(other.directory, "hindsight", Facts({})))
    table = "CREATE TABLE tenant.alembic_version AS SELECT text 'left' AS version_num"
    other.execute("CREATE SCHEMA tenant", table, user="hindsight")
    try:
        assert wants_copy(other, "old"), "nobody knows yet that it stays so"
        run(database.record_first_ready(other.directory, {}, {"old"}, "public"))
        assert not wants_copy(other, "old")
        assert wants_copy(other, "new"), "a newer hindsight-api"
        assert wants_copy(other, "old", tenancy="tenant"), "one that is told to serve it"
        other.execute("UPDATE tenant.alembic_version SET version_num = 'other'", user="hindsight")
        assert wants_copy(other, "old")
    finally:
        other.execute("DROP SCHEMA tenant CASCADE", user="hindsight")


def test_what_is_brought_in_is_not_copied_until_it_was_served(other: Server) -> None:
    run(database.prepare(other.directory, "hindsight", Facts({}, uncopied={"public": ["old"]})))
    assert not wants_copy(other, "new")
    assert not wants_copy(other, "newer"), "another hindsight-api, since the sidecar was killed before"
    run(database.record_first_ready(other.directory, {}, {"old"}, "public"))
    assert wants_copy(other, "new")


def test_a_copy_of_what_was_brought_back_has_the_time_of_what_it_was_until_it_is_served(other: Server) -> None:
    was, known = "hindsight_kept_20250102t030405z", databases(other)
    run(database.prepare(other.directory, "hindsight", Facts({})))
    other.execute(f"COMMENT ON DATABASE hindsight IS '{was}'", database="postgres")  # as an exchange does
    try:
        assert run(swapping.copy(other.directory, other.directory, "1.1.0")) == f"{was}_before_1_1_0"
        run(database.record_first_ready(other.directory, {}, {"old"}, "public"))
        assert run(swapping.copy(other.directory, other.directory, "1.1.0")) > f"{was}_before_1_1_0"
    finally:
        for name in databases(other) - known:
            run(swapping.drop_kept(other.directory, name))


def test_settings_of_our_sessions_win_over_what_the_environment_has(
    other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c maintenance_work_mem=11MB")
    address = dumping.local(other.directory, "hindsight", "hindsight", maintenance_work_mem="9MB")
    with psycopg.connect(address.conninfo) as connection:
        assert connection.execute("SHOW maintenance_work_mem").fetchone() == ("9MB",)
        assert connection.execute("SHOW transaction_timeout").fetchone() == ("0",)
    assert address.option == f"--dbname={address.conninfo}"


def test_a_copy_that_does_not_fit_is_not_begun(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.volume.free_bytes", lambda _: 70 * MIB)
    was = databases(other)
    with pytest.raises(BlockedError, match="HINDSIGHT_SIDECAR_UPGRADE_COPY=false") as blocked:
        run(swapping.copy(other.directory, other.directory, "1.1.0"))
    assert blocked.value.reason is Reason.NO_SPACE
    assert databases(other) == was


# What ends early -----------------------------------------------------------------------------------------------

SLOW = """
CREATE EXTENSION vector SCHEMA public;
CREATE TABLE memory_units (bank_id text, embedding vector(3));
INSERT INTO memory_units VALUES ('first', '[1,2,3]');
CREATE FUNCTION slow(of text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
ALTER TABLE memory_units {};
CREATE INDEX slow_index ON memory_units ({});
CREATE OR REPLACE FUNCTION slow(of text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE
    AS 'BEGIN PERFORM pg_sleep(60); RETURN true; END';
"""
LOAD = SLOW.format("ADD CHECK (slow(bank_id))", "bank_id")
INDEX = SLOW.format("ADD CHECK (bank_id > '')", "slow(bank_id)")


def pg_restores() -> list[int]:
    """Return the pids of all pg_restore that we started, and of those that they did."""
    found, ours = [], {os.getpid()}
    for process in sorted(processes.all_processes(), key=lambda process: process.pid):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            if process.name == "pg_restore" and int(stat[stat.rindex(")") + 2 :].split()[1]) in ours:
                found.append(process.pid)
                ours.add(process.pid)
    return found


@pytest.mark.parametrize("how", ["cancelled", "killed"])
@pytest.mark.parametrize(("script", "phase"), [(LOAD, "load"), (INDEX, "index")], ids=["load", "index"])
def test_a_load_that_ends_early_leaves_nothing(
    script: str, phase: str, how: str, server: Server, file: Path, operation: Operation
) -> None:
    source = server.make_database()
    server.execute(script, database=source)
    checked = preflight(server, pg_dump(server, file, source))

    async def work(scratch: Path) -> None:
        task = asyncio.create_task(
            staging.stage(checked, server.programs, server.directory, scratch, MACHINE, operation)
        )
        sleeping = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname ~ '^hindsight_staging_'"
        while not (operation.phase == phase and server.rows(sleeping, "postgres")):
            assert not task.done()
            await asyncio.sleep(0.02)
        if how == "cancelled":
            task.cancel()
        else:
            os.kill(pg_restores()[0], signal.SIGKILL)
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else ProgramError) as error:
            await task
        assert how == "cancelled" or str(error.value).startswith("pg_restore was ended by signal 9: ")

    with reachable_directory() as scratch:
        run(work(scratch))
        assert list(scratch.iterdir()) == []
    assert leftovers(server) == set()
    wait_for(lambda: pg_restores() == [], 10, "no pg_restore left")


def test_what_an_earlier_sidecar_did_not_finish_is_dropped_and_named(server: Server) -> None:
    names = {"hindsight_staging_20240102t030405z_abcd", 'hindsight_staging_we ird"'}
    others = {"hindsight_kept_of_ours", "hindsightxstaging_x"}
    for name in names | others:
        server.make_database(name=name)
    was, told = databases(server), []
    with server.connect("hindsight_staging_20240102t030405z_abcd"):
        run(staging.sweep(server.directory, lambda *words, **more: told.append((*words, *more.values()))))
    assert databases(server) == was - names
    assert sorted(told) == sorted(("dropping a database that was not finished", name) for name in names)


# What a move does besides --------------------------------------------------------------------------------------


def contents_of(**tables: Table) -> Contents:
    return Contents({f"public.{name}": table for name, table in tables.items()})


def test_what_was_stored_meanwhile_is_told_by_table() -> None:
    old = contents_of(
        memory_units=Table(3, "a"), banks=Table(1, "a"), documents=Table(2, "a"), same=Table(1, "a"), audit_log=Table(1, "a")
    )  # fmt: skip
    new = contents_of(
        memory_units=Table(5, "b"), banks=Table(1, "b"), same=Table(1, "a"), audit_log=Table(2, "b"), more=Table(4, "c"),
        llm_requests=Table(1, "c"), bank_stats_cache=Table(1, "c", derived=True),
        graph_maintenance_queue=Table(1, "c"), entity_maintenance_queue=Table(1, "c"),
    )  # fmt: skip
    assert moving.newer_than(old, new) == [
        "public.banks: changed rows",
        "public.documents: -2 rows",
        "public.memory_units: +2 rows",
        "public.more: +4 rows",
    ]
    assert moving.newer_than(old, old) == []


def test_tasks_that_had_begun_are_pending_again(loaded: str, server: Server) -> None:
    source = server.make_database(loaded)
    table = "CREATE TABLE {}.async_operations AS SELECT s AS status, 'w' AS worker_id, now() AS claimed_at FROM unnest(ARRAY['processing', 'completed', 'pending', 'failed']) AS s"
    names = ["public", "tenant_two"]
    server.execute(*(table.format(name) for name in names), database=source, user="hindsight")
    run(moving._reset_tasks(server.directory, source))
    for name in names:
        assert server.rows(f"SELECT status, worker_id, claimed_at IS NULL FROM {name}.async_operations ORDER BY 1, 2", source) == [
            ("completed", "w", False), ("failed", "w", False), ("pending", "w", False), ("pending", None, True),
        ]  # fmt: skip


def test_a_database_without_tasks_is_left_alone(loaded: str, server: Server) -> None:
    run(moving._reset_tasks(server.directory, loaded))


def test_some_memories_of_every_bank_are_a_sample(server: Server, other: Server) -> None:
    found = run(moving.sample(server.directory, "public"))
    assert [bank for bank, _ in found] == ["first", "second"] * 5
    assert len(set(found)) == 10
    assert found == run(moving.sample(server.directory, "public"))
    observations = dict(server.rows("SELECT text, bank_id FROM memory_units WHERE fact_type = 'observation'"))
    assert not {text for _, text in found} & set(observations)
    assert run(moving.sample(other.directory, "public")) == []
    assert run(moving.sample(server.directory, "absent")) == []


def test_a_sample_is_of_the_schema_that_is_asked_for(other: Server) -> None:
    other.execute('CREATE SCHEMA "Our own" CREATE TABLE memory_units (LIKE public.memory_units)', user="hindsight")
    row = "(gen_random_uuid(), 'theirs', 'The key is below the pot.', 'world', '[1,2,3]')"
    try:
        other.execute(f'INSERT INTO "Our own".memory_units VALUES {row}', user="hindsight")
        assert run(moving.sample(other.directory, "Our own")) == [("theirs", "The key is below the pot.")]
        assert run(moving.sample(other.directory, "public")) == []
        found = run(migrated.look(other.directory))
        assert found == Found({"Our own": 1, "public": 0}, {"public": ["old"]}, frozenset())
        banks = "CREATE TABLE \"Our own\".banks AS SELECT 'another' AS bank_id"
        other.execute(banks, user="hindsight")
        assert run(migrated.look(other.directory)).memories["Our own"] == 0, "a bank that is no more"
        tasks = (
            "CREATE TABLE \"Our own\".async_operations AS SELECT 'pending' AS status, 'batch_retain' AS operation_type"
        )
        other.execute(tasks, user="hindsight")
        assert run(migrated.look(other.directory)).replacing == {"Our own"}
        other.execute("UPDATE \"Our own\".async_operations SET operation_type = 'consolidation'", user="hindsight")
        assert run(migrated.look(other.directory)).replacing == set()
    finally:
        other.execute('DROP SCHEMA "Our own" CASCADE', user="hindsight")


def test_what_recalls_say_nothing_of_is_told() -> None:
    ours, both = Found({"public": 3}), Found({"public": 3, "tenant": 2, "empty": 0})
    assert moving.not_recalled(3, ours, "public", recalled=True) == []
    assert moving.not_recalled(0, Found({"public": 0}), "public", recalled=False) == []
    other_tenants = "no memory was recalled of schema tenant: hindsight-api answers the sidecar from public alone"
    assert moving.not_recalled(5, both, "public", recalled=True) == [other_tenants]
    [none, others] = moving.not_recalled(5, Found({"tenant": 5}), "public", recalled=False)
    assert none.startswith(
        "none of its memories was recalled (one of 20 to 1000 characters is needed in schema public, "
    )
    assert others == other_tenants
    [told] = moving.not_recalled(5, both, None, recalled=False)
    assert told.endswith("the tenant extension decides")
    [observations] = moving.not_recalled(5, Found({"public": 0}), "public", recalled=False)
    assert observations.startswith("none of its memories was recalled (")


# What is compared ----------------------------------------------------------------------------------------------


def sequence(last: int = 1, definition: str = "bigint by 1", *, called: bool = True) -> Sequence:
    return Sequence(last, called, definition)


@pytest.mark.parametrize(
    ("there", "here", "fault"),
    [
        ({"tables": {"a": Table(1, "x")}}, {}, "table a was there (1 rows) and is not here"),
        ({}, {"tables": {"a": Table(1, "x")}}, "table a is here (1 rows) and was not there"),
        ({"tables": {"a": Table(1, "x")}}, {"tables": {"a": Table(2, "x")}}, "table a had 1 rows there, and has 2 here"),
        (
            {"tables": {"a": Table(1, "x")}}, {"tables": {"a": Table(1, "y")}},
            "table a has 1 rows on both sides, and their content differs",
        ),
        (
            {"tables": {"a": Table(1, "x", derived=True)}}, {"tables": {"a": Table(2, "x")}},
            "table a had 1 rows there, and has 2 here",
        ),
        *(
            ({kind: {"a": "x"}}, {kind: {"a": "y"}}, f"{kind} that differ: a (x there, y here)")
            for kind in ("columns", "indexes", "constraints", "views", "routines", "triggers")
        ),
        *(
            ({kind: {"a": "x"}}, {}, f"{kind} missing here: a")
            for kind in ("columns", "indexes", "constraints", "sequences", "views", "routines", "triggers", "revisions", "dimensions")
        ),
        *(
            ({}, {kind: {"a": "x"}}, f"{kind} here that were not there: a")
            for kind in ("columns", "indexes", "constraints", "sequences", "views", "routines", "triggers", "revisions", "dimensions")
        ),
        ({"dimensions": {"a": 384}}, {"dimensions": {"a": 768}}, "dimensions that differ: a (384 there, 768 here)"),
        ({"revisions": {"a": ["x"]}}, {"revisions": {"a": ["y"]}}, "revisions that differ: a (['x'] there, ['y'] here)"),
        (
            {"sequences": {"a": sequence()}}, {"sequences": {"a": sequence(definition="bigint by 2")}},
            f"sequences that differ: a ({sequence()} there, {sequence(definition='bigint by 2')} here)",
        ),
        ({"extensions": {"a": "1", "b": "1"}}, {"extensions": {"c": "1"}}, "extensions missing here: a, b"),
        (
            {"indexes": dict.fromkeys("gfedcba", "x")}, {}, "indexes missing here: a, b, c, d, e and 2 more",
        ),
    ],
)  # fmt: skip
def test_each_difference_is_a_fault(there: dict[str, Any], here: dict[str, Any], fault: str) -> None:
    comparison = verification.compare(Contents(**there), Contents(**here))
    assert comparison.faults == [fault]
    assert comparison.to_json()["faults"] == [fault]


def line(there: Contents, here: Contents) -> tuple[int | None, int | None, bool | None]:
    comparison = verification.compare(there, here)
    assert comparison.faults == []
    [found] = comparison.tables
    return found.there, found.here, found.equal


def test_derived_tables_are_listed_and_not_compared() -> None:
    one, other = Contents({"a": Table(1, "x", derived=True)}), Contents({"a": Table(2, "y", derived=True)})
    assert line(one, other) == (1, 2, None)
    assert line(one, Contents()) == (1, None, None)
    assert line(Contents(), one) == (None, 1, None)
    assert line(Contents({"a": Table(1, "x")}), Contents({"a": Table(1, "x")})) == (1, 1, True)


def test_what_an_older_archive_calls_derived_is_compared_where_it_is_not() -> None:
    there = Contents({"a": Table(1, "x", derived=True)})
    assert line(there, Contents({"a": Table(1, "x")})) == (1, 1, True)
    for here in (Table(1, "y"), Table(0, "z")):
        [fault] = verification.compare(there, Contents({"a": here})).faults
        assert fault.startswith("table a ha")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("CHECK ((a = ANY (ARRAY['x'::text, 'y'::text])))", "CHECK ((a = ANY ((ARRAY['x'::text, 'y'::text])::text[])))"),
        (
            "CHECK (((a)::text = ANY ((ARRAY['x'::character varying, 'y'::character varying])::text[])))",
            "CHECK (((a)::text = ANY (ARRAY[('x'::character varying)::text, ('y'::character varying)::text])))",
        ),
        ("'x'::character varying(10)", "'x'"),
    ],
)  # fmt: skip
def test_another_wording_of_the_same_definition_is_no_fault(one: str, other: str) -> None:
    for kind in ("constraints", "indexes", "columns", "views"):
        comparison = verification.compare(Contents(**{kind: {"a": one}}), Contents(**{kind: {"a": other}}))
        assert comparison.faults == []
        assert comparison.counts[kind] == (1, 1, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("CHECK (a > 1)", "CHECK (a > 2)"),
        ("CHECK (a > 1)", "CHECK (a >= 1)"),
        ("CREATE INDEX a ON b USING hnsw (c) WITH (m='16')", "CREATE INDEX a ON b USING hnsw (c) WITH (m='17')"),
        ("character varying(10)", "character varying(20)"),
        ("text default ", "text not null default "),
        ("vector(384) default ", "vector(768) default "),
    ],
)
def test_another_definition_is_a_fault(one: str, other: str) -> None:
    [fault] = verification.compare(Contents(columns={"a": one}), Contents(columns={"a": other})).faults
    assert fault == f"columns that differ: a ({one} there, {other} here)"


def test_between_majors_views_and_routines_count_by_name_alone() -> None:
    there = Contents(views={"a": "x", "b": "x"}, routines={"c": "x"}, triggers={"d": "x"})
    here = Contents(views={"a": "y"}, routines={"c": "y"}, triggers={"d": "y"})
    comparison = verification.compare(there, here, same_major=False)
    assert comparison.faults == ["views missing here: b", "triggers that differ: d (x there, y here)"]
    assert comparison.counts["views"] == (2, 1, 1)
    assert comparison.counts["routines"] == (1, 1, 1)


def test_where_a_sequence_stands_does_not_matter_here() -> None:
    one, other = sequence(1), sequence(99, called=False)
    assert verification.compare(Contents(sequences={"a": one}), Contents(sequences={"a": other})).faults == []


def test_versions_of_extensions_are_noted_and_others_here_do_not_matter() -> None:
    comparison = verification.compare(
        Contents(extensions={"a": "1", "b": "1"}), Contents(extensions={"a": "2", "b": "1", "c": "3"})
    )
    assert comparison.faults == []
    assert comparison.notes == ["extension a was 1, and is 2 here"]
