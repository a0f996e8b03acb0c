"""The administration endpoints of the control API, `/v1/...`: what each takes, answers and refuses."""

import errno
import json
import re
from collections.abc import AsyncIterator, Awaitable
from typing import Annotated, Any, Literal, TypeVar

import psycopg
from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from starlette.requests import ClientDisconnect

from sidecar import archive
from sidecar.administration import Administration
from sidecar.archive import Archive
from sidecar.asgi import problem
from sidecar.errors import BlockedError, RefusedError, TransientError
from sidecar.operations import BusyError, Operation
from sidecar.restoring import Wish
from sidecar.status import RETRY_AFTER
from sidecar.threads import iterate_off_loop, off_loop

TAR = "application/x-tar"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")  # no file has more bytes than that
_MARK = "administration"
_TOLD = 500  # characters of what is wrong with a body, which may repeat names in it

PROBLEM: dict[str, Any] = {"content": {"application/problem+json": {}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "what was sent cannot be meant", **PROBLEM},
    401: {"description": "the token is missing or wrong", **PROBLEM},
    403: {"description": "administration is off on this address", **PROBLEM},
    404: {"description": "there is none of that name", **PROBLEM},
    409: {"description": "another operation runs", **PROBLEM},
    413: {"description": "the body is larger than any that can be meant", **PROBLEM},
    422: {"description": "refused; nothing was touched", **PROBLEM},
    429: {"description": "the token is wrong, and many before it were", **PROBLEM},
    503: {"description": "not so now", **PROBLEM},
}
T = TypeVar("T")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                # JSON can write half a surrogate pair, which no file, database or answer can hold.
                raise ValueError("it has half a character; expected text") from None
        return value


class DumpBody(_Body):
    """How a dump is wanted."""

    compression: Literal["gzip", "zstd", "none"] = "gzip"


class RestoreBody(_Body):
    """What to restore: a dump on the volume, or an upload that a dry run kept."""

    dump: str | None = None
    upload: str | None = None
    dry_run: bool = False
    discard_newer: bool = False
    force_model: bool = False

    @property
    def wish(self) -> Wish:
        """How it is wanted."""
        return Wish(self.dry_run, self.discard_newer, self.force_model)


class MigrationBody(_Body):
    """Where to bring memories from."""

    source: str = Field(alias="from", max_length=4096)
    password: SecretStr | None = None
    freeze: bool = False
    dry_run: bool = False
    discard_newer: bool = False
    force_model: bool = False


class AdoptionBody(_Body):
    """How the cluster at PGDATA that others made is to be adopted."""

    database: str | None = Field(default=None, max_length=63)
    crashed: bool = False
    dry_run: bool = False
    force_model: bool = False


class RollbackBody(_Body):
    """Which kept database to serve again; the latest where none is named."""

    database: str | None = None


class ProblemResponse(JSONResponse):
    """A problem, which may have anything in it that a client sent."""

    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - JSON
        """Return it as ASCII, which half a surrogate pair has a form in too."""
        return json.dumps(content, separators=(",", ":")).encode()


def attach(request: Request) -> Administration:
    """Return the administration of the running sidecar. Raises TransientError in its first second."""
    found: Administration | None = getattr(request.app.state, _MARK, None)
    if found is None:
        raise TransientError("the sidecar is starting; try again in a moment")
    return found


def add_handlers(app: FastAPI) -> None:
    """Make problems of what the endpoints raise."""

    @app.exception_handler(BusyError)
    def busy(_: Request, error: BusyError) -> JSONResponse:
        return _problem(409, "Another operation runs", str(error), operation=error.operation.id)

    @app.exception_handler(RefusedError)
    def refused(_: Request, error: RefusedError) -> JSONResponse:
        return _problem(422, "Refused", str(error))

    @app.exception_handler(TransientError)
    def not_now(_: Request, error: TransientError) -> JSONResponse:
        answer = _problem(503, "Not now", str(error))
        answer.headers["Retry-After"] = str(RETRY_AFTER)
        return answer

    @app.exception_handler(BlockedError)
    def blocked(_: Request, error: BlockedError) -> JSONResponse:
        return not_now(_, TransientError(f"{error.reason}: {error.detail}"))

    @app.exception_handler(OSError)
    def no_disk(_: Request, error: OSError) -> JSONResponse:
        return not_now(_, TransientError(_worded(error)))

    @app.exception_handler(psycopg.OperationalError)
    def no_database(_: Request, error: psycopg.OperationalError) -> JSONResponse:
        return not_now(
            _, TransientError(f"Postgres does not answer ({str(error).strip()}); try again once the sidecar is ready")
        )

    @app.exception_handler(RequestValidationError)
    def meaningless(_: Request, error: RequestValidationError) -> JSONResponse:
        told = "; ".join(f"{'.'.join(map(str, one['loc'][1:])) or 'the body'}: {one['msg']}" for one in error.errors())
        return _problem(400, "Bad request", f"{told[:_TOLD]}; docs/endpoints.md has what is expected")


def _problem(status: int, title: str, detail: str, **members: Any) -> JSONResponse:  # noqa: ANN401 - JSON
    return ProblemResponse(problem(status, title, detail, **members), status)


def _worded(error: OSError) -> str:
    """Return in a sentence why files of ours could not be used, and what to do."""
    why = error.strerror or str(error) or type(error).__name__
    seen = f"{error.filename}: {why}" if error.filename else why
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"there is no space for it ({seen}); delete old dumps or kept databases, or grow the volume"
    return (
        f"the volume cannot be used for it ({seen}); give it and all in it to the sidecar's user, or look at its disk"
    )


def _begun(operation: Operation) -> JSONResponse:
    return JSONResponse(operation.to_json(), 202, {"Location": f"/v1/operations/{operation.id}"})


def router(guard: Any) -> APIRouter:  # noqa: ANN401, C901 - what fastapi.Depends returns; a list of endpoints
    """Return the endpoints, each behind `guard`."""
    routes = APIRouter(prefix="/v1", dependencies=[guard], responses=RESPONSES)

    @routes.post("/dumps", status_code=202, summary="Begin a dump of the served memories")
    async def begin_dump(request: Request, body: DumpBody | None = None) -> Response:
        return _begun(attach(request).dump((body or DumpBody()).compression))

    @routes.get("/dumps", summary="The dumps on the volume")
    async def list_dumps(request: Request) -> dict[str, Any]:
        return {"dumps": await off_loop(_listed, attach(request))}

    @routes.get("/dumps/{identifier}", summary="One dump, as a portable archive", response_class=StreamingResponse)
    async def get_dump(request: Request, identifier: str) -> Response:
        return _send(*await _found(off_loop(_opened, attach(request), identifier)), request)

    @routes.delete("/dumps/{identifier}", status_code=204, summary="Delete a dump")
    async def delete_dump(request: Request, identifier: str) -> None:
        await _found(off_loop(attach(request).delete_dump, identifier))

    @routes.put("/restores", status_code=202, summary="Send an archive or a file of pg_dump -Fc, and begin its restore")
    async def put_restore(
        request: Request,
        *,
        dry_run: Annotated[bool, Query()] = False,
        discard_newer: Annotated[bool, Query()] = False,
        force_model: Annotated[bool, Query()] = False,
    ) -> Response:
        return _begun(await _upload(request, Wish(dry_run, discard_newer, force_model)))

    @routes.post("/restores", status_code=202, summary="Begin the restore of a dump on the volume, or of a kept upload")
    async def post_restore(request: Request, body: RestoreBody) -> Response:
        administration = attach(request)
        if (body.dump is None) == (body.upload is None):
            raise HTTPException(400, "name a `dump` of the volume or an `upload` that a dry run kept, one of the two")
        await administration.check_possible()
        if body.upload is not None:
            return _begun(await administration.restore_upload(body.upload, body.wish))
        return _begun(await _found(administration.restore_dump(body.dump or "", body.wish)))

    @routes.delete("/restores/{identifier}", status_code=204, summary="Remove an upload that a dry run kept")
    async def discard_upload(request: Request, identifier: str) -> None:
        await _found(attach(request).discard_upload(identifier))

    @routes.post("/migrations", status_code=202, summary="Begin to bring in the memories of a Postgres elsewhere")
    async def migrate(request: Request, body: MigrationBody) -> Response:
        wish = Wish(body.dry_run, body.discard_newer, body.force_model)
        password = body.password.get_secret_value() if body.password else None
        administration = attach(request)
        await administration.check_possible()
        return _begun(administration.migrate(body.source, wish, freeze=body.freeze, password=password))

    @routes.post(
        "/adoption", status_code=202, summary="Begin to bring in the memories of the foreign cluster at PGDATA"
    )
    async def adopt(request: Request, body: AdoptionBody | None = None) -> Response:
        wanted = body or AdoptionBody()
        wish = Wish(dry_run=wanted.dry_run, force_model=wanted.force_model)
        return _begun(await attach(request).adopt(wanted.database, wish, crashed=wanted.crashed))

    @routes.post("/rollback", status_code=202, summary="Serve a kept database again")
    async def rollback(request: Request, body: RollbackBody | None = None) -> Response:
        return _begun(await attach(request).rollback((body or RollbackBody()).database))

    @routes.get("/databases", summary="The databases that were served before, and the clusters that were adopted from")
    async def databases(request: Request) -> dict[str, Any]:
        administration = attach(request)
        clusters = await administration.kept_clusters()
        return {"kept": [vars(one) for one in await administration.kept()], "clusters": [vars(one) for one in clusters]}

    @routes.delete("/databases/{name}", status_code=204, summary="Drop a kept database or cluster")
    async def drop_database(request: Request, name: str) -> None:
        await attach(request).drop_kept(name)

    @routes.get("/operations", summary="What runs and what ran since this start")
    async def operations(request: Request) -> dict[str, Any]:
        return {"operations": [one.to_json() for one in attach(request).operations.all()]}

    @routes.get("/operations/{identifier}", summary="One operation: how far it is, or what came of it")
    async def operation(request: Request, identifier: str) -> dict[str, Any]:
        one = attach(request).operations.find(identifier)
        if one is None:
            raise HTTPException(
                404, "there is no operation of that name since this start; GET /v1/operations lists them"
            )
        return one.to_json()

    @routes.delete("/operations/{identifier}", summary="Cancel an operation")
    async def cancel(request: Request, identifier: str) -> dict[str, Any]:
        return (await attach(request).operations.cancel(identifier)).to_json()

    return routes


def _listed(administration: Administration) -> list[dict[str, Any]]:
    return [dict(archive.as_mapping(one)) for one in administration.dumps()]


def _opened(administration: Administration, identifier: str) -> tuple[Archive, int, str]:
    """Return a dump with its size and checksum, which are on the disk too."""
    found = administration.open_dump(identifier)
    return found, found.size, found.checksum


async def _found(work: Awaitable[T]) -> T:
    """Wait for it, and answer 404 where what is named is not there."""
    try:
        return await work
    except FileNotFoundError as error:
        raise HTTPException(404, "there is none of that name; GET /v1/dumps lists the dumps") from error


async def _upload(request: Request, wish: Wish) -> Operation:
    administration = attach(request)
    await administration.check_possible()  # before gigabytes are sent
    given = request.headers.get("content-length")
    length = int(given) if given is not None and given.isdigit() else None
    try:
        identifier = await administration.receive(_pieces(request), length)
    except ClientDisconnect as error:
        raise RefusedError("the upload was cut; send it again") from error
    try:
        return await administration.restore_upload(identifier, wish)
    except BusyError:
        await administration.discard_upload(identifier)
        raise


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


def _send(found: Archive, size: int, checksum: str, request: Request) -> Response:
    """Answer with an archive, or the range of it that was asked for; the length is known, so a cut answer shows."""
    tag = f'"{checksum}"'
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-store",
        "Content-Disposition": f'attachment; filename="{found.manifest.id}.tar"',
        "ETag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    start, end, status = 0, size, 200
    wanted = request.headers.get("range")
    if wanted is not None and request.headers.get("if-range", tag) == tag:
        span = parse_range(wanted, size)
        if span is None:
            answer = _problem(
                416,
                "No such range",
                f"the range {wanted[:60]!r} is not in the archive's {size} bytes; ask for one that is",
            )
            answer.headers["Content-Range"] = f"bytes */{size}"
            return answer
        (start, end), status = span, 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - start)
    return StreamingResponse(iterate_off_loop(found.read(start, end)), status, headers, TAR)


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Return start and end (exclusive) of a single byte range (RFC 9110, 14.1.2); None where it is not in the file."""
    found = _RANGE.fullmatch(text.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last so many
        start, end = max(size - int(found[2]), 0), size
    else:
        start, end = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
    return (start, end) if start < end else None
