"""What the sidecar tells about itself: one immutable picture, replaced as things change and read by every endpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sidecar import __version__
from sidecar.backoff import End
from sidecar.machine import Phase, State, Subject
from sidecar.schedule import Record
from sidecar.volume import Space

STALE_AFTER = 3.0  # seconds; an older sample proves nothing any more
RETRY_AFTER = 2  # seconds, what a refused client is told
_SAMPLING = State(
    Phase.DEGRADED,
    Subject.SAMPLING,
    f"Postgres and hindsight-api were not looked at for {STALE_AFTER:g} s: the sidecar itself does not get to run; give it more CPU",
)


def component(
    state: str = "down", pid: int | None = None, restarts: int = 0, fault: str | None = None
) -> dict[str, Any]:
    """Return what `/health` tells of Postgres or hindsight-api; by default, of one that was not started yet."""
    return {"state": state, "pid": pid, "restarts": restarts, "fault": fault}


@dataclass(frozen=True)
class Picture:
    """The sidecar at one moment.

    Attributes:
        state: of the supervisor.
        since: when that state began.
        sampled: monotonic seconds of the last look at Postgres and hindsight-api.
        postgres, api: what is known of each, with pid, restarts and the last fault.
        versions: of every part, as far as known.
        model: identity of the model in use, None where its manifest cannot be read.
        ends: how often each component came to its end unasked, and how.
        volume: whether its file system answers, and what is free on it.
        memory_count: rows in memory_units over all tenants, None before the first count.
        database_bytes: size of the served database, None before it was measured.
        wal_bytes: size of Postgres' write-ahead log, None before it was measured.
        space: of the volume, None before it was looked at and while it cannot be.
        upstream_version: the body of hindsight-api's own `/version`, from the running one or worked out before.
        ever_ready: whether this start was ready once.
        pgdata: where the memories are.
        origin: where the served database came from, None where it grew here.
        dumps: the schedule of dumps and how it goes, None where there is none.

    """

    state: State = field(default_factory=lambda: State(Phase.STARTING, Subject.VOLUME))
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    sampled: float = field(default_factory=time.monotonic)
    postgres: dict[str, Any] = field(default_factory=component)
    api: dict[str, Any] = field(default_factory=component)
    versions: dict[str, str | None] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    ends: Mapping[str, Mapping[End, int]] = field(default_factory=dict)
    memory_count: int | None = None
    database_bytes: int | None = None
    wal_bytes: int | None = None
    space: Space | None = None
    volume: dict[str, Any] = field(default_factory=dict)
    upstream_version: dict[str, Any] = field(default_factory=dict)
    ever_ready: bool = False
    pgdata: str = ""
    origin: dict[str, Any] | None = None
    dumps: Record | None = None


class Status:
    """Holds the current picture. The clock is monotonic seconds.

    Attributes:
        picture: what is known now.
        first_ready_after: seconds from this object's making to the first readiness, None before it.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._counted = clock()
        self._seconds: dict[tuple[str, str], float] = {}
        self.picture = Picture(sampled=self._began)
        self.first_ready_after: float | None = None

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - the fields of Picture
        """Replace some of the picture; a new state begins now."""
        if "state" in changes or "sampled" in changes:
            now = self._clock()
            self._seconds = self._seconds_until(now)
            self._counted = now
        state = changes.get("state")
        if state is not None and (state.phase, state.subject) != (self.picture.state.phase, self.picture.state.subject):
            changes["since"] = datetime.now(UTC)
        self.picture = replace(self.picture, **changes)
        if self.first_ready_after is None and self.ready:
            self.first_ready_after = self._clock() - self._began

    @property
    def seconds(self) -> Mapping[tuple[str, str], float]:
        """How long each state lasted in all, by its labels; the current one until now."""
        return self._seconds_until(self._clock())

    def _seconds_until(self, now: float) -> dict[tuple[str, str], float]:
        """Return the time in each state until then; of the current one, what its sample was too old for is `sampling`."""
        seconds = dict(self._seconds)
        state, stale_from = self.picture.state, now
        if state.phase is Phase.READY:
            stale_from = min(max(self.picture.sampled + STALE_AFTER, self._counted), now)
        for one, passed in ((state, stale_from - self._counted), (_SAMPLING, now - stale_from)):
            seconds[one.labels] = seconds.get(one.labels, 0.0) + passed
        return seconds

    @property
    def sample_age(self) -> float:
        """Seconds since Postgres and hindsight-api were last looked at."""
        return self._clock() - self.picture.sampled

    @property
    def ready(self) -> bool:
        """Whether memory calls can be served, as far as a fresh sample tells."""
        return self.picture.state.phase is Phase.READY and self.sample_age < STALE_AFTER

    @property
    def state(self) -> State:
        """The state as it is told: one of being ready that is too old to be trusted is `degraded(sampling)`."""
        stale = self.picture.state.phase is Phase.READY and not self.ready
        return _SAMPLING if stale else self.picture.state

    @property
    def phase_text(self) -> str:
        """The state as one phrase, for a refused client."""
        return str(self.state)

    def body(self) -> dict[str, Any]:
        """Return `/health`'s body: hindsight-api's own members and ours."""
        picture = self.picture
        ready, state, since = self.ready, self.state, picture.since
        if state is _SAMPLING:
            since = datetime.now(UTC) - timedelta(seconds=self.sample_age - STALE_AFTER)
        return {
            "status": "healthy" if ready else "unhealthy",
            "database": "connected" if picture.postgres.get("state") == "up" else "unavailable",
            "state": state.phase,
            "subject": state.subject,
            "reason": state.subject if state.phase is Phase.BLOCKED else None,
            "detail": state.detail,
            "since": since.isoformat(timespec="milliseconds"),
            "sample_age_seconds": round(self.sample_age, 3),
            "components": {"postgres": picture.postgres, "hindsight-api": picture.api},
            "versions": {"sidecar": __version__, **picture.versions},
            "model": picture.model,
            "stand_in": bool(picture.model and picture.model["stand_in"]),
            "memory_count": picture.memory_count,
            "pgdata": picture.pgdata,
            "volume": picture.volume,
            "origin": picture.origin,
            "dumps": picture.dumps and picture.dumps.to_json(),
        }
