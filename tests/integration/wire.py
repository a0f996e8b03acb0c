"""HTTP as bytes: a client that changes nothing, and a tee that records what passes between the gateway and hindsight-api."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import h11
from pydantic import SecretStr

from sidecar.gateway import Gateway
from sidecar.listeners import Server, bind_tcp
from sidecar.machine import Phase, State
from sidecar.settings import Address, Settings
from sidecar.status import Status
from sidecar.tenant import Tenant

TIMEOUT = 60.0  # seconds without a byte
CHUNK = 1 << 16
# Of one connection only, RFC 9110 section 7.6.1: what a gateway may change.
HOP_BY_HOP = (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade")
Headers = list[tuple[bytes, bytes]]


@dataclass
class Message:
    """A request or an answer: its first line's two parts, its headers in lower case, its body without framing."""

    start: tuple[bytes, bytes] | int
    headers: Headers
    body: bytes = b""

    @property
    def status(self) -> int:
        assert isinstance(self.start, int)
        return self.start

    @property
    def end_to_end(self) -> Headers:
        """The headers that are not of the connection."""
        return [(name, value) for name, value in self.headers if name not in HOP_BY_HOP]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    def undated(self) -> tuple[object, Headers, bytes]:
        """All but the date, for two answers to two calls."""
        return self.start, sorted(item for item in self.end_to_end if item[0] != b"date"), self.body


def unauthorized(headers: Headers) -> Headers:
    """Return headers without the one that the gateway puts the key in."""
    return [(name, value) for name, value in headers if name != b"authorization"]


def _message(event: h11.Request | h11.Response) -> Message:
    start = (event.method, event.target) if isinstance(event, h11.Request) else event.status_code
    return Message(start, [(bytes(name), bytes(value)) for name, value in event.headers])


def parse(raw: bytes, connection: h11.Connection) -> Message:
    """Parse one whole message; a message that is not whole is an h11 error or an assertion."""
    connection.receive_data(raw)
    connection.receive_data(b"")
    message: Message | None = None
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request | h11.Response):
            message = _message(event)
        elif isinstance(event, h11.Data):
            assert message is not None
            message.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert message is not None
            return message
        else:
            assert isinstance(event, h11.InformationalResponse), f"not a whole message: {event}"


@dataclass
class Recording:
    """The bytes of one connection between the gateway and hindsight-api."""

    sent: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)

    def request(self) -> Message:
        return parse(bytes(self.sent), h11.Connection(h11.SERVER))

    def answer(self) -> Message:
        connection = h11.Connection(h11.CLIENT)
        method, target = self.request().start  # type: ignore[misc]  # of a request
        # An answer can be understood only by whoever knows the question: HEAD has no body.
        connection.send(h11.Request(method=method, target=target, headers=[("host", "x")]))
        connection.send(h11.EndOfMessage())
        return parse(bytes(self.answered), connection)


class Call:
    """One request on a connection of its own, and its answer as it comes."""

    def __init__(
        self, port: int, method: str, target: str | bytes, body: bytes | None = None, headers: Headers | None = None
    ) -> None:
        target = target.encode("ascii") if isinstance(target, str) else target
        length = [(b"content-length", str(len(body)).encode())] if body is not None else []
        # One name whatever the port, so that two answers that repeat it are the same.
        self.request = Message(
            (method.encode(), target), [(b"host", b"127.0.0.1:8888"), *length, *(headers or [])], body or b""
        )
        self._connection = h11.Connection(h11.CLIENT)
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT)
        start = h11.Request(method=method, target=target, headers=[*self.request.headers, (b"connection", b"close")])
        self._send(start, *([h11.Data(data=body)] if body else []), h11.EndOfMessage())

    def _send(self, *events: h11.Event) -> None:
        raw = b"".join(self._connection.send(event) or b"" for event in events)
        # A refusal may come, and the connection end, before a large body was taken.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next part of the answer; raises TimeoutError where none comes."""
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(self._socket.recv(CHUNK))
        return event

    def head(self) -> Message:
        """Return the answer up to its body."""
        while not isinstance(event := self.next_event(), h11.Response):
            assert isinstance(event, h11.InformationalResponse), event
        return _message(event)

    def chunk(self) -> bytes:
        """Return the next piece of the body, nothing at its end."""
        event = self.next_event()
        assert isinstance(event, h11.Data | h11.EndOfMessage), event
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    def answer(self) -> Message:
        """Return the whole answer."""
        message = self.head()
        while chunk := self.chunk():
            message.body += chunk
        return message


def call(
    port: int, method: str, target: str | bytes, body: bytes | None = None, headers: Headers | None = None
) -> Message:
    """Make a call and return its answer."""
    with Call(port, method, target, body, headers) as made:
        return made.answer()


class Tee:
    """Passes connections on to a port of this machine and keeps what went over them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.recordings: list[Recording] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        recording = Recording()
        self.recordings.append(recording)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(
            _pump(reader, upstream_writer, recording.sent), _pump(upstream_reader, writer, recording.answered)
        )


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            record += data  # before it is passed on: whoever has the answer finds it recorded
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.contextmanager
def relayed(path: Path) -> Iterator[int]:
    """Have a port of loopback that leads to a Unix socket, for clients that know of none."""
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        try:
            await asyncio.gather(_pump(reader, inner_writer, bytearray()), _pump(inner_reader, writer, bytearray()))
        finally:
            writer.close()
            inner_writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, name="relay")
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:

        async def end() -> None:
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others)
            await asyncio.sleep(0)  # in which what was closed is let go

        asyncio.run_coroutine_threadsafe(end(), loop).result(TIMEOUT)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT)
        loop.close()


@dataclass(frozen=True)
class RecordedGateway:
    """A gateway with a tee between it and hindsight-api."""

    port: int
    tee: Tee

    def call(
        self, method: str, target: str | bytes, body: bytes | None = None, headers: Headers | None = None
    ) -> "Exchange":
        """Make a call, and return what the client and what hindsight-api sent and got."""
        before = len(self.tee.recordings)
        with Call(self.port, method, target, body, headers) as made:
            answer = made.answer()
        assert len(self.tee.recordings) == before + 1, "a call makes one connection to hindsight-api"
        return Exchange(made.request, answer, self.tee.recordings[-1])


@dataclass(frozen=True)
class Exchange:
    """One call, as the client saw it and as it was between the gateway and hindsight-api."""

    request: Message
    answer: Message
    recording: Recording

    def check(self) -> None:
        """Assert that each side got what the other sent."""
        received, sent = self.recording.request(), self.recording.answer()
        assert received.start == self.request.start
        assert received.body == self.request.body
        assert unauthorized(received.end_to_end) == unauthorized(self.request.end_to_end)
        assert self.answer.status == sent.status
        assert self.answer.body == sent.body
        assert self.answer.end_to_end == sent.end_to_end


@contextlib.contextmanager
def recorded_gateway(api_port: int, key: str) -> Iterator[RecordedGateway]:
    """Have a real gateway in front of a running hindsight-api, which asks for this key, with a tee between the two."""
    started: Future[tuple[RecordedGateway, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with _serving(api_port, key) as recorded:
            end = asyncio.Event()
            started.set_result((recorded, asyncio.get_running_loop(), end))
            await end.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=work, name="recorded-gateway")
    thread.start()
    try:
        recorded, loop, end = started.result(TIMEOUT)
        try:
            yield recorded
        finally:
            loop.call_soon_threadsafe(end.set)
    finally:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


@contextlib.asynccontextmanager
async def _serving(api_port: int, key: str) -> AsyncIterator[RecordedGateway]:
    tee = Tee(api_port)
    async with await asyncio.start_server(tee.serve, "127.0.0.1", 0) as tee_server:
        status = Status(clock=lambda: 0.0)  # in which no sample grows old
        status.update(state=State(Phase.READY), sampled=0.0)
        settings = Settings(api_listen=Address("127.0.0.1", tee_server.sockets[0].getsockname()[1]))
        tenant = Tenant(settings, {})
        tenant.key = SecretStr(key)
        gateway = Gateway(settings, status, tenant, lambda _: None)
        listener = bind_tcp("HINDSIGHT_SIDECAR_LISTEN", Address("127.0.0.1", 0))
        server = Server(gateway, listener)
        try:
            await server.listening()
            yield RecordedGateway(listener.getsockname()[1], tee)
        finally:
            await server.end(1.0)
            listener.close()
