"""What the sidecar tells about itself: one immutable picture, replaced as things change and read by every endpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sidecar import __version__
from sidecar.machine import Phase, State
from sidecar.schedule import Record

STALE_AFTER = 3.0  # seconds; an older sample proves nothing any more
RETRY_AFTER = 2  # seconds, what a refused client is told


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
        volume: whether its file system answers, and what is free on it.
        memory_count: rows in memory_units over all tenants, None before the first count.
        upstream_version: the body of hindsight-api's own `/version`, from the running one or worked out before.
        ever_ready: whether this start was ready once.
        pgdata: where the memories are.
        origin: where the served database came from, None where it grew here.
        dumps: the schedule of dumps and how it goes, None where there is none.

    """

    state: State = field(default_factory=lambda: State(Phase.STARTING, "volume"))
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    sampled: float = field(default_factory=time.monotonic)
    postgres: dict[str, Any] = field(default_factory=dict)
    api: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    memory_count: int | None = None
    volume: dict[str, Any] = field(default_factory=dict)
    upstream_version: dict[str, Any] = field(default_factory=dict)
    ever_ready: bool = False
    pgdata: str = ""
    origin: dict[str, Any] | None = None
    dumps: Record | None = None


class Status:
    """Holds the current picture. The clock is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.picture = Picture()

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - the fields of Picture
        """Replace some of the picture; a new state begins now."""
        state = changes.get("state")
        if state is not None and (state.phase, state.subject) != (self.picture.state.phase, self.picture.state.subject):
            changes["since"] = datetime.now(UTC)
        self.picture = replace(self.picture, **changes)

    @property
    def sample_age(self) -> float:
        """Seconds since Postgres and hindsight-api were last looked at."""
        return self._clock() - self.picture.sampled

    @property
    def ready(self) -> bool:
        """Whether memory calls can be served, as far as a fresh sample tells."""
        return self.picture.state.phase is Phase.READY and self.sample_age < STALE_AFTER

    @property
    def phase_text(self) -> str:
        """The state as one phrase, for a refused client."""
        if self.picture.state.phase is Phase.READY and not self.ready:
            return "degraded(sampling)"
        return str(self.picture.state)

    def body(self) -> dict[str, Any]:
        """Return `/health`'s body: hindsight-api's own members and ours."""
        picture = self.picture
        ready = self.ready
        return {
            "status": "healthy" if ready else "unhealthy",
            "database": "connected" if picture.postgres.get("state") == "up" else "unavailable",
            "state": picture.state.phase if ready or picture.state.phase is not Phase.READY else Phase.DEGRADED,
            "subject": picture.state.subject,
            "reason": picture.state.subject if picture.state.phase is Phase.BLOCKED else None,
            "detail": picture.state.detail,
            "since": picture.since.isoformat(timespec="milliseconds"),
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
