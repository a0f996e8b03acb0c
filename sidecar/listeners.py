"""The addresses: bound before anything slow is imported, so that no probe is ever refused."""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from sidecar.asgi import App, Scope
from sidecar.errors import SettingsError
from sidecar.faultless import Faultless
from sidecar.settings import Address, Settings

_BACKLOG = 1024  # connections that wait to be taken up; Linux has 4096 at the most
_GONE_PATIENCE = 0.3  # seconds for a call to end whose client is gone
_TAKEN_PATIENCE = 3.0  # seconds
_TAKEN_PAUSE = 0.05
RUN_LOCK = "sidecar.lock"


def bind_tcp(name: str, address: Address) -> socket.socket:
    """Bind and listen.

    An address that is taken is tried again for a moment: what a killed sidecar left takes its time to end.

    Raises:
        SettingsError: the address is taken or not ours, naming the setting that moves it.

    """
    deadline = time.monotonic() + _TAKEN_PATIENCE
    while True:
        try:
            return _bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise SettingsError(
                    f"cannot listen on {address} ({error.strerror}); end what listens there, "
                    f"or set {name} to a free address"
                ) from error
        time.sleep(_TAKEN_PAUSE)


def _bind(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With its protocol named, asyncio sets TCP_NODELAY on what is accepted. Without it the body of an answer waits for
    # the acknowledgement of its head, which a client on a kept connection delays by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Bind the control socket so that it is 0600 from its first moment on; a server's own `uds=` would make it 0666.

    Raises:
        SettingsError: something else is there.

    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)  # of a sidecar that was killed: the run directory's lock is ours
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise _not_ours(path, error) from error
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def _not_ours(path: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"{path} cannot be used ({error.strerror}); the run directory has to be the sidecar's own: remove what is there, "
        "or set HINDSIGHT_SIDECAR_RUN_DIR to another one"
    )


def lock_run_dir(run_dir: Path) -> int:
    """Make sure that no other sidecar uses this run directory, for as long as the returned descriptor is open.

    Raises:
        SettingsError: one does, or something else is there.

    """
    path = run_dir / RUN_LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _not_ours(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SettingsError(
            f"another sidecar uses the run directory {run_dir}; stop it, or set HINDSIGHT_SIDECAR_RUN_DIR to another one"
        ) from None
    return descriptor


class Listeners:
    """All listening sockets of one sidecar."""

    def __init__(self, settings: Settings) -> None:
        self._run_lock = lock_run_dir(settings.run_dir)
        self.gateway = bind_tcp("HINDSIGHT_SIDECAR_LISTEN", settings.listen)
        self.control = bind_tcp("HINDSIGHT_SIDECAR_CONTROL_LISTEN", settings.control_listen)
        self.metrics = (
            bind_tcp("HINDSIGHT_SIDECAR_METRICS_LISTEN", settings.metrics_listen) if settings.metrics_listen else None
        )
        # Found out now rather than by hindsight-api, a few seconds and a model load later.
        bind_tcp("HINDSIGHT_SIDECAR_API_LISTEN", settings.api_listen).close()
        self.socket = bind_unix(settings.control_socket)


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    return name if isinstance(name, str) else str(Address(*name[:2]))


@contextlib.contextmanager
def _no_signal_handlers() -> Iterator[None]:
    """Stand in for uvicorn's own handling: the supervisor decides when the servers end."""
    yield


class Server:
    """An ASGI application served on a bound socket, from its making until `end`.

    Attributes:
        serving: done when the server has ended.

    """

    def __init__(
        self,
        app: App,
        listener: socket.socket,
        *,
        probes: Collection[str] = frozenset(),
        refused: Callable[[Scope], object] = lambda _: None,
        connections: int | None = None,
    ) -> None:
        """Begin to serve, at most so many connections; one more may ask for the paths of `probes`, and else is `refused`."""
        import uvicorn  # noqa: PLC0415 - the sockets are bound before this is imported

        from sidecar.accepting import Acceptor  # noqa: PLC0415 - the same
        from sidecar.connection import HEADERS_MAX, Connection, NoRoom, connections_allowed  # noqa: PLC0415 - the same

        limit = connections or connections_allowed()
        no_room = Faultless(NoRoom(app, _address(listener), probes, refused))
        config = uvicorn.Config(
            Faultless(app),
            http=type("Connection", (Connection,), {"limit": limit, "no_room": no_room}),
            h11_max_incomplete_event_size=HEADERS_MAX,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _no_signal_handlers  # type: ignore[method-assign]
        startup = self._server.startup

        def protocol() -> Connection:
            state = self._server.server_state
            made: Connection = config.http_protocol_class(  # type: ignore[call-arg, assignment]
                config=config, server_state=state, app_state=self._server.lifespan.state
            )
            return made

        async def start(sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG001 - the acceptor has ours
            await startup([])
            self._server.servers.append(Acceptor(listener, protocol))  # type: ignore[arg-type]

        self._server.startup = start  # type: ignore[method-assign]
        self.serving: asyncio.Task[None] = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def listening(self) -> None:
        """Return once requests are answered, or once the server has ended."""
        while not self._server.started and not self.serving.done():  # noqa: ASYNC110 - uvicorn has a flag, no event
            await asyncio.sleep(0)

    async def end(self, grace: float) -> None:
        """Close; what is under way gets `grace` seconds. Then its client is gone for it, as if that had left.

        What does not end then either, such as one that waits for a disk, is left behind.
        """
        self._server.should_exit = True
        await asyncio.wait({self.serving}, timeout=grace)
        for _ in range(2):  # some may come until it closes its sockets
            if self.serving.done():
                return
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self.serving}, timeout=_GONE_PATIENCE)
            self._server.force_exit = True
