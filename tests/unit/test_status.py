import json
from datetime import UTC, datetime

import pytest

from sidecar.errors import Reason
from sidecar.machine import Phase, State, Subject
from sidecar.schedule import Failure, Record
from sidecar.status import STALE_AFTER, Picture, Status

READY = State(Phase.READY)
SAMPLING = ("degraded", "sampling")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> Status:
    status = Status(clock)
    status.update(state=READY, sampled=clock.now, postgres={"state": "up"}, api={"state": "up"})
    return status


def test_it_begins_as_starting_and_not_ready() -> None:
    status = Status()
    assert not status.ready
    assert str(status.picture.state) == "starting(volume)"


def test_a_fresh_sample_of_ready_is_ready(status: Status, clock: Clock) -> None:
    assert status.ready
    clock.now += STALE_AFTER - 0.01
    assert status.ready
    assert status.phase_text == "ready"


def test_a_stale_sample_is_not_ready_and_says_why(status: Status, clock: Clock) -> None:
    clock.now += STALE_AFTER
    assert not status.ready
    assert status.phase_text == "degraded(sampling)"
    body = status.body()
    assert body["status"] == "unhealthy"
    assert (body["state"], body["subject"], body["reason"]) == ("degraded", "sampling", None)
    assert "does not get to run" in body["detail"]
    assert body["sample_age_seconds"] == STALE_AFTER
    # It has begun when the sample became too old.
    clock.now += 60
    since = datetime.fromisoformat(status.body()["since"])
    assert 59 < (datetime.now(UTC) - since).total_seconds() < 70


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.READY])
def test_no_other_phase_is_ready(phase: Phase, status: Status) -> None:
    status.update(state=State(phase, "x"))
    assert not status.ready
    assert status.body()["status"] == "unhealthy"
    assert status.phase_text == f"{phase}(x)"


def test_the_body_has_hindsights_own_members_and_is_json(status: Status) -> None:
    body = json.loads(json.dumps(status.body()))
    assert body["status"] == "healthy"
    assert body["database"] == "connected"
    assert body["state"] == "ready"
    assert body["model"] is None
    assert body["stand_in"] is False
    assert body["memory_count"] is None
    assert set(body["components"]) == {"postgres", "hindsight-api"}


@pytest.mark.parametrize("seen", ["down", "starting", "recovering", "unresponsive"])
def test_a_database_that_does_not_answer_is_unavailable(seen: str, status: Status) -> None:
    status.update(postgres={"state": seen})
    assert status.body()["database"] == "unavailable"


def test_only_a_block_has_a_reason(status: Status) -> None:
    status.update(state=State(Phase.BLOCKED, "no-space", "full"))
    assert (status.body()["reason"], status.body()["detail"]) == ("no-space", "full")
    status.update(state=State(Phase.STARTING, "postgres"))
    assert status.body()["reason"] is None


def test_a_state_has_begun_when_it_changed(status: Status) -> None:
    began = datetime(2024, 1, 1, tzinfo=UTC)
    status.update(since=began)
    status.update(state=State(Phase.READY), sampled=101.0)
    status.update(state=State(Phase.READY, None, "another detail"))
    assert status.picture.since == began
    status.update(state=State(Phase.DEGRADED, "postgres"))
    assert status.picture.since > began


def test_the_time_in_each_state_is_what_has_passed(status: Status, clock: Clock) -> None:
    ready, starting = ("ready", ""), ("starting", "volume")
    assert status.seconds == {starting: 0, ready: 0, SAMPLING: 0}
    clock.now += 2
    status.update(memory_count=5)
    assert status.seconds[ready] == 2
    status.update(sampled=clock.now)
    clock.now += STALE_AFTER + 10  # of which it was trusted for as long as a sample is
    assert (status.seconds[ready], status.seconds[SAMPLING]) == (2 + STALE_AFTER, 10)
    clock.now += 1
    status.update(state=State(Phase.BLOCKED, Reason.NO_SPACE), sampled=clock.now)
    clock.now += 100  # a state that is no good needs no fresh sample
    assert status.seconds == {starting: 0, ready: 2 + STALE_AFTER, SAMPLING: 11, ("blocked", "no-space"): 100}
    assert sum(status.seconds.values()) == clock.now - 100.0


def test_the_time_of_a_start_is_until_the_first_readiness(clock: Clock) -> None:
    status = Status(clock)
    clock.now += 4
    status.update(state=State(Phase.STARTING, Subject.API), sampled=clock.now)
    assert status.first_ready_after is None
    clock.now += 2
    status.update(state=READY, sampled=clock.now)
    assert status.first_ready_after == 6
    clock.now += 10
    status.update(state=State(Phase.DEGRADED, Subject.API), sampled=clock.now)
    status.update(state=READY, sampled=clock.now)
    assert status.first_ready_after == 6


def test_a_stand_in_is_told(status: Status) -> None:
    status.update(model={"stand_in": True})
    assert status.body()["stand_in"] is True


def test_a_scheduled_dump_that_fails_is_told_and_leaves_it_healthy(status: Status) -> None:
    assert status.body()["dumps"] is None
    status.update(dumps=Record("17 3 * * *", failure=Failure(datetime(2026, 11, 29, tzinfo=UTC), "no space")))
    body = json.loads(json.dumps(status.body()))
    assert body["status"] == "healthy"
    assert body["dumps"]["last_failure"]["reason"] == "no space"


def test_a_picture_is_not_changed_but_replaced(status: Status) -> None:
    before = status.picture
    status.update(memory_count=5)
    assert before.memory_count is None
    assert status.picture.memory_count == 5
    assert isinstance(before, Picture)


def test_the_first_answer_has_every_member_of_a_component() -> None:
    components = Status().body()["components"]
    never_started = {"state": "down", "pid": None, "restarts": 0, "fault": None}
    assert components == {"postgres": never_started, "hindsight-api": never_started}
