"""A hindsight-api or a Postgres that is there and does not answer: told within three seconds, and over without help."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import Answer, RunningSidecar, call, running_sidecar, wait_for

pytestmark = pytest.mark.alone

TOLD_WITHIN = 3.0  # seconds
AT_ONCE = 1.0  # seconds
HUNG_AFTER = 5.0  # seconds, the shortest that can be set
TEXT = "The lighthouse keeper's parrot speaks four languages."
QUESTION = "Which bird knows several tongues?"


@pytest.fixture(scope="module")
def sidecar(model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar that waits for a hung hindsight-api no longer than it must."""
    with running_sidecar(model_dir, HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}") as running:
        yield running


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[float]:
    """Have processes stopped; they go on afterwards, where they are still there. Tells when they were stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        resume(pids)


def resume(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


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


def wait_told(sidecar: RunningSidecar, since: float) -> None:
    """Wait until both addresses say that memory calls are not served, and check how long that took."""
    for port, path in ((sidecar.port, "/health"), (sidecar.control_port, "/health"), (sidecar.control_port, "/readyz")):
        wait_for(lambda port=port, path=path: call(port, path).status == 503, 30, f"503 from {port}{path}", every=0.02)
    took = time.monotonic() - since
    assert took < TOLD_WITHIN, f"the hang was told after {took:.2f} s"


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


def check_alive(sidecar: RunningSidecar) -> None:
    """Check that the sidecar itself turns: a restart by Kubernetes would not help."""
    began = time.monotonic()
    assert call(sidecar.control_port, "/livez").status == 200
    assert call(sidecar.control_port, "/startupz").status == 200
    took = time.monotonic() - began
    assert took < AT_ONCE, f"alive after {took:.2f} s"


def test_a_hindsight_api_that_goes_on_is_kept(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]["hindsight-api"]
    pid = before["pid"]
    with ThreadPoolExecutor(1) as pool, stopped([pid]) as since:
        # Nobody knows yet, so it is passed on, and waits for the stopped process.
        in_flight = pool.submit(recall, sidecar)
        wait_told(sidecar, since)
        check_refusals(sidecar, "hindsight-api")
        check_alive(sidecar)
        assert sidecar.health()["components"]["hindsight-api"]["state"] == "unresponsive"
        assert not in_flight.done()
        resume([pid])
        assert remembers(in_flight.result(30)), "the call that waited is answered"
    sidecar.wait_ready(30)
    assert sidecar.health()["components"]["hindsight-api"] == before
    assert remembers(recall(sidecar))


def test_a_postgres_that_goes_on_is_kept(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]
    # The postmaster first, so that it makes no new process meanwhile.
    postmaster = before["postgres"]["pid"]
    pids = [postmaster, *(pid for pid in sidecar.postgres_pids() if pid != postmaster)]
    assert len(pids) > 5
    with stopped(pids) as since:
        wait_told(sidecar, since)
        wait_for(
            lambda: sidecar.health()["components"]["postgres"]["state"] == "unresponsive", 2, "that it is Postgres"
        )
        check_refusals(sidecar, "postgres")
        # Long enough for a hindsight-api that does not answer, because of it, to count as hung.
        wait_for(
            lambda: time.monotonic() > since + TOLD_WITHIN + HUNG_AFTER + 2, 20, "some seconds of a stopped Postgres"
        )
        check_refusals(sidecar, "postgres")
        check_alive(sidecar)
        health = sidecar.health()
        assert health["database"] == "unavailable"
    sidecar.wait_ready(30)
    assert sidecar.health()["components"] == before
    assert remembers(recall(sidecar))


def test_a_hindsight_api_that_hangs_is_replaced(sidecar: RunningSidecar) -> None:
    remember(sidecar)
    before = sidecar.health()["components"]
    pid = before["hindsight-api"]["pid"]
    with ThreadPoolExecutor(1) as pool, stopped([pid]) as since:
        in_flight = pool.submit(recall, sidecar)
        wait_told(sidecar, since)
        check_refusals(sidecar, "hindsight-api")
        ended = in_flight.result(30)
        took = time.monotonic() - since
        assert HUNG_AFTER < took < TOLD_WITHIN + HUNG_AFTER + 2, f"the call in flight ended after {took:.2f} s"
        assert ended.status == 502
        assert int(ended.headers["retry-after"]) > 0
        assert "may have been stored" in ended.json()["detail"]
        check_refusals(sidecar, "hindsight-api")
        sidecar.wait_ready()
    health = sidecar.health()
    after = health["components"]
    assert after["hindsight-api"]["pid"] != pid
    assert after["hindsight-api"]["restarts"] == before["hindsight-api"]["restarts"] + 1
    assert after["postgres"] == before["postgres"]
    assert health["memory_count"] == 1
    assert remembers(recall(sidecar))
    assert sidecar.stop() == 0
