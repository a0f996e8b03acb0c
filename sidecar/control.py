"""The control API's application: health for probes, metrics, and administration for whoever may."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from sidecar import __version__, administration_routes, probes
from sidecar.administrators import MAY, Administrators
from sidecar.asgi import problem
from sidecar.faultless import FAULT
from sidecar.metrics import CONTENT_TYPE, Metrics
from sidecar.settings import Settings, masked
from sidecar.status import Status

_TITLES = {
    400: "Bad request",
    403: "Administration off",
    404: "Not found",
    405: "Method not allowed",
    413: "Body too large",
}
_bearer = HTTPBearer(auto_error=False, description="The token of HINDSIGHT_SIDECAR_TOKEN; the socket needs none.")


def _administrator(request: Request, _: Annotated[object, Security(_bearer)]) -> None:
    """Make sure that `Administrators` let this one through. An endpoint that it does not look at is closed.

    Raises:
        HTTPException: 403.

    """
    if request.scope.get(MAY) is not True:
        raise HTTPException(403, "this is for administrators alone")


Administrator = Annotated[None, Depends(_administrator)]


def _methods(request: Request) -> list[str]:
    """Return every method that a request's path has: each of them is a route of its own, which knows its own alone."""
    found = [
        method
        for method in ("DELETE", "GET", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return sorted([*found, "HEAD"] if "GET" in found else found)


def build(settings: Settings, status: Status, metrics: Metrics) -> FastAPI:
    """Return the control application."""
    app = FastAPI(title="hindsight-sidecar control", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Administrators, settings=settings)

    @app.exception_handler(StarletteHTTPException)
    def as_problem(request: Request, error: StarletteHTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # noqa: PLR2004 - the HTTP status
            headers["Allow"] = ", ".join(_methods(request))
        body = problem(error.status_code, _TITLES.get(error.status_code, "Refused"), str(error.detail))
        return administration_routes.ProblemResponse(body, error.status_code, headers)

    @app.exception_handler(Exception)
    def as_fault(_: Request, __: Exception) -> JSONResponse:  # `Faultless` has it in the log
        return administration_routes.ProblemResponse(FAULT, 500)

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

    @app.get(
        "/v1/status",
        summary="Health and the settings in effect, secrets masked",
        responses={status: administration_routes.RESPONSES[status] for status in (401, 403, 429)},
    )
    async def show_status(_: Administrator) -> dict[str, Any]:
        return {"health": status.body(), "settings": masked(settings)}

    administration_routes.add_handlers(app)
    app.include_router(administration_routes.router(Depends(_administrator)))
    return app
