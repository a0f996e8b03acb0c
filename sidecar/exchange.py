"""One memory call to hindsight-api, over a connection of its own.

A client library's pool, retries and redirects are of no use here, and cost a call more time than all the rest of the
gateway.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import h11

from sidecar.asgi import Headers
from sidecar.settings import Address

CONNECT_TIMEOUT = 2.0  # seconds; it is on loopback
_READ_AHEAD = 2**18  # bytes of an answer that may wait for the client to take them
_HEAD_MAX = 100 * 1024  # bytes of its headers


class ExchangeError(Exception):
    """It ended before it answered, or answered what is no HTTP."""


class NotThereError(ExchangeError):
    """Nobody took the connection: nothing was sent."""


@contextmanager
def _no_http() -> Iterator[None]:
    try:
        yield
    except h11.ProtocolError as error:
        raise ExchangeError(f"{type(error).__name__}: {error}") from error


class _Wire(asyncio.Protocol):
    """Bytes both ways. What came before the connection broke can still be read: it may be the answer."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._full = False
        self._paused = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        if len(self._came) > _READ_AHEAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        self._ended = True
        self._wake(self._reader)
        return True  # a server that has nothing more to say may still listen

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._error = exc
        self._wake(self._reader)
        self._wake(self._writer)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake(self._writer)

    @staticmethod
    def _wake(waiting: "asyncio.Future[None] | None") -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def write(self, data: bytes) -> bool:
        """Send; return whether there is still anybody to send more to."""
        if self.transport.is_closing():
            return False
        self.transport.write(data)
        if self._full and not self.transport.is_closing():
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        return not self.transport.is_closing()

    async def read(self) -> bytes:
        """Return what came, nothing at the end. Raises ExchangeError where the connection broke."""
        if not self._came and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._came and self._error is not None:
            raise ExchangeError(f"{type(self._error).__name__}: {self._error}") from self._error
        data = bytes(self._came)
        self._came.clear()
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data


class Exchange:
    """A call, and what comes of it: `begin`, then `pieces`, and `close` in any case."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_MAX)
        self._wire: _Wire | None = None

    async def begin(
        self, method: str, target: bytes, headers: Headers, body: AsyncIterator[bytes] | None
    ) -> h11.Response:
        """Send a request, and return the beginning of its answer. Bytes of the target are sent as they are.

        Raises:
            NotThereError: nobody took the connection.
            ExchangeError: no answer came of it.

        """
        with _no_http():
            head = self._http.send(h11.Request(method=method, target=target, headers=headers)) or b""
        self._wire = wire = await self._connect()
        listening = True
        if body is not None:
            async for piece in body:
                with _no_http():
                    data = head + (self._http.send(h11.Data(data=piece)) or b"")
                head = b""
                listening = listening and await wire.write(data)
                if not listening:
                    break  # it may have answered before it had all of it
        if listening:
            with _no_http():
                head += self._http.send(h11.EndOfMessage()) or b""
            if head:
                await wire.write(head)
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ExchangeError(f"it answered {type(event).__name__}")
        return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it comes. Raises ExchangeError where it breaks off."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _connect(self) -> _Wire:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, wire = await asyncio.get_running_loop().create_connection(
                    _Wire, self._address.host, self._address.port
                )
        except (OSError, TimeoutError) as error:
            raise NotThereError(f"{type(error).__name__}: {error}") from error
        return wire

    async def _next(self) -> h11.Event:
        assert self._wire is not None  # noqa: S101 - `begin` came first
        while True:
            with _no_http():
                event = self._http.next_event()
            if isinstance(event, h11.Event):
                return event
            if event is h11.PAUSED:
                raise ExchangeError("it wants to speak another protocol")
            data = await self._wire.read()
            with _no_http():
                self._http.receive_data(data)

    def close(self) -> None:
        """Close the connection, at once."""
        if self._wire is not None:
            self._wire.transport.abort()
