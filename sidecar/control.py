"""The control API's application: health for probes, metrics, and administration for whoever may."""

import hmac
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from sidecar import __version__, administration_routes, probes
from sidecar.asgi import problem
from sidecar.control_listener import MARK, SOCKET
from sidecar.metrics import CONTENT_TYPE, Metrics
from sidecar.settings import Settings, masked
from sidecar.status import Status


def _administrator(request: Request) -> None:
    """Let through whoever could open the socket, or has the token.

    Raises:
        HTTPException: 401 for a missing or wrong token, 403 where administration is off.

    """
    if request.scope.get(MARK) == SOCKET:
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

    async def probe(request: Request) -> JSONResponse:
        code, body, headers = probes.answer(request.url.path, status)
        return JSONResponse(body, code, {"Cache-Control": "no-store"} | headers)

    for path, (what, can_fail) in probes.PROBES.items():
        unready: dict[int | str, Any] = {503: {"description": "not so now; the body says why"}} if can_fail else {}
        app.get(path, responses=unready, summary=what, name=path.strip("/"))(probe)

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
