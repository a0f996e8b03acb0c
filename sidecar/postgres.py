"""Our PostgreSQL: the data directory made or healed, its process, and what is seen of it."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sidecar import cluster, cluster_exchange, database, log, postgres_binaries, postgres_log, sizing, users
from sidecar.child import Child
from sidecar.component import Component
from sidecar.errors import BlockedError, Reason, TransientError
from sidecar.initscripts import InitScripts
from sidecar.machine import Server
from sidecar.measurement import Measurement
from sidecar.programs import Programs
from sidecar.settings import Settings
from sidecar.side_server import SideServer
from sidecar.threads import off_loop
from sidecar.volume import Space
from sidecar.watch import PostgresWatch

_ORPHAN_PATIENCE = 30.0  # seconds
_STOP_PATIENCE = 60.0  # seconds for a fast shutdown on behalf of an operation
_HARD_PATIENCE = 10.0  # seconds for an immediate one
_LOOK_PATIENCE = 2.0  # seconds for a look at the data directory during a stop
_NO_SPACE_SHOWN = 15.0  # seconds for which a want of space is told, where the free bytes do not show it (inodes, quota)


class Postgres(Component[PostgresWatch]):
    """One data directory and the postmaster on it.

    Attributes:
        binaries: the installation in use, None before the data directory was looked at.
        measurement: of what is stored.
        measuring: the task that does it, None where Postgres does not run.

    """

    def __init__(
        self,
        settings: Settings,
        scripts: InitScripts,
        identity: Mapping[str, str],
        timezone: str,
        changed: Callable[[], None],
        space: Callable[[], Space | None],
    ) -> None:
        super().__init__(PostgresWatch(settings.run_dir, settings.pgdata, changed))
        self._space = space
        self._looking = threading.Lock()
        self._server_lock = cluster.ServerLock(settings.pgdata)
        self._settings = settings
        self._scripts = scripts
        self._identity = identity
        self._timezone = timezone
        self._log = log.get("postgres")
        self._orphan_since: float | None = None
        self.binaries: postgres_binaries.Binaries | None = None
        self.measurement = Measurement(settings.run_dir, self._schemas_that_answer)
        self.measuring: asyncio.Task[None] | None = None

    def _schemas_that_answer(self) -> frozenset[str] | None:
        return self.watch.schemas if self.watch.server is Server.UP else None

    async def prepare(self) -> None:
        """Look at the data directory, heal its mode, or make the cluster; a cancellation leaves nothing half done.

        Raises:
            BlockedError: with the reason why Postgres may not be started.
            TransientError: it did not work this time.

        """
        binaries, found = await off_loop(self._look)
        self.binaries = binaries
        if found is cluster.Found.NOTHING:
            self._check_can_initdb()
            self._log.info("making the cluster", pgdata=str(self._settings.pgdata), version=binaries.version)
        child = self._scripts.start("10-initdb", "initdb", self._environment(binaries), signal.SIGKILL)
        try:
            code = await child.wait()
        finally:
            child.kill_session()
        if code != 0:
            raise self.no_space(child) or TransientError(
                f"10-initdb ended with {code}: {' '.join(list(child.tail)[-3:])}"
            )
        if found is cluster.Found.NOTHING:
            await off_loop(self._lock_new_cluster)

    def _lock_new_cluster(self) -> None:
        with self._looking:
            self._server_lock.acquire()

    def _look(self) -> tuple[postgres_binaries.Binaries, cluster.Found]:
        # One at a time: an earlier look that hung and was given up must not remove the next postmaster's pid file.
        with self._looking:
            cluster_exchange.finish(self._settings.pgdata)  # one that failed half way, before one is made in its place
            found = cluster.inspect(self._settings.pgdata)
            self._clear_stale_pid_file()
            cluster.clear_stale_socket_lock(self._settings.run_dir)
            return postgres_binaries.choose(self._settings.pg_bindir, found.major), found.found

    def _clear_stale_pid_file(self) -> None:
        now = time.monotonic()
        try:
            if cluster.clear_stale_pid_file(self._settings.pgdata, self._server_lock):
                self._log.info("removed a stale postmaster.pid", pgdata=str(self._settings.pgdata))
        except cluster.StillRunningError as error:
            # After a sidecar was killed, its Postgres takes a moment for its own shutdown. Longer is no such case.
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

    def start(self) -> None:
        """Start the postmaster and begin to watch it."""
        if self.binaries is None:
            raise TransientError("the data directory was not prepared")
        env = self._environment(self.binaries)
        with self._server_lock.handed_over() as keeps:
            child = self._scripts.start("20-postgres", "postgres", env, signal.SIGINT, self.watch.hear, keeps)
        self.watch.postmaster = child.pid
        self._begin(child)
        self.measuring = asyncio.create_task(self.measurement.run())

    def stop_watching(self) -> None:
        """Look no more."""
        super().stop_watching()
        if self.measuring is not None:
            self.measuring.cancel()
            self.measuring = None

    async def stop(self) -> None:
        """Shut it down fast, or hard where it does not end; the next start recovers from its log then."""
        if self.child is None:
            return
        for number, patience in ((signal.SIGINT, _STOP_PATIENCE), (signal.SIGQUIT, _HARD_PATIENCE)):
            self.child.send(number)
            if await self.child.wait(patience) is not None:
                return

    def side_server(self, pgdata: Path, socket_dir: Path, binaries: postgres_binaries.Binaries) -> SideServer:
        """Return how a server is run beside this one, on another data directory."""
        return SideServer(pgdata, socket_dir, self.programs(binaries), self._scripts)

    def no_space(self, child: Child) -> BlockedError | None:
        """Return the reason where a child ended for want of space, None where it did not say so."""
        return self._found_no_space(child.name) if any(map(postgres_log.no_space, child.tail)) else None

    def wants_space(self, now: float) -> str | None:
        """Say where Postgres runs and cannot write for want of space, None where it can. `now` is monotonic seconds."""
        said = self.watch.no_space_at
        if said is None:
            return None
        space = self._space()
        if now - said > _NO_SPACE_SHOWN and space is not None and space.enough:
            self.watch.no_space_at = None
            return None
        return self._found_no_space("Postgres").detail

    def _found_no_space(self, who: str) -> BlockedError:
        return BlockedError(
            Reason.NO_SPACE,
            f"{who} found no space on {self._settings.volume} ({self._space() or 'what is free cannot be told'}); free some "
            "or grow the volume, and it goes on by itself",
            retry_after=10,
        )

    async def is_shut_down(self) -> bool:
        """Tell whether the data directory was left in order; not for long, as its disk may hang."""
        if self.binaries is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_PATIENCE):
                return await off_loop(postgres_binaries.is_shut_down, self.binaries, self._settings.pgdata)
        return False

    async def checkpoint(self) -> None:
        """Write out what is dirty."""
        async with await database.connect(self._settings.run_dir, database.SUPERUSER) as connection:
            await connection.execute("CHECKPOINT")

    def programs(self, binaries: postgres_binaries.Binaries) -> Programs:
        """Return how the programs of an installation are run here, the server among them."""
        environment = {
            **self._identity,
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "TZ": self._timezone,
            "TMPDIR": str(self._settings.run_dir / "scratch"),
        }
        return Programs(binaries, environment, self._scripts.cwd)

    def _environment(self, binaries: postgres_binaries.Binaries) -> dict[str, str]:
        settings = sizing.postgres_settings(sizing.this_machine())
        return {
            **self.programs(binaries).environment,
            "PGDATA": str(self._settings.pgdata),
            "PG_BINDIR": str(binaries.bindir),
            "PG_SOCKET_DIR": str(self._settings.run_dir),
            "POSTGRES_SETTINGS": " ".join(f"{name}={value}" for name, value in settings.items()),
        }
