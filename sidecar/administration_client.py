"""The administration endpoints, as the commands call them: over the control socket, or over TCP with the token.

Plain blocking calls of the standard library, one connection each: a command does one thing at a time, and Ctrl-C has to
reach it wherever it waits.
"""

import contextlib
import hashlib
import http.client
import json
import re
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

from sidecar import probe
from sidecar.errors import RefusedError, SidecarError, VerificationError
from sidecar.progress import Meter, Progress, Tell

TOKEN = "HINDSIGHT_SIDECAR_TOKEN"  # noqa: S105 - the variable's name
SOURCE_TOKEN = "HINDSIGHT_SIDECAR_SOURCE_TOKEN"  # noqa: S105 - likewise
CHUNK = 2**20  # bytes
RUNNING = "running"  # the outcome of an operation that has not ended
_TIMEOUT = 120.0  # seconds that a connection may be silent
_CANCEL_TIMEOUT = 600.0  # seconds for an operation to clean up: hindsight-api may have to be started again
_CONTINUE_PATIENCE = 10.0  # seconds for the word that the body is welcome; then it is sent without it
_FIRST_PAUSE, _PAUSE = 0.05, 0.5  # seconds between looks at an operation
_SILENCE = 15.0  # seconds in which a port-forward may be made again
_REFUSED = 422
_SENDABLE = re.compile(r"[!-~]+")
_JSON = "application/json"
Json = dict[str, Any]


class ProblemError(SidecarError):
    """The sidecar did not do it, and its text is the problem's detail; `status` is the HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class UnreachableError(SidecarError):
    """No sidecar answers."""


class CutError(SidecarError):
    """A transfer ended early."""


class InterruptedByUserError(SidecarError):
    """Ctrl-C, twice or where there is nothing to cancel; the text says what goes on without this command."""


def token_from(environ: Mapping[str, str], name: str = TOKEN) -> str | None:
    """Return the token of this name from the environment or its file; None where there is none.

    Raises:
        SidecarError: the file cannot be read, or the token cannot be sent.

    """
    path, token = environ.get(f"{name}_FILE"), environ.get(name)
    if path:
        try:
            token = Path(path).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            raise SidecarError(f"{name}_FILE names {path}, which cannot be read ({error})") from error
    if token and not _SENDABLE.fullmatch(token):
        raise SidecarError(f"the token of {name} has characters that no HTTP header can carry; use visible ASCII alone")
    return token or None


def checked_url(url: str) -> str:
    """Return a control address without a slash at its end. Raises ValueError where it is none."""
    parts = urlsplit(url)
    plain = (
        parts.scheme in {"http", "https"} and parts.hostname and not (parts.query or parts.fragment or parts.username)
    )
    if not plain or parts.path not in {"", "/"} or parts.port == 0:
        raise ValueError(f"{url!r} is no address; expected one such as http://127.0.0.1:8890")
    return url.removesuffix("/")


class Readable(Protocol):
    """What can be sent: a file, or what comes from elsewhere."""

    def read(self, size: int, /) -> bytes:
        """Return at most so many bytes; none at the end."""


@dataclass(frozen=True)
class Client:
    """Calls one sidecar.

    Attributes:
        url: `http://host:port` of a control address; None for the control socket of the run directory.
        token: sent over TCP alone.

    """

    url: str | None = None
    token: str | None = field(default=None, repr=False)

    # One request ------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Json:
        """Return what a path tells. Raises ProblemError, RefusedError, UnreachableError."""
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Json | None = None, timeout: float = _TIMEOUT) -> Json:
        """Make one request, and return the JSON of its answer; `{}` where it has none.

        Raises:
            RefusedError: it was refused, and nothing was touched.
            ProblemError: it was not done for another reason.
            UnreachableError: nobody answers, or something that is no sidecar.

        """
        content = None if body is None else json.dumps(body).encode()
        headers = {"Accept": _JSON} | ({} if body is None else {"Content-Type": _JSON})
        with self._connected(timeout) as connection:
            connection.request(method, path, content, self._headers(headers))
            return self._answer(connection.getresponse())

    @contextlib.contextmanager
    def _connected(self, timeout: float = _TIMEOUT) -> Iterator[http.client.HTTPConnection]:
        connection = self._connection(timeout)
        try:
            yield connection
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self.url is None:
            return probe.SocketConnection(probe.control_socket(), timeout)
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=timeout)

    def _unreachable(self, error: Exception) -> UnreachableError:
        if self.url is None:
            return UnreachableError(probe.nobody(error))
        return UnreachableError(
            f"no sidecar answers at {self.url} ({str(error) or type(error).__name__}); is it running, is its control "
            "address forwarded there, and is that not the gateway's?"
        )

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        with_token = self.url is not None and self.token is not None
        return {**headers, **({"Authorization": f"Bearer {self.token}"} if with_token else {})}

    def _answer(self, response: http.client.HTTPResponse) -> Json:
        content = response.read()
        if response.status == http.client.NO_CONTENT:
            return {}
        kind = response.headers.get_content_type()
        found = json.loads(content) if kind in {_JSON, "application/problem+json"} else None
        if not isinstance(found, dict):
            raise http.client.HTTPException(f"what answers there is no sidecar: HTTP {response.status}, {kind}")
        if response.status < http.client.BAD_REQUEST:
            return found
        if "detail" not in found or "title" not in found:
            raise http.client.HTTPException(f"what answers there is no sidecar: HTTP {response.status}")
        if response.status == _REFUSED:
            raise RefusedError(str(found["detail"]))
        raise ProblemError(response.status, str(found["detail"]))

    # Operations -------------------------------------------------------------------------------------------------

    def wait(self, operation: Json, tell: Tell) -> Json:
        """Return an operation once it has ended. Ctrl-C cancels it and waits for that, and a second one leaves.

        Raises:
            UnreachableError: the sidecar does not answer any more.
            ProblemError: it does not know the operation any more.
            InterruptedByUserError: after the second Ctrl-C.

        """
        try:
            return self._followed(operation, tell)
        except KeyboardInterrupt:
            pass
        try:
            tell(Progress(f"cancelling {operation['kind']}"))
            return self._cancelled(operation, tell)
        except KeyboardInterrupt:
            name = operation["id"]
            raise InterruptedByUserError(
                f"left while the sidecar may still work at it; `hindsight-sidecar operations {name}` says how it ends"
            ) from None

    def cancel(self, identifier: str) -> Json:
        """Cancel an operation, and return it once it has cleaned up. Raises RefusedError where it does not run."""
        return self.call("DELETE", f"/v1/operations/{quote(identifier, safe='')}", timeout=_CANCEL_TIMEOUT)

    def _cancelled(self, operation: Json, tell: Tell) -> Json:
        try:
            return self.cancel(str(operation["id"]))
        except RefusedError:  # it has just ended
            return self._followed(operation, tell)

    def _followed(self, operation: Json, tell: Tell) -> Json:
        pause, heard = _FIRST_PAUSE, time.monotonic()
        while operation["outcome"] == RUNNING:
            tell(
                Progress(
                    f"{operation['kind']}: {operation['phase']}",
                    operation["done"],
                    operation["total"],
                    operation["unit"],
                    operation["rate"],
                    operation["remaining_seconds"],
                )
            )
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSE)
            try:
                operation = self.get(f"/v1/operations/{operation['id']}")
                heard = time.monotonic()
            except (UnreachableError, ProblemError) as error:
                self._check_patience(error, heard, operation)
        return operation

    @staticmethod
    def _check_patience(error: UnreachableError | ProblemError, heard: float, operation: Json) -> None:
        """Go on after a moment's silence; otherwise say what is known of the operation."""
        kind, name = operation["kind"], operation["id"]
        if isinstance(error, ProblemError) and error.status == http.client.NOT_FOUND:
            raise ProblemError(
                error.status,
                f"the sidecar was restarted while it ran {kind} {name}, which did not end; what was served before is "
                "served, unless the exchange had been made (`hindsight-sidecar databases` would have one more)",
            ) from error
        if isinstance(error, ProblemError) and error.status < http.client.INTERNAL_SERVER_ERROR:
            raise error
        if time.monotonic() - heard > _SILENCE:
            raise UnreachableError(
                f"{error} ({kind} {name} was at {operation['phase']!r}; once it answers, "
                f"`hindsight-sidecar operations {name}` says how it ended)"
            ) from error

    # Transfers --------------------------------------------------------------------------------------------------

    def download(self, identifier: str, write: Callable[[bytes], object], tell: Tell) -> str:
        """Write an archive piece by piece, and return its sha256, which is the one that the sidecar says.

        Raises:
            CutError: it ended early.
            VerificationError: what came is not what the sidecar has.
            OSError: from `write`.

        """
        with self.opened(identifier) as found:
            meter = Meter("download", found.length, tell)
            while piece := found.read(CHUNK):
                write(piece)
                meter.add(len(piece))
        return found.sha256

    @contextlib.contextmanager
    def opened(self, identifier: str, span: tuple[int, int] | None = None) -> Iterator["Download"]:
        """Have an archive as it comes, or the bytes of it from the first number up to and without the second."""
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        wanted = http.client.OK if span is None else http.client.PARTIAL_CONTENT
        with self._transfer() as connection:
            with self._named_failures():
                connection.request("GET", f"/v1/dumps/{quote(identifier, safe='')}", headers=self._headers(headers))
                response = connection.getresponse()
                if response.status != wanted:
                    self._answer(response)
                    raise http.client.HTTPException(f"it answered {response.status} where an archive was expected")
            yield Download(response, whole=span is None)

    def upload(self, source: Readable, length: int | None, wish: Mapping[str, bool], tell: Tell) -> tuple[Json, str]:
        """Send an archive, and return the operation that restores it and the sha256 of what was sent.

        `length` is None for a stream, which is sent in chunks. Where the sidecar refuses, nothing or not all is sent.

        Raises:
            RefusedError, ProblemError, UnreachableError: as `call`.
            CutError, OSError: the source ended early, or cannot be read.

        """
        query = urlencode({name: "true" for name, wanted in wish.items() if wanted})
        framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        waits = self.url is None or not self.url.startswith("https:")  # TLS cannot be peeked into
        with self._transfer() as connection:
            with self._named_failures():
                connection.putrequest("PUT", f"/v1/restores{'?' if query else ''}{query}")
                headers = {"Content-Type": "application/octet-stream", "Accept": _JSON, **framing}
                for name, value in self._headers(headers | ({"Expect": "100-continue"} if waits else {})).items():
                    connection.putheader(name, value)
                connection.endheaders()
            seen = hashlib.sha256()
            if not waits or _is_welcome(connection):
                for piece in _pieces(source, length, Meter("upload", length, tell)):
                    seen.update(piece)
                    if not _sent(connection, piece if length is not None else b"%x\r\n%b\r\n" % (len(piece), piece)):
                        break  # it has answered already
                else:
                    _sent(connection, b"" if length is not None else b"0\r\n\r\n")
            try:
                response = connection.getresponse()
            except OSError as error:
                raise CutError(
                    f"the connection was cut while the archive was sent ({error}); `hindsight-sidecar operations` tells "
                    "whether its restore was begun all the same"
                ) from error
            with self._named_failures():
                return self._answer(response), seen.hexdigest()

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[http.client.HTTPConnection]:
        """Have a connection beside which files are read and written: their errors are not the connection's."""
        connection = self._connection(_TIMEOUT)
        try:
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def _named_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from error


class Download:
    """An archive as it comes from a sidecar, read like a file. Its last piece is given out once all of it is proved.

    Attributes:
        length: in bytes.
        sha256: of the whole archive, as the sidecar says it.

    """

    def __init__(self, response: http.client.HTTPResponse, *, whole: bool) -> None:
        self._response = response
        self._whole = whole
        self._seen = hashlib.sha256()
        self._received = 0
        self.length = int(response.headers.get("content-length", "0"))
        self.sha256 = response.headers.get("etag", "").strip('"')

    def read(self, size: int) -> bytes:
        """Return at most so many bytes; none once all were given out.

        Raises:
            CutError: it ended early.
            VerificationError: what came is not what the sidecar has.

        """
        if self._received == self.length or size == 0:
            return b""
        try:
            piece = self._response.read(size)
        except (OSError, http.client.HTTPException):
            piece = b""
        self._received += len(piece)
        self._seen.update(piece)
        if not piece:
            raise CutError(f"the download was cut after {self._received} of {self.length} bytes")
        if self._whole and self._received == self.length and self._seen.hexdigest() != self.sha256:
            raise VerificationError(
                f"what was downloaded has sha256 {self._seen.hexdigest()}, and the sidecar says {self.sha256}"
            )
        return piece


def _is_welcome(connection: http.client.HTTPConnection) -> bool:
    """Wait for the word that the body may come, so that gigabytes are not sent to be refused."""
    if not select.select([connection.sock], [], [], _CONTINUE_PATIENCE)[0]:
        return True
    try:
        begin: bytes = connection.sock.recv(12, socket.MSG_PEEK)
    except OSError:
        return False
    return begin[9:12] == b"100"  # otherwise it is the whole answer


def _sent(connection: http.client.HTTPConnection, data: bytes) -> bool:
    try:
        connection.send(data)
    except OSError:
        return False
    return True


def _pieces(source: Readable, length: int | None, meter: Meter) -> Iterator[bytes]:
    sent = 0
    while piece := source.read(CHUNK if length is None else min(CHUNK, length - sent)):
        sent += len(piece)
        yield piece
        meter.add(len(piece))
    if length is not None and sent != length:
        raise CutError(f"the file had {length} bytes and ended after {sent} while it was sent; nothing was replaced")
