"""The control API: health for probes, metrics, and administration for whoever may."""

import hmac
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from sidecar import __version__, administration_routes
from sidecar.asgi import App, Message, Receive, Scope, Send, problem, send_json
from sidecar.hosts import AllowedHosts
from sidecar.metrics import CONTENT_TYPE, Metrics
from sidecar.settings import Address, Settings, setting_names
from sidecar.status import RETRY_AFTER, Status

SOCKET_LISTENER = "socket"
TCP_LISTENER = "tcp"
_MARK = "sidecar.listener"


class Marked:
    """Marks every request with the listener it came through, which no client can imitate."""

    def __init__(self, app: App, listener: str, hosts: AllowedHosts | None) -> None:
        self._app = app
        self._listener = listener
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and self._hosts is not None and not self._hosts.allows(scope["headers"]):
            body = problem(421, "Foreign Host", "the Host header names none of this listener's addresses")
            await send_json(send, 421, body)
            return
        scope[_MARK] = self._listener
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # Some probes ask with HEAD alone; FastAPI has no such routes.
            scope["method"], send = "GET", _without_body(send)
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_headers


def _administrator(request: Request) -> None:
    """Let through whoever could open the socket, or has the token.

    Raises:
        HTTPException: 401 for a missing or wrong token, 403 where administration is off.

    """
    if request.scope.get(_MARK) == SOCKET_LISTENER:
        return
    settings: Settings = request.app.state.settings
    if settings.token is None:
        raise HTTPException(
            403,
            "administration is off on this address; set HINDSIGHT_SIDECAR_TOKEN, or use the socket in the run directory, as `hindsight-sidecar status` does",
        )
    given = request.headers.getlist("authorization")
    expected = f"Bearer {settings.token.get_secret_value()}".encode()
    if len(given) != 1 or not hmac.compare_digest(given[0].encode("latin-1"), expected):
        raise HTTPException(401, "send the token of HINDSIGHT_SIDECAR_TOKEN as `Authorization: Bearer <token>`")


Administrator = Annotated[None, Depends(_administrator)]


def masked(settings: Settings) -> dict[str, Any]:
    """Return the settings in effect by variable, without any secret."""
    values = settings.model_dump(mode="json")
    names = setting_names()
    shown = {}
    for name, variable in names.items():
        value = getattr(settings, name)
        shown[variable] = str(value) if isinstance(value, Address) else values[name]
    return shown


def changed(settings: Settings) -> dict[str, str]:
    """Return the settings that are not at their default, by variable and without any secret."""
    shown = masked(settings)
    return {
        variable: str(shown[variable])
        for name, variable in setting_names().items()
        if getattr(settings, name) != Settings.model_fields[name].default
    }


def build(settings: Settings, status: Status, metrics: Metrics) -> FastAPI:
    """Return the control application."""
    app = FastAPI(title="hindsight-sidecar control", version=__version__, docs_url=None, redoc_url=None)
    app.state.settings = settings

    @app.exception_handler(StarletteHTTPException)
    def as_problem(_: Request, error: StarletteHTTPException) -> JSONResponse:
        titles = {
            400: "Bad request",
            401: "Token needed",
            403: "Administration off",
            404: "Not found",
            405: "Method not allowed",
        }
        body = problem(error.status_code, titles.get(error.status_code, "Refused"), str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 401:  # noqa: PLR2004 - the HTTP status
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(body, error.status_code, headers, media_type="application/problem+json")

    def verdict(*, good: bool) -> JSONResponse:
        headers = {"Cache-Control": "no-store"} | ({} if good else {"Retry-After": str(RETRY_AFTER)})
        return JSONResponse(status.body(), 200 if good else 503, headers)

    unready: dict[int | str, dict[str, Any]] = {503: {"description": "not so now; the body says why"}}

    @app.get("/health", responses=unready, summary="Whether memory calls are served")
    @app.get("/readyz", responses=unready, summary="The same, by Kubernetes' name")
    async def health() -> JSONResponse:
        return verdict(good=status.ready)

    @app.get("/startupz", responses=unready, summary="Whether this start was ready once")
    async def startup() -> JSONResponse:
        return verdict(good=status.picture.ever_ready)

    @app.get("/livez", summary="Whether the supervisor's loop turns")
    async def live() -> JSONResponse:
        # The answer itself is the proof: it comes from the same loop. The database is not asked.
        return JSONResponse(
            {"status": "alive", "state": str(status.picture.state)}, headers={"Cache-Control": "no-store"}
        )

    @app.get("/version", summary="Versions of the parts")
    async def version() -> dict[str, str | None]:
        return {"sidecar": __version__, **status.picture.versions}

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/v1/status", summary="Health and the settings in effect, secrets masked")
    async def show_status(_: Administrator) -> dict[str, Any]:
        return {"health": status.body(), "settings": masked(settings)}

    administration_routes.add_handlers(app)
    app.include_router(administration_routes.router(Depends(_administrator)))
    return app


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
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})

    return app
