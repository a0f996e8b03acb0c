"""What a running sidecar tells in numbers: how components ended, what is stored, what is done with it."""

import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
import pytest
from administrator import ask, finished
from harness import RunningSidecar, call, running_sidecar, store_as_they_are, wait_for
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "hindsight_sidecar_"
BANK = "told"
HUNG_AFTER = 5.0  # seconds, the shortest that can be set
WITHIN = 60.0


@pytest.fixture(scope="module")
def sidecar(model_dir: Any) -> Iterator[RunningSidecar]:
    with running_sidecar(model_dir, HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}") as running:
        yield running


def metrics(sidecar: RunningSidecar) -> dict[str, float]:
    """Return every sample, by its name and the values of its labels."""
    families = text_string_to_metric_families(call(sidecar.control_port, "/metrics").body.decode())
    return {
        " ".join([sample.name.removeprefix(PREFIX), *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def restarts(sidecar: RunningSidecar) -> dict[str, float]:
    """Return how components ended, without the reasons that there were none for."""
    prefix = "component_restarts_total "
    return {
        name.removeprefix(prefix): value
        for name, value in metrics(sidecar).items()
        if name.startswith(prefix) and value
    }


def connect(sidecar: RunningSidecar) -> psycopg.Connection[Any]:
    return psycopg.connect(host=str(sidecar.run_dir), user="hindsight", dbname="hindsight", connect_timeout=5)


def test_what_is_stored_and_what_it_takes(sidecar: RunningSidecar) -> None:
    store_as_they_are(sidecar, BANK, ["The lighthouse keeper feeds two goats.", "The mill stands still in winter."])
    wait_for(lambda: metrics(sidecar)["memories"] == 2, 10, "two memories")
    seen = wait_for(lambda: (found := metrics(sidecar)).get("wal_size_bytes") and found, 20, "the volume's space")
    with connect(sidecar) as connection:
        (size,) = connection.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
    assert size / 2 < seen["database_size_bytes"] < 2 * size
    assert seen["wal_size_bytes"] >= 16 * 2**20  # a segment
    status = os.statvfs(sidecar.volume)
    assert seen["volume_size_bytes"] == status.f_blocks * status.f_frsize
    assert 0 < seen["volume_free_bytes"] < seen["volume_size_bytes"]


def test_how_long_the_start_took_and_what_for(sidecar: RunningSidecar) -> None:
    seen = metrics(sidecar)
    took = {name: value for name, value in seen.items() if name.startswith("state_seconds_total starting")}
    assert sum(took.values()) == pytest.approx(seen["start_duration_seconds"], abs=0.1)
    assert max(took, key=lambda name: took[name]) == "state_seconds_total starting hindsight-api"
    assert seen["state_seconds_total ready "] > 0
    lasted = sum(value for name, value in seen.items() if name.startswith("state_seconds_total "))
    assert lasted <= time.time() - seen["process_start_time_seconds"] < lasted + 10


def test_calls_are_counted_and_probes_are_not(sidecar: RunningSidecar) -> None:
    before = metrics(sidecar)
    assert sidecar.recall(BANK, "Which animals are fed?")
    assert sidecar.memory("/banks/none/documents/none").status == 404
    call(sidecar.port, "/health")
    after = wait_for(
        lambda: (found := metrics(sidecar))["gateway_requests_total GET 4xx"] > before.get("gateway_requests_total GET 4xx", 0) and found,
        5, "a call that is over",
    )  # fmt: skip
    counted = {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith("gateway_")
        and not name.startswith("gateway_answer_seconds_bucket")
        and value != before.get(name, 0)
    }
    assert counted.pop("gateway_answer_seconds_sum") > 0
    assert counted == {
        "gateway_requests_total POST 2xx": 1,
        "gateway_requests_total GET 4xx": 1,
        "gateway_answer_seconds_count": 1,
    }


def test_a_dump_is_told_with_how_it_ended_and_when_and_at_the_next_start_too(sidecar: RunningSidecar) -> None:
    assert "dump_last_success_timestamp_seconds" not in metrics(sidecar)
    operation = finished(sidecar, ask(sidecar, "POST", "/v1/dumps"))
    made_at = datetime.fromisoformat(operation["report"]["dump"]["made"]).timestamp()
    seen = metrics(sidecar)
    ended = {name for name, value in seen.items() if name.startswith("operations_total ") and value}
    assert ended == {"operations_total dump done"}
    assert seen["dump_last_success_timestamp_seconds"] == pytest.approx(made_at, abs=0.001)
    assert not [name for name, value in seen.items() if name.startswith("operation_running ") and value]
    assert sidecar.stop() == 0
    sidecar.start_ready()
    seen = metrics(sidecar)
    assert seen["dump_last_success_timestamp_seconds"] == pytest.approx(made_at, abs=0.001)
    assert seen["operations_total dump done"] == 0


def back(sidecar: RunningSidecar, reason: str, count: int) -> None:
    """Wait until an end was told for this reason, and until the sidecar is ready after it."""
    wait_for(lambda: restarts(sidecar).get(reason) == count, WITHIN, reason)
    sidecar.wait_ready()


def test_every_end_is_told_by_how_it_came(sidecar: RunningSidecar) -> None:
    assert restarts(sidecar) == {}
    os.kill(sidecar.pid_of("hindsight-api"), signal.SIGKILL)
    back(sidecar, "hindsight-api killed", 1)
    os.kill(sidecar.pid_of("hindsight-api"), signal.SIGSTOP)
    back(sidecar, "hindsight-api hung", 1)
    os.kill(sidecar.pid_of("postgres"), signal.SIGINT)  # somebody shuts it down
    back(sidecar, "postgres exited", 1)
    # One of its processes is killed; the postmaster lives on.
    postmaster = sidecar.pid_of("postgres")
    backend = next(pid for pid in sidecar.postgres_pids() if pid != postmaster)
    os.kill(backend, signal.SIGKILL)
    back(sidecar, "postgres reinitialized", 1)
    assert sidecar.pid_of("postgres") == postmaster
    assert restarts(sidecar) == {
        "hindsight-api killed": 1,
        "hindsight-api hung": 1,
        "postgres exited": 1,
        "postgres reinitialized": 1,
    }
    assert sidecar.health()["components"]["postgres"]["restarts"] == 1
    told = [(event["event"], event["reason"]) for event in sidecar.events() if "reason" in event]
    assert told == [("hindsight-api ended", "killed"), ("hindsight-api ended", "hung"), ("postgres ended", "exited")]


def test_a_refused_call_is_told_with_its_reason(sidecar: RunningSidecar) -> None:
    before = metrics(sidecar)
    os.kill(sidecar.pid_of("hindsight-api"), signal.SIGKILL)
    wait_for(lambda: sidecar.memory("/banks").status == 503, 10, "a refusal")
    after = metrics(sidecar)
    refused = ("gateway_refusals_total not-ready", "gateway_refusals_total failed")
    assert sum(after[name] for name in refused) > sum(before[name] for name in refused)
    assert after["gateway_requests_total GET 5xx"] > before.get("gateway_requests_total GET 5xx", 0)
    sidecar.wait_ready()
