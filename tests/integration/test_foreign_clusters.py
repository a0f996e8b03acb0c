"""What others may have set up in a cluster keeps nobody from reading its memories, and the cluster is not written to."""

import os
import select
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import seed_cluster
from harness import give_to_the_sidecar, reachable_directory
from postgres_server import ENV, UNPRIVILEGED, run

from sidecar import foreign_cluster
from sidecar.errors import RefusedError
from sidecar.foreign_cluster import Foreign
from sidecar.initscripts import InitScripts
from sidecar.operations import Kind, Operation
from sidecar.programs import Programs
from sidecar.side_server import SideServer

SCRIPTS = Path(__file__).parents[2] / "initscripts"
_LOCK_OUT = "EVENT TRIGGER lock_out"
MEMORIES = (
    "CREATE EXTENSION vector",
    "CREATE TABLE memory_units (id int PRIMARY KEY, text text, embedding vector(3))",
    "INSERT INTO memory_units SELECT i, 'memory ' || i, '[1,2,3]' FROM generate_series(1, 50) AS i",
)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """Make a small one, once."""
    with reachable_directory() as directory:
        pgdata = directory / "made" / "pgdata"
        seed_cluster.make_empty(pgdata)
        with seed_cluster.running(pgdata) as socket_dir:
            for statement in MEMORIES:
                seed_cluster.execute(socket_dir, statement)
        yield pgdata


@pytest.fixture
def pgdata(made: Path) -> Iterator[Path]:
    with reachable_directory() as directory:
        copy = directory / "volume" / "pgdata"
        shutil.copytree(made, copy, symlinks=True)
        give_to_the_sidecar(copy.parent)
        seed_cluster.give_back(copy)
        yield copy


def side_server(pgdata: Path) -> SideServer:
    """Return how a server is run on a copy; as root, the server alone without root's rights."""
    socket_dir = pgdata.parent.parent / "side"
    socket_dir.mkdir(exist_ok=True)
    give_to_the_sidecar(socket_dir)
    binaries = seed_cluster.binaries()
    if os.geteuid() == 0:
        programs = pgdata.parent.parent / "bin"
        programs.mkdir(exist_ok=True)
        for name in ("postgres", "pg_dump"):
            without = ["/usr/bin/setpriv", *UNPRIVILEGED, "--"] if name == "postgres" else []
            command = " ".join([*without, binaries.program(name)])
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        binaries = replace(binaries, bindir=programs)
    copy = pgdata.with_name("pgdata.adopting-copy")
    return SideServer(copy, socket_dir, Programs(binaries, ENV, Path("/")), InitScripts(SCRIPTS, Path("/"), "error"))


def memories(pgdata: Path) -> int:
    found = Foreign.seen(pgdata, seed_cluster.binaries().major)
    directory = pgdata.with_name("pgdata.adopting-dump")
    fetched = run(foreign_cluster.fetch(found, side_server(pgdata), directory, None, Operation(Kind.ADOPT)))
    return fetched.manifest.contents.memories


def configure(pgdata: Path, line: str) -> None:
    with (pgdata / "postgresql.conf").open("a") as conf:
        conf.write(f"{line}\n")


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(
            (
                "ALTER DATABASE template1 SET session_preload_libraries = 'not_here'",
                "ALTER DATABASE postgres SET session_preload_libraries = 'not_here'",
            ),
            id="a library that is not here",
        ),
        pytest.param(
            ("ALTER DATABASE postgres SET default_transaction_read_only = on",), id="a database that is not written to"
        ),
        pytest.param(("CREATE ROLE weak", "ALTER DATABASE postgres SET role = 'weak'"), id="another role"),
        pytest.param(
            (
                "CREATE ROLE postgres LOGIN CONNECTION LIMIT 0",
                "ALTER ROLE postgres IN DATABASE postgres SET search_path = 'nowhere'",
                "ALTER ROLE ALL SET statement_timeout = '1ms'",
            ),
            id="settings of roles",
        ),
        pytest.param(
            (
                "CREATE FUNCTION lock_out() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no'; END$$",
                f"CREATE {_LOCK_OUT} ON login EXECUTE FUNCTION lock_out(); ALTER {_LOCK_OUT} ENABLE ALWAYS",
            ),
            id="a login trigger",
        ),
        pytest.param(
            ("CREATE DATABASE half", "UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'half'"),
            id="a database that was being dropped",
        ),
        pytest.param(
            ("UPDATE pg_database SET datallowconn = false WHERE datname = 'template1'",), id="a closed template1"
        ),
        pytest.param(
            (
                "SELECT pg_create_physical_replication_slot('one', true)",
                "SELECT pg_create_logical_replication_slot('other', 'pgoutput')",
            ),
            id="slots",
        ),
    ],
)
def test_what_is_set_up_in_it(statements: tuple[str, ...], pgdata: Path) -> None:
    configure(pgdata, "wal_level = logical")
    with seed_cluster.running(pgdata) as socket_dir:
        for statement in statements:
            seed_cluster.execute(socket_dir, statement)
    before = seed_cluster.fingerprint(pgdata)
    assert memories(pgdata) == 50
    assert seed_cluster.fingerprint(pgdata) == before


def test_a_subscription_is_not_taken_part_in(pgdata: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as publisher:
        address = f"host=127.0.0.1 port={publisher.getsockname()[1]}"
        with seed_cluster.running(pgdata) as socket_dir:
            for statement in (
                f"CREATE SUBSCRIPTION one CONNECTION '{address}' PUBLICATION other WITH (connect = false, slot_name = one)",
                "ALTER SUBSCRIPTION one ENABLE",
            ):
                seed_cluster.execute(socket_dir, statement)
            publisher.settimeout(20)
            publisher.accept()[0].close()  # a server that takes part in it comes here
        while select.select([publisher], [], [], 0)[0]:
            publisher.accept()[0].close()
        assert memories(pgdata) == 50
        assert select.select([publisher], [], [], 0)[0] == []


def test_what_cannot_be_run_is_refused_in_its_own_words(pgdata: Path) -> None:
    configure(pgdata, "max_prepared_transactions = 5")
    with seed_cluster.running(pgdata) as socket_dir:
        seed_cluster.execute(socket_dir, "BEGIN; DELETE FROM memory_units WHERE id = 1; PREPARE TRANSACTION 'one'")
    before = seed_cluster.fingerprint(pgdata)
    with pytest.raises(RefusedError, match=r"maximum number of prepared transactions reached .*pg_dump -Fc"):
        memories(pgdata)
    assert seed_cluster.fingerprint(pgdata) == before
