"""What stands before the gateway, and counts the memory calls that go through it."""

import time

from sidecar.asgi import App, Message, Receive, Scope, Send
from sidecar.gateway import HEALTH_PATHS, LIVE_PATH, NO_ROOM, VERSION_PATHS
from sidecar.metrics import Metrics

_OWN = HEALTH_PATHS | VERSION_PATHS | {LIVE_PATH}  # of the sidecar: probes are no memory calls
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"  # a client may make up as many methods as it likes
_NONE = "none"
_CUT = "cut"
_GOOD = 2  # hundreds


class Metered:
    """An ASGI application that changes nothing of what goes through it."""

    def __init__(self, app: App, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or (scope["path"] in _OWN and scope["method"] in ("GET", "HEAD")):
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = _NONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = f"{message['status'] // 100}xx"
                if message["status"] // 100 == _GOOD:
                    self._metrics.time_answer(time.monotonic() - began)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except BaseException:
            status = _NONE if status == _NONE else _CUT
            raise
        finally:
            self._count(scope, status)

    def refuse(self, scope: Scope) -> None:
        """Count a call that was refused before it came here, for want of a connection."""
        self._metrics.count_refusal(NO_ROOM)
        self._count(scope, "5xx")

    def _count(self, scope: Scope, status: str) -> None:
        self._metrics.count_request(scope["method"] if scope["method"] in _METHODS else _OTHER, status)
