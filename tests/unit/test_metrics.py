from datetime import UTC, datetime

from sidecar.machine import Phase, State
from sidecar.metrics import Metrics
from sidecar.schedule import Failure, Made, Record
from sidecar.status import STALE_AFTER, Status


def values(metrics: Metrics) -> dict[str, float]:
    """Return every sample by its name with labels."""
    lines = metrics.render().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_the_current_state_is_one_and_every_other_is_zero() -> None:
    status = Status()
    metrics = Metrics(status)
    for state in (State(Phase.BLOCKED, "no-space"), State(Phase.STARTING, "recovery"), State(Phase.READY)):
        status.update(state=state)
        seen = {name: value for name, value in values(metrics).items() if name.startswith("hindsight_sidecar_state")}
        assert len(seen) == len(Phase)
        current = f'hindsight_sidecar_state{{phase="{state.phase}",subject="{state.subject or ""}"}}'
        assert [name for name, value in seen.items() if value] == [current]
        assert all('subject=""' in name for name, value in seen.items() if not value)


def test_ready_is_what_the_gateway_goes_by() -> None:
    now = [100.0]
    status = Status(clock=lambda: now[0])
    metrics = Metrics(status)
    status.update(state=State(Phase.READY), sampled=100.0)
    assert values(metrics)["hindsight_sidecar_ready"] == 1
    now[0] += STALE_AFTER
    assert values(metrics)["hindsight_sidecar_ready"] == 0


def test_components_with_their_restarts() -> None:
    status = Status()
    status.update(postgres={"state": "up", "restarts": 2}, api={"state": "unresponsive", "restarts": 5})
    seen = values(Metrics(status))
    assert seen['hindsight_sidecar_component_up{component="postgres"}'] == 1
    assert seen['hindsight_sidecar_component_up{component="hindsight-api"}'] == 0
    assert seen['hindsight_sidecar_component_restarts{component="postgres"}'] == 2
    assert seen['hindsight_sidecar_component_restarts{component="hindsight-api"}'] == 5


def test_memories_are_absent_until_they_were_counted() -> None:
    status = Status()
    metrics = Metrics(status)
    assert "hindsight_sidecar_memories" not in values(metrics)
    status.update(memory_count=0)
    assert values(metrics)["hindsight_sidecar_memories"] == 0
    status.update(memory_count=369)
    assert values(metrics)["hindsight_sidecar_memories"] == 369


def test_versions_that_are_not_known_are_empty() -> None:
    status = Status()
    status.update(versions={"hindsight-api": "1.1.0", "postgres": None})
    (info,) = [name for name in values(Metrics(status)) if name.startswith("hindsight_sidecar_info")]
    assert 'hindsight_api="1.1.0"' in info
    assert 'postgres=""' in info


def test_scheduled_dumps_are_absent_without_a_schedule_and_times_until_they_are_known() -> None:
    status = Status()
    metrics = Metrics(status)
    assert not [name for name in values(metrics) if "scheduled" in name]
    status.update(dumps=Record("* * * * *", outcomes={"done": 0, "failed": 2}))
    assert {name: value for name, value in values(metrics).items() if "scheduled" in name} == {
        'hindsight_sidecar_scheduled_dumps_total{outcome="done"}': 0,
        'hindsight_sidecar_scheduled_dumps_total{outcome="failed"}': 2,
    }
    good, bad = datetime(2026, 11, 29, 3, 17, tzinfo=UTC), datetime(2026, 11, 30, 3, 17, 4, tzinfo=UTC)
    status.update(dumps=Record("* * * * *", None, Made("x", good), Failure(bad, "no space")))
    seen = values(metrics)
    assert seen["hindsight_sidecar_scheduled_dump_last_success_timestamp_seconds"] == good.timestamp()
    assert seen["hindsight_sidecar_scheduled_dump_last_failure_timestamp_seconds"] == bad.timestamp()


def test_refusals_are_counted_by_their_reason() -> None:
    metrics = Metrics(Status())
    metrics.count_refusal("not-ready")
    metrics.count_refusal("not-ready")
    metrics.count_refusal("failed")
    seen = values(metrics)
    assert seen['hindsight_sidecar_gateway_refusals_total{reason="not-ready"}'] == 2
    assert seen['hindsight_sidecar_gateway_refusals_total{reason="failed"}'] == 1


def test_two_sidecars_in_one_process_do_not_share_numbers() -> None:
    first, second = Metrics(Status()), Metrics(Status())
    first.count_refusal("failed")
    assert 'hindsight_sidecar_gateway_refusals_total{reason="failed"}' not in values(second)


def test_the_process_is_told_under_our_name() -> None:
    seen = values(Metrics(Status()))
    assert seen["hindsight_sidecar_process_resident_memory_bytes"] > 0
    assert not [name for name in seen if not name.startswith("hindsight_sidecar_")]
