"""One client's connection: how long it may keep us waiting, how many there may be, and what is answered to what is no HTTP."""

import asyncio
import json
import math
import resource
import socket
import sys
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidecar import log
from sidecar.asgi import App, Message, Receive, Scope, Send, problem, send_json
from sidecar.faultless import Faultless
from sidecar.status import RETRY_AFTER

REQUEST_TIME = 20.0  # seconds for a request's headers, and for what comes of its body after the answer
ONE_WAY_TIME = 5.0  # seconds in which a client that closed its own direction still gets answers
UNREAD_TIME = 60.0  # seconds for which a client may take nothing of what is sent to it
HEADERS_MAX = 16384  # bytes
_TOLD_EVERY = 60.0  # seconds between two log lines
_LOOK = 0.002  # seconds between looks at whether there is room
MOMENT = 0.1  # seconds that each client has from being taken up, however many others come
_OURS = 96  # descriptors for everything else that the sidecar has open
_SHARES = 5  # the gateway's clients, its connections to hindsight-api, the two addresses of the control API, that of the metrics
_MOST, _LEAST = 1024, 8


def connections_allowed() -> int:
    """Return how many connections one listener may have, so that all of them together leave descriptors for the rest."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, (descriptors - _OURS) // _SHARES))


class Connection(H11Protocol):
    """Uvicorn's h11 protocol, with a bound on what a client can make us wait for and hold.

    Attributes:
        limit: connections of one listener; one more takes the place of the one that we have waited for longest.
        no_room: what is served to one more where calls are under way on all of them.
        since: seconds of the loop's clock at which it was taken up.

    """

    limit: ClassVar[int] = _MOST
    no_room: ClassVar[Faultless]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take up a connection."""
        super().connection_made(transport)
        self.since = self._heard = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._one_way = False
        if len(self.open_ones()) > self.limit:
            self.app = self.no_room
        _bound_unread(transport.get_extra_info("socket"))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Take up what came."""
        self._heard = self.loop.time()
        super().data_received(data)
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Stay open for the answer where the whole request has come: the client closed its own direction alone, perhaps.

        A client that is gone altogether looks just the same, so the answer has to come within `ONE_WAY_TIME`.
        """
        if self._between_requests or self.conn.their_state is not h11.DONE:
            return False
        if not self._one_way:
            self._one_way = True
            self.loop.call_later(ONE_WAY_TIME, self._close)
        return True

    def on_response_complete(self) -> None:
        """Go on to the next request, if there can be one."""
        super().on_response_complete()
        if self._one_way and self._between_requests:
            self.transport.close()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or more of it than is taken, and close."""
        error = sys.exception()
        status = HTTPStatus(error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is under way, and cannot be taken back
            self.transport.close()
            return
        why = (
            f"a request's headers may have {HEADERS_MAX // 1024} KiB; send shorter ones"
            if status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            else f"this is no request of HTTP/1.1 ({error or msg}); check what the client sends"
        )
        body = json.dumps(problem(status, status.phrase, why)).encode()
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _between_requests(self) -> bool:
        cycle: object = self.cycle  # None before the first request, whatever uvicorn's annotation says
        return cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """Whether the next thing to happen is the client's."""
        return self._between_requests or (self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused)

    def open_ones(self) -> list["Connection"]:
        """Return all connections of its listener that are not on their way out."""
        return [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]

    def idlest(self) -> "Connection | None":
        """Return the one of them to be closed for another: what we have waited for longest, of those that had their moment.

        Where none had it yet, the one that will have had it first; None where all have calls under way.
        """
        waiting = [one for one in self.open_ones() if one._waits_for_client]  # noqa: SLF001 - our own kind
        heard = [one for one in waiting if one.left_of_its_moment() <= 0]
        # Whose answer is not all on its way yet would lose the rest of it.
        return min(heard or waiting, key=lambda one: (one.unsent > 0, one._heard if heard else one.since), default=None)  # noqa: SLF001

    @property
    def unsent(self) -> int:
        """Bytes that its client has not taken yet, and the kernel has no room for."""
        return self.transport.get_write_buffer_size()

    def left_of_its_moment(self) -> float:
        """Return how many seconds are left in which what its client sent at once is sure to be heard."""
        return self.since + MOMENT - self.loop.time()

    def _watch(self) -> None:
        """Bound the time for what we wait for now. Between whole requests uvicorn's own bound holds."""
        cycle: object = self.cycle
        begun = cycle is None or bool(self.conn.trailing_data[0]) or self.conn.their_state is h11.SEND_BODY
        if self.transport.is_closing() or not self._between_requests or not begun:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIME, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.give_up()

    def give_up(self) -> None:
        """Close it, whatever its client has not taken yet: with that in hand a closed one would keep its descriptor."""
        if self.unsent:
            self.transport.abort()
        else:
            self.transport.close()


def _bound_unread(client: socket.socket) -> None:
    """Have the kernel break the connection off where its client takes nothing for `UNREAD_TIME`, closed by us or not."""
    if client.family != socket.AF_UNIX:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIME * 1000))


async def make_room(newcomer: Connection) -> None:
    """Have room for one more connection, or wait for it while all others have only just come.

    Where all have calls under way there is none, and the newcomer will be told so.
    """
    while len(newcomer.open_ones()) >= newcomer.limit:
        idlest = newcomer.idlest()
        if idlest is None:
            return
        left = idlest.left_of_its_moment()
        if left <= 0:
            idlest.give_up()
        else:
            await asyncio.sleep(min(left, _LOOK))  # most send their request at once, and are waited for no longer


class NoRoom:
    """What is served to a client for which there is no room: the probes, and then it has to leave."""

    def __init__(self, app: App, address: str, probes: Collection[str], refused: Callable[[Scope], object]) -> None:
        """`app` answers `probes`, which are paths; `refused` is called for whatever else is asked."""
        self._app = app
        self._address = address
        self._probes = probes
        self._refused = refused
        self._told = -math.inf
        self._log = log.get("sidecar")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        if scope["method"] in ("GET", "HEAD") and scope["path"] in self._probes:
            await self._app(scope, receive, last)
            return
        self._refused(scope)
        self._tell()
        body = problem(
            503, "Too many connections", "every connection of this address is in use; close some, and try again"
        )
        await send_json(last, 503, body, [(b"retry-after", str(RETRY_AFTER).encode())], head=scope["method"] == "HEAD")

    def _tell(self) -> None:
        if (now := time.monotonic()) - self._told > _TOLD_EVERY:
            self._told = now
            self._log.warning("every connection of an address is in use", address=self._address)
