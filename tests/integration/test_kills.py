"""kill -9 at moments that are met exactly; tests/torture has every part at every moment."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import wait_for

from sidecar import processes

BANK = "kills"


def stored(sidecar: Any) -> list[str]:
    items = sidecar.memory(f"/banks/{BANK}/memories/list?limit=10000").json()["items"]
    return [item["text"] for item in items]


def test_kill_during_the_first_initialisation(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    making = sidecar.volume / "pgdata.making"
    for moment in ("PG_VERSION", "global/pg_control", "hindsight-sidecar.marker"):
        sidecar.start()
        wait_for(
            lambda moment=moment: (making / moment).exists(), 30, f"{moment} in the half-made cluster", every=0.002
        )
        sidecar.process.kill()
        sidecar.process.wait()
        wait_for(lambda: not processes_named("initdb", sidecar), 20, "initdb gone")
        assert not sidecar.pgdata.exists() or (sidecar.pgdata / "hindsight-sidecar.marker").exists()
    sidecar.start_ready()
    assert not making.exists()
    assert sidecar.stop() == 0


def processes_named(name: str, sidecar: Any) -> list[int]:
    found = []
    for process in processes.all_processes():
        if process.name == name:
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_text()
            except OSError:
                continue
            if str(sidecar.volume) in words:
                found.append(process.pid)
    return found


def test_kill_of_everything_at_once_leaves_a_stale_pid_file(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    sidecar.retain(BANK, ["The lighthouse keeper wound the clock before the storm."])
    doomed = [sidecar.process.pid, sidecar.pid_of("hindsight-api"), *sidecar.postgres_pids()]
    for pid in doomed:
        with suppress(ProcessLookupError):  # one that ended with its parent
            os.kill(pid, signal.SIGKILL)
    sidecar.process.wait()
    wait_for(lambda: not sidecar.postgres_pids(), 20, "all gone")
    path = sidecar.pgdata / "postmaster.pid"
    lines = path.read_text().splitlines()
    # The number belongs to somebody else by now: here to the test's own process, a live one of another program.
    path.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    sidecar.start_ready()
    assert any(event["event"] == "removed a stale postmaster.pid" for event in sidecar.events())
    assert "starting(recovery)" in [event.get("state") for event in sidecar.events()], "a recovery is told as one"
    assert len(stored(sidecar)) == 1
    assert sidecar.stop() == 0
