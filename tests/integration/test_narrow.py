"""A container that is short of everything but space: shared memory, descriptors, memory; and one whose clock jumps."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from faults import Alive, needs_root, process_of, sql
from harness import RunningSidecar, store_as_they_are, wait_for
from postgres_server import UNPRIVILEGED

from sidecar import postgres_binaries

CGROUP = Path("/sys/fs/cgroup/memory")  # of version 1; of version 2 the root is the hierarchy
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
BANK = "narrow"
TEXT = "The glassblower keeps a kiln behind the bakery."


def in_namespace(*lines: str) -> list[str]:
    """Return how a program is run in a mount namespace of its own, after some lines of shell."""
    return ["/usr/bin/unshare", "--mount", "/bin/sh", "-euc", "\n".join([*lines, 'exec "$@"']), "sh"]


def oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@contextlib.contextmanager
def limited_memory(name: str, limit: int) -> Iterator[Path | None]:
    """Make a group of processes that may use so much memory in sum; None where that cannot be done here."""
    second = (CGROUP.parent / "cgroup.controllers").exists()
    group = (CGROUP.parent if second else CGROUP) / name
    try:
        group.mkdir()
        (group / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text().split(), 20, "the group empty")
        group.rmdir()


# Takes memory for as long as a process is there.
HOG = """
import os, sys, time
process, taken = os.pidfd_open(int(sys.argv[1])), []
import select
while not select.select([process], [], [], 0.005)[0]:
    taken.append(b"x" * (4 << 20))
"""


@needs_root
def test_little_shared_memory_few_descriptors_and_then_too_little_memory(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    with limited_memory(f"hindsight-test-{os.getpid()}", 2 * 1024**3) as group:
        join = [f"echo $$ > {group}/cgroup.procs"] if group else []
        sidecar.start(
            in_namespace(*join, "mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm", "ulimit -n 256")
        ).wait_ready()
        check_few_descriptors(sidecar)
        check_little_shared_memory(sidecar)
        check_too_little_memory(sidecar, group)
        assert sidecar.stop() == 0


def check_few_descriptors(sidecar: RunningSidecar) -> None:
    store_as_they_are(sidecar, BANK, [TEXT])
    assert sidecar.process is not None
    with Alive(sidecar) as alive, ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda _: sidecar.recall(BANK, "Where is the kiln?"), range(120)))
    assert all(results[0]["text"] == TEXT for results in found)
    assert alive.failed == []


def check_little_shared_memory(sidecar: RunningSidecar) -> None:
    """Build an index with helpers, which share what they sort: where that lies in /dev/shm it fails."""
    with sql(sidecar) as connection:
        connection.execute(
            "CREATE TABLE public.vectors AS SELECT i, (SELECT array_agg(random()) FROM generate_series(1, 16 + i * 0))::vector(16) AS v "
            "FROM generate_series(1, 20000) i"
        )
        connection.execute("ALTER TABLE public.vectors SET (parallel_workers = 2)")
        connection.execute("SET maintenance_work_mem = '64MB'")
        connection.execute("CREATE INDEX ON public.vectors USING hnsw (v vector_l2_ops)")
        connection.execute("DROP TABLE public.vectors")


def check_too_little_memory(sidecar: RunningSidecar, group: Path | None) -> None:
    before = sidecar.health()["components"]
    postgres, api = before["postgres"]["pid"], before["hindsight-api"]["pid"]
    assert sidecar.process is not None
    own = oom_score_adj(sidecar.process.pid)
    assert oom_score_adj(postgres) == oom_score_adj(process_of(sidecar, "checkpointer")) == own
    assert oom_score_adj(api) >= own + 100 or oom_score_adj(api) == 1000
    if group is not None:
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        hog = ["/bin/sh", "-euc", script, "sh", sys.executable, "-c", HOG, str(api)]
        # It may be killed as well: before the memory of the one that was killed first is given back.
        assert subprocess.run(hog, check=False, timeout=120).returncode in (0, -signal.SIGKILL)
    else:
        os.kill(api, signal.SIGKILL)
    wait_for(lambda: sidecar.health()["components"]["hindsight-api"]["pid"] not in (None, api), 30, "a new one")
    sidecar.wait_ready()
    after = sidecar.health()["components"]
    assert after["postgres"] == before["postgres"], "Postgres was left alone"
    assert after["hindsight-api"]["restarts"] == before["hindsight-api"]["restarts"] + 1
    assert sidecar.recall(BANK, "Where is the kiln?")[0]["text"] == TEXT


def with_a_clock(sidecar: RunningSidecar, clock: Path) -> dict[str, str]:
    """Let every child of a sidecar that was not started take its time of day from a file; return what it itself needs."""
    preload = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    sidecar.settings["HINDSIGHT_SIDECAR_PASS_ENV"] = ",".join(preload)
    # PostgreSQL gets no variable of ours, so its programs are reached through scripts.
    real = postgres_binaries.choose(None, None).bindir
    bindir = sidecar.home / "pg" / "bin"
    bindir.mkdir(parents=True)
    (bindir.parent / "share").symlink_to(real.parent / "share")
    exports = "".join(f"export {name}='{value}'\n" for name, value in preload.items())
    for program in real.iterdir():
        script = bindir / program.name
        script.write_text(f"#!/bin/sh\n{exports}exec '{program}' \"$@\"\n")
        script.chmod(0o755)
    sidecar.settings["HINDSIGHT_SIDECAR_PG_BINDIR"] = str(bindir)
    return preload


def now_in_postgres(sidecar: RunningSidecar) -> datetime:
    with sql(sidecar) as connection:
        row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    assert isinstance(row[0], datetime)
    return row[0]


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
def test_a_clock_that_jumps_an_hour_forth_and_back(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    clock = sidecar.home / "clock"
    clock.write_text("+0\n")
    clock.chmod(0o644)
    preload = with_a_clock(sidecar, clock)
    # Its semaphore belongs to whoever is preloaded first, so that is no longer root.
    exports = [f"{name}={value}" for name, value in preload.items()]
    sidecar.start(["/usr/bin/setpriv", *UNPRIVILEGED, "/usr/bin/env", *exports]).wait_ready()
    store_as_they_are(sidecar, BANK, [TEXT])
    before = sidecar.health()["components"]
    for offset, hours in (("+3600", 1), ("-3600", -1), ("+0", 0)):
        clock.write_text(f"{offset}\n")
        due = datetime.now(UTC) + timedelta(hours=hours)
        wait_for(lambda due=due: abs(now_in_postgres(sidecar) - due) < timedelta(minutes=1), 20, "the other time")
        # Longer than any age of a sample, and than any pause between two looks: nothing of ours asks the time of day.
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            health = sidecar.health()
            assert health["status"] == "healthy", health
            assert 0 <= health["sample_age_seconds"] < 3
            assert sidecar.recall(BANK, "Where is the kiln?")[0]["text"] == TEXT
        text = f"It was stored at {offset}."
        sidecar.retain(BANK, [text])
        assert text in [one["text"] for one in sidecar.memory(f"/banks/{BANK}/memories/list").json()["items"]]
    assert sidecar.health()["components"] == before
    clock.write_text("-3600\n")
    os.kill(before["hindsight-api"]["pid"], signal.SIGKILL)  # a backoff that would be an hour long by the time of day
    wait_for(lambda: sidecar.health()["components"]["hindsight-api"]["restarts"] == 1, 10, "its end seen")
    sidecar.wait_ready(60)
    began = time.monotonic()
    assert sidecar.stop() == 0
    assert time.monotonic() - began < 9
