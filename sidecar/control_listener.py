"""What stands before the control API's application on each address, and answers probes before there is one."""

import asyncio

from sidecar import probes
from sidecar.asgi import App, Message, Receive, Scope, Send, problem, send_json
from sidecar.hosts import AllowedHosts
from sidecar.metrics import CONTENT_TYPE, Metrics
from sidecar.status import Status

SOCKET = "socket"
TCP = "tcp"
SCRAPER = "scraper"  # asks for metrics alone
MARK = "sidecar.listener"


class Later:
    """An application that takes its time to be imported: until it is there probes are answered, and the rest waits."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._app: asyncio.Future[App] = asyncio.get_running_loop().create_future()

    def set(self, app: App) -> None:
        """Serve this application from now on."""
        self._app.set_result(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not self._app.done() and scope["type"] == "http" and (scope["method"], scope["path"]) in _EARLY:
            code, body, headers = probes.answer(scope["path"], self._status)
            await send_json(
                send, code, body, [(name.lower().encode(), text.encode()) for name, text in headers.items()]
            )
            return
        app = await asyncio.shield(self._app)
        await app(scope, receive, send)


_EARLY = {("GET", path) for path in probes.PROBES}


class Marked:
    """Marks every request with the listener it came through, which no client can imitate."""

    def __init__(self, app: App, listener: str, hosts: AllowedHosts | None) -> None:
        self._app = app
        self._listener = listener
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        if self._hosts is not None and (foreign := self._hosts.refusal(scope)) is not None:
            body = problem(foreign.status, foreign.title, foreign.detail)
            await send_json(send, foreign.status, body, head=scope["method"] == "HEAD")
            return
        scope[MARK] = self._listener
        if scope["method"] == "HEAD":
            # Some probes ask with HEAD alone; FastAPI has no such routes.
            scope["method"], send = "GET", _without_body(send)
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_headers


def metrics_app(metrics: Metrics) -> App:
    """Return an application that answers `/metrics` and nothing else, for a scraper outside the pod."""

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/metrics":
            await send_json(send, 404, problem(404, "No such endpoint", "only /metrics is served on this address"))
            return
        content = metrics.render()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app
