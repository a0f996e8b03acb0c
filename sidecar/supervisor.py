"""The supervisor: carries out what `machine.decide` decides, and tells `Status` what it sees."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import psycopg

from sidecar import (
    api_environment,
    backoff,
    cluster_exchange,
    database,
    log,
    machine,
    staging,
    swapping,
    upstream,
    users,
    volume,
)
from sidecar.administration import Administration
from sidecar.at_hand import AtHand
from sidecar.backoff import End
from sidecar.child import Child
from sidecar.errors import BlockedError, SidecarError, TransientError
from sidecar.hindsight_api import HindsightApi
from sidecar.initscripts import InitScripts
from sidecar.machine import Decision, Fault, Phase, Server, State, Step, World
from sidecar.maintenance import Maintenance
from sidecar.postgres import Postgres
from sidecar.recognition import Recognition
from sidecar.rehearsal import RehearsalError
from sidecar.schedule import Retention, Times
from sidecar.scheduler import Scheduler
from sidecar.settings import Settings
from sidecar.status import Status, component
from sidecar.stopping import Stop, stop_children
from sidecar.tenant import Tenant, served_schema, tenancy
from sidecar.threads import off_loop
from sidecar.volume_watch import VolumeWatch

_DROP_AGAIN = 30.0  # seconds until a staged database that could not be dropped is tried again
_RETRY = 0.5  # seconds until a step that failed for a passing reason is tried again
_TICK = 1.0  # seconds; the longest that the picture stays as it is
_REMIND = 60.0  # seconds between log lines that say why it is not ready
_OPERATION_SHARE = 4  # of the time to stop, for an operation to clean up
_ASKED = "asked"  # why a component ended that was not to run any more
_RELEASE_PATIENCE = 0.5  # seconds to give the volume's lock back; closing a file asks a file system that may hang
_CANCEL_PATIENCE = 0.5  # seconds for a step to end once cancelled; a server that hangs must not hold a stop up


class Supervisor:
    """Runs Postgres and hindsight-api for as long as the sidecar lives.

    Attributes:
        world: what the decisions are made from.
        installed: the installed hindsight-api.
        administration: begins operations on what is served.
        gave_up: the state in which it was blocked for too long, None where it was not.

    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        status: Status,
        installed: upstream.Upstream,
        scripts: Path,
        tenant: Tenant,
        answered: Callable[[], float],
        *,
        first_ready: Callable[[], None] | None = None,
    ) -> None:
        self.world = World()
        self.installed = installed
        self.gave_up: State | None = None
        self._settings = settings
        self._tenancy = tenancy(environ)
        self._status = status
        self._first_ready = first_ready
        self._log = log.get("sidecar")
        self._changed = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._asked: float | None = None  # monotonic seconds of that
        self._maintenance = Maintenance(
            self.world, self._changed.set, served_schema(environ), lambda: self._at_hand.revisions.heads
        )
        self._lock = volume.VolumeLock(settings.volume)
        self._blocked_since: float | None = None
        self._told = time.monotonic()
        self._dropping: asyncio.Task[None] | None = None
        self._drop_again = -math.inf
        home = settings.run_dir / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        self._identity = users.identity_environment(settings.run_dir, home)
        self._cwd = api_environment.make_directories(settings.run_dir)
        runner = InitScripts(scripts, self._cwd, settings.child_log_level)
        changed = self._changed.set
        self._volume = VolumeWatch(settings.volume, changed)
        self._watching_volume: asyncio.Task[None] | None = None
        self._postgres = Postgres(
            settings, runner, self._identity, environ.get("TZ", "UTC"), changed, lambda: self._volume.space
        )
        self._api = HindsightApi(settings, self.installed, runner, self._identity, environ, tenant, answered, changed)
        self._at_hand = AtHand(settings, self.world, status, self._postgres, self._api, self._identity, self._cwd)
        self._recognition = Recognition(settings.run_dir)
        self.administration = Administration(settings, self._at_hand, self._maintenance)
        self._scheduler: Scheduler | None = None
        if settings.dump_schedule is not None:
            retention = Retention(settings.dump_keep, settings.dump_keep_days)
            self._scheduler = Scheduler(Times(settings.dump_schedule), retention, self.administration)

    def request_stop(self, why: str) -> None:
        """Ask for the end, from a signal handler; asking again changes nothing."""
        if not self._stop_asked.is_set():
            self._asked = time.monotonic()
            self._log.info("stopping", why=why, phase=str(self._status.picture.state))
        self._stop_asked.set()
        self._changed.set()

    async def run(self) -> Stop:
        """Supervise until asked to stop or until giving up; return once Postgres is reaped."""
        self._watching_volume = asyncio.create_task(self._volume.run())
        try:
            while True:
                self._changed.clear()
                self._observe()
                self._look_at_schedule()
                self._look_at_leftovers()
                await self._maintenance.tell_looked()
                now = time.monotonic()
                decision = machine.decide(self.world, now, api_hung_after=self._settings.api_hung_after)
                if decision.step is Step.STOP:
                    break
                if decision.step is Step.WAIT:
                    await self._wait(decision, now)
                else:
                    await self._carry_out(decision.step)
        finally:
            stop = await self._end()
        return stop

    # What is seen -----------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        """Take what the watches and the children tell into the world, and the world into the picture."""
        now = time.monotonic()
        world = self.world
        world.stopping = world.stopping or self._stop_asked.is_set()
        self._observe_ends(now)
        self._look(now)
        for watching in (self._watching_volume, self._postgres.watching, self._postgres.measuring, self._api.watching):
            if watching is not None and watching.done():
                watching.result()  # a watch that ended by itself has a defect: better no sidecar than a blind one

    def _observe_ends(self, now: float) -> None:
        world = self.world
        if (ended := self._postgres.forget()) is not None:
            no_space = self._postgres.no_space(ended)
            end = backoff.how(ended.returncode or 0) if no_space is None else End.NO_SPACE
            tell = self._log.warning if world.postgres_wanted else self._log.info
            told = end if world.postgres_wanted else _ASKED
            tell("postgres ended", pid=ended.pid, status=ended.returncode, reason=told)
            world.postgres_ended()
            if no_space is not None:
                self._fault(no_space)
            if world.postgres_wanted and no_space is None:
                world.postgres_restarts.record(now, end)
            elif world.postgres_wanted:
                world.postgres_restarts.record_excused(end)
        if (ended := self._api.forget()) is not None:
            end = End.HUNG if self._api.was_hung(ended) else backoff.how(ended.returncode or 0)
            tell = self._log.warning if world.api_wanted else self._log.info
            told = end if world.api_wanted else _ASKED
            tell("hindsight-api ended", pid=ended.pid, status=ended.returncode, reason=told)
            world.api_ended()
            if world.api_wanted:
                world.api_restarts.record(now, end)

    def _look(self, now: float) -> None:
        """Take what the watches tell, also in the middle of a step."""
        world = self.world
        world.see_volume(self._volume.fault)
        if self._postgres.child is not None:
            world.see_postgres(self._postgres.watch.server)
            recovery = self._postgres.watch.recovery
            world.recovery = None if recovery is None else recovery.sentence
            world.locked = self._postgres.watch.locked
        if self._api.child is not None:
            world.see_api(self._api.watch.server, now)
        world.no_space = self._postgres.wants_space(now)
        self._publish(now)

    def _publish(self, now: float) -> None:
        world = self.world
        state = machine.state_of(world, now)
        before = self._status.picture.state
        world.ever_ready = world.ever_ready or state.phase is Phase.READY
        postgres, api = self._postgres, self._api
        self._status.update(
            state=state,
            sampled=now,
            ever_ready=world.ever_ready,
            ends={
                "postgres": {**world.postgres_restarts.ends, End.REINITIALIZED: postgres.watch.reinitialized},
                "hindsight-api": world.api_restarts.ends,
            },
            memory_count=postgres.measurement.memory_count,
            database_bytes=postgres.measurement.database_bytes,
            wal_bytes=postgres.measurement.wal_bytes,
            space=self._volume.space,
            volume=_volume(self._volume),
            postgres={
                **_component(world.postgres, postgres.child, world.postgres_restarts.total, postgres.watch.fault),
                "recovery": recovery.to_json() if (recovery := postgres.watch.recovery) else None,
            },
            api=_component(world.api, api.child, world.api_restarts.total, api.watch.fault),
        )
        reminder = state.phase is not Phase.READY and now - self._told > _REMIND
        if str(state) != str(before) or reminder:  # not whenever a figure in its detail changes
            tell = self._log.warning if reminder or state.phase in (Phase.BLOCKED, Phase.DEGRADED) else self._log.info
            tell("state", state=str(state), **({"detail": state.detail} if state.detail else {}))
            self._told = now
        if state.phase is Phase.READY and self._first_ready is not None:
            self._first_ready()
            self._first_ready = None
        # Whoever began an operation, such as an adoption, is about to mend it.
        waits = state.phase is Phase.BLOCKED and not self.administration.busy
        self._blocked_since = (self._blocked_since or now) if waits else None

    def _look_at_leftovers(self) -> None:
        if self._dropping is not None and self._dropping.done():
            self._dropping.result()  # what it does not expect is a defect
            self._dropping = None
        now = time.monotonic()
        idle = self.world.postgres is Server.UP and self.administration.operations.current is None
        if staging.left and idle and self._dropping is None and now > self._drop_again:
            self._drop_again = now + _DROP_AGAIN
            self._dropping = asyncio.create_task(staging.drop_left(self._settings.run_dir))

    def _look_at_schedule(self) -> None:
        if self._scheduler is not None:
            self._scheduler.look(datetime.now(UTC), ready=self._status.ready)
            self._status.update(dumps=self._scheduler.record)

    def _fault(self, error: SidecarError) -> None:
        now = time.monotonic()
        if isinstance(error, BlockedError):
            self.world.fault = Fault(error.reason, error.detail, now + error.retry_after)
        else:
            self.world.step_failed(str(error), now, now + _RETRY)

    # What is done -----------------------------------------------------------------------------------------------

    async def _wait(self, decision: Decision, now: float) -> None:
        limit = self._settings.blocked_exit_after
        if limit is not None and self._blocked_since is not None and now - self._blocked_since > limit:
            self.gave_up = self._status.picture.state
            self.world.stopping = True
            return
        pause = _TICK if decision.until is None else min(_TICK, max(decision.until - now, 0.01))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    async def _carry_out(self, step: Step) -> None:
        """Take one step. A stop or the end of a child ends it: every step leaves the disk whole at any moment."""
        effects: dict[Step, Callable[[], Awaitable[None]]] = {
            Step.TAKE_VOLUME: self._take_volume,
            Step.PREPARE_CLUSTER: self._prepare_cluster,
            Step.START_POSTGRES: self._start_postgres,
            Step.STOP_POSTGRES: self._postgres.stop,
            Step.CHECK_DATABASE: self._check_database,
            Step.KEEP_COPY: self._keep_copy,
            Step.START_API: self._start_api,
            Step.STOP_API: self._api.stop,
            Step.REPLACE_API: self._api.replace,
            Step.PROVE: self._prove,
        }
        work = asyncio.ensure_future(effects[step]())
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stop_asked.wait()), *self._ends_of_children()]
        try:
            while not work.done() and not any(end.done() for end in ends):
                await asyncio.wait({work, *ends}, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self._look(time.monotonic())
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_PATIENCE)
            if not work.done():
                work.add_done_callback(_take_no_notice)
            elif not work.cancelled():
                self._take_result(step, work)
        finally:
            work.cancel()
            for end in ends:
                end.cancel()

    def _ends_of_children(self) -> list["asyncio.Future[int | None]"]:
        children = [child for child in (self._postgres.child, self._api.child) if child is not None]
        return [asyncio.ensure_future(child.wait()) for child in children]

    def _take_result(self, step: Step, work: "asyncio.Future[None]") -> None:
        error = work.exception()
        if error is None:
            self.world.fault = None
        elif isinstance(error, BlockedError):
            self._fault(error)
        elif isinstance(error, TransientError | RehearsalError | psycopg.Error | httpx2.HTTPError | OSError):
            self._log.warning("step failed", step=step.value, error=f"{error}".strip())
            self._fault(TransientError(f"could not {step.value}: {error}".strip()))
        else:
            raise error

    async def _take_volume(self) -> None:
        await off_loop(self._look_at_volume)
        self.world.volume_held = True

    def _look_at_volume(self) -> None:
        # First: where the layout is wrong, the directory that is looked at is not the volume.
        volume.check_layout(self._settings.pgdata, ephemeral=self._settings.ephemeral)
        volume.check_access(self._settings.volume)
        self._lock.acquire()
        if (old := cluster_exchange.finish(self._settings.pgdata)) is not None:
            self._log.warning("finished an exchange of data directories", kept=old)
        self.administration.sweep_files()
        if self._scheduler is not None:
            self._scheduler.read_volume(datetime.now(UTC))

    async def _prepare_cluster(self) -> None:
        await self._postgres.prepare()
        if self._postgres.binaries is not None:
            self._status.update(versions={**self._status.picture.versions, "postgres": self._postgres.binaries.version})
        self.world.cluster_prepared = True

    async def _start_postgres(self) -> None:
        self._postgres.start()
        self._told_end(self._postgres.child)

    async def _check_database(self) -> None:
        await self._at_hand.look_at_installed()
        at_hand = self._at_hand
        if (
            self.administration.operations.current is None
        ):  # also before what cannot be served: that may be restored over
            await self.administration.sweep_databases()
        await database.check(self._settings.run_dir, at_hand.model, at_hand.known_revisions)
        await self._recognition.check(at_hand.model, at_hand.embedder, at_hand.similarities)
        self._status.update(origin=await database.origin(self._settings.run_dir))
        if self._settings.upgrade_copy:
            heads = at_hand.revisions.heads
            self.world.copy_due = await database.wants_copy(self._settings.run_dir, heads, self._tenancy)
        self.world.database_checked = True

    async def _keep_copy(self) -> None:
        name = await swapping.copy(self._settings.run_dir, self._settings.volume, self.installed.version)
        self._log.info("kept a copy from before the schema is migrated", database=name)
        self.world.copy_due = False

    async def _start_api(self) -> None:
        await self._api.start(self._at_hand.model)
        self._told_end(self._api.child)

    async def _prove(self) -> None:
        await self._api.prove()
        body = await self._api.version_body()
        if body is not None:
            self._status.update(upstream_version=body)
        versions, heads = self._status.picture.versions, self._at_hand.revisions.heads
        await database.record_first_ready(self._settings.run_dir, versions, heads, self._tenancy)
        self.world.proved = True

    def _told_end(self, child: Child | None) -> None:
        if child is not None:
            child.on_end(self._changed.set)

    async def _end_operation(self) -> None:
        """End what runs; what it cannot clean up now is named and cleaned up at the next start."""
        await self._maintenance.tell_looked()  # whoever waits for the loop learns that it has ended
        try:
            async with asyncio.timeout(self._settings.stop_grace / _OPERATION_SHARE):
                await self.administration.end()
        except TimeoutError:
            self._log.warning("an operation did not end in time; what it left is cleaned up at the next start")

    async def _end(self) -> Stop:
        began = time.monotonic() if self._asked is None else self._asked
        self.world.stopping = True
        self._publish(time.monotonic())
        await self._end_operation()
        if self._dropping is not None:
            self._dropping.cancel()
        self._postgres.stop_watching()
        self._api.stop_watching()
        stop = await stop_children(
            self._api.child,
            self._postgres.child,
            self._settings.stop_grace - (time.monotonic() - began),
            checkpoint=self._postgres.checkpoint,
            shut_down=self._postgres.is_shut_down,
            tell=self._log.info,
        )
        await self._api.close()
        if self._watching_volume is not None:
            self._watching_volume.cancel()
        if self._volume.fault is None:  # the end of the process gives it back as well
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_PATIENCE):
                    await off_loop(self._lock.release)
        return replace(stop, seconds=time.monotonic() - began)


def _take_no_notice(work: "asyncio.Future[None]") -> None:
    """Take the result of a step that was given up: it hung, and what it says at last comes too late."""
    if not work.cancelled():
        work.exception()


def _volume(watch: VolumeWatch) -> dict[str, Any]:
    space = watch.space
    return {
        "state": watch.server.value,
        "fault": watch.fault,
        "free_bytes": space.free if space else None,
        "free_inodes": space.inodes if space else None,
    }


def _component(server: Server, child: Child | None, restarts: int, fault: str | None) -> dict[str, Any]:
    told = None if server in (Server.UP, Server.DOWN) else fault
    return component(server.value, child.pid if child else None, restarts, told)
