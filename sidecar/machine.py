"""The supervisor's decisions: from what is seen now to what is done next. Nothing here has an effect."""

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

from sidecar.backoff import CRASH_CEILING, CRASH_WINDOW, Restarts
from sidecar.errors import Reason
from sidecar.kinds import Kind

CRASH_LOOP_RETRY = 60.0  # seconds between tries of a component in a crash loop


class Server(Enum):
    """What is known of Postgres or hindsight-api."""

    DOWN = "down"
    STARTING = "starting"  # its process runs and it has not answered yet
    RECOVERING = "recovering"  # Postgres alone: it answers, and says that it replays its log
    UP = "up"
    UNRESPONSIVE = "unresponsive"  # it has answered, and now does not


class Phase(StrEnum):
    """The states of the sidecar."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    MAINTENANCE = "maintenance"
    BLOCKED = "blocked"
    STOPPING = "stopping"


class Subject(StrEnum):
    """What it is about while the sidecar starts or is degraded. Each has a paragraph in docs/troubleshooting.md."""

    VOLUME = "volume"
    CLUSTER = "cluster"
    POSTGRES = "postgres"
    RECOVERY = "recovery"
    API = "hindsight-api"
    SAMPLING = "sampling"  # of a degraded sidecar alone: its supervisor did not get to look


OperationName = NewType("OperationName", str)  # an operation's kind and id, which is what maintenance is about


class Step(Enum):
    """What the supervisor may do next."""

    STOP = "stop"
    WAIT = "wait"  # until `Decision.until`, or until something happens
    TAKE_VOLUME = "take the volume"
    PREPARE_CLUSTER = "prepare the cluster"
    START_POSTGRES = "start Postgres"
    STOP_POSTGRES = "stop Postgres"
    CHECK_DATABASE = "check the database"
    KEEP_COPY = "keep a copy of the database"
    START_API = "start hindsight-api"
    STOP_API = "stop hindsight-api"
    REPLACE_API = "replace a hung hindsight-api"
    PROVE = "recall a memory"


@dataclass(frozen=True)
class Decision:
    """A step, and for a wait the monotonic time at which to look again (None: only when something happens)."""

    step: Step
    until: float | None = None


@dataclass(frozen=True)
class Fault:
    """Why the last step may not be taken again before `until` (monotonic seconds)."""

    reason: Reason | None  # None: not blocked, only waiting for the next try
    detail: str
    until: float
    tries: int = 1  # that failed since a step last succeeded
    since: float = math.inf  # when the first of them failed; not known: no limit to them is ever reached


@dataclass
class World:
    """All that the decisions depend on. Times are monotonic seconds."""

    stopping: bool = False
    fault: Fault | None = None
    volume_held: bool = False
    volume_fault: str | None = None  # the volume does not answer; the sentence that says so
    cluster_prepared: bool = False  # since Postgres last ended
    postgres: Server = Server.DOWN
    postgres_restarts: Restarts = field(default_factory=Restarts)
    recovery: str | None = None  # how far Postgres is with it, as one sentence
    locked: str | None = None  # Postgres answers, and every memory call would wait; the sentence that says for what
    database_checked: bool = False
    copy_due: bool = False  # hindsight-api would migrate the schema, and no copy from before is kept yet
    api: Server = Server.DOWN
    api_restarts: Restarts = field(default_factory=Restarts)
    api_unresponsive_since: float | None = None
    proved: bool = False  # a recall gave its text back since both were last started
    ever_ready: bool = False
    maintenance: OperationName | None = None  # the operation that memory calls wait for
    api_wanted: bool = True  # not while an operation exchanges the database
    postgres_wanted: bool = True  # not while an operation exchanges the data directory
    no_space: str | None = None  # Postgres runs and cannot write; the sentence that says so

    def postgres_ended(self) -> None:
        """Forget what held for the Postgres that is gone."""
        self.postgres = Server.DOWN
        self.cluster_prepared = False
        self.database_checked = False
        self.proved = False

    def see_volume(self, fault: str | None) -> None:
        """Take what is seen of the volume now."""
        if fault is not None and self.volume_fault is None:
            self.proved = False
        self.volume_fault = fault

    def see_postgres(self, server: Server) -> None:
        """Take what is seen of Postgres now."""
        if server is not Server.UP and self.postgres is Server.UP:
            self.proved = False
        self.postgres = server

    def see_api(self, server: Server, now: float) -> None:
        """Take what is seen of hindsight-api now.

        Without Postgres and its volume it cannot answer: the time until it counts as hung begins when they do.
        """
        if server is not Server.UNRESPONSIVE:
            self.api_unresponsive_since = None
        elif self.api is not Server.UNRESPONSIVE or self.postgres is not Server.UP or self.volume_fault is not None:
            self.api_unresponsive_since = now
            self.proved = False
        self.api = server

    def step_failed(self, detail: str, now: float, until: float) -> None:
        """Note that a step failed for a passing reason, and may be taken again at a time."""
        last = self.fault if self.fault is not None and self.fault.reason is None else None
        tries, since = (1, now) if last is None else (last.tries + 1, last.since)
        self.fault = Fault(None, detail, until, tries, since)

    def database_exchanged(self) -> None:
        """Forget what held for the database that was served before."""
        self.database_checked = False
        self.proved = False
        self.fault = None

    def api_ended(self) -> None:
        """Forget what held for the hindsight-api that is gone."""
        self.api = Server.DOWN
        self.api_unresponsive_since = None
        self.proved = False


@dataclass(frozen=True)
class State:
    """What the world is told: `starting(postgres)`, `blocked(no-space)`, `ready`."""

    phase: Phase
    subject: Subject | Reason | OperationName | None = None
    detail: str | None = None

    def __str__(self) -> str:
        return f"{self.phase}({self.subject})" if self.subject else str(self.phase)

    @property
    def labels(self) -> tuple[str, str]:
        """Phase and subject as one of `LABELS`: of an operation its kind alone, since there is no end to their names."""
        subject = self.subject or ""
        return self.phase, subject.partition(" ")[0] if self.phase is Phase.MAINTENANCE else subject


# Every state that there is, as `State.labels` tells it.
LABELS: tuple[tuple[str, str], ...] = (
    *((Phase.STARTING, subject) for subject in Subject if subject is not Subject.SAMPLING),
    (Phase.READY, ""),
    *((Phase.DEGRADED, subject) for subject in Subject),
    *((Phase.MAINTENANCE, kind) for kind in Kind),
    *((Phase.BLOCKED, reason) for reason in Reason),
    (Phase.STOPPING, ""),
)


def decide(world: World, now: float, *, api_hung_after: float) -> Decision:
    """Return the next step. The first thing that is missing is mended first: volume, cluster, Postgres, database, API."""
    if world.stopping:
        return Decision(Step.STOP)
    if not world.postgres_wanted:
        return _decide_all_down(world)
    if (pause := _pause(world, now)) is not None:
        return pause
    if not world.volume_held:
        return Decision(Step.TAKE_VOLUME)
    if world.postgres is not Server.UP:
        return _decide_postgres(world, now)
    if not world.api_wanted:
        return Decision(Step.WAIT if world.api is Server.DOWN else Step.STOP_API)
    if not world.database_checked:
        return Decision(Step.CHECK_DATABASE)
    if world.copy_due and world.api is Server.DOWN:
        return Decision(Step.KEEP_COPY)
    if world.api is not Server.UP:
        return _decide_api(world, now, api_hung_after)
    return Decision(Step.WAIT) if world.proved else Decision(Step.PROVE)


def _pause(world: World, now: float) -> Decision | None:
    if world.fault is not None and now < world.fault.until:
        return Decision(Step.WAIT, world.fault.until)
    # Whatever is done on a volume that hangs would hang as well, and a process that was started there for ever.
    return None if world.volume_fault is None else Decision(Step.WAIT)


def _decide_all_down(world: World) -> Decision:
    if world.api is not Server.DOWN:
        return Decision(Step.STOP_API)
    return Decision(Step.WAIT if world.postgres is Server.DOWN else Step.STOP_POSTGRES)


def _decide_postgres(world: World, now: float) -> Decision:
    if world.postgres is not Server.DOWN:
        return Decision(Step.WAIT)
    due = _due(world.postgres_restarts, now)
    if now < due:
        return Decision(Step.WAIT, due)
    return Decision(Step.START_POSTGRES if world.cluster_prepared else Step.PREPARE_CLUSTER)


def _decide_api(world: World, now: float, api_hung_after: float) -> Decision:
    if world.api is Server.DOWN:
        if world.no_space is not None:
            return Decision(Step.WAIT)  # it would load its model and end, again and again
        due = _due(world.api_restarts, now)
        return Decision(Step.WAIT, due) if now < due else Decision(Step.START_API)
    if world.api is Server.UNRESPONSIVE and world.api_unresponsive_since is not None:
        limit = world.api_unresponsive_since + api_hung_after
        return Decision(Step.WAIT, limit) if now < limit else Decision(Step.REPLACE_API)
    return Decision(Step.WAIT)


def _due(restarts: Restarts, now: float) -> float:
    due = restarts.due(now)
    return due - restarts.delay(now) + CRASH_LOOP_RETRY if restarts.looping(now) else due


def _crash_loop(component: str, restarts: Restarts, detail: str | None) -> State:
    return State(
        Phase.BLOCKED,
        Reason.CRASH_LOOP,
        f"{component} ended more than {CRASH_CEILING} times in {CRASH_WINDOW / 60:.0f} minutes ({restarts.total} in all); "
        f"it is tried every {CRASH_LOOP_RETRY:.0f} s; its log lines say why" + (f": {detail}" if detail else ""),
    )


def state_of(world: World, now: float) -> State:
    """Say what state this is."""
    if world.stopping:
        return State(Phase.STOPPING)
    if world.fault is not None and world.fault.reason is not None:
        return State(Phase.BLOCKED, world.fault.reason, world.fault.detail)
    if world.no_space is not None:
        return State(Phase.BLOCKED, Reason.NO_SPACE, world.no_space)
    missing = _missing(world)
    detail = world.fault.detail if world.fault else None
    told = {Subject.VOLUME: world.volume_fault, Subject.RECOVERY: world.recovery, Subject.POSTGRES: world.locked}
    detail = (told.get(missing) if missing is not None else None) or detail
    if missing is Subject.POSTGRES and world.postgres is not Server.UP and world.postgres_restarts.looping(now):
        return _crash_loop("Postgres", world.postgres_restarts, detail)
    if missing is Subject.API and world.api is not Server.UP and world.api_restarts.looping(now):
        return _crash_loop("hindsight-api", world.api_restarts, detail)
    if world.maintenance is not None:
        return State(Phase.MAINTENANCE, world.maintenance)
    if missing is None:
        return State(Phase.READY)
    return State(Phase.DEGRADED if world.ever_ready else Phase.STARTING, missing, detail)


def _missing(world: World) -> Subject | None:
    if not world.volume_held or world.volume_fault is not None:
        return Subject.VOLUME
    if world.postgres is Server.RECOVERING:
        return Subject.RECOVERY
    if world.postgres is Server.DOWN and not world.cluster_prepared and world.postgres_restarts.total == 0:
        return Subject.CLUSTER
    if world.postgres is not Server.UP or not world.database_checked:
        return Subject.POSTGRES
    if world.api is not Server.UP or not world.proved:
        return Subject.API
    return Subject.POSTGRES if world.locked is not None else None
