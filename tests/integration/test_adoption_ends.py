"""An adoption that is cancelled, or whose sidecar stops, ends at once in whatever phase, and leaves nothing behind."""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import seed_cluster
from administrator import ask
from harness import RunningSidecar, wait_for

from sidecar.serve import EXIT_GAVE_UP

MEMORIES = (
    "CREATE EXTENSION vector",
    "CREATE TABLE memory_units (id int PRIMARY KEY, text text, embedding vector(384))",
    "INSERT INTO memory_units SELECT i, repeat('memory ' || i, 10), array_fill(1, ARRAY[384])::vector FROM generate_series(1, 20000) AS i",
    "CREATE INDEX ON memory_units USING gin (string_to_array(text, ' '))",
)
PHASES = ("copy", "recover the copy", "dump", "hash", "make the cluster", "check", "load", "index", "verify")
BUDGET = 9.0  # seconds


def foreign(sidecar: RunningSidecar) -> RunningSidecar:
    """Give a sidecar somebody's cluster at PGDATA, left as a kill leaves it."""
    seed_cluster.make_empty(sidecar.pgdata)
    with seed_cluster.running(sidecar.pgdata, last=signal.SIGKILL) as socket_dir:
        for statement in MEMORIES:
            seed_cluster.execute(socket_dir, statement)
    wait_for(lambda: not sidecar.postgres_pids(), 20, "the seed's processes gone")
    seed_cluster.give_back(sidecar.pgdata)
    sidecar.start().wait_state("blocked(foreign-cluster)", 60)
    return sidecar


@pytest.fixture
def blocked(make_sidecar: Any) -> RunningSidecar:
    """Have a sidecar that is blocked by it."""
    return foreign(make_sidecar())


def begun(sidecar: RunningSidecar, phase: str) -> str:
    seen = len(sidecar.events())
    operation = ask(sidecar, "POST", "/v1/adoption", {"crashed": True})
    assert operation.status == 202, operation.json()

    def reached() -> bool:
        return any(event.get("phase") == phase for event in sidecar.events()[seen:])

    wait_for(reached, 60, f"phase {phase}", every=0.005)
    return str(operation.json()["id"])


def working(sidecar: RunningSidecar) -> list[str]:
    """Return the processes that work somewhere on the volume, also in what was removed meanwhile."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink().is_relative_to(sidecar.volume):
                found.append((entry / "comm").read_text())
    return found


def beside(sidecar: RunningSidecar) -> list[str]:
    return sorted(path.name for path in sidecar.volume.iterdir() if path.name.startswith(("pgdata.", ".exchange")))


@pytest.mark.timeout(300)
def test_cancelled_in_any_phase(blocked: RunningSidecar) -> None:
    before = seed_cluster.fingerprint(blocked.pgdata)
    for phase in PHASES:
        identifier = begun(blocked, phase)
        began = time.monotonic()
        ended = ask(blocked, "DELETE", f"/v1/operations/{identifier}").json()
        took = time.monotonic() - began
        assert (phase, ended["error"]) == (phase, "it was cancelled; nothing was replaced")
        assert took < BUDGET, (phase, took)
        assert (beside(blocked), working(blocked)) == ([], []), phase
    assert seed_cluster.fingerprint(blocked.pgdata) == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "phase", [name if name in {"dump", "load"} else pytest.param(name, marks=pytest.mark.long) for name in PHASES]
)
def test_stopped_in_a_phase(phase: str, blocked: RunningSidecar) -> None:
    before = seed_cluster.fingerprint(blocked.pgdata)
    begun(blocked, phase)
    began = time.monotonic()
    assert blocked.stop() == 0
    assert time.monotonic() - began < BUDGET
    assert (beside(blocked), working(blocked)) == ([], [])
    assert seed_cluster.fingerprint(blocked.pgdata) == before


@pytest.mark.timeout(120)
def test_nothing_is_given_up_in_the_middle_of_it(make_sidecar: Any) -> None:
    sidecar = foreign(make_sidecar(HINDSIGHT_SIDECAR_BLOCKED_EXIT_AFTER="2"))
    began = time.monotonic()
    begun(sidecar, "verify")
    assert time.monotonic() - began > 2, "the adoption took too little time to tell"
    assert sidecar.wait_end(30) == EXIT_GAVE_UP
    ended = [event for event in sidecar.events() if event["event"] == "operation ended"]
    assert [event["outcome"] for event in ended] == ["verification-failed"]
