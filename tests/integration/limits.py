"""What a sidecar may be short of beside space: shared memory, memory, descriptors; and a time of day of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from faults import process_of, sql
from harness import RunningSidecar, wait_for
from postgres_server import UNPRIVILEGED

from sidecar import postgres_binaries

CGROUP = Path("/sys/fs/cgroup/memory")  # of version 1; of version 2 the root is the hierarchy
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


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


def build_an_index_in_parallel(sidecar: RunningSidecar) -> None:
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


def check_the_kernels_choice(sidecar: RunningSidecar) -> None:
    """Check whom the kernel would end first for want of memory: hindsight-api, and Postgres not before the sidecar."""
    components = sidecar.health()["components"]
    assert sidecar.process is not None
    own = oom_score_adj(sidecar.process.pid)
    assert oom_score_adj(components["postgres"]["pid"]) == oom_score_adj(process_of(sidecar, "checkpointer")) == own
    api = oom_score_adj(components["hindsight-api"]["pid"])
    assert api >= own + 100 or api == 1000


def take_its_memory(sidecar: RunningSidecar, group: Path | None) -> None:
    """Have hindsight-api end for want of memory, or as if where there is no group, and check that it alone is replaced."""
    check_the_kernels_choice(sidecar)
    before = sidecar.health()["components"]
    api = before["hindsight-api"]["pid"]
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


class Clock:
    """The time of day of a sidecar that was not started, and of all its children, which may jump.

    Attributes:
        wrapper: what it has to be started with.

    """

    def __init__(self, sidecar: RunningSidecar) -> None:
        assert FAKETIME is not None, "libfaketime is not installed"
        self._sidecar = sidecar
        self._path = sidecar.home / "clock"
        self.jump(0)
        preload = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "PYTHONPATH": str(self._sleeping()),
        }
        sidecar.settings["HINDSIGHT_SIDECAR_PASS_ENV"] = ",".join(preload)
        sidecar.settings["HINDSIGHT_SIDECAR_PG_BINDIR"] = str(self._programs(preload))
        # Its semaphore belongs to whoever is preloaded first, so that is no longer root.
        exports = [f"{name}={value}" for name, value in preload.items()]
        self.wrapper = ["/usr/bin/setpriv", *UNPRIVILEGED, "/usr/bin/env", *exports]

    def _sleeping(self) -> Path:
        """Make what lets Python sleep there: libfaketime's `clock_nanosleep` refuses every time that is absolute."""
        directory = self._sidecar.home / "sleeping"
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(
            "import threading, time\ntime.sleep = lambda seconds: threading.Event().wait(seconds) and None\n"
        )
        directory.chmod(0o755)
        return directory

    def _programs(self, preload: dict[str, str]) -> Path:
        """Make scripts through which PostgreSQL's programs are reached, as they get no variable of ours."""
        real = postgres_binaries.choose(None, None).bindir
        bindir = self._sidecar.home / "pg" / "bin"
        bindir.mkdir(parents=True)
        (bindir.parent / "share").symlink_to(real.parent / "share")
        exports = "".join(f"export {name}='{value}'\n" for name, value in preload.items())
        for program in real.iterdir():
            script = bindir / program.name
            script.write_text(f"#!/bin/sh\n{exports}exec '{program}' \"$@\"\n")
            script.chmod(0o755)
        return bindir

    def jump(self, hours: int) -> None:
        """Let it be so many hours later than it is, before Postgres sees it or not."""
        new = self._path.with_name("clock.new")  # nobody may find half of it
        new.write_text(f"{hours * 3600:+d}\n")
        new.chmod(0o644)
        new.replace(self._path)

    def wait_seen(self, hours: int) -> None:
        """Wait until Postgres has that time."""
        due = datetime.now(UTC) + timedelta(hours=hours)
        wait_for(lambda: abs(now_in_postgres(self._sidecar) - due) < timedelta(minutes=1), 20, "the other time")


def now_in_postgres(sidecar: RunningSidecar) -> datetime:
    with sql(sidecar) as connection:
        row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    assert isinstance(row[0], datetime)
    return row[0]
