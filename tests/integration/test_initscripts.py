"""The init scripts by hand: they need their environment and nothing of the sidecar."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from harness import give_to_the_sidecar, reachable_directory, wait_for

from sidecar import cluster, postgres_binaries

SCRIPTS = Path(sys.prefix) / "share/hindsight-sidecar/initscripts"
UNPRIVILEGED = ["setpriv", "--reuid=hindsight", "--regid=hindsight", "--clear-groups"] if os.geteuid() == 0 else []


@pytest.fixture
def volume() -> Iterator[Path]:
    with reachable_directory() as directory:
        give_to_the_sidecar(directory)
        yield directory


def environment(volume: Path) -> dict[str, str]:
    binaries = postgres_binaries.choose(None, None)
    return {
        "PATH": "/usr/bin:/bin",
        "PGDATA": str(volume / "pgdata"),
        "PG_BINDIR": str(binaries.bindir),
        "PG_SOCKET_DIR": str(volume),
        "POSTGRES_SETTINGS": "max_connections=10 shared_buffers=16MB",
    }


def initdb(volume: Path, **changes: str) -> "subprocess.CompletedProcess[str]":
    argv = [*UNPRIVILEGED, str(SCRIPTS / "10-initdb")]
    env = environment(volume) | changes
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_a_cluster_by_hand(volume: Path) -> None:
    made = initdb(volume)
    assert made.returncode == 0, made.stderr
    pgdata = volume / "pgdata"
    assert pgdata.stat().st_mode & 0o7777 == 0o700
    assert (pgdata / cluster.MARKER).is_file()
    assert [path.name for path in volume.iterdir()] == ["pgdata"]
    assert postgres_binaries.is_shut_down(postgres_binaries.choose(None, 18), pgdata)

    pgdata.chmod(0o2770)
    assert initdb(volume).returncode == 0
    assert pgdata.stat().st_mode & 0o777 == 0o700

    argv = [*UNPRIVILEGED, str(SCRIPTS / "20-postgres")]
    with (volume / "log").open("w") as log:
        server = subprocess.Popen(argv, env=environment(volume), stdout=log, stderr=log)
    try:
        # Its socket is there before it lets anybody in; the last line of this file says when.
        told = pgdata / "postmaster.pid"
        wait_for(lambda: told.is_file() and told.read_text().rstrip().endswith("ready"), 20, "an open server")
        assert facts(volume) == {
            "data_checksums": "on",
            "fsync": "on",
            "listen_addresses": "",
            "max_connections": "10",
            "provider": "b C.UTF-8",
            "extensions": ["btree_gin public", "pg_trgm public", "vector public"],
            "hindsight is superuser": False,
            "left out by pg_dump": 0,
        }
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def facts(volume: Path) -> dict[str, object]:
    with psycopg.connect(host=str(volume), user="hindsight", dbname="hindsight", autocommit=True) as connection:

        def one(query: str) -> object:
            row = connection.execute(query).fetchone()
            assert row is not None
            return row[0]

        return {
            **{
                name: one(f"SHOW {name}") for name in ("data_checksums", "fsync", "listen_addresses", "max_connections")
            },
            "provider": one(
                "SELECT datlocprovider::text || ' ' || datlocale FROM pg_database WHERE datname = current_database()"
            ),
            "extensions": one(
                "SELECT array_agg(extname || ' ' || extnamespace::regnamespace ORDER BY extname) FROM pg_extension "
                "WHERE extname <> 'plpgsql'"
            ),
            # What has a number below this counts as PostgreSQL's own.
            "left out by pg_dump": one(
                "SELECT (SELECT count(*) FROM pg_extension WHERE oid < 16384 AND extname <> 'plpgsql') "
                "+ (SELECT count(*) FROM pg_roles WHERE oid < 16384 AND rolname = 'hindsight') "
                "+ (SELECT count(*) FROM pg_namespace WHERE oid < 16384 AND nspname = 'hindsight_sidecar') "
                "+ (SELECT count(*) FROM pg_database WHERE oid < 16384 AND datname = 'hindsight')"
            ),
            "hindsight is superuser": one("SELECT rolsuper FROM pg_roles WHERE rolname = 'hindsight'"),
        }


def test_what_a_killed_attempt_left_is_made_anew(volume: Path) -> None:
    leftover = volume / "pgdata.making"
    leftover.mkdir()
    (leftover / "PG_VERSION").write_text("18\n")
    for path in (leftover, leftover / "PG_VERSION"):
        give_to_the_sidecar(path)
    assert initdb(volume).returncode == 0
    assert not leftover.exists()
    assert (volume / "pgdata" / cluster.MARKER).is_file()


def test_a_directory_that_holds_something_is_not_replaced(volume: Path) -> None:
    (volume / "pgdata").mkdir()
    (volume / "pgdata" / "letter.txt").write_text("keep me")
    give_to_the_sidecar(volume / "pgdata")
    refused = initdb(volume)
    assert refused.returncode != 0
    assert (volume / "pgdata" / "letter.txt").read_text() == "keep me"


def test_a_missing_variable_is_named(volume: Path) -> None:
    refused = initdb(volume, PG_BINDIR="")
    assert refused.returncode != 0
    assert "PG_BINDIR" in refused.stderr
