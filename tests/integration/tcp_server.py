"""A PostgreSQL that others reach over TCP with a password, as memories are migrated from."""

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from harness import free_ports, give_to_the_sidecar, reachable_directory
from postgres_server import ENV, SETTINGS, UNPRIVILEGED, process_of
from psycopg import sql

WITHIN = 60.0  # seconds, for what takes one or two


@dataclass
class TcpServer:
    """A running server: superuser `postgres`, and role `anna` with a password, which owns the databases made here.

    Attributes:
        bindir: of its installation.
        directory: of its data and log.
        port: on 127.0.0.1.
        password: of both roles.

    """

    bindir: Path
    directory: Path
    port: int
    password: str

    def url(self, database: str, user: str = "anna") -> str:
        """Return what a migration is given."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str, user: str = "anna") -> "psycopg.Connection[Any]":
        """Connect, in autocommit."""
        return psycopg.connect(self.url(database, user), password=self.password, autocommit=True)

    def execute(self, database: str, *statements: Any, user: str = "anna") -> None:
        """Run statements, each for itself."""
        with self.connect(database, user) as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self, database: str, query: Any) -> list[Any]:
        """Return what a query gives."""
        with self.connect(database, "postgres") as connection:
            return connection.execute(query).fetchall()

    def make_database(self, name: str, *extensions: str) -> None:
        """Make a database of anna's, with extensions of the superuser's."""
        owned = sql.SQL("CREATE DATABASE {} OWNER anna TEMPLATE template0").format(sql.Identifier(name))
        self.execute("postgres", owned, user="postgres")
        for extension in extensions:
            self.execute(name, sql.SQL("CREATE EXTENSION {}").format(sql.Identifier(extension)), user="postgres")

    def read_only(self, database: str) -> bool:
        """Tell whether new sessions of a database may not write."""
        with self.connect(database) as connection:
            [(found,)] = connection.execute("SHOW default_transaction_read_only").fetchall()
        return bool(found == "on")


@contextlib.contextmanager
def running_tcp_server(bindir: Path) -> Iterator[TcpServer]:
    """Make a cluster, run it on a free port of loopback, and stop it."""
    with reachable_directory() as directory:
        directory.chmod(0o755)
        give_to_the_sidecar(directory)
        server = TcpServer(bindir, directory, free_ports(1)[0], secrets.token_urlsafe(12))
        _initdb(server)
        with _running(server):
            role = sql.SQL("CREATE ROLE anna LOGIN PASSWORD {}").format(sql.Literal(server.password))
            server.execute("postgres", role, user="postgres")
            yield server


def _argv(server: TcpServer, program: str, *arguments: str) -> list[str]:
    # It ends with us, whatever ends us: nobody else would stop it.
    return ["/usr/bin/setpriv", *UNPRIVILEGED, "--pdeathsig=INT", "--", str(server.bindir / program), *arguments]


def _initdb(server: TcpServer) -> None:
    password = server.directory / "password"
    password.write_text(server.password)
    give_to_the_sidecar(password)
    arguments = [
        f"--pgdata={server.directory / 'pgdata'}",
        "--username=postgres",
        "--auth=scram-sha-256",
        f"--pwfile={password}",
        "--encoding=UTF8",
        "--locale=C.UTF-8",
        "--no-sync",
        "--no-instructions",
    ]
    done = subprocess.run(
        _argv(server, "initdb", *arguments), env=ENV, cwd="/", check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def _running(server: TcpServer) -> Iterator[None]:
    settings = {**SETTINGS, "listen_addresses": "127.0.0.1", "port": str(server.port), "unix_socket_directories": ""}
    options = [f"-c{name}={value}" for name, value in settings.items()]
    argv = _argv(server, "postgres", "-D", str(server.directory / "pgdata"), *options)
    with process_of(argv, server.directory / "log", lambda: server.execute("postgres", "SELECT 1", user="postgres")):
        yield
