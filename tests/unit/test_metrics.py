import asyncio
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sidecar.backoff import End
from sidecar.errors import Reason, RefusedError
from sidecar.kinds import Kind
from sidecar.machine import LABELS, OperationName, Phase, State, Subject
from sidecar.metrics import Metrics
from sidecar.operations import Operation, Operations
from sidecar.schedule import Failure, Made, Record
from sidecar.status import STALE_AFTER, Status
from sidecar.volume import Space


def written(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def values(metrics: Metrics) -> dict[str, float]:
    """Return every sample by its name with labels, as Prometheus' own client reads it."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {written(sample): sample.value for family in families for sample in family.samples}


def named(prefix: str, found: dict[str, float]) -> dict[str, float]:
    """Return the values of one metric, by its labels as they are written."""
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(f"{prefix}{{")}


@pytest.mark.parametrize(
    ("state", "labels"),
    [
        (State(Phase.BLOCKED, Reason.NO_SPACE), '{phase="blocked",subject="no-space"}'),
        (State(Phase.STARTING, Subject.RECOVERY), '{phase="starting",subject="recovery"}'),
        (State(Phase.MAINTENANCE, OperationName("restore 20261129")), '{phase="maintenance",subject="restore"}'),
        (State(Phase.READY), '{phase="ready",subject=""}'),
    ],
    ids=str,
)
def test_the_current_state_is_one_and_every_other_is_zero(state: State, labels: str) -> None:
    status = Status()
    status.update(state=state, sampled=math.inf)
    seen = named("hindsight_sidecar_state", values(Metrics(status)))
    assert len(seen) == len(LABELS)
    assert {name: value for name, value in seen.items() if value} == {labels: 1}


def test_a_state_that_nobody_looked_after_is_not_told_as_ready() -> None:
    status = Status()
    status.update(state=State(Phase.READY), sampled=-math.inf)
    seen = named("hindsight_sidecar_state", values(Metrics(status)))
    assert [name for name, value in seen.items() if value] == ['{phase="degraded",subject="sampling"}']


def test_how_long_each_state_lasted_and_how_long_the_start_took() -> None:
    now = [100.0]
    status = Status(clock=lambda: now[0])
    metrics = Metrics(status)
    now[0] += 2
    status.update(state=State(Phase.STARTING, Subject.API), sampled=now[0])
    now[0] += 5
    assert "hindsight_sidecar_start_duration_seconds" not in values(metrics)
    status.update(state=State(Phase.READY), sampled=now[0])
    now[0] += 1
    seen = values(metrics)
    assert seen["hindsight_sidecar_start_duration_seconds"] == 7
    assert {name: value for name, value in named("hindsight_sidecar_state_seconds_total", seen).items() if value} == {
        '{phase="starting",subject="volume"}': 2,
        '{phase="starting",subject="hindsight-api"}': 5,
        '{phase="ready",subject=""}': 1,
    }


def test_ready_is_what_the_gateway_goes_by() -> None:
    now = [100.0]
    status = Status(clock=lambda: now[0])
    metrics = Metrics(status)
    status.update(state=State(Phase.READY), sampled=100.0)
    assert values(metrics)["hindsight_sidecar_ready"] == 1
    now[0] += STALE_AFTER
    assert values(metrics)["hindsight_sidecar_ready"] == 0


def test_components_with_their_restarts_by_how_they_ended() -> None:
    status = Status()
    status.update(
        postgres={"state": "up"},
        api={"state": "unresponsive"},
        ends={"postgres": {End.NO_SPACE: 2, End.REINITIALIZED: 1}, "hindsight-api": {End.HUNG: 5}},
    )
    seen = values(Metrics(status))
    assert seen['hindsight_sidecar_component_up{component="postgres"}'] == 1
    assert seen['hindsight_sidecar_component_up{component="hindsight-api"}'] == 0
    restarts = named("hindsight_sidecar_component_restarts_total", seen)
    assert len(restarts) == 11
    assert {name: value for name, value in restarts.items() if value} == {
        '{component="postgres",reason="no-space"}': 2,
        '{component="postgres",reason="reinitialized"}': 1,
        '{component="hindsight-api",reason="hung"}': 5,
    }


def test_sizes_are_absent_until_they_are_known() -> None:
    status = Status()
    metrics = Metrics(status)
    assert not [name for name in values(metrics) if name.endswith("_size_bytes")]
    status.update(database_bytes=7, space=Space(free=40, inodes=None, size=100))
    seen = values(metrics)
    assert seen["hindsight_sidecar_database_size_bytes"] == 7
    assert seen["hindsight_sidecar_volume_size_bytes"] == 100
    assert seen["hindsight_sidecar_volume_free_bytes"] == 40
    assert "hindsight_sidecar_wal_size_bytes" not in seen
    status.update(wal_bytes=16)
    assert values(metrics)["hindsight_sidecar_wal_size_bytes"] == 16


@dataclass
class Administered:
    """An administration, as far as metrics look at it."""

    operations: Operations = field(default_factory=Operations)
    last_dump: datetime | None = None


def test_operations_by_kind_and_by_how_they_ended() -> None:
    metrics, administered = Metrics(Status()), Administered()
    assert not [name for name in values(metrics) if "operation" in name]
    metrics.watch_operations(administered)
    seen = values(metrics)
    assert named("hindsight_sidecar_operation_running", seen) == {f'{{kind="{kind}"}}': 0 for kind in Kind}
    assert set(named("hindsight_sidecar_operations_total", seen).values()) == {0}
    assert "hindsight_sidecar_dump_last_success_timestamp_seconds" not in seen

    async def refused(_: Operation) -> None:
        raise RefusedError("not so")

    async def work() -> None:
        administered.operations.start(Kind.RESTORE, refused)
        while administered.operations.current is not None:  # noqa: ASYNC110 - it ends in the next turns of the loop
            await asyncio.sleep(0)

    asyncio.run(work())
    administered.last_dump = datetime(2026, 11, 29, 3, 17, tzinfo=UTC)
    seen = values(metrics)
    ended = named("hindsight_sidecar_operations_total", seen)
    assert {name for name, value in ended.items() if value} == {'{kind="restore",outcome="refused"}'}
    assert seen["hindsight_sidecar_dump_last_success_timestamp_seconds"] == administered.last_dump.timestamp()


def test_how_far_the_operation_is_that_runs() -> None:
    metrics, administered = Metrics(Status()), Administered()
    metrics.watch_operations(administered)
    administered.operations._current = current = Operation(Kind.DUMP)
    seen = values(metrics)
    assert seen['hindsight_sidecar_operation_running{kind="dump"}'] == 1
    assert seen['hindsight_sidecar_operation_start_timestamp_seconds{kind="dump"}'] == current.started.timestamp()
    assert not [name for name in seen if "operation_progress" in name or "operation_done" in name]
    current.enter("dump", None, "bytes")
    current.done = 5
    assert values(metrics)['hindsight_sidecar_operation_done{kind="dump",phase="dump",unit="bytes"}'] == 5
    assert not [name for name in values(metrics) if "operation_expected" in name]
    current.enter("hash", 10, "bytes")
    current.done = 5
    seen = values(metrics)
    assert seen['hindsight_sidecar_operation_progress_ratio{kind="dump",phase="hash"}'] == 0.5
    assert seen['hindsight_sidecar_operation_expected{kind="dump",phase="hash",unit="bytes"}'] == 10
    assert not [name for name in seen if 'phase="dump"' in name]


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
    assert values(second)['hindsight_sidecar_gateway_refusals_total{reason="failed"}'] == 0


def test_a_call_is_counted_and_its_answer_timed() -> None:
    metrics = Metrics(Status())
    metrics.count_request("POST", "2xx")
    metrics.time_answer(0.2)
    seen = values(metrics)
    assert seen['hindsight_sidecar_gateway_requests_total{method="POST",status="2xx"}'] == 1
    assert seen['hindsight_sidecar_gateway_answer_seconds_bucket{le="0.1"}'] == 0
    assert seen['hindsight_sidecar_gateway_answer_seconds_bucket{le="0.25"}'] == 1
    assert seen["hindsight_sidecar_gateway_answer_seconds_sum"] == 0.2


def test_the_process_is_told_under_our_name() -> None:
    seen = values(Metrics(Status()))
    assert seen["hindsight_sidecar_process_resident_memory_bytes"] > 0
    assert not [name for name in seen if not name.startswith("hindsight_sidecar_")]
