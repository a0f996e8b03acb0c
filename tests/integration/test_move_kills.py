"""kill -9 of everything that moves memories, wherever it is: what is served next is the old or the new, whole."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made
import psycopg
import pytest
from administrator import archive_of, ask, finished
from harness import RunningSidecar, reachable_directory, store_as_they_are, wait_for
from postgres_server import Server, run, running, running_server

from sidecar import archive, cluster, contents, database, dumping, processes, staging, swapping
from sidecar.api_environment import ROLE
from sidecar.archive import DUMP, Archive
from sidecar.contents import Contents
from sidecar.operations import Kind, Operation

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "fixtures/hindsight_like.sql"
WITHIN = 30.0  # seconds, for what takes one
SHORTLY = 5.0  # seconds in which what a dead sidecar had started has to end
KEPT = "hindsight_kept_20240102t030405z"
CONNECTED = "SELECT pid FROM pg_stat_activity WHERE application_name = 'hindsight-sidecar'"
LOADING, INDEXING = 1, 2  # advisory locks that hold a load and an index's build where they are
WITH_STANDBYS = {"wal_level": "replica", "max_wal_senders": "1"}
# A row and an index that wait for whoever has the lock, and go on at once where nobody has it.
NEWER = f"""
DELETE FROM memory_links;
DELETE FROM memory_units WHERE bank_id = 'second';
CREATE FUNCTION held(of bigint, key integer) RETURNS bigint LANGUAGE plpgsql IMMUTABLE
    AS 'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(key); RETURN of; END';
CREATE TABLE loaded_late (n bigint CHECK (public.held(n, {LOADING}) = n));
INSERT INTO loaded_late VALUES (1);
CREATE INDEX indexed_late ON loaded_late (public.held(n, {INDEXING}));
"""
# What is served is large enough for a dump to take a moment.
LARGE = """
CREATE TABLE attachments AS SELECT i, (SELECT decode(string_agg(md5(i || '.' || j), ''), 'hex') FROM generate_series(1, 500) AS j) AS content
FROM generate_series(1, 1000) AS i
"""


class Mover:
    """A mover, and the job that it does."""

    def __init__(self, server: Server, volume: Path) -> None:
        self.log = volume / "log"
        with (volume / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", HERE / "mover.py", server.directory, volume],
                env={"PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "PATH": "/usr/bin:/bin"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        self._rest = b""
        self.pid = 0
        self.moments: list[str] = []

    def begin(self, job: str, **options: Any) -> "Mover":
        self.moments, self.log.write_bytes(b"")
        self._say({"job": job, "log": str(self.log), **options})
        self.pid, self.moments = self._next()["pid"], []
        return self

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + WITHIN
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the mover says nothing after {self.moments[-1:]}"
            piece = self._process.stdout.read(65536)
            assert piece, "the mover ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def until(self, moment: str) -> "Mover":
        """Let it go on until it waits there."""
        while True:
            told = self._next()
            assert "at" in told, f"{moment!r} did not come: {told} after {self.moments}"
            self.moments.append(told["at"])
            if told["at"] == moment:
                return self
            self._say("go on")

    def go_on(self) -> "Mover":
        self._say("go on")
        return self

    def finish(self) -> dict[str, Any]:
        """Let it go on to its end, and return what came of it."""
        found: dict[str, Any] = {}
        while "ended" not in (told := self._next()):
            if "at" in told:
                self.moments.append(told["at"])
                self._say("go on")
            found |= told
        self.pid = 0
        assert "failed" not in found, found
        done: dict[str, Any] = found["done"]
        return done

    def kill(self) -> None:
        """Kill what it does; a test that failed may have left it half done."""
        os.kill(self.pid, signal.SIGKILL)
        while "ended" not in self._next():
            pass
        self.pid = 0

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def end(self) -> None:
        """End it; a job that waits ends with it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(10)


@dataclass
class Place:
    """A server with memories, a volume with an archive of other ones, and who moves them."""

    server: Server
    volume: Path
    restarts: contextlib.ExitStack
    old: Contents = field(default_factory=Contents)
    new: Contents = field(default_factory=Contents)
    dump: str = ""

    def __post_init__(self) -> None:
        server = self.server
        server.execute(SCRIPT.read_text(encoding="utf-8"), user="hindsight")
        server.make_database("hindsight", "new_memories")
        server.execute(NEWER, database="new_memories", user="hindsight")
        server.execute(LARGE, user="hindsight")
        server.execute("ALTER DATABASE hindsight RENAME TO old_memories", database="postgres")
        self.old, self.new = self.read("old_memories"), self.read("new_memories")
        made = run(
            dumping.dump(
                server.address("new_memories"), server.programs, self.dumps, Operation(Kind.DUMP), versions={}, model=None
            )
        )  # fmt: skip
        self.dump = made.manifest.id
        self.whole = self.volume / "new.tar"
        self.whole.write_bytes(b"".join(made.read()))
        # The cluster belongs to whom the server runs as; what the mover looks at has to be its own.
        pgdata = self.volume / "pgdata"
        pgdata.mkdir()
        shutil.copy(server.directory / "pgdata/PG_VERSION", pgdata)
        (pgdata / cluster.MARKER).touch()
        self.mover = Mover(server, self.volume)
        self.make_served("old_memories")

    @property
    def dumps(self) -> Path:
        return self.volume / "dumps"

    @property
    def scratch(self) -> Path:
        return self.server.directory / "scratch"

    def read(self, name: str) -> Contents:
        async def work() -> Contents:
            async with (
                await database.connect(self.server.directory, ROLE, name) as connection,
                connection.transaction(),
            ):
                return await contents.read(connection)

        return run(work())

    def databases(self) -> set[str]:
        return {name for (name,) in self.server.rows("SELECT datname FROM pg_database", "postgres")}

    def make_served(self, template: str) -> None:
        self.server.make_database(template, "hindsight")

    def make_kept(self, name: str = KEPT) -> None:
        self.server.make_database("new_memories", name)
        self.server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false", database="postgres")

    def begin(self, job: str, **more: Any) -> Mover:
        """Begin a job, named as in the tables below."""
        if "rollback" in job:
            self.make_kept()
        options: dict[str, Any] = {"fails": "fails" in job, "dry_run": "rehearsal" in job}
        kind = {"upload": "upload", "rehearsal": "upload", "dump": "dump", "rollback": "rollback"}.get(
            job.split(maxsplit=1)[0], "restore"
        )
        return self.mover.begin(kind, dump=self.dump, file=str(self.whole), **options, **more)

    # The next start ---------------------------------------------------------------------------------------------

    def leftovers(self) -> set[str]:
        """Return what has to be named: files and databases that are not whole."""
        files = {path.name for path in self.dumps.iterdir() if path.name.startswith(".")}
        query = f"SELECT datname FROM pg_database WHERE starts_with(datname, '{staging.STAGING}') OR datconnlimit = -2"
        return files | {name for (name,) in self.server.rows(query, "postgres")}

    def started_again(self) -> None:
        """Have what the next start does done, and look at what it left."""
        wait_for(lambda: self.programs() == [], SHORTLY, "no program of PostgreSQL left")
        wait_for(self.is_quiet, SHORTLY, "nothing more done in the server")
        left = self.leftovers() | {path.name for path in self.scratch.iterdir()}
        told = self.mover.begin("start").finish()
        named = " ".join(json.dumps(event) for event in self.mover.events())
        assert [name for name in left if name not in named] == [], "not named"
        assert self.leftovers() == set()
        assert list(self.scratch.iterdir()) == []
        assert sorted(told["dumps"]) == sorted(path.name for path in self.dumps.iterdir()), "a dump that is not listed"
        for identifier in told["dumps"]:
            found = Archive.open(self.dumps / identifier)
            assert found.hash() == found.checksum
            assert archive.hash_file(found.directory / DUMP) == found.manifest.sha256

    def programs(self) -> list[int]:
        found = []
        for process in processes.all_processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                if process.state != "Z" and str(self.server.directory).encode() in words and process.name != "postgres":
                    found.append(process.pid)
        ours = {os.getpid(), self.mover._process.pid}
        return [pid for pid in found if pid not in ours]

    def is_quiet(self) -> bool:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() "
            "AND (application_name <> '' OR usename <> 'postgres')"
        )
        with contextlib.suppress(psycopg.OperationalError):
            return bool(self.server.rows(query, "postgres") == [(0,)])
        return False

    def check(self, served: str) -> None:
        """Look at what is served, and at what is kept of what was."""
        contents = {"old": self.old, "new": self.new}
        assert self.read("hindsight") == contents[served]
        kept = [one.name for one in run(swapping.kept(self.server.directory))]
        for name in kept:
            self.server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true", database="postgres")
        found = [self.read(name) for name in kept]
        if served == "new":
            assert self.old in found, "the old one is lost"
        assert all(one in (self.old, self.new) for one in found)

    def put_back(self) -> None:
        """Make everything as it was before the first test."""
        if self.mover.pid:
            self.mover.kill()
        kept = [one.name for one in run(swapping.kept(self.server.directory))]
        doomed = [
            *kept,
            *(["hindsight"] if kept else []),
            *(n for n in self.databases() if n.startswith(staging.STAGING)),
        ]
        self.server.execute(*(f"DROP DATABASE {name} WITH (FORCE)" for name in doomed), database="postgres")
        if kept:
            self.make_served("old_memories")
        for path in self.dumps.iterdir():
            if path.name != self.dump:
                shutil.rmtree(path)

    # Victims ----------------------------------------------------------------------------------------------------

    def kill_postmaster(self) -> None:
        pid = int((self.server.directory / "pgdata/postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_for(lambda: not processes.postgres_in(self.server.directory / "pgdata"), WITHIN, "all of Postgres gone")
        (self.server.directory / "pgdata/postmaster.pid").unlink()

    def restart(self) -> None:
        self.restarts.enter_context(running(self.server, **WITH_STANDBYS))


@pytest.fixture(scope="module")
def module_place() -> Iterator[Place]:
    with reachable_directory() as volume, contextlib.ExitStack() as restarts, running_server(**WITH_STANDBYS) as server:
        place = Place(server, volume, restarts)
        try:
            yield place
        finally:
            place.mover.end()
            restarts.close()


@pytest.fixture
def place(module_place: Place) -> Iterator[Place]:
    yield module_place
    module_place.put_back()


# The mover ------------------------------------------------------------------------------------------------------

DUMPING = [
    "phase dump",
    "pg_dump --file",
    "phase hash",
    "write manifest.json",
    "manifest.json is written",
    "write archive.sha256",
    "archive.sha256 is written",
    "rename .partial-ID",
    "renamed .partial-ID",
]
STAGING = [
    "phase check",
    "pg_restore --list",
    "phase baseline",
    'CREATE DATABASE "staging" OWNER "hindsight" TEMPLATE template0',
    "the database is made",
    'CREATE EXTENSION "vector" SCHEMA "public"',
    'CREATE EXTENSION "pg_trgm" SCHEMA "public"',
    'CREATE EXTENSION "btree_gin" SCHEMA "public"',
    "phase load",
    "pg_restore --section=pre-data",
    "pg_restore --section=data",
    "phase index",
    "pg_restore --section=post-data",
    "unlinked staging.list",
    "phase analyze",
    "ANALYZE",
    "phase verify",
    "phase embed a sample",
]
EXCHANGING = ["phase swap", "hindsight-api is down", "RENAME 1", "RENAME 2", "ALLOW_CONNECTIONS false", "ALLOW_CONNECTIONS true", "COMMENT", "COMMIT"]  # fmt: skip
SERVING = ["exchanged", "phase verify again", "phase start hindsight-api", "hindsight-api is up", "phase recall", "memory calls are served"]  # fmt: skip
PUTTING_BACK = ["phase roll back", *EXCHANGING[1:]]
SERVING_AGAIN = ["exchanged", "phase serve", "hindsight-api is up", "memory calls are served"]
RECEIVING = [
    "half of it came",
    "all of it came",
    "phase unpack",
    "a piece is unpacked",
    "write manifest.json",
    "manifest.json is written",
    "unlinked upload",
]
REMOVING = ["unlinked manifest.json", "unlinked memory.dump", "rmdir .incoming-ID"]
DROPPING = 'DROP DATABASE IF EXISTS "staging" WITH (FORCE)'
PREPARING = "DROP SCHEMA IF EXISTS hindsight_sidecar CASCADE"
HASHING = "phase hash"  # of what lies on the volume
RESTORING = [*STAGING, PREPARING, *EXCHANGING, *SERVING]
# All moments of each job, in their order.
JOBS = {
    "dump": DUMPING,
    "restore": [HASHING, *RESTORING],
    "restore that fails": [HASHING, *RESTORING[:-3], *PUTTING_BACK, *SERVING_AGAIN, DROPPING],
    "upload": [*RECEIVING, *RESTORING, *REMOVING],
    "rehearsal": [*RECEIVING, *(one for one in STAGING if one != "phase baseline"), DROPPING],
    "rollback": [*EXCHANGING, "exchanged", "phase start hindsight-api", "hindsight-api is up", "memory calls are served"],
    "rollback that fails": [*EXCHANGING, "exchanged", "phase start hindsight-api", *PUTTING_BACK, *SERVING_AGAIN],
}  # fmt: skip
# Those at which a job is killed: each moment once, with what is served afterwards.
KILLS = [
    *(("dump", "", one, "old") for one in DUMPING),
    *(("restore", "", one, "old") for one in [HASHING, *STAGING, PREPARING, *EXCHANGING]),
    *(("restore", "", one, "new") for one in SERVING),
    *(("restore that fails", "phase start hindsight-api", one, "new") for one in PUTTING_BACK),
    *(("restore that fails", "phase roll back", one, "old") for one in [*SERVING_AGAIN, DROPPING]),
    *(("upload", "", one, "old") for one in RECEIVING),
    *(("upload", "memory calls are served", one, "new") for one in REMOVING),
    ("rehearsal", "", DROPPING, "old"),
    *(("rollback", "", one, "old") for one in EXCHANGING),
    *(("rollback", "", one, "new") for one in JOBS["rollback"][len(EXCHANGING) :]),
    *(("rollback that fails", "phase start hindsight-api", one, "new") for one in PUTTING_BACK),
    *(("rollback that fails", "phase roll back", one, "old") for one in SERVING_AGAIN),
]


def test_these_are_all_moments(place: Place) -> None:
    for job, moments in JOBS.items():
        done = place.begin(job).finish()
        assert done["outcome"] == ("verification-failed" if "fails" in job else "done"), done["error"]
        assert told(place.mover.moments) == told(moments)
        assert place.leftovers() == {name for name in place.leftovers() if "rehearsal" in job}
        place.started_again()
        place.check("new" if job in {"restore", "upload", "rollback"} else "old")
        place.put_back()


def told(moments: list[str]) -> list[str]:
    """Return them so that the order in which a directory is removed does not matter."""
    return sorted(moments) if REMOVING[0] in moments else moments


@pytest.mark.parametrize(("job", "after", "moment", "served"), KILLS)
def test_the_mover_is_killed(job: str, after: str, moment: str, served: str, place: Place) -> None:
    mover = place.begin(job)
    if after:
        mover.until(after).go_on()
    mover.until(moment).kill()
    place.started_again()
    place.check(served)


@pytest.mark.parametrize("moment", ["removing", "unlinked memory.dump", DROPPING])
def test_the_next_start_is_killed_too(moment: str, place: Place) -> None:
    place.mover.begin("upload", file=str(place.whole)).until("phase load").kill()
    if moment == "removing":
        moment = "unlinked manifest.json"
    place.mover.begin("start").until(moment).kill()
    place.started_again()
    place.check("old")


@pytest.mark.parametrize(
    "moment", ["renamed ID", "unlinked manifest.json", "unlinked memory.dump", "rmdir .partial-ID"]
)
def test_killed_while_a_dump_is_deleted(moment: str, place: Place) -> None:
    made = place.mover.begin("dump").finish()["report"]["dump"]["id"]
    place.mover.begin("delete_dump", dump=made).until(moment).kill()
    place.started_again()
    assert [path.name for path in place.dumps.iterdir()] == [place.dump]


# Programs and servers ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def holding(place: Place, key: int) -> Iterator[None]:
    """Hold whatever loads or indexes where it is, in the database that is being filled."""
    [name] = [name for name in place.databases() if name.startswith(staging.STAGING)]
    connection = place.server.connect(name, "postgres")
    connection.execute("SELECT pg_advisory_lock(%s)", (key,))
    try:
        yield
    finally:
        with contextlib.suppress(psycopg.OperationalError):
            connection.close()


def waiting(place: Place, kind: str) -> int:
    """Return the pid of the backend that waits for a lock."""
    query = f"SELECT pid FROM pg_locks WHERE NOT granted AND locktype = '{kind}' ORDER BY 1"
    return int(wait_for(lambda: place.server.rows(query, "postgres"), WITHIN, "a backend that waits")[0][0])


def kill(place: Place, victim: str, backend: int) -> None:
    """Kill a victim; what it leads goes on until it notices."""
    if victim == "mover":
        place.mover.kill()
    elif victim == "backend":
        os.kill(backend, signal.SIGKILL)
    elif victim == "postmaster":
        place.kill_postmaster()
        place.restart()
    else:
        leader, *workers = sorted(set(place.programs()) - {place.mover.pid})
        for pid in workers if victim == "workers" else [leader]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["mover", "pg_restore", "workers", "backend", "postmaster"])
@pytest.mark.parametrize("section", ["data", "post-data"])
def test_killed_in_the_middle_of_a_load(section: str, victim: str, place: Place) -> None:
    mover = place.mover.begin("restore", dump=place.dump).until(f"pg_restore --section={section}".replace("post-", ""))
    with holding(place, LOADING if section == "data" else INDEXING):
        mover.go_on()
        if section == "post-data":
            mover.until("pg_restore --section=post-data").go_on()
        kill(place, victim, waiting(place, "advisory"))
        if victim == "mover":
            wait_for(lambda: place.programs() == [], SHORTLY, "no pg_restore left")
            wait_for(place.is_quiet, SHORTLY, "no load left")
    if victim != "mover":
        done = mover.finish()
        assert done["outcome"] == "failed"
        assert done["error"].startswith("pg_restore ")
    place.started_again()
    place.check("old")


@pytest.mark.parametrize("victim", ["mover", "pg_dump", "backend", "postmaster"])
@pytest.mark.parametrize("where", ["before its first byte", "in its file"])
def test_killed_in_the_middle_of_a_dump(where: str, victim: str, place: Place) -> None:
    with place.server.connect(user="postgres") as blocker:
        mover = place.mover.begin("dump").until("phase dump")
        if where == "before its first byte":
            blocker.execute("BEGIN")
            blocker.execute("LOCK TABLE attachments IN ACCESS EXCLUSIVE MODE")
        mover.go_on().until("pg_dump --file").go_on()
        if where == "before its first byte":
            kill(place, victim, waiting(place, "relation"))
        else:
            wait_for(lambda: written(place) > 100_000, WITHIN, "a part of the file", every=0.001)
            kill(place, victim, blocker.info.backend_pid)
            assert not list(place.dumps.glob(".partial-*/manifest.json")), "it was over already"
        with contextlib.suppress(psycopg.OperationalError):
            blocker.close()
    if victim != "mover":
        assert mover.finish()["outcome"] == "failed"
    assert [path.name for path in place.dumps.iterdir() if not path.name.startswith(".")] == [place.dump]
    place.started_again()
    place.check("old")


def written(place: Place) -> int:
    return sum(path.stat().st_size for path in place.dumps.glob(".partial-*/memory.dump"))


@pytest.mark.parametrize(
    ("job", "moment"),
    [("dump", "pg_dump --file"), ("restore", "pg_restore --list"), ("restore", "pg_restore --section=pre-data")],
)
def test_a_program_is_killed_as_it_begins(job: str, moment: str, place: Place) -> None:
    mover = place.begin(job).until(moment)
    for pid in set(place.programs()) - {mover.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    done = mover.go_on().finish()
    assert done["outcome"] in {"failed", "refused", "done"}, done
    assert done["outcome"] != "done" or job == "restore", "it was quicker"
    place.started_again()
    place.check("new" if (job, done["outcome"]) == ("restore", "done") else "old")


# The server ends, and is there again by the time that the mover notices, or a moment later. Where nobody is connected
# just then, either may come of it: served is what the outcome says.
CRASHES = [
    ("restore", "", "the database is made", None, None),
    ("restore", "", 'CREATE EXTENSION "vector" SCHEMA "public"', "failed", "old"),
    ("restore", "", "ANALYZE", "failed", "old"),
    ("restore", "", PREPARING, "failed", "old"),
    ("restore", "", "RENAME 2", "done", "new"),
    ("restore", "", "COMMIT", "done", "new"),
    ("restore", "", "phase verify again", None, None),
    ("restore", "", "phase start hindsight-api", None, None),
    ("restore that fails", "phase roll back", "RENAME 2", "verification-failed", "old"),
    ("restore that fails", "phase roll back", "COMMIT", "verification-failed", "old"),
    ("rollback", "", "COMMIT", "done", "new"),
    ("rollback that fails", "phase roll back", "COMMIT", "verification-failed", "old"),
    ("rehearsal", "", DROPPING, "done", "old"),  # it has its report; what is not dropped is named, and dropped later
]


@pytest.mark.parametrize("victim", ["backend", "postmaster"])
@pytest.mark.parametrize(("job", "after", "moment", "outcome", "served"), CRASHES)
def test_the_server_is_killed(
    job: str, after: str, moment: str, outcome: str | None, served: str | None, victim: str, place: Place
) -> None:
    mover = place.begin(job)
    if after:
        mover.until(after).go_on()
    mover.until(moment)
    own = place.server.connect("postgres", "postgres")
    others = [pid for (pid,) in place.server.rows(f"{CONNECTED} ORDER BY backend_start DESC", "postgres")]
    kill(place, victim, (others or [own.info.backend_pid])[0])
    done = mover.go_on().finish()
    own.close()
    if outcome is None:
        outcome, served = ("done", "new") if done["outcome"] == "done" else ("failed", "old")
    assert (done["outcome"], served) == (outcome, served), done
    place.started_again()
    place.check(served or "")


@pytest.mark.parametrize(("job", "after", "outcome", "served"), [("restore", "", "done", "new"), ("restore that fails", "phase roll back", "verification-failed", "old")])  # fmt: skip
def test_the_server_is_killed_after_it_committed_and_before_it_said_so(
    job: str, after: str, outcome: str, served: str, place: Place
) -> None:
    mover = place.begin(job)
    if after:
        mover.until(after).go_on()
    mover.until("COMMIT")
    # Each commit waits for a standby that never comes, once it is in the log.
    place.server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()", database="postgres")  # fmt: skip
    wait_for(
        lambda: place.server.rows("SHOW synchronous_standby_names", "postgres") == [("nobody",)], WITHIN, "the setting"
    )
    place.server.execute(
        "CHECKPOINT", database="postgres"
    )  # by the process that has to know, which looks at its settings first
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    mover.go_on()
    try:
        [(pid,)] = wait_for(lambda: place.server.rows(query, "postgres"), WITHIN, "a commit that waits")
        os.kill(pid, signal.SIGKILL)
    finally:
        wait_for(lambda: commits_again(place), WITHIN, "a server that waits for no standby")
    done = mover.finish()
    assert done["outcome"] == outcome, done
    assert mover.moments.count("COMMIT") == (2 if after else 1), "it was not tried again"
    place.started_again()
    place.check(served)


def commits_again(place: Place) -> bool:
    with contextlib.suppress(psycopg.OperationalError):
        place.server.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()", database="postgres")  # fmt: skip
        return True
    return False


def test_what_could_not_be_put_back_is_told(place: Place) -> None:
    mover = place.begin("restore that fails", away=0.2).until("phase roll back")
    place.kill_postmaster()
    done = mover.go_on().finish()
    place.restart()
    [name] = [one.name for one in run(swapping.kept(place.server.directory))]
    assert (done["outcome"], done["report"]["kept"]) == ("failed", name)
    assert done["error"].startswith("hindsight-api ends again and again with this database; its log lines say why; and it could not be put back (")  # fmt: skip
    assert done["error"].endswith(f"is kept as {name}: serve it again with `hindsight-sidecar rollback {name}`")
    place.started_again()
    place.check("new")


def test_what_was_half_dropped_is_dropped(place: Place) -> None:
    place.make_kept()
    with place.server.connect("postgres", "postgres") as bystander:
        pid = bystander.info.backend_pid
        mover = place.mover.begin("drop_kept", name=KEPT).until('DROP DATABASE "kept" WITH (FORCE)')
        [dropping] = [one for (one,) in place.server.rows(f"{CONNECTED} AND pid <> {pid}", "postgres")]
        os.kill(pid, signal.SIGSTOP)  # the server waits for each of its processes to close what it has open
        try:
            mover.go_on()
            wait_for(lambda: KEPT in place.leftovers(), WITHIN, "a DROP DATABASE that cannot be undone")
            os.kill(dropping, signal.SIGKILL)
        finally:
            os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(psycopg.OperationalError):
            bystander.close()
    mover.kill()
    wait_for(place.is_quiet, WITHIN, "the server up again")
    assert KEPT in place.leftovers()
    place.started_again()
    assert KEPT not in place.databases()
    place.check("old")


def test_what_cannot_be_whole_is_named(place: Place) -> None:
    made = place.mover.begin("dump").finish()["report"]["dump"]["id"]
    with (place.dumps / made / DUMP).open("r+b") as file:
        file.truncate(1000)
    stray = place.server.directory / "pgdata/base/4000000000"
    stray.mkdir()
    assert place.mover.begin("start").finish() == {"dumps": [place.dump]}
    named = {event["path"]: event["event"] for event in place.mover.events() if event["level"] == "warning"}
    assert named == {
        str(place.dumps / made): "a dump is not whole, and not listed; delete it",
        str(stray): "a crash left files that belong to no database; delete them while the sidecar is stopped",
    }
    stray.rmdir()
    place.mover.begin("delete_dump", dump=made).finish()


# The real sidecar ----------------------------------------------------------------------------------------------

BANK = "moved"
TEXTS = ["The spare key is under the blue flower pot.", "The boat lies in the harbour of Rovinj."]
LATER = "The dentist wants to see Ada on Tuesday."


@pytest.fixture(scope="module")
def sidecar(model_dir: Path) -> Iterator[RunningSidecar]:
    with reachable_directory() as directory:
        directory.chmod(0o777)
        one = RunningSidecar(directory, made.api_venv(), model_dir)
        try:
            one.start_ready()
            store_as_they_are(one, BANK, TEXTS)
            yield one
        finally:
            one.end()


@pytest.fixture(scope="module")
def content(sidecar: RunningSidecar) -> bytes:
    return archive_of(sidecar)


@pytest.mark.parametrize(
    ("kind", "phase", "served"),
    [
        pytest.param("dump", "dump", "old", marks=pytest.mark.long),
        pytest.param("restore", "load", "old", marks=pytest.mark.long),
        ("restore", "swap", "old"),
        ("restore", "verify again", "new"),
        pytest.param("restore", "start hindsight-api", "new", marks=pytest.mark.long),
    ],
)
def test_the_sidecar_is_killed(kind: str, phase: str, served: str, sidecar: RunningSidecar, content: bytes) -> None:
    if LATER not in texts(sidecar):
        sidecar.retain(BANK, [LATER])
    old = sorted([*TEXTS, LATER])
    assert sorted(texts(sidecar)) == old
    was, origin = kept(sidecar), sidecar.health()["origin"]
    begun = ask(sidecar, "POST", "/v1/dumps") if kind == "dump" else ask(sidecar, "PUT", "/v1/restores", content)
    name = begun.json()["id"]
    mark = f'"operation": "{kind} {name}", "phase": "{phase}"'
    wait_for(lambda: mark in sidecar.log_text(), 60, f"phase {phase}", every=0.002)
    assert sidecar.process is not None
    sidecar.process.kill()
    sidecar.process.wait()
    left = {path.name for path in (sidecar.volume / "dumps").iterdir() if path.name.startswith(".")}
    if kind == "restore" and served == "old":
        left.add(f"{staging.STAGING}{name.replace('-', '_').lower()}")
    before = len(sidecar.log_text())
    sidecar.start_ready()
    told = sidecar.log_text()[before:]
    assert left
    assert [one for one in left if one not in told] == [], "not named"
    assert not [path.name for path in (sidecar.volume / "dumps").iterdir() if path.name.startswith(".")]
    assert list((sidecar.run_dir / "scratch").glob(f"{staging.STAGING}*")) == []
    assert sorted(texts(sidecar)) == (old if served == "old" else sorted(TEXTS))
    assert sidecar.recall(BANK, "Where can I find the key to the house?")[0]["text"] == TEXTS[0]
    assert len(kept(sidecar)) == len(was) + (served == "new")
    told_origin = sidecar.health()["origin"]
    if served == "old":
        assert told_origin == origin
    else:
        assert (told_origin["operation"], told_origin["memories"]) == (f"restore {name}", len(TEXTS))
    if phase == "start hindsight-api":
        done = finished(sidecar, ask(sidecar, "POST", "/v1/rollback"))
        assert done["outcome"] == "done", done
        assert sidecar.health()["origin"] == origin
        assert sidecar.recall(BANK, "When is the appointment for the teeth?")[0]["text"] == LATER


def texts(sidecar: RunningSidecar) -> list[str]:
    return [item["text"] for item in sidecar.memory(f"/banks/{BANK}/memories/list").json()["items"]]


def kept(sidecar: RunningSidecar) -> list[str]:
    return [one["name"] for one in ask(sidecar, "GET", "/v1/databases").json()["kept"]]
