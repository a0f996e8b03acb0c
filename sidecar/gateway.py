"""The memory API's address: passes everything through to hindsight-api, and answers for it while it cannot."""

import asyncio
import contextlib
import hmac
import math
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from pydantic import SecretStr

from sidecar import log
from sidecar.asgi import Headers, Message, Receive, Scope, Send, problem, send_json
from sidecar.attempts import Attempts
from sidecar.exchange import Exchange, ExchangeError, NotThereError
from sidecar.hosts import AllowedHosts
from sidecar.settings import Settings
from sidecar.status import RETRY_AFTER, Status
from sidecar.tenant import Tenant

_BODY_PAUSE = 60.0  # seconds between two pieces of a body
_PATH_SHOWN = 200  # characters of a path, as it was sent, in a log line
# Of one connection only, RFC 9110 section 7.6.1; `host` is made anew for the other one, with the same value.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade"}
)  # fmt: skip
# What a message cannot do without; a client that names them there would have its call cut down rather than passed on.
_NEVER_HOP_BY_HOP = frozenset({b"authorization", b"content-encoding", b"content-length", b"content-type", b"host"})
# Answered here, so that a probe is never refused and never waits.
HEALTH_PATHS = frozenset({"/health", "/health/ready"})
LIVE_PATH = "/health/live"
VERSION_PATHS = frozenset({"/version", "/v1/version"})
PROBES = HEALTH_PATHS | {LIVE_PATH}
NO_ROOM = "too-many-connections"  # why a call is refused that does not get as far as here
_OPEN_PATHS = PROBES | VERSION_PATHS


class ClientGoneError(Exception):
    """The client closed its connection."""


class StalledError(Exception):
    """The client stopped in the middle of a body."""


def _end_to_end(headers: Headers) -> Headers:
    """Return the headers that are not of one connection only, neither by their name nor by being named in `connection`."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")}
    named -= _NEVER_HOP_BY_HOP
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP and name not in named]


def _to_upstream(headers: Headers) -> tuple[Headers, bool]:
    """Return a request's headers as hindsight-api gets them, and whether a body follows."""
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    passed = _end_to_end(headers)
    if chunked:
        passed = [item for item in passed if item[0] != b"content-length"]
        passed.append((b"transfer-encoding", b"chunked"))
    if not any(name == b"host" for name, _ in passed):
        passed.append((b"host", b"hindsight-api"))  # HTTP/1.0 has none, and 1.1, which is spoken there, must have one
    has_body = chunked or any(name == b"content-length" for name, _ in passed)
    return [*passed, (b"connection", b"close")], has_body


class Gateway:
    """An ASGI application. It changes no byte of a body and no header but those of the connection itself, and the key.

    Attributes:
        in_flight: calls that hindsight-api is answering now.
        answered: monotonic seconds of the last time that it began to answer one, minus infinity before the first.

    """

    def __init__(self, settings: Settings, status: Status, tenant: Tenant, count: Callable[[str], None]) -> None:
        self._status = status
        self._key: SecretStr | None = settings.api_key
        self._attempts = Attempts(str(settings.listen))
        self._hosts = AllowedHosts(settings.listen, settings.allowed_hosts, settings.allowed_origins)
        self._count = count
        self._tenant = tenant
        self._log = log.get("gateway")
        self._timeout = settings.gateway_timeout
        self._upstream = settings.api_listen
        self._began = time.monotonic()
        self.in_flight = 0
        self.answered = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        headers: Headers = scope["headers"]
        head = scope["method"] == "HEAD"
        if (foreign := self._hosts.refusal(scope)) is not None:
            body = problem(foreign.status, foreign.title, foreign.detail)
            await self._refuse(send, foreign.reason, foreign.status, body, head=head)
            return
        path = scope["path"]
        if path in _OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            await self._answer(path, send, head=head)
            return
        if not self._authorized(headers):
            await self._refuse_unauthorized(send, headers, head=head)
            return
        if not self._status.ready:
            await self._refuse_for_now(send, head=head)
            return
        self.in_flight += 1
        try:
            await self._pass_through(scope, receive, send)
        finally:
            self.in_flight -= 1

    def _authorized(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        given = [value for name, value in headers if name == b"authorization"]
        expected = b"Bearer " + self._key.get_secret_value().encode()
        return len(given) == 1 and hmac.compare_digest(given[0], expected)

    async def _answer(self, path: str, send: Send, *, head: bool) -> None:
        picture = self._status.picture
        if path in HEALTH_PATHS:
            ready = self._status.ready
            extra = [] if ready else [(b"retry-after", str(RETRY_AFTER).encode())]
            await send_json(send, 200 if ready else 503, self._status.body(), extra, head=head)
        elif path == LIVE_PATH:
            version = picture.upstream_version.get("api_version")
            uptime = round(time.monotonic() - self._began, 1)
            await send_json(send, 200, {"status": "alive", "version": version, "uptime_seconds": uptime}, head=head)
        else:
            await send_json(send, 200, picture.upstream_version, head=head)

    async def _refuse(
        self, send: Send, why: str, status: int, body: object, headers: Headers | None = None, *, head: bool = False
    ) -> None:
        self._count(why)
        await send_json(send, status, body, headers, head=head)

    async def _refuse_unauthorized(self, send: Send, headers: Headers, *, head: bool) -> None:
        guessed = any(name == b"authorization" for name, _ in headers)
        if guessed and (seconds := self._attempts.retry_after()) is not None:
            await self._refuse(send, "too-many-attempts", 429, problem(
                429, "Too many wrong keys", "the key is wrong, as many before it were; send that of HINDSIGHT_SIDECAR_API_KEY",
            ), [(b"retry-after", str(seconds).encode())], head=head)  # fmt: skip
            return
        await self._refuse(send, "unauthorized", 401, problem(
            401, "Key needed", "HINDSIGHT_SIDECAR_API_KEY is set here; send it as `Authorization: Bearer <key>`",
        ), [(b"www-authenticate", b"Bearer")], head=head)  # fmt: skip

    async def _refuse_for_now(self, send: Send, *, head: bool) -> None:
        state = self._status.state
        body = problem(
            503,
            "Memory not ready",
            f"the memory backend is {self._status.phase_text}; nothing was stored or read: try again",
            state=state.phase,
            subject=state.subject,
            reason=state.detail,
        )
        await self._refuse(send, "not-ready", 503, body, [(b"retry-after", str(RETRY_AFTER).encode())], head=head)

    async def _pass_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _RequestBody(receive)
        work = asyncio.ensure_future(self._exchange(scope, body, send))
        watch = asyncio.ensure_future(body.client_gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # The client is gone: hindsight-api learns it as it would have without us.
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientGoneError):
                await work
        finally:
            watch.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _exchange(self, scope: Scope, body: "_RequestBody", send: Send) -> None:
        headers, has_body = _to_upstream(scope["headers"])
        headers = self._tenant.passed_on(headers, scope["path"])
        body.expected = has_body
        query = scope["query_string"]
        # The client's own path, bytes as they came: a URL object would encode them anew and take out dots.
        target = scope["raw_path"] + (b"?" + query if query else b"")
        started = False
        # A connection of its own for every call: a kept one may be closed by the other side at the very moment a
        # memory is sent over it, and whether it was stored would be anybody's guess.
        exchange = Exchange(self._upstream)
        try:
            async with asyncio.timeout(self._timeout):  # for its beginning: a stream of events has no end to wait for
                response = await exchange.begin(scope["method"], target, headers, body.stream() if has_body else None)
            if response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                self.answered = time.monotonic()
            headers = _end_to_end(response.headers.raw_items())
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            started = True
            async for piece in exchange.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ExchangeError, TimeoutError) as error:
            path = scope["raw_path"].decode("latin-1")[:_PATH_SHOWN]
            self._log.warning("hindsight-api did not answer", error=f"{type(error).__name__}: {error}", path=path)
            if started:
                # Half an answer must not look like a whole one: the server closes the connection on this.
                raise
            if isinstance(error, TimeoutError):
                await self._refuse(send, "timeout", 504, problem(
                    504, "No answer in time", f"hindsight-api gave no answer within {self._timeout:g} s; "
                    "what was sent may have been stored",
                ))  # fmt: skip
            else:
                await self._refuse_failed(send, error)
        except StalledError:
            await self._refuse(send, "stalled", 408, problem(
                408, "The body stopped", f"no piece of the body came for {_BODY_PAUSE:g} s; send it again",
            ), [(b"connection", b"close")])  # fmt: skip
        finally:
            exchange.close()

    async def _refuse_failed(self, send: Send, error: Exception) -> None:
        if isinstance(error, NotThereError):
            status, detail = 503, "hindsight-api is not there; nothing was sent to it: try again"
        else:
            status, detail = 502, "hindsight-api ended before it answered; what was sent may have been stored"
        retry = [(b"retry-after", str(RETRY_AFTER).encode())]
        await self._refuse(send, "failed", status, problem(status, "Memory backend gone", detail), retry)


class _RequestBody:
    """The request's body as it comes, and after it the news that the client has gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.expected = False
        self._complete = asyncio.Event()

    async def stream(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            try:
                async with asyncio.timeout(_BODY_PAUSE):
                    message: Message = await self._receive()
            except TimeoutError:
                raise StalledError from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        self._complete.set()

    async def client_gone(self) -> None:
        """Return when the client has closed its connection. Two readers of one channel would steal from each other."""
        if self.expected:
            await self._complete.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
