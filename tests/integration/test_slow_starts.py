"""A crash recovery and a migration that take their time: alive, not ready, with what goes on told, and never cut short."""

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from typing import Any

import psycopg
import pytest
from faults import Alive
from harness import RunningSidecar, call, wait_for
from postgres_server import UNPRIVILEGED

from sidecar import postgres_binaries

# Rows whose log is to be replayed, of some 300 bytes each.
SHORT = int(os.environ.get("HINDSIGHT_TEST_RECOVERY_ROWS", "700000"))
HUNG_AFTER = 5.0  # seconds, the shortest that can be set
LONG = int(os.environ.get("HINDSIGHT_TEST_LONG_RECOVERY_ROWS", "20000000"))


def crash_with_a_long_log(sidecar: RunningSidecar, rows: int) -> None:
    """Write rows into the data directory of a stopped sidecar, with checkpoints held off, and kill Postgres there."""
    program = postgres_binaries.choose(None, int((sidecar.pgdata / "PG_VERSION").read_text())).program("postgres")
    argv = [program, "-D", str(sidecar.pgdata), "-k", str(sidecar.run_dir), "-c", "listen_addresses="]
    for setting in ("max_wal_size=64GB", "checkpoint_timeout=1h", "shared_buffers=256MB", "synchronous_commit=off"):
        argv += ["-c", setting]
    with subprocess.Popen(
        ["/usr/bin/setpriv", *UNPRIVILEGED, *argv], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            with wait_for(lambda: connected(sidecar), 30, "a connection") as connection:
                connection.execute("CREATE TABLE public.crashed (id uuid PRIMARY KEY, other uuid, text text)")
                connection.execute("CREATE INDEX ON public.crashed (other)")
                connection.execute(
                    "INSERT INTO public.crashed SELECT gen_random_uuid(), gen_random_uuid(), repeat('x', 20) "
                    f"FROM generate_series(1, {rows})"
                )
                connection.execute("SET synchronous_commit = on")
                connection.execute("CREATE TABLE public.committed ()")
        finally:
            doomed = sidecar.postgres_pids()
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):  # a worker that had its end anyway
                    os.kill(pid, signal.SIGKILL)
            server.wait()
    wait_for(lambda: not sidecar.postgres_pids(), 20, "Postgres gone")


def connected(sidecar: RunningSidecar) -> "psycopg.Connection[Any] | None":
    try:
        return psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight", autocommit=True)
    except psycopg.OperationalError:
        return None


def recover(sidecar: RunningSidecar, at_least: float, within: float) -> None:
    """Start it, and check what it tells while Postgres replays its log for at least so many seconds."""
    told: list[dict[str, Any]] = []
    began = time.monotonic()
    sidecar.start()
    with Alive(sidecar, from_now=False) as alive:
        body = sidecar.wait_state("starting(recovery)", 60)
        pid = body["components"]["postgres"]["pid"]
        while body["subject"] == "recovery":
            assert time.monotonic() - began < within
            progress = body["components"]["postgres"]["recovery"]
            if progress is not None and (not told or progress != told[-1]):
                told.append(progress)
                assert body["detail"].startswith("Postgres ")
            assert body["components"]["postgres"]["pid"] == pid, "it was not cut short"
            assert call(sidecar.control_port, "/readyz").status == 503
            assert call(sidecar.control_port, "/startupz").status == 503
            assert call(sidecar.port, "/health").status == 503
            body = wait_for(lambda seen=progress: changed(sidecar, seen), 30, "something else")
    alive.check()
    figures = [one["percent"] for one in told if one["percent"] is not None]
    assert figures == sorted(figures)
    assert len(set(figures)) >= 3, told
    assert all(0 <= figure <= 100 for figure in figures)
    longest = max(one["seconds"] or 0 for one in told)
    assert longest >= at_least, f"a recovery of {longest} s shows nothing"


def changed(sidecar: RunningSidecar, progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the health where a recovery has come further than this, or is over."""
    body = sidecar.health()
    return body if body["subject"] != "recovery" or body["components"]["postgres"]["recovery"] != progress else None


def migrate_slowly(sidecar: RunningSidecar) -> None:
    """Keep hindsight-api from migrating for longer than one that hangs may live, and its tables from everybody."""
    # hindsight_api.migrations: whoever migrates a schema holds this lock, and all others wait for it.
    lock = int.from_bytes(hashlib.sha256(b"public").digest()[:8], "big") % 2**31
    with wait_for(lambda: connected(sidecar), 60, "a connection") as holding:
        holding.execute("SELECT pg_advisory_lock(%s)", (lock,))
        body = sidecar.wait_state("starting(hindsight-api)")
        pid = wait_for(lambda: sidecar.health()["components"]["hindsight-api"]["pid"], 30, "hindsight-api started")
        with Alive(sidecar) as alive, holding.transaction():
            holding.execute("LOCK TABLE public.memory_units")
            until = time.monotonic() + HUNG_AFTER + 5
            while time.monotonic() < until:
                body = sidecar.health()
                assert (body["state"], body["subject"]) == ("starting", "hindsight-api"), body
                assert body["components"]["hindsight-api"]["pid"] == pid, "it was not replaced"
                assert body["components"]["postgres"]["state"] == "up"
                assert call(sidecar.control_port, "/startupz").status == 503
        alive.check()
    sidecar.wait_ready()
    assert sidecar.pid_of("hindsight-api") == pid


@pytest.mark.parametrize(
    ("rows", "at_least", "within"),
    [(SHORT, 1.0, 120.0), pytest.param(LONG, 60.0, 1500.0, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_a_long_recovery_and_a_long_migration_are_told_and_left_alone(
    make_sidecar: Any, rows: int, at_least: float, within: float
) -> None:
    sidecar = make_sidecar(HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}").start_ready()
    sidecar.retain("crash", ["The harbour pilot knows every sandbank by its birds."])
    assert sidecar.stop() == 0
    crash_with_a_long_log(sidecar, rows)
    recover(sidecar, at_least, within)
    migrate_slowly(sidecar)
    health = sidecar.health()["components"]["postgres"]
    assert (health["recovery"], health["restarts"]) == (None, 0)
    with psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight") as connection:
        assert connection.execute("SELECT count(*) FROM public.crashed").fetchone() == (rows,)
        assert connection.execute("SELECT to_regclass('public.committed') IS NOT NULL").fetchone() == (True,)
    assert len(sidecar.recall("crash", "Who knows the sandbanks?")) == 1
    assert sidecar.stop() == 0
