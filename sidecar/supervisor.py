"""The supervisor: carries out what `machine.decide` decides, and tells `Status` what it sees."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import psycopg

from sidecar import (
    api_environment,
    cluster,
    database,
    log,
    machine,
    model,
    postgres_binaries,
    rehearsal,
    sizing,
    upstream,
    users,
    volume,
)
from sidecar.child import Child
from sidecar.errors import BlockedError, Reason, SidecarError, TransientError
from sidecar.machine import Decision, Fault, Phase, Server, State, Step, World
from sidecar.settings import Settings
from sidecar.status import Status
from sidecar.stopping import Stop, stop_children
from sidecar.watch import TIMEOUT, ApiWatch, PostgresWatch

_RETRY = 0.5  # seconds until a step that failed for a passing reason is tried again
_ORPHAN_PATIENCE = 30.0  # seconds
_TICK = 1.0  # seconds; the longest that the picture stays as it is
_SWEEPS = 10  # looks, a second apart, for traces that our own bank left
_NO_SPACE = "No space left on device"
_OOM_SCORE = "500"  # of 1000: short of memory, the kernel takes hindsight-api rather than the database


class Supervisor:
    """Runs Postgres and hindsight-api for as long as the sidecar lives.

    Attributes:
        world: what the decisions are made from.
        upstream: the installed hindsight-api.
        gave_up: the state in which it was blocked for too long, None where it was not.

    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        status: Status,
        initscripts: Path,
        *,
        first_ready: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self._first_ready = first_ready
        self.world = World()
        self.status = status
        self.gave_up: State | None = None
        self._environ = environ
        self._scripts = initscripts
        self._log = log.get("sidecar")
        self._changed = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._lock = volume.VolumeLock(settings.volume)
        self._machine = sizing.this_machine()
        self._identity = users.identity_environment(settings.run_dir, settings.run_dir / "home")
        self._binaries: postgres_binaries.Binaries | None = None
        self.upstream = upstream.find(settings.api_venv)
        self._known_revisions: frozenset[str] | None = None
        self._model: model.Model | None = None
        self._postgres: Child | None = None
        self._api: Child | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._client = httpx2.AsyncClient(
            base_url=f"http://{settings.api_listen}",
            headers=_upstream_key(environ),
            limits=httpx2.Limits(max_keepalive_connections=0),
            timeout=httpx2.Timeout(30.0, connect=TIMEOUT),
            trust_env=False,
        )
        self._postgres_watch = PostgresWatch(settings.run_dir, self._changed.set)
        self._api_watch = ApiWatch(self._client, self._changed.set)
        self._blocked_since: float | None = None
        self._orphan_since: float | None = None

    def request_stop(self, why: str) -> None:
        """Ask for the end, from a signal handler; asking again changes nothing."""
        if not self._stop_asked.is_set():
            self._log.info("stopping", why=why, phase=str(self.status.picture.state))
        self._stop_asked.set()
        self._changed.set()

    async def run(self) -> Stop:
        """Supervise until asked to stop or until giving up; return once Postgres is reaped."""
        self._prepare()
        try:
            while True:
                self._changed.clear()
                self._observe()
                now = time.monotonic()
                decision = machine.decide(self.world, now, api_hung_after=self.settings.api_hung_after)
                if decision.step is Step.STOP:
                    break
                if decision.step is Step.WAIT:
                    await self._wait(decision, now)
                else:
                    await self._carry_out(decision.step)
        finally:
            stop = await self._end()
        return stop

    def _prepare(self) -> None:
        home = self.settings.run_dir / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        self._working_directory = api_environment.make_directories(self.settings.run_dir)
        self.status.update(
            pgdata=str(self.settings.pgdata),
            versions={"hindsight-api": self.upstream.version, "postgres": None},
            upstream_version=upstream.expected_version_body(
                self.upstream, {**api_environment.defaults(), **api_environment.given(self._environ)}
            ),
        )
        with contextlib.suppress(BlockedError):  # shown from the first second on; START_API says what is wrong with it
            self.status.update(model=model.read(self.settings.model_dir, self.settings.flavor).to_json())

    # What is seen -----------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        """Take what the watches and the children tell into the world, and the world into the picture."""
        world = self.world
        world.stopping = world.stopping or self._stop_asked.is_set()
        if self._postgres is not None and self._postgres.returncode is not None:
            self._postgres_ended(self._postgres)
        if self._api is not None and self._api.returncode is not None:
            self._api_ended(self._api)
        if self._postgres is not None:
            if self._postgres_watch.server is not Server.UP and world.postgres is Server.UP:
                world.proved = False
            world.postgres = self._postgres_watch.server
        if self._api is not None:
            was, world.api = world.api, self._api_watch.server
            # Without Postgres it cannot answer: the time until it counts as hung begins when Postgres is up.
            since_now = was is not Server.UNRESPONSIVE or world.postgres is not Server.UP
            if world.api is Server.UNRESPONSIVE and since_now:
                world.api_unresponsive_since = time.monotonic()
                world.proved = False
            elif world.api is not Server.UNRESPONSIVE:
                world.api_unresponsive_since = None
        self._publish()

    def _publish(self) -> None:
        now = time.monotonic()
        state = machine.state_of(self.world, now)
        world = self.world
        before = self.status.picture.state
        if state.phase is Phase.READY:
            world.ever_ready = True
        self.status.update(
            state=state,
            sampled=now,
            ever_ready=world.ever_ready,
            memory_count=self._postgres_watch.memory_count,
            postgres=_component(
                world.postgres, self._postgres, world.postgres_restarts.total, self._postgres_watch.fault
            ),
            api=_component(world.api, self._api, world.api_restarts.total, self._api_watch.fault),
        )
        if (state.phase, state.subject, state.detail) != (before.phase, before.subject, before.detail):
            tell = self._log.warning if state.phase in (Phase.BLOCKED, Phase.DEGRADED) else self._log.info
            tell("state", state=str(state), **({"detail": state.detail} if state.detail else {}))
        if state.phase is Phase.READY and self._first_ready is not None:
            self._first_ready()
            self._first_ready = None
        self._blocked_since = (self._blocked_since or now) if state.phase is Phase.BLOCKED else None

    def _postgres_ended(self, child: Child) -> None:
        self._log.warning("postgres ended", pid=child.pid, status=child.returncode)
        self._postgres = None
        self._cancel("postgres-watch")
        self._postgres_watch.server = Server.DOWN
        self.world.postgres_ended()
        self.world.postgres_restarts.record(time.monotonic())
        if any(_NO_SPACE in line for line in child.tail):
            self._fault(BlockedError(Reason.NO_SPACE, _no_space(self.settings.volume), retry_after=10))

    def _api_ended(self, child: Child) -> None:
        self._log.warning("hindsight-api ended", pid=child.pid, status=child.returncode)
        self._api = None
        self._cancel("api-watch")
        self._api_watch.server = Server.DOWN
        self.world.api_ended()
        self.world.api_restarts.record(time.monotonic())

    def _fault(self, error: BlockedError | SidecarError) -> None:
        now = time.monotonic()
        if isinstance(error, BlockedError):
            self.world.fault = Fault(error.reason, error.detail, now + error.retry_after)
        else:
            self.world.fault = Fault(None, str(error), now + _RETRY)

    # What is done -----------------------------------------------------------------------------------------------

    async def _wait(self, decision: Decision, now: float) -> None:
        limit = self.settings.blocked_exit_after
        if limit is not None and self._blocked_since is not None and now - self._blocked_since > limit:
            self.gave_up = self.status.picture.state
            self.world.stopping = True
            return
        pause = _TICK if decision.until is None else min(_TICK, max(decision.until - now, 0.01))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    async def _carry_out(self, step: Step) -> None:
        """Take one step; a stop ends it at once, since every step leaves the disk whole at any moment."""
        effects: dict[Step, Callable[[], Awaitable[None]]] = {
            Step.TAKE_VOLUME: self._take_volume,
            Step.PREPARE_CLUSTER: self._prepare_cluster,
            Step.START_POSTGRES: self._start_postgres,
            Step.CHECK_DATABASE: self._check_database,
            Step.START_API: self._start_api,
            Step.REPLACE_API: self._replace_api,
            Step.PROVE: self._prove,
        }
        work = asyncio.ensure_future(effects[step]())
        stop = asyncio.ensure_future(self._stop_asked.wait())
        gone = asyncio.ensure_future(self._a_child_ended())
        try:
            while not work.done() and not stop.done() and not gone.done():
                await asyncio.wait({work, stop, gone}, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED)
                self._publish()
            if not work.done():
                work.cancel()
            await work
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
        except BlockedError as error:
            self._fault(error)
        except (TransientError, rehearsal.RehearsalError, psycopg.Error, OSError) as error:
            self._log.warning("step failed", step=step.value, error=f"{error}".strip())
            self._fault(SidecarError(f"could not {step.value}: {error}".strip()))
        else:
            self.world.fault = None
        finally:
            stop.cancel()
            gone.cancel()

    async def _a_child_ended(self) -> None:
        children = [child for child in (self._postgres, self._api) if child is not None]
        waits = [asyncio.ensure_future(child.wait()) for child in children]
        try:
            if waits:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.Event().wait()
        finally:
            for wait in waits:
                wait.cancel()

    async def _take_volume(self) -> None:
        volume.check_access(self.settings.volume)
        volume.check_layout(self.settings.pgdata, ephemeral=self.settings.ephemeral)
        self._lock.acquire()
        self.world.volume_held = True

    async def _prepare_cluster(self) -> None:
        found = cluster.inspect(self.settings.pgdata)
        self._clear_stale_pid_file()
        self._binaries = postgres_binaries.choose(self.settings.pg_bindir, found.major)
        if found.found is cluster.Found.NOTHING:
            self._check_can_initdb()
            self._log.info("making the cluster", pgdata=str(self.settings.pgdata), postgres=self._binaries.version)
        self.status.update(versions={**self.status.picture.versions, "postgres": self._binaries.version})
        child = self._spawn("10-initdb", "initdb", self._postgres_environment(), signal.SIGKILL)
        try:
            code = await child.wait()
        finally:
            child.kill_session()
        if code != 0:
            said = " ".join(list(child.tail)[-3:])
            if any(_NO_SPACE in line for line in child.tail):
                raise BlockedError(Reason.NO_SPACE, _no_space(self.settings.volume), retry_after=10)
            raise TransientError(f"10-initdb ended with {code}: {said}")
        self.world.cluster_prepared = True

    def _clear_stale_pid_file(self) -> None:
        now = time.monotonic()
        try:
            if cluster.clear_stale_pid_file(self.settings.pgdata):
                self._log.info("removed a stale postmaster.pid", pgdata=str(self.settings.pgdata))
        except cluster.StillRunningError as error:
            # After a sidecar was killed, its Postgres takes a moment for its own shutdown. Longer than that is no such case.
            self._orphan_since = self._orphan_since or now
            if now - self._orphan_since > _ORPHAN_PATIENCE:
                raise BlockedError(Reason.VOLUME_LOCKED, str(error)) from error
            raise
        self._orphan_since = None

    def _check_can_initdb(self) -> None:
        if "LD_PRELOAD" not in self._identity and not users.has_entry(os.geteuid()):
            raise BlockedError(
                Reason.PERMISSIONS,
                f"uid {os.geteuid()} has no passwd entry, and initdb needs one; install libnss-wrapper, or run as a uid "
                "that has one (runAsUser: 1000)",
            )

    async def _start_postgres(self) -> None:
        self._postgres = self._spawn("20-postgres", "postgres", self._postgres_environment(), signal.SIGINT)
        self._tasks["postgres-watch"] = asyncio.create_task(self._postgres_watch.run())
        self._tasks["postgres-end"] = asyncio.create_task(self._tell_end(self._postgres))

    async def _check_database(self) -> None:
        self._model = model.read(self.settings.model_dir, self.settings.flavor)
        model.check_files(self._model)
        self.status.update(model=self._model.to_json())
        if self._known_revisions is None:
            env = {**self._identity, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
            self._known_revisions = await upstream.revisions(self.upstream, env, self._working_directory)
        await database.check(self.settings.run_dir, self._model, self._known_revisions)
        self.world.database_checked = True

    async def _start_api(self) -> None:
        if self._model is None:
            raise TransientError("the model was not looked at")
        env = api_environment.build(
            self.settings, self._model, self.upstream, self._machine, self._environ, self._identity
        )
        child = self._spawn("30-hindsight-api", "hindsight-api", env, signal.SIGKILL)
        Path(f"/proc/{child.pid}/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
        self._api = child
        self._tasks["api-watch"] = asyncio.create_task(self._api_watch.run())
        self._tasks["api-end"] = asyncio.create_task(self._tell_end(child))

    async def _replace_api(self) -> None:
        if self._api is not None:
            self._log.warning("replacing a hung hindsight-api", pid=self._api.pid, limit=self.settings.api_hung_after)
            self._api.send(signal.SIGKILL)
            await self._api.wait(TIMEOUT)

    async def _prove(self) -> None:
        score = await rehearsal.prove(self._client)
        response = await self._client.get("/version")
        if response.is_success:
            self.status.update(upstream_version=response.json())
        await database.record_first_ready(self.settings.run_dir, self.status.picture.versions)
        self._log.info("a memory was stored and recalled by its meaning", semantic=round(score, 3))
        self._tasks["sweep"] = asyncio.create_task(self._sweep())
        self.world.proved = True

    async def _sweep(self) -> None:
        """Delete the traces that our own bank leaves; hindsight-api writes them some time after the call."""
        quiet = 0
        for _ in range(_SWEEPS):
            await asyncio.sleep(1)
            try:
                async with await database.connect(self.settings.run_dir) as connection:
                    deleted = await database.sweep_traces(connection, rehearsal.CANARY_BANK)
            except (psycopg.Error, OSError) as error:
                self._log.warning("traces of our own bank were not swept", error=str(error).strip())
                return
            quiet = 0 if deleted else quiet + 1
            if quiet >= 2:  # noqa: PLR2004 - nothing came for two seconds
                return

    # Children ---------------------------------------------------------------------------------------------------

    def _spawn(self, script: str, name: str, env: Mapping[str, str], death_signal: signal.Signals) -> Child:
        passed_on = log.ChildLines(name, self.settings.child_log_level)

        def hear(line: str) -> None:
            passed_on(line)
            if name == "postgres":
                self._postgres_watch.hear(line)

        cwd = self._working_directory
        return Child.start(name, [str(self._scripts / script)], env=env, cwd=cwd, death_signal=death_signal, hear=hear)

    def _postgres_environment(self) -> dict[str, str]:
        if self._binaries is None:
            raise TransientError("no PostgreSQL was chosen yet")
        settings = sizing.postgres_settings(self._machine)
        return {
            **self._identity,
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "TZ": self._environ.get("TZ", "UTC"),
            "TMPDIR": str(self.settings.run_dir / "scratch"),
            "PGDATA": str(self.settings.pgdata),
            "PG_BINDIR": str(self._binaries.bindir),
            "PG_SOCKET_DIR": str(self.settings.run_dir),
            "POSTGRES_SETTINGS": " ".join(f"{name}={value}" for name, value in settings.items()),
        }

    async def _tell_end(self, child: Child) -> None:
        await child.wait()
        self._changed.set()

    def _cancel(self, *names: str) -> None:
        for name in names:
            task = self._tasks.pop(name, None)
            if task is not None:
                task.cancel()

    async def _end(self) -> Stop:
        self.world.stopping = True
        self._publish()
        self._cancel("sweep", "api-watch", "postgres-watch")
        stop = await stop_children(
            self._api,
            self._postgres,
            self.settings.stop_grace,
            checkpoint=self._checkpoint,
            shut_down=self._is_shut_down,
            tell=self._log.info,
        )
        self._cancel("postgres-end", "api-end")
        await self._client.aclose()
        self._lock.release()
        return stop

    def _is_shut_down(self) -> bool:
        return self._binaries is not None and postgres_binaries.is_shut_down(self._binaries, self.settings.pgdata)

    async def _checkpoint(self) -> None:
        async with await database.connect(self.settings.run_dir, database.SUPERUSER) as connection:
            await connection.execute("CHECKPOINT")


def _component(server: Server, child: Child | None, restarts: int, fault: str | None) -> dict[str, Any]:
    return {
        "state": server.value,
        "pid": child.pid if child else None,
        "restarts": restarts,
        "fault": None if server in (Server.UP, Server.DOWN) else fault,
    }


def _upstream_key(environ: Mapping[str, str]) -> dict[str, str]:
    key = environ.get("HINDSIGHT_API_TENANT_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _no_space(directory: Path) -> str:
    return (
        f"Postgres found no space on {directory} ({volume.free_bytes(directory) // sizing.MIB} MiB free now); "
        "free some or grow the volume, and it goes on by itself"
    )
