"""A hindsight-api or a Postgres that is there and does not answer: told within three seconds, and over without help."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faults import (
    TOLD_WITHIN,
    Alive,
    make_it_turn,
    process_of,
    processes_of,
    resume,
    sql,
    stopped,
    wait_told,
    waiting_backend,
)
from harness import Answer, RunningSidecar, call, running_sidecar, wait_for

pytestmark = pytest.mark.alone

AT_ONCE = 1.0  # seconds
HUNG_AFTER = 5.0  # seconds, the shortest that can be set
AT_WORK = 10.0  # seconds: more than until a hang is told and what hangs is replaced, and less than is excused
TEXT = "The lighthouse keeper's parrot speaks four languages."
QUESTION = "Which bird knows several tongues?"


@pytest.fixture(scope="module")
def sidecar(model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar that waits for a hung hindsight-api no longer than it must."""
    with running_sidecar(model_dir, HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}") as running:
        yield running


def recall(sidecar: RunningSidecar, timeout: float = 60.0) -> Answer:
    body = {"query": QUESTION, "budget": "low"}
    return sidecar.memory("/banks/hung/memories/recall", "POST", body, timeout=timeout)


def remember(sidecar: RunningSidecar) -> None:
    config = {"updates": {"retain_extraction_mode": "chunks", "enable_observations": False}}
    assert sidecar.memory("/banks/hung", "DELETE").status == 200
    assert sidecar.memory("/banks/hung", "PUT", {}).status == 200
    assert sidecar.memory("/banks/hung/config", "PATCH", config).status == 200
    sidecar.retain("hung", [TEXT])


def remembers(answer: Answer) -> bool:
    return answer.status == 200 and {result["text"] for result in answer.json()["results"]} == {TEXT}


def check_refusals(sidecar: RunningSidecar, component: str) -> None:
    """Check that a memory call is refused at once, and says why and until when."""
    for _ in range(3):
        began = time.monotonic()
        refused = recall(sidecar)
        took = time.monotonic() - began
        assert took < AT_ONCE, f"refused after {took:.2f} s"
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert (refused.json()["state"], refused.json()["subject"]) == ("degraded", component)


def test_a_hindsight_api_that_goes_on_is_kept(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]["hindsight-api"]
    pid = before["pid"]
    with ThreadPoolExecutor(1) as pool, stopped([pid]) as since:
        # Nobody knows yet, so it is passed on, and waits for the stopped process.
        in_flight = pool.submit(recall, sidecar)
        wait_told(sidecar, since, "hindsight-api")
        check_refusals(sidecar, "hindsight-api")
        assert call(sidecar.control_port, "/startupz").status == 200
        assert sidecar.health()["components"]["hindsight-api"]["state"] == "unresponsive"
        assert not in_flight.done()
        resume([pid])
        assert remembers(in_flight.result(30)), "the call that waited is answered"
    sidecar.wait_ready(30)
    assert sidecar.health()["components"]["hindsight-api"] == before
    assert remembers(recall(sidecar))


def test_a_hindsight_api_that_answers_nobody_since_it_is_at_work_does_not_hang(make_sidecar: Any) -> None:
    sidecar = make_sidecar(HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}")
    turn = make_it_turn(sidecar, AT_WORK)
    sidecar.start_ready()
    remember(sidecar)
    before = sidecar.health()["components"]
    with ThreadPoolExecutor(2) as pool:
        turn()
        began = time.monotonic()
        recalling = pool.submit(recall, sidecar)
        states = set()
        while not recalling.done():
            health = sidecar.health()
            states.add((health["state"], health["detail"]))
        assert time.monotonic() - began > AT_WORK / 2, "it was not kept from answering"
        assert remembers(recalling.result())
    assert {state for state, _ in states} == {"ready"}, states
    assert sidecar.health()["components"] == before


def test_a_postgres_that_goes_on_is_kept(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]
    # The postmaster first, so that it makes no new process meanwhile.
    postmaster = before["postgres"]["pid"]
    pids = [postmaster, *(pid for pid in sidecar.postgres_pids() if pid != postmaster)]
    assert len(pids) > 5
    with Alive(sidecar) as alive, stopped(pids) as since:
        wait_told(sidecar, since, "postgres")
        check_refusals(sidecar, "postgres")
        # Long enough for a hindsight-api that does not answer, because of it, to count as hung.
        wait_for(
            lambda: time.monotonic() > since + TOLD_WITHIN + HUNG_AFTER + 2, 20, "some seconds of a stopped Postgres"
        )
        check_refusals(sidecar, "postgres")
        health = sidecar.health()
        assert health["database"] == "unavailable"
    alive.check()
    sidecar.wait_ready(30)
    assert sidecar.health()["components"] == before
    assert remembers(recall(sidecar))


@pytest.mark.parametrize("kind", ["postmaster", "checkpointer"])
def test_one_stopped_process_of_postgres_is_named(sidecar: RunningSidecar, kind: str) -> None:
    """Queries go on being answered without either: nobody would know until new connections hang, or the disk is full."""
    remember(sidecar)
    before = sidecar.health()["components"]
    pid = before["postgres"]["pid"] if kind == "postmaster" else process_of(sidecar, kind)
    with Alive(sidecar) as alive, stopped([pid]) as since:
        fault = wait_told(sidecar, since, "postgres")
        assert f"process {pid} (" in fault
        assert f"`kill -CONT {pid}`" in fault
        check_refusals(sidecar, "postgres")
    alive.check()
    sidecar.wait_ready(30)
    assert sidecar.health()["components"] == before
    assert remembers(recall(sidecar))


def test_a_backend_that_stops_in_the_middle_of_a_memory_call(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]
    with ThreadPoolExecutor(1) as pool, sql(sidecar) as watching, sql(sidecar) as locking:
        with locking.transaction():
            locking.execute("LOCK TABLE memory_links")
            in_flight = pool.submit(recall, sidecar)
            pid = wait_for(lambda: waiting_backend(watching), 20, "a backend that waits for the lock")
            with stopped([pid]) as since:
                fault = wait_told(sidecar, since, "postgres")
                assert f"process {pid} (" in fault
                assert not in_flight.done()
        assert remembers(in_flight.result(30)), "the call that waited is answered"
    sidecar.wait_ready(30)
    assert sidecar.health()["components"] == before


def test_a_lock_that_every_memory_call_would_wait_for_is_told(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]
    with sql(sidecar) as locking, locking.transaction():
        locking.execute("LOCK TABLE memory_units")
        since = time.monotonic()
        detail = wait_told(sidecar, since, "postgres")
        assert f"process {locking.info.backend_pid} holds a lock on memory_units" in detail
        assert sidecar.health()["components"]["postgres"]["state"] == "up"
        check_refusals(sidecar, "postgres")
    sidecar.wait_ready(30)
    assert sidecar.health()["components"] == before
    assert remembers(recall(sidecar))
    wait_for(lambda: sidecar.health()["memory_count"] == 1, 10, "the count, which waited as well")


def test_what_an_operator_keeps_beside_the_memories_is_no_concern_of_theirs(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    since = time.monotonic()
    with sql(sidecar) as operator, sql(sidecar) as locking:
        operator.execute("CREATE SCHEMA backup")
        operator.execute("CREATE TABLE backup.memory_units AS TABLE public.memory_units")
        operator.execute("CREATE TABLE backup.alembic_version AS TABLE public.alembic_version")
        locking.autocommit = False
        locking.execute("LOCK TABLE backup.memory_units IN ACCESS EXCLUSIVE MODE")
        with Alive(sidecar) as alive:
            wait_for(lambda: time.monotonic() > since + 2 * TOLD_WITHIN, 20, "some looks")
            assert remembers(recall(sidecar))
            assert sidecar.health_status() == 200
        alive.check()
        locking.rollback()
        # What is hindsight-api's own is another matter.
        operator.execute("REVOKE SELECT ON public.memory_units FROM hindsight")
        assert "permission denied for table memory_units" in wait_told(sidecar, time.monotonic(), "postgres")
        operator.execute("GRANT SELECT ON public.memory_units TO hindsight")
        sidecar.wait_ready(30)
        try:
            assert sidecar.stop() == 0
            sidecar.start_ready()
            assert remembers(recall(sidecar))
        finally:
            with sql(sidecar) as after:
                after.execute("DROP SCHEMA backup CASCADE")


def test_a_hindsight_api_that_hangs_is_replaced(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]
    pid = before["hindsight-api"]["pid"]
    with Alive(sidecar) as alive, ThreadPoolExecutor(1) as pool, stopped([pid]) as since:
        in_flight = pool.submit(recall, sidecar)
        wait_told(sidecar, since, "hindsight-api")
        check_refusals(sidecar, "hindsight-api")
        ended = in_flight.result(30)
        took = time.monotonic() - since
        assert HUNG_AFTER < took < TOLD_WITHIN + HUNG_AFTER + 2, f"the call in flight ended after {took:.2f} s"
        assert ended.status == 502
        assert int(ended.headers["retry-after"]) > 0
        assert "may have been stored" in ended.json()["detail"]
        check_refusals(sidecar, "hindsight-api")
        sidecar.wait_ready()
    alive.check()
    health = sidecar.health()
    after = health["components"]
    assert after["hindsight-api"]["pid"] != pid
    assert after["hindsight-api"]["restarts"] == before["hindsight-api"]["restarts"] + 1
    assert after["postgres"] == before["postgres"]
    assert health["memory_count"] == 1
    assert remembers(recall(sidecar))
    assert sidecar.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["everything", "postmaster", "checkpointer", "hindsight-api"])
def test_what_is_stopped_does_not_hold_a_stop_up(sidecar: RunningSidecar, kind: str) -> None:
    if sidecar.process is None or sidecar.process.poll() is not None:
        sidecar.start_ready()
    remember(sidecar)
    before = sidecar.health()["components"]
    pids = {
        "everything": lambda: sorted(sidecar.postgres_pids()),
        "postmaster": lambda: [before["postgres"]["pid"]],
        "checkpointer": lambda: [process_of(sidecar, kind)],
        "hindsight-api": lambda: [before["hindsight-api"]["pid"]],
    }[kind]()
    with stopped(pids):
        began = time.monotonic()
        assert sidecar.stop() == (0 if kind == "hindsight-api" else 4)
        assert time.monotonic() - began < 9 + 1
        wait_for(lambda: not processes_of(sidecar), 5, "nothing left")
    sidecar.start_ready()
    assert remembers(recall(sidecar))
