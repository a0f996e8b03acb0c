"""A running sidecar: supervisor, gateway and control API on one event loop."""

import asyncio
import contextlib
import sys
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from sidecar import api_environment, log, probes, upstream
from sidecar.asgi import App
from sidecar.control_listener import SCRAPER, SOCKET, TCP, Later, Marked, metrics_app
from sidecar.environment import Sorted
from sidecar.errors import BlockedError, SettingsError
from sidecar.gateway import PROBES, Gateway
from sidecar.hosts import AllowedHosts
from sidecar.initscripts import installed
from sidecar.listeners import Listeners, Server
from sidecar.metering import Metered
from sidecar.metrics import Metrics
from sidecar.model import Model, read
from sidecar.serve import EXIT_FAULT, EXIT_GAVE_UP, EXIT_HARD_STOP, EXIT_SETTINGS, EXIT_STOPPED, leave
from sidecar.settings import Settings, changed
from sidecar.status import Status
from sidecar.tenant import Tenant
from sidecar.threads import off_loop
from sidecar.upstream import Upstream
from sidecar.welcome import text as welcome_text

if TYPE_CHECKING:
    from sidecar.supervisor import Supervisor

_SERVER_GRACE = 1.0  # seconds that open connections get once the children are gone, where the budget has them left
_LOOK_PATIENCE = 2.0  # seconds for the model's manifest, before anything is served
_RESERVE = 0.5  # seconds of the budget for what comes after those


def check_api_variables(settings: Settings, found: Sorted, installed: Upstream, model: Model | None) -> None:
    """Check the variables for hindsight-api before anything starts; without a model there is nothing to compare them with.

    Raises:
        SettingsError: naming each that cannot be passed on.

    """
    asked = api_environment.given(found.kept)
    tenant_key = asked.get("HINDSIGHT_API_TENANT_API_KEY")
    if settings.api_key is not None and tenant_key not in (None, settings.api_key.get_secret_value()):
        # One Authorization header passes both.
        raise SettingsError(
            "HINDSIGHT_SIDECAR_API_KEY and HINDSIGHT_API_TENANT_API_KEY differ, and a client sends one key for both; "
            "set them to the same value, or set one of them"
        )
    if model is None:
        return
    faults = api_environment.check(asked, api_environment.owned(settings, model), installed)
    if faults:
        raise SettingsError(*faults)


def _import_the_rest() -> None:
    """Import what takes its time, while probes are answered already."""
    from sidecar import control, supervisor  # noqa: F401, PLC0415


class Sidecar:
    """Everything that runs, with one way in and one way out."""

    def __init__(self, settings: Settings, found: Sorted, listeners: Listeners, *, welcome: bool = False) -> None:
        self._settings = settings
        self._found = found
        self._listeners = listeners
        self._log = log.get("sidecar")
        self._status = Status()
        self._metrics = Metrics(self._status)
        self._tenant = Tenant(settings, found.kept)
        self._gateway = Gateway(settings, self._status, self._tenant, self._metrics.count_refusal)
        self._metrics.watch_calls(lambda: self._gateway.in_flight)
        self._wants_welcome = welcome
        self._supervisor: Supervisor | None = None
        self._stop_asked: str | None = None
        self._grace = _SERVER_GRACE

    def request_stop(self, why: str) -> None:
        """Ask for the end."""
        self._stop_asked = self._stop_asked or why
        if self._supervisor is not None:
            self._supervisor.request_stop(why)

    def _make_supervisor(self) -> "Supervisor":
        """Make the supervisor, and the control API's application with it.

        Raises:
            SettingsError: something named in the settings is not there.

        """
        from sidecar import control  # noqa: PLC0415
        from sidecar.supervisor import Supervisor  # noqa: PLC0415

        kept = self._found.kept
        supervisor = Supervisor(
            self._settings,
            kept,
            self._status,
            self._installed,
            installed(),
            self._tenant,
            lambda: self._gateway.answered,
            first_ready=self._welcome if self._wants_welcome else None,
        )
        app = control.build(self._settings, self._status, self._metrics)
        supervisor.administration.attach_to(app)
        self._metrics.watch_operations(supervisor.administration)
        self._control.set(app)
        if self._stop_asked is not None:
            supervisor.request_stop(self._stop_asked)
        return supervisor

    async def _look_at_model(self) -> Model | None:
        """Return what is known of the model; None where that is nothing, which is told once it is to be loaded."""
        with contextlib.suppress(BlockedError, TimeoutError):
            async with asyncio.timeout(_LOOK_PATIENCE):
                return await off_loop(read, self._settings.model_dir, self._settings.flavor)
        return None

    def _tell_what_is_known(self, model: Model | None) -> None:
        """Have the first answer say all that later ones say, as far as nothing has to run for it."""
        expected = {**api_environment.defaults(), **api_environment.given(self._found.kept)}
        self._status.update(
            pgdata=str(self._settings.pgdata),
            versions={"hindsight-api": self._installed.version, "postgres": None},
            upstream_version=upstream.expected_version_body(self._installed, expected),
        )
        if model is not None:
            self._status.update(model=model.to_json())

    def _welcome(self) -> None:
        program = str(Path(sys.prefix) / "bin" / "hindsight-sidecar")
        log.tell(
            welcome_text(
                self._settings, self._status.picture, has_llm=api_environment.has_llm(self._found.kept), program=program
            )
        )

    def _servers(self) -> list[Server]:
        settings, listeners = self._settings, self._listeners
        self._control = Later(self._status)
        hosts = AllowedHosts(settings.control_listen, settings.allowed_hosts)
        metered = Metered(self._gateway, self._metrics)
        gateway = Server(metered, listeners.gateway, probes=PROBES, refused=metered.refuse)
        served: list[tuple[App, socket]] = [
            (Marked(self._control, TCP, hosts), listeners.control),
            (Marked(self._control, SOCKET, None), listeners.socket),
        ]
        if listeners.metrics is not None and settings.metrics_listen is not None:
            hosts = AllowedHosts(settings.metrics_listen, settings.allowed_hosts)
            served.append((Marked(metrics_app(self._metrics), SCRAPER, hosts), listeners.metrics))
        return [gateway, *(Server(app, listener, probes=probes.PROBES) for app, listener in served)]

    async def run(self) -> int:
        """Run until the end; return the exit code."""
        servers: list[Server] = []
        self._log.info("sidecar started", **changed(self._settings))
        if self._found.links:
            self._log.info("dropped Kubernetes' service links", names=self._found.links)
        try:
            self._installed = upstream.find(self._settings.api_venv)
            model = await self._look_at_model()
            self._tell_what_is_known(model)
            servers = self._servers()
            await asyncio.gather(*(server.listening() for server in servers))
            await asyncio.to_thread(_import_the_rest)
            await off_loop(check_api_variables, self._settings, self._found, self._installed, model)
            self._supervisor = self._make_supervisor()
            return await self._supervise(self._supervisor, [server.serving for server in servers])
        except SettingsError as error:
            for fault in error.faults:
                self._log.error("a setting cannot be used", fault=fault)
            return leave(EXIT_SETTINGS, "; ".join(error.faults))
        except Exception:  # noqa: BLE001 - whatever it is, the exit code and the trace tell of it
            self._log.exception("unexpected fault")
            return leave(EXIT_FAULT, "an unexpected fault; the log has the trace")
        finally:
            await asyncio.gather(*(server.end(self._grace) for server in servers))

    async def _supervise(self, supervisor: "Supervisor", servers: list[asyncio.Task[None]]) -> int:
        supervising = asyncio.create_task(supervisor.run())
        everything: set[asyncio.Task[Any]] = {supervising, *servers}
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        ended = [server for server in servers if server.done()]
        if ended:
            self.request_stop("a server of ours ended")
        stop = await supervising
        self._grace = min(max(self._settings.stop_grace - stop.seconds - _RESERVE, 0.0), _SERVER_GRACE)
        self._log.info("stopped", clean=stop.clean, seconds=round(stop.seconds, 2))
        for server in ended:
            server.result()  # raises what it ended with
        if ended:
            raise RuntimeError("a server of ours ended, and nobody had asked it to")
        if not stop.clean:
            return leave(
                EXIT_HARD_STOP,
                f"Postgres was not shut down in order ({stop.seconds:.1f} of {self._settings.stop_grace:g} s); its next start recovers",
            )
        if supervisor.gave_up is not None:
            return leave(EXIT_GAVE_UP, f"{supervisor.gave_up} for too long: {supervisor.gave_up.detail}")
        return EXIT_STOPPED
