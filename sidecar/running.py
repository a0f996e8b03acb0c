"""A running sidecar: supervisor, gateway and control API on one event loop."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from sidecar import api_environment, control, log
from sidecar.environment import Sorted
from sidecar.errors import BlockedError, SettingsError
from sidecar.gateway import Gateway
from sidecar.hosts import AllowedHosts
from sidecar.listeners import Listeners, serve_on
from sidecar.metrics import Metrics
from sidecar.model import read
from sidecar.serve import EXIT_FAULT, EXIT_GAVE_UP, EXIT_HARD_STOP, EXIT_STOPPED, leave
from sidecar.settings import Settings
from sidecar.status import Status
from sidecar.supervisor import Supervisor
from sidecar.welcome import text as welcome_text

_SERVER_GRACE = 1.0  # seconds that open connections get once the children are gone


def initscripts() -> Path:
    """Return where this installation keeps its init scripts."""
    return Path(sys.prefix) / "share" / "hindsight-sidecar" / "initscripts"


def check_api_variables(settings: Settings, found: Sorted, supervisor: Supervisor) -> None:
    """Check the variables for hindsight-api before anything starts.

    Raises:
        SettingsError: naming each that cannot be passed on.

    """
    asked = api_environment.given(found.kept)
    try:
        decided = api_environment.owned(settings, read(settings.model_dir, settings.flavor))
    except BlockedError:
        return  # looked at again when there is a model
    faults = api_environment.check(asked, decided, supervisor.upstream)
    if faults:
        raise SettingsError(*faults)


class Sidecar:
    """Everything that runs, with one way in and one way out.

    Raises:
        SettingsError: something named in the settings is not there.

    """

    def __init__(self, settings: Settings, found: Sorted, listeners: Listeners, *, welcome: bool = False) -> None:
        self._settings = settings
        self._listeners = listeners
        self._log = log.get("sidecar")
        if found.links:
            self._log.info("dropped Kubernetes' service links", names=found.links)
        self._status = Status()
        self._metrics = Metrics(self._status)
        self._has_llm = api_environment.has_llm(found.kept)
        self._supervisor = Supervisor(
            settings, found.kept, self._status, initscripts(), first_ready=self._welcome if welcome else None
        )
        check_api_variables(settings, found, self._supervisor)
        self._gateway = Gateway(settings, self._status, self._metrics.count_refusal)

    def request_stop(self, why: str) -> None:
        """Ask for the end."""
        self._supervisor.request_stop(why)

    def _welcome(self) -> None:
        program = str(Path(sys.prefix) / "bin" / "hindsight-sidecar")
        log.tell(welcome_text(self._settings, self._status.picture, has_llm=self._has_llm, program=program))

    def _servers(self) -> list[asyncio.Task[None]]:
        settings, listeners = self._settings, self._listeners
        app = control.build(settings, self._status, self._metrics)
        hosts = AllowedHosts(settings.control_listen, settings.allowed_hosts)
        served = [
            (self._gateway, listeners.gateway),
            (control.Marked(app, control.TCP_LISTENER, hosts), listeners.control),
            (control.Marked(app, control.SOCKET_LISTENER, None), listeners.socket),
        ]
        if listeners.metrics is not None:
            served.append((control.metrics_app(self._metrics), listeners.metrics))
        return [asyncio.create_task(serve_on(app, listener, grace=_SERVER_GRACE)) for app, listener in served]

    async def run(self) -> int:
        """Run until the end; return the exit code."""
        servers = self._servers()
        supervising = asyncio.create_task(self._supervisor.run())
        self._log.info("sidecar started", **{name: str(v) for name, v in control.masked(self._settings).items() if v})
        try:
            everything: set[asyncio.Task[Any]] = {supervising, *servers}
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if not supervising.done():
                self.request_stop("a server of ours ended")
            stop = await supervising
        except Exception:  # noqa: BLE001 - whatever it is, the exit code and the trace tell of it
            self._log.exception("unexpected fault")
            return leave(EXIT_FAULT, "an unexpected fault; the log has the trace")
        finally:
            for server in servers:
                server.cancel()
            await asyncio.gather(*servers, return_exceptions=True)
            await self._gateway.close()
        self._log.info("stopped", clean=stop.clean, seconds=round(stop.seconds, 2))
        if not stop.clean:
            return leave(EXIT_HARD_STOP, f"Postgres did not shut down within {self._settings.stop_grace:g} s")
        if self._supervisor.gave_up is not None:
            return leave(EXIT_GAVE_UP, f"{self._supervisor.gave_up} for too long: {self._supervisor.gave_up.detail}")
        return EXIT_STOPPED
