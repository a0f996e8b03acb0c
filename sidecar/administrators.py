"""Who may administer: judged before a byte of a body is read, so that nobody else can make the sidecar hold one."""

import hmac

from starlette.exceptions import HTTPException

from sidecar.asgi import App, Headers, Message, Receive, Scope, Send, problem, send_json
from sidecar.attempts import Attempts
from sidecar.control_listener import MARK, SOCKET
from sidecar.settings import Settings

PREFIX = "/v1/"
MAY = "sidecar.administrator"
BODY_MAX = 65536  # bytes of a body that is JSON
UPLOAD = ("PUT", "/v1/restores")  # has no such bound: it goes to the volume piece by piece, as long as there is space
_OFF = (
    "administration is off on this address; set HINDSIGHT_SIDECAR_TOKEN, or use the socket in the run directory, as "
    "`hindsight-sidecar status` does"
)
_NEEDED = "send the token of HINDSIGHT_SIDECAR_TOKEN as `Authorization: Bearer <token>`"
_TOO_LARGE = f"a body here may have {BODY_MAX} bytes; docs/endpoints.md has what is expected"


class Administrators:
    """Lets whoever could open the socket, or has the token, through to `/v1/`, and everyone to the rest."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._token = settings.token
        self._attempts = Attempts(str(settings.control_listen))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            if scope["path"].startswith(PREFIX):
                if (refused := self._refusal(scope)) is not None:
                    status, title, detail, headers = refused
                    await send_json(send, status, problem(status, title, detail), headers)
                    return
                scope[MAY] = True
            if (scope["method"], scope["path"]) != UPLOAD:
                if _length(scope["headers"]) > BODY_MAX:
                    await send_json(send, 413, problem(413, "Body too large", _TOO_LARGE))
                    return
                receive = _bounded(receive)
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str, Headers] | None:
        """Return status, title, detail and headers of the answer to who may not; None for who may."""
        if scope.get(MARK) == SOCKET:
            return None
        if self._token is None:
            return 403, "Administration off", _OFF, []
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        expected = f"Bearer {self._token.get_secret_value()}".encode()
        if len(given) == 1 and hmac.compare_digest(given[0], expected):
            return None
        if given and (seconds := self._attempts.retry_after()) is not None:
            detail = f"the token is wrong, as many before it were; {_NEEDED}"
            return 429, "Too many wrong tokens", detail, [(b"retry-after", str(seconds).encode())]
        return 401, "Token needed", _NEEDED, [(b"www-authenticate", b"Bearer")]


def _length(headers: Headers) -> int:
    """Return the length that was told, which h11 has found to be a number; 0 where none was."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _bounded(receive: Receive) -> Receive:
    """Return a `receive` that gives no more than `BODY_MAX` bytes, whatever was told of their number."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > BODY_MAX:
            raise HTTPException(413, _TOO_LARGE)
        return message

    return bounded
