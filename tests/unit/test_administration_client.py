"""The client of the administration endpoints, and its commands, against a small HTTP server on a real socket."""

import contextlib
import io
import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sidecar import administration_client, commands, destination
from sidecar.administration_client import (
    Client,
    CutError,
    InterruptedByUserError,
    ProblemError,
    UnreachableError,
    checked_url,
    token_from,
)
from sidecar.archive import DUMP as DUMP_FILE
from sidecar.archive import Archive, Manifest, finish
from sidecar.contents import Contents, Table
from sidecar.errors import RefusedError, SidecarError, VerificationError
from sidecar.progress import Progress

SOURCE = Path(sys.modules["sidecar"].__path__[0]).parent
MAIN = "import sys; sys.argv[0] = 'hindsight-sidecar'; from sidecar.cli import main; main()"
ID = "20261129T210300Z-ab12"
TAR = os.urandom(3 * 2**20 + 7)
HASH = sha256(TAR).hexdigest()
DUMP = {"id": ID, "made": "2026-11-29T21:03:00.000+00:00", "size": len(TAR), "sha256": HASH, "memories": 369,
        "versions": {"hindsight-api": "1.1.0", "postgres": "18.6"}, "model": None, "compression": "gzip"}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Answers from the server's table of `METHOD path`."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        method_and_path = f"{self.command} {self.path.partition('?')[0]}"
        self.server.asked.append((f"{self.command} {self.path}", dict(self.headers)))
        found = self.server.table.get(method_and_path, (404, {"title": "Not found", "detail": "there is none"}))
        if callable(found):
            found = found(self)
        elif self.command in {"POST", "PUT"}:
            self.body()
        if found is not None:
            self.send_json(*found)

    def send_json(self, status: int, body: Any, kind: str | None = None) -> None:
        content = b"" if status == 204 else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind or ("application/problem+json" if status >= 400 else "application/json"))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_expect_100(self) -> bool:
        if self.server.unwelcome is not None:  # as an application does that answers without reading
            self.send_json(*self.server.unwelcome)
            self.close_connection = True
            return False
        return super().handle_expect_100()

    def body(self) -> bytes:
        """Read the whole body, in either framing; what was cut is what came."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815


class Quiet:
    """A server for clients that may go away."""

    def handle_error(self, *_: object) -> None:
        assert isinstance(sys.exc_info()[1], ConnectionError)


class UnixServer(Quiet, socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A server on a Unix socket that waits for its threads at the end."""


class TcpServer(Quiet, ThreadingHTTPServer):
    """A server on a port."""


class Fake:
    """A sidecar's control socket: what it answers by `METHOD path`, and what it was asked."""

    def __init__(self, server: Any) -> None:
        self.server = server
        server.table, server.asked, server.unwelcome = {}, [], None
        self.table: dict[str, Any] = server.table

    @property
    def asked(self) -> list[str]:
        return [request for request, _ in self.server.asked]

    def headers(self, request: str) -> dict[str, str]:
        found: dict[str, str] = next(headers for asked, headers in self.server.asked if asked == request)
        return found


@contextlib.contextmanager
def running(server: Any) -> Iterator[Fake]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Fake(server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def sidecar(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("HINDSIGHT_SIDECAR_RUN_DIR", str(short_path))
    monkeypatch.setattr(administration_client, "_PAUSE", 0.02)
    with running(UnixServer(str(short_path / "control.sock"), Handler)) as fake:
        yield fake


def operation(kind: str = "dump", outcome: str = "done", **members: Any) -> dict[str, Any]:
    ended = None if outcome == "running" else "2026-11-29T21:03:09.500+00:00"
    return {"id": "op-1", "kind": kind, "outcome": outcome, "phase": "hash", "done": 5, "total": 10, "unit": "bytes",
            "percent": 50.0, "rate": 2.0, "remaining_seconds": 2.5, "started": "2026-11-29T21:03:00.000+00:00",
            "ended": ended, "error": None, "report": {}, **members}  # fmt: skip


def in_turn(*answers: Any) -> Callable[[Handler], Any]:
    """Return each answer once, and the last one for ever."""
    left = list(answers)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


def archive(content: bytes = TAR, tag: str = HASH, length: int = len(TAR)) -> Callable[[Handler], None]:
    def send(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/x-tar")
        handler.send_header("Content-Length", str(length))
        handler.send_header("ETag", f'"{tag}"')
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = True

    return send


def ignore(_: Progress) -> None:
    pass


def problem(status: int, detail: str) -> tuple[int, dict[str, str]]:
    return status, {"title": "A title", "detail": detail}


# One request ---------------------------------------------------------------------------------------------------


def test_an_answer_is_its_json(sidecar: Fake) -> None:
    sidecar.table |= {"GET /v1/dumps": (200, {"dumps": []}), "DELETE /v1/dumps/x": (204, None)}
    assert Client().get("/v1/dumps") == {"dumps": []}
    assert Client().call("DELETE", "/v1/dumps/x") == {}
    assert "Authorization" not in sidecar.headers("GET /v1/dumps")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 503])
def test_a_problem_is_its_detail(status: int, sidecar: Fake) -> None:
    sidecar.table["GET /v1/dumps"] = problem(status, "say why")
    with pytest.raises(ProblemError, match=r"^say why$") as caught:
        Client().get("/v1/dumps")
    assert caught.value.status == status


def test_what_was_refused_is_a_refusal(sidecar: Fake) -> None:
    sidecar.table["GET /v1/dumps"] = problem(422, "say why")
    with pytest.raises(RefusedError, match=r"^say why$"):
        Client().get("/v1/dumps")


@pytest.mark.parametrize(
    "answer",
    [(200, ["no", "object"]), (200, {}, "text/html"), (404, {"detail": "Not Found"}, "application/json")],
)
def test_what_is_no_answer_of_a_sidecar_is_nobody(answer: Any, sidecar: Fake) -> None:
    sidecar.table["GET /v1/dumps"] = answer
    with pytest.raises(UnreachableError, match=r"no sidecar answers at .*control\.sock"):
        Client().get("/v1/dumps")


def test_nobody_at_the_socket(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINDSIGHT_SIDECAR_RUN_DIR", str(short_path))
    with pytest.raises(UnreachableError, match="no sidecar answers at"):
        Client().get("/v1/dumps")
    with pytest.raises(UnreachableError):
        Client().upload(io.BytesIO(TAR), len(TAR), {}, ignore)
    with pytest.raises(UnreachableError):
        Client().download(ID, lambda _: None, ignore)


def test_over_tcp_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing is sent through it
    with running(TcpServer(("127.0.0.1", 0), Handler)) as fake:
        fake.table["GET /v1/dumps"] = (200, {"dumps": []})
        url = f"http://127.0.0.1:{fake.server.server_port}"
        Client(url, "a-token").get("/v1/dumps")
        assert fake.headers("GET /v1/dumps")["Authorization"] == "Bearer a-token"
    with pytest.raises(UnreachableError, match=f"no sidecar answers at {url}"):
        Client(url).get("/v1/dumps")


def test_the_token_is_not_shown() -> None:
    assert "a-token" not in repr(Client("http://127.0.0.1:1", "a-token"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8890", "http://[::1]:8890", "https://sidecar.example"])
def test_addresses(url: str) -> None:
    assert checked_url(url) == checked_url(f"{url}/") == url


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8890", "ftp://x", "http://", "http://x:port", "http://x:0", "http://x/v1", "http://x?a",
            "http://me:secret@x"]
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        checked_url(url)


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert token_from({}) is None
    assert token_from({"HINDSIGHT_SIDECAR_TOKEN": ""}) is None
    assert token_from({"HINDSIGHT_SIDECAR_TOKEN": "one"}) == "one"
    assert token_from({"HINDSIGHT_SIDECAR_TOKEN_FILE": str(file)}) == "from-file"
    with pytest.raises(SidecarError, match=r"HINDSIGHT_SIDECAR_TOKEN_FILE names .*absent"):
        token_from({"HINDSIGHT_SIDECAR_TOKEN_FILE": str(tmp_path / "absent")})
    with pytest.raises(SidecarError, match="visible ASCII") as caught:
        token_from({"HINDSIGHT_SIDECAR_TOKEN": "sec\nret"})
    assert "ret" not in str(caught.value).replace("cannot", "")


# Waiting -------------------------------------------------------------------------------------------------------


def test_an_operation_is_followed_to_its_end(sidecar: Fake) -> None:
    seen: list[Progress] = []
    running_on = operation(outcome="running", phase="load", total=None)
    sidecar.table["GET /v1/operations/op-1"] = in_turn((200, running_on), (200, operation()))
    ended = Client().wait(operation(outcome="running"), seen.append)
    assert ended["outcome"] == "done"
    assert seen == [
        Progress("dump: hash", 5, 10, "bytes", 2.0, 2.5),
        Progress("dump: load", 5, None, "bytes", 2.0, 2.5),
    ]


def test_a_moment_of_silence_is_waited_out(sidecar: Fake) -> None:
    nobody = (200, {}, "text/html")
    sidecar.table["GET /v1/operations/op-1"] = in_turn(nobody, problem(503, "starting"), (200, operation()))
    assert Client().wait(operation(outcome="running"), ignore)["outcome"] == "done"


def test_a_long_silence_is_an_unreachable_sidecar(sidecar: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration_client, "_SILENCE", 0.1)
    sidecar.table["GET /v1/operations/op-1"] = (200, {}, "text/html")
    with pytest.raises(UnreachableError, match=r"dump op-1 was at 'hash'.*hindsight-sidecar operations op-1"):
        Client().wait(operation(outcome="running"), ignore)


@pytest.mark.usefixtures("sidecar")
def test_a_restarted_sidecar_does_not_know_the_operation() -> None:
    with pytest.raises(ProblemError, match="the sidecar was restarted while it ran dump op-1"):
        Client().wait(operation(outcome="running"), ignore)


def test_a_token_that_is_not_taken_any_more_ends_the_waiting(sidecar: Fake) -> None:
    sidecar.table["GET /v1/operations/op-1"] = problem(401, "send the token")
    with pytest.raises(ProblemError, match="send the token"):
        Client().wait(operation(outcome="running"), ignore)


class Presses:
    """Presses Ctrl-C whenever progress is told, so often."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, _: Progress) -> None:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt


def test_ctrl_c_cancels_and_waits(sidecar: Fake) -> None:
    sidecar.table["DELETE /v1/operations/op-1"] = (200, operation(outcome="cancelled", error="it was cancelled"))
    presses = Presses(1)
    assert Client().wait(operation(outcome="running"), presses)["outcome"] == "cancelled"
    assert sidecar.asked == ["DELETE /v1/operations/op-1"]


def test_ctrl_c_too_late(sidecar: Fake) -> None:
    sidecar.table |= {
        "DELETE /v1/operations/op-1": problem(422, "it does not run"),
        "GET /v1/operations/op-1": (200, operation()),
    }
    assert Client().wait(operation(outcome="running"), Presses(1))["outcome"] == "done"


def test_ctrl_c_twice_leaves(sidecar: Fake) -> None:
    sidecar.table["DELETE /v1/operations/op-1"] = (200, operation(outcome="cancelled"))
    with pytest.raises(InterruptedByUserError, match="hindsight-sidecar operations op-1"):
        Client().wait(operation(outcome="running"), Presses(2))
    assert sidecar.asked == []


# Downloads -----------------------------------------------------------------------------------------------------


def test_a_download(sidecar: Fake) -> None:
    sidecar.table[f"GET /v1/dumps/{ID}"] = archive()
    written, seen = bytearray(), []
    assert Client().download(ID, written.extend, seen.append) == HASH
    assert written == TAR
    assert (seen[-1].done, seen[-1].total, seen[-1].unit) == (len(TAR), len(TAR), "bytes")


@pytest.mark.parametrize("kept", [0, 1, 2**20, len(TAR) - 1])
def test_a_cut_download(kept: int, sidecar: Fake) -> None:
    sidecar.table[f"GET /v1/dumps/{ID}"] = archive(TAR[:kept])
    with pytest.raises(CutError, match=f"cut after {kept} of {len(TAR)} bytes"):
        Client().download(ID, lambda _: None, ignore)


def test_a_download_with_another_hash(sidecar: Fake) -> None:
    sidecar.table[f"GET /v1/dumps/{ID}"] = archive(tag="0" * 64)
    with pytest.raises(VerificationError, match=f"has sha256 {HASH}, and the sidecar says 0000"):
        Client().download(ID, lambda _: None, ignore)


def test_a_download_of_nothing(sidecar: Fake) -> None:
    with pytest.raises(ProblemError, match="there is none"):
        Client().download("absent/../x", lambda _: None, ignore)
    assert sidecar.asked == ["GET /v1/dumps/absent%2F..%2Fx"]


def test_what_cannot_be_written_is_told_as_that(sidecar: Fake) -> None:
    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    sidecar.table[f"GET /v1/dumps/{ID}"] = archive()
    with pytest.raises(OSError, match="No space left"):
        Client().download(ID, full, ignore)


# Uploads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [len(TAR), None])
def test_an_upload(length: int | None, sidecar: Fake) -> None:
    received = []

    def take(handler: Handler) -> Any:
        received.append(handler.body())
        return 202, operation("restore", "running")

    sidecar.table["PUT /v1/restores"] = take
    begun, seen = Client().upload(io.BytesIO(TAR), length, {"dry_run": True, "force_model": False}, ignore)
    assert (begun["kind"], seen, received) == ("restore", HASH, [TAR])
    headers = sidecar.headers("PUT /v1/restores?dry_run=true")
    assert headers.get("Content-Length") == (str(length) if length else None)


@pytest.mark.parametrize("length", [len(TAR), None])
@pytest.mark.parametrize(("status", "kind"), [(409, ProblemError), (422, RefusedError)])
def test_an_upload_that_is_not_welcome_is_not_sent(
    status: int, kind: type[SidecarError], length: int | None, sidecar: Fake
) -> None:
    sidecar.server.unwelcome = problem(status, "another one runs")
    source = io.BytesIO(TAR)
    with pytest.raises(kind, match="another one runs"):
        Client().upload(source, length, {}, ignore)
    assert source.tell() == 0


def test_an_upload_that_is_refused_on_the_way(sidecar: Fake) -> None:
    def refuse(handler: Handler) -> Any:
        handler.rfile.read(1000)
        handler.close_connection = True
        return problem(422, "there is no space for it")

    sidecar.table["PUT /v1/restores"] = refuse
    with pytest.raises(RefusedError, match="there is no space for it"):
        Client().upload(io.BytesIO(TAR * 4), len(TAR) * 4, {}, ignore)


def test_a_sidecar_that_goes_away_during_an_upload(sidecar: Fake) -> None:
    def vanish(handler: Handler) -> None:
        handler.rfile.read(1000)
        handler.close_connection = True

    sidecar.table["PUT /v1/restores"] = vanish
    with pytest.raises(
        CutError, match=r"`hindsight-sidecar operations` tells whether its restore was begun all the same$"
    ):
        Client().upload(io.BytesIO(TAR * 4), len(TAR) * 4, {}, ignore)


@pytest.mark.parametrize(("fault", "length"), [("short", len(TAR) + 1), ("unreadable", len(TAR)), ("unreadable", None)])
def test_a_file_that_ends_early_is_never_sent_as_whole(fault: str, length: int | None, sidecar: Fake) -> None:
    received: list[bytes] = []
    over = threading.Event()

    def take(handler: Handler) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # reset, or no size of a next chunk
            received.append(handler.body())
        handler.close_connection = True
        over.set()

    class Source(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if fault == "unreadable" and self.tell() > 2**20:
                raise OSError(5, "Input/output error")
            return super().read(size)

    sidecar.table["PUT /v1/restores"] = take
    with pytest.raises((CutError, OSError), match=r"ended after|Input/output error"):
        Client().upload(Source(TAR), length, {}, ignore)
    assert over.wait(10)
    assert all(len(content) < (length or 0) for content in received)


# Commands: dump ------------------------------------------------------------------------------------------------


def run(*arguments: str, given: str | bytes | None = None) -> Any:
    return CliRunner().invoke(commands.app, list(arguments), input=given)


@pytest.fixture
def dumping(sidecar: Fake) -> Fake:
    """Return a sidecar that makes and has one dump."""
    begun = operation(outcome="running", phase="dump")
    sidecar.table |= {
        "POST /v1/dumps": (202, begun),
        "GET /v1/operations/op-1": (200, operation(report={"dump": DUMP})),
        "GET /v1/dumps": (200, {"dumps": [DUMP]}),
        f"GET /v1/dumps/{ID}": archive(),
        f"DELETE /v1/dumps/{ID}": (204, None),
    }
    return sidecar


def test_a_dump_on_the_volume(dumping: Fake) -> None:
    done = run("dump")
    assert (done.exit_code, done.stdout) == (0, f"{ID}\n")
    assert "369 memories in 3.0 MiB" in done.stderr
    assert f"GET /v1/dumps/{ID}" not in dumping.asked
    assert json.loads(run("dump", "--json").stdout) == DUMP


def test_a_dump_in_a_file(dumping: Fake, tmp_path: Path) -> None:
    file = tmp_path / "memory.tar"
    done = run("dump", "-o", str(file))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{file}: 369 memories in 3.0 MiB, sha256 {HASH}")
    assert file.read_bytes() == TAR
    assert file.stat().st_mode & 0o7777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["memory.tar"]
    assert dumping.asked[-1] == f"DELETE /v1/dumps/{ID}"


def test_a_dump_of_the_volume_in_a_file(dumping: Fake, tmp_path: Path) -> None:
    file = tmp_path / "memory.tar"
    done = run("dump", "--id", ID, "-o", str(file), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == DUMP | {"file": str(file)}
    assert file.read_bytes() == TAR
    assert dumping.asked == ["GET /v1/dumps", f"GET /v1/dumps/{ID}"]


@pytest.mark.usefixtures("dumping")
def test_a_dump_that_is_not_there(tmp_path: Path) -> None:
    done = run("dump", "--id", "other", "-o", str(tmp_path / "x"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "there is no dump 'other' on the volume; `hindsight-sidecar dumps` lists them\n"
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_replaced_by_force_alone(dumping: Fake, tmp_path: Path) -> None:
    file = tmp_path / "memory.tar"
    file.write_bytes(b"what I have")
    done = run("dump", "-o", str(file))
    assert done.exit_code == 4
    assert f"{file} is there already; nothing was written" in done.stderr
    assert (file.read_bytes(), dumping.asked) == (b"what I have", [])
    assert run("dump", "-o", str(file), "--force").exit_code == 0
    assert file.read_bytes() == TAR


def test_a_file_that_appears_meanwhile_is_not_replaced(dumping: Fake, tmp_path: Path) -> None:
    file = tmp_path / "memory.tar"

    def send(handler: Handler) -> None:
        file.write_bytes(b"of someone else")
        archive()(handler)

    dumping.table[f"GET /v1/dumps/{ID}"] = send
    assert run("dump", "-o", str(file)).exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["memory.tar"]
    assert file.read_bytes() == b"of someone else"


def test_a_place_that_cannot_be_written_is_told_before_a_dump_is_made(dumping: Fake, tmp_path: Path) -> None:
    for place, sentence in ((tmp_path, "is a directory"), (tmp_path / "no" / "x", "No such file or directory")):
        done = run("dump", "-o", str(place))
        assert done.exit_code == 1
        assert sentence in done.stderr
    assert dumping.asked == []


@pytest.mark.usefixtures("dumping")
def test_what_an_earlier_command_left_is_written_over(tmp_path: Path) -> None:
    left = tmp_path / "memory.tar.partial"
    left.write_bytes(b"x" * (len(TAR) + 100))
    left.chmod(0o644)
    assert run("dump", "-o", str(tmp_path / "memory.tar")).exit_code == 0
    assert (tmp_path / "memory.tar").read_bytes() == TAR
    assert (tmp_path / "memory.tar").stat().st_mode & 0o7777 == 0o600


def test_two_commands_for_one_file(dumping: Fake, tmp_path: Path) -> None:
    file = tmp_path / "memory.tar"
    with destination.destination(str(file), force=False):
        done = run("dump", "-o", str(file))
    assert done.exit_code == 1
    assert f"another command writes {file}.partial" in done.stderr
    assert dumping.asked == []


@pytest.mark.parametrize(
    ("found", "code", "sentence"),
    [
        (archive(TAR[:-1]), 1, "the download was cut"),
        (archive(tag="0" * 64), 5, "the sidecar says 0000"),
        (archive(bytes(len(TAR))), 5, f"the sidecar says {HASH}"),
    ],
    ids=["cut", "of another hash", "with other bytes"],
)
def test_a_failed_download_leaves_no_file_and_keeps_the_dump(
    found: Any, code: int, sentence: str, dumping: Fake, tmp_path: Path
) -> None:
    dumping.table[f"GET /v1/dumps/{ID}"] = found
    done = run("dump", "-o", str(tmp_path / "memory.tar"))
    assert (done.exit_code, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert f"`hindsight-sidecar dump --id {ID} -o FILE` fetches it again" in done.stderr
    assert not list(tmp_path.iterdir())
    assert f"DELETE /v1/dumps/{ID}" not in dumping.asked


@pytest.mark.parametrize(
    ("outcome", "code"), [("failed", 1), ("cancelled", 1), ("refused", 4), ("verification-failed", 5)]
)
def test_how_a_dump_ends_is_the_exit_code(outcome: str, code: int, dumping: Fake, tmp_path: Path) -> None:
    dumping.table["GET /v1/operations/op-1"] = (200, operation(outcome=outcome, error="there is no space"))
    done = run("dump", "-o", str(tmp_path / "x"))
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr == f"dump {outcome}: there is no space\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("status", "code"), [(401, 1), (403, 1), (409, 1), (422, 4), (503, 1)])
def test_a_problem_is_one_sentence_and_an_exit_code(status: int, code: int, sidecar: Fake) -> None:
    sidecar.table["POST /v1/dumps"] = problem(status, "another operation runs")
    done = run("dump")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", "another operation runs\n")


# Commands: restore ---------------------------------------------------------------------------------------------

COMPARISON = {
    "tables": [{"name": "public.memory_units", "there": 369, "here": 369, "equal": True}],
    "counts": {"indexes": {"there": 102, "here": 102, "equal": 102}, "constraints": {"there": 53, "here": 53, "equal": 53}},
    "faults": [],
    "notes": [],
}  # fmt: skip
REPORT = {"memories": 369, "comparison": COMPARISON, "unproved": []}
REHEARSED = operation("restore", report=REPORT | {"dry_run": True, "upload": "up-1"})
RESTORED = operation("restore", report=REPORT | {"kept": "hindsight_kept_20261129t210305z"})


@pytest.fixture
def restoring(sidecar: Fake) -> Fake:
    """Return a sidecar that restores what it gets; what came is in its `server.received`."""
    sidecar.server.received = []

    def take(handler: Handler) -> Any:
        sidecar.server.received.append(handler.body())
        return 202, REHEARSED if "dry_run=true" in handler.path else RESTORED

    def again(handler: Handler) -> Any:
        sidecar.server.received.append(json.loads(handler.body()))
        return 202, REHEARSED if sidecar.server.received[-1]["dry_run"] else RESTORED

    sidecar.table |= {
        "GET /v1/status": (200, {"health": {"model": None, "memory_count": 12}}),
        "GET /v1/dumps": (200, {"dumps": [DUMP]}),
        "PUT /v1/restores": take,
        "POST /v1/restores": again,
    }
    return sidecar


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "memory.tar"
    path.write_bytes(TAR)
    return str(path)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a person at a terminal; the answers come from the input."""
    monkeypatch.setattr("sidecar.administering.Console.is_terminal", staticmethod(lambda: True))


LINE = (
    f"2026-11-29 21:03 UTC: 369 memories restored from memory.tar (sha256 {HASH}); 1 tables, 102 indexes, 53 constraints "
    "equal; the old database is kept as hindsight_kept_20261129t210305z"
)


def test_restore_with_yes_sends_once(restoring: Fake, file: str) -> None:
    done = run("restore", file, "--yes", "--discard-newer", "--force-model")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == LINE
    assert restoring.server.received == [TAR]
    assert restoring.asked == ["GET /v1/status", "PUT /v1/restores?discard_newer=true&force_model=true"]


def test_restore_where_nobody_can_be_asked(restoring: Fake, file: str) -> None:
    done = run("restore", file)
    assert done.exit_code == 4
    assert "public.memory_units    369   369  equal" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("dry run: 369 memories of memory.tar can be restored")
    assert len(done.stderr.splitlines()) == 1
    assert "nothing was replaced" in done.stderr
    assert "--yes" in done.stderr
    assert restoring.server.received == [TAR]
    assert restoring.asked[-1] == "DELETE /v1/restores/up-1"


def test_a_dry_run(restoring: Fake, file: str) -> None:
    done = run("restore", file, "--dry-run", "--yes", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == REHEARSED | {"source_sha256": HASH}
    assert [asked for asked in restoring.asked if "/v1/restores" in asked] == [
        "PUT /v1/restores?dry_run=true",
        "DELETE /v1/restores/up-1",
    ]


@pytest.mark.usefixtures("terminal")
def test_yes_at_the_question_restores_what_was_kept(restoring: Fake, file: str) -> None:
    done = run("restore", file, "--discard-newer", given="y\n")
    assert done.exit_code == 0
    assert "12 memories are served now; 369 memories of memory.tar come instead" in done.stderr
    assert done.stdout.splitlines()[-1] == LINE
    wanted = {"upload": "up-1", "dry_run": False, "discard_newer": True, "force_model": False}
    assert restoring.server.received == [TAR, wanted]
    assert "DELETE /v1/restores/up-1" not in restoring.asked  # the operation removes it itself


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("answer", "code"), [("n\n", 4), ("\n", 4), ("", 4)])
def test_anything_but_yes_replaces_nothing(answer: str, code: int, restoring: Fake, file: str) -> None:
    done = run("restore", file, given=answer)
    assert done.exit_code == code
    assert restoring.server.received == [TAR]
    assert restoring.asked[-1] == "DELETE /v1/restores/up-1"


@pytest.mark.usefixtures("terminal")
def test_with_json_a_terminal_gets_the_report_and_the_output_one_document(restoring: Fake, file: str) -> None:
    done = run("restore", file, "--json", given="y\n")
    assert json.loads(done.stdout) == RESTORED | {"source_sha256": HASH}
    assert "public.memory_units    369   369  equal" in done.stderr
    assert restoring.asked[-1] == "POST /v1/restores"


def test_restore_of_a_dump_on_the_volume(restoring: Fake) -> None:
    done = run("restore", "--dump", ID, "--yes")
    assert done.exit_code == 0
    assert f"369 memories restored from dump {ID} (sha256 {HASH})" in done.stdout
    assert restoring.server.received == [{"dump": ID, "dry_run": False, "discard_newer": False, "force_model": False}]
    assert run("restore", "--dump", "other", "--yes").exit_code == 1


@pytest.mark.parametrize(
    ("outcome", "code"), [("failed", 1), ("cancelled", 1), ("refused", 4), ("verification-failed", 5)]
)
def test_how_a_restore_ends_is_the_exit_code(outcome: str, code: int, restoring: Fake, file: str) -> None:
    report = {"comparison": COMPARISON | {"faults": ["one"]}} if outcome == "verification-failed" else {}
    restoring.table["PUT /v1/restores"] = lambda handler: (
        handler.body() and (202, operation("restore", outcome, error="say\n why", report=report))
    )
    for more in ([], ["--yes"], ["--dry-run"]):
        done = run("restore", file, *more)
        assert done.exit_code == code
        assert done.stderr == f"restore {outcome}: say why\n"
        assert bool(done.stdout) is bool(report)


def test_a_file_that_is_not_there(restoring: Fake, tmp_path: Path) -> None:
    done = run("restore", str(tmp_path / "absent.tar"), "--yes")
    assert (done.exit_code, done.stderr) == (1, f"{tmp_path / 'absent.tar'}: No such file or directory\n")
    assert restoring.asked == ["GET /v1/status"]


# Commands: migrate ---------------------------------------------------------------------------------------------

LATER_ID = "20261129T220000Z-cd34"
URL = "postgresql://anna@db.example/memories"


def made_archive(directory: Path, identifier: str, rows: int) -> Archive:
    """Return an archive whose database had so many rows in one table."""
    directory.mkdir()
    (directory / DUMP_FILE).write_bytes(TAR)
    contents = Contents(tables={"public.memory_units": Table(rows, str(rows))})
    made = datetime(2026, 11, 29, 21, 3, tzinfo=UTC)
    return finish(directory, Manifest(identifier, made, {}, "gzip", None, contents, len(TAR), HASH))


def served(found: Archive, content: bytes | None = None) -> Callable[[Handler], None]:
    """Answer with an archive or a range of it; the whole may be another content."""

    def send(handler: Handler) -> None:
        whole = b"".join(found.read())
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if wanted is None:
            return archive(whole if content is None else content, found.checksum, len(whole))(handler)
        part = whole[int(wanted[1]) : int(wanted[2]) + 1]
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        handler.wfile.write(part)
        return None

    return send


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Fake]:
    """Return another sidecar, whose second dump has one row more."""
    first, second = made_archive(tmp_path / "a", ID, 369), made_archive(tmp_path / "b", LATER_ID, 370)
    begun = [operation(report={"dump": {"id": identifier}}) for identifier in (ID, LATER_ID)]
    with running(TcpServer(("127.0.0.1", 0), Handler)) as fake:
        fake.first = first  # type: ignore[attr-defined]
        fake.table |= {
            "POST /v1/dumps": in_turn(*((202, one) for one in begun)),
            f"GET /v1/dumps/{ID}": served(first),
            f"GET /v1/dumps/{LATER_ID}": served(second),
            f"DELETE /v1/dumps/{ID}": (204, None),
            f"DELETE /v1/dumps/{LATER_ID}": (204, None),
        }
        yield fake


def at(fake: Fake) -> str:
    return f"http://127.0.0.1:{fake.server.server_port}"


def test_migrate_from_another_sidecar(restoring: Fake, there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINDSIGHT_SIDECAR_SOURCE_TOKEN", "of-the-source")
    done = run("migrate", "--from", at(there), "--yes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert restoring.server.received == [b"".join(there.first.read())]
    assert f"369 memories restored from {at(there)} (sha256 {there.first.checksum}); " in done.stdout
    assert "LATER     public.memory_units: +1 rows, at the source since it was read: not here" in done.stdout
    assert there.headers("POST /v1/dumps")["Authorization"] == "Bearer of-the-source"
    assert [asked for asked in there.asked if "DELETE" in asked] == [
        f"DELETE /v1/dumps/{ID}",
        f"DELETE /v1/dumps/{LATER_ID}",
    ]


def test_a_rehearsal_from_another_sidecar_replaces_nothing(restoring: Fake, there: Any) -> None:
    done = run("migrate", "--from", at(there))
    assert done.exit_code == 4
    assert "nothing was replaced" in done.stderr
    assert restoring.asked[-1] == "DELETE /v1/restores/up-1"
    assert there.asked[-1] == f"DELETE /v1/dumps/{ID}"


@pytest.mark.usefixtures("terminal")
def test_after_the_question_nothing_is_fetched_again(restoring: Fake, there: Any) -> None:
    assert run("migrate", "--from", at(there), given="y\n").exit_code == 0
    assert restoring.server.received[1]["upload"] == "up-1"
    assert there.asked.count(f"GET /v1/dumps/{ID}") == 3  # manifest in two parts, and the whole


@pytest.mark.parametrize(("damage", "code"), [("cut", 1), ("changed", 5)])
def test_a_damaged_download_is_never_restored(damage: str, code: int, restoring: Fake, there: Any) -> None:
    whole = b"".join(there.first.read())
    content = whole[:-5000] if damage == "cut" else whole[:-1] + b"x"
    there.table[f"GET /v1/dumps/{ID}"] = served(there.first, content)

    def take(handler: Handler) -> None:
        received = handler.rfile.read(int(handler.headers["Content-Length"]))
        assert len(received) < len(whole)
        restoring.server.received.append("cut")

    restoring.table["PUT /v1/restores"] = take
    done = run("migrate", "--from", at(there), "--yes")
    assert (done.exit_code, done.stdout) == (code, "")
    assert ("was cut after" if damage == "cut" else "and the sidecar says") in done.stderr
    assert restoring.server.received in ([], ["cut"])
    assert there.asked[-1] == f"DELETE /v1/dumps/{ID}"


def test_what_cannot_be_seen_of_later_writes_is_said(restoring: Fake, there: Any) -> None:
    assert restoring
    there.table["POST /v1/dumps"] = in_turn(
        (202, operation(report={"dump": {"id": ID}})), problem(409, "a restore runs")
    )
    done = run("migrate", "--from", at(there), "--yes")
    assert done.exit_code == 0
    assert (
        "UNPROVED  whether anything was written at the source since its dump is not known (a restore runs)"
        in done.stdout
    )


def test_a_dump_that_stays_there_is_named(restoring: Fake, there: Any) -> None:
    assert restoring
    there.table[f"DELETE /v1/dumps/{ID}"] = problem(503, "not so now")
    done = run("migrate", "--from", at(there), "--yes")
    assert done.exit_code == 0
    assert done.stderr == (
        f"the dump {ID} is still on the volume of {at(there)} (not so now); delete it there: "
        f"`hindsight-sidecar dumps --delete {ID}`\n"
    )


@pytest.mark.parametrize(("status", "code"), [(401, 1), (403, 1), (409, 1), (422, 4)])
def test_a_source_that_refuses(status: int, code: int, restoring: Fake, there: Any) -> None:
    assert restoring
    there.table["POST /v1/dumps"] = problem(status, "say why")
    done = run("migrate", "--from", at(there), "--yes")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", "say why\n")


def test_a_source_where_nobody_is(restoring: Fake) -> None:
    assert restoring
    done = run("migrate", "--from", "http://127.0.0.1:1", "--yes")
    assert done.exit_code == 3
    assert "no sidecar answers at http://127.0.0.1:1" in done.stderr


@pytest.fixture
def migrating(restoring: Fake) -> Fake:
    """Return a sidecar that migrates from what it is told; that is in its `server.received`."""

    def take(handler: Handler) -> Any:
        restoring.server.received.append(json.loads(handler.body()))
        report = REPORT | ({"dry_run": True} if restoring.server.received[-1]["dry_run"] else {"kept": "k"})
        return 202, operation("migrate", report=report | {"written_there_since": []})

    restoring.table["POST /v1/migrations"] = take
    return restoring


def test_migrate_from_a_postgres(migrating: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("migrate", "--from", URL, "--yes", "--freeze")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith(f"2026-11-29 21:03 UTC: 369 memories migrated from {URL}; 1 tables")
    options = {"dry_run": False, "discard_newer": False, "force_model": False}
    assert migrating.server.received == [{"from": URL, "freeze": True, **options}], "no password found, none sent"
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    assert run("migrate", "--from", URL, "--dry-run").exit_code == 0
    assert migrating.server.received[-1]["password"] == "s3cret"  # noqa: S105 - no secret


@pytest.mark.usefixtures("terminal")
def test_after_the_question_a_postgres_is_read_again(migrating: Fake) -> None:
    assert run("migrate", "--from", URL, given="y\n").exit_code == 0
    assert [body["dry_run"] for body in migrating.server.received] == [True, False]


def test_a_source_that_the_sidecar_cannot_reach(migrating: Fake) -> None:
    ended = operation("migrate", "failed", error="it cannot be reached", report={"unreachable": URL})
    migrating.table["POST /v1/migrations"] = (202, ended)
    done = run("migrate", "--from", URL, "--yes")
    assert (done.exit_code, done.stderr) == (3, "migrate failed: it cannot be reached\n")


def test_migrate_from_a_file(restoring: Fake, file: str) -> None:
    done = run("migrate", "--from", file, "--yes")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, LINE)
    assert restoring.server.received == [TAR]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["postgresql://anna:s3cret@db.example/m"], "password in it"),
        (["postgresql://anna@db.example/m?password=s3cret"], "password in it"),
        (["pg0://hindsight"], "pg0:// is no source"),
        (["http://127.0.0.1:8890/v1"], "is no address"),
        (["memory.tar", "--freeze"], "--freeze is for a Postgres URL"),
        (["http://127.0.0.1:8890", "--password-file", "x"], "--password-file is for a Postgres URL"),
    ],
)
def test_a_source_that_cannot_be_meant(arguments: list[str], told: str, sidecar: Fake) -> None:
    done = run("migrate", "--from", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in " ".join(re.sub("[│╭╮╰╯─]", " ", done.stderr).split())
    assert "s3cret" not in done.stderr
    assert sidecar.asked == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["restore"],
        ["restore", "x", "--dump", "y"],
        ["dump", "--id", "x"],
        ["dump", "--compression", "rar"],
        ["dumps", "--url", "nowhere"],
        ["verify"],
        ["migrate"],
    ],
)
def test_wrong_usage(arguments: list[str], sidecar: Fake) -> None:
    assert run(*arguments).exit_code == 2
    assert sidecar.asked == []


@pytest.mark.parametrize("command", ["dump", "dumps", "operations", "databases", "rollback"])
def test_without_a_sidecar(command: str, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINDSIGHT_SIDECAR_RUN_DIR", str(short_path))
    done = run(command)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith(f"no sidecar answers at {short_path}/control.sock")
    assert len(done.stderr.splitlines()) == 1


# Commands: lists, kept databases -------------------------------------------------------------------------------


def test_lists(dumping: Fake) -> None:
    kept = [{"name": "hindsight_kept_20261129t210305z", "size": 10_000_000}]
    clusters = [{"name": "pgdata.kept-20261128t210305z", "size": 20_000_000}]
    dumping.table |= {
        "GET /v1/databases": (200, {"kept": kept, "clusters": clusters}),
        "GET /v1/operations": (200, {"operations": [operation(), operation(outcome="running")]}),
    }
    assert run("dumps").stdout.splitlines()[1].startswith(f"{ID}  2026-11-29 21:03 UTC  hand       369  3.0 MiB  1.1.0")
    assert json.loads(run("dumps", "--json").stdout) == {"dumps": [DUMP]}
    assert run("databases").stdout.splitlines()[1:] == [
        "hindsight_kept_20261129t210305z  2026-11-29 21:03 UTC   9.5 MiB",
        "pgdata.kept-20261128t210305z     2026-11-28 21:03 UTC  19.1 MiB",
    ]
    ended, still = run("operations").stdout.splitlines()[1:]
    assert ended.split()[1:] == ["dump", "done", "hash", "2026-11-29", "21:03", "UTC", "0:10"]
    assert still.split()[1:] == ["dump", "running", "hash", "50", "%", "2026-11-29", "21:03", "UTC", "-"]
    assert json.loads(run("operations", "op-1", "--json").stdout) == operation(report={"dump": DUMP})


def test_what_is_deleted_is_named_safely(sidecar: Fake) -> None:
    sidecar.table |= {"DELETE /v1/dumps/a%2Fb": (204, None), "DELETE /v1/databases/a%2Fb": (204, None)}
    for arguments in (("dumps", "--delete", "a/b"), ("databases", "--drop", "a/b")):
        done = run(*arguments)
        assert (done.exit_code, done.output) == (0, "")
    assert run("dumps", "--delete", "absent").exit_code == 1


def test_cancelling(sidecar: Fake) -> None:
    sidecar.table["DELETE /v1/operations/op-1"] = (200, operation(outcome="cancelled"))
    done = run("operations", "--cancel", "op-1")
    assert done.exit_code == 0
    assert " cancelled " in done.stdout


NEWER, OLDER = "hindsight_kept_20261129t210305z", "hindsight_kept_20261128t210305z"


@pytest.fixture
def kept(sidecar: Fake) -> Fake:
    """Return a sidecar with two kept databases."""

    def roll(handler: Handler) -> Any:
        name = json.loads(handler.body())["database"]
        return 202, operation("rollback", report={"served": name, "kept": "hindsight_kept_20261129t220000z"})

    databases = [{"name": name, "size": 1} for name in (NEWER, OLDER)]
    sidecar.table |= {"GET /v1/databases": (200, {"kept": databases}), "POST /v1/rollback": roll}
    return sidecar


@pytest.mark.parametrize(("name", "chosen"), [([], NEWER), ([OLDER], OLDER)])
def test_rollback_with_yes(name: list[str], chosen: str, kept: Fake) -> None:
    done = run("rollback", *name, "--yes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        f"2026-11-29 21:03 UTC: {chosen} is served again; the database that was served until then is kept as "
        "hindsight_kept_20261129t220000z\n"
    )
    assert kept.asked[-1] == "POST /v1/rollback"


def test_rollback_where_nobody_can_be_asked(kept: Fake) -> None:
    done = run("rollback")
    assert (done.exit_code, done.stdout) == (4, "")
    assert "nothing was replaced" in done.stderr
    assert kept.asked == ["GET /v1/databases"]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 4)])
def test_rollback_asks(answer: str, code: int, kept: Fake) -> None:
    done = run("rollback", given=answer)
    assert done.exit_code == code
    assert f"{NEWER}, served until 2026-11-29 21:03 UTC, is served again" in done.stderr
    assert ("POST /v1/rollback" in kept.asked) is (code == 0)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("name", "told"),
    [(f"{NEWER}_before_1_1_0", ", served until 2026-11-29 21:03 UTC,"), ("hindsight_kept_by_hand", "")],
)
def test_until_when_it_was_served_is_told_where_its_name_says_it(name: str, told: str, kept: Fake) -> None:
    kept.table["GET /v1/databases"] = (200, {"kept": [{"name": name, "size": 1}]})
    assert f"{name}{told} is served again. What is served now is kept" in run("rollback", given="n\n").stderr


def test_rollback_to_nothing(kept: Fake) -> None:
    assert run("rollback", "hindsight_kept_x", "--yes").exit_code == 4
    kept.table["GET /v1/databases"] = (200, {"kept": []})
    done = run("rollback", "--yes")
    assert (done.exit_code, done.stderr) == (4, "no kept database is there; `hindsight-sidecar databases` lists them\n")
    assert "POST /v1/rollback" not in kept.asked


def test_a_failed_rollback(kept: Fake) -> None:
    kept.table["POST /v1/rollback"] = (202, operation("rollback", "verification-failed", error="it cannot be served"))
    done = run("rollback", "--yes")
    assert (done.exit_code, done.stdout) == (5, "")
    assert done.stderr == "rollback verification-failed: it cannot be served\n"


def test_the_token_goes_with_the_url_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINDSIGHT_SIDECAR_TOKEN", "a-token")
    with running(TcpServer(("127.0.0.1", 0), Handler)) as fake:
        fake.table["GET /v1/dumps"] = (200, {"dumps": []})
        assert run("dumps", "--url", f"http://127.0.0.1:{fake.server.server_port}").exit_code == 0
        assert fake.headers("GET /v1/dumps")["Authorization"] == "Bearer a-token"


def test_no_command_takes_the_token_as_an_argument() -> None:
    group: Any = typer.main.get_command(commands.app)
    names = {option for command in group.commands.values() for parameter in command.params for option in parameter.opts}
    assert not [name for name in names if re.search("(token|key|password)$", name)]


# Processes: pipes and Ctrl-C -----------------------------------------------------------------------------------


def start(*arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        env={"PYTHONPATH": str(SOURCE), "HINDSIGHT_SIDECAR_RUN_DIR": os.environ["HINDSIGHT_SIDECAR_RUN_DIR"]},
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@pytest.mark.parametrize(("found", "code"), [(archive(), 0), (archive(TAR[:-1]), 1)])
def test_a_dump_to_standard_output(found: Any, code: int, dumping: Fake) -> None:
    dumping.table[f"GET /v1/dumps/{ID}"] = found
    output, errors = (process := start("dump", "-o", "-", "--json")).communicate(timeout=60)
    assert process.returncode == code
    if code:
        assert b"the download was cut" in errors
    else:
        assert output == TAR
        assert json.loads(errors)["sha256"] == HASH


def test_a_reader_that_goes_away_is_a_failure(dumping: Fake) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("dump", "-o", "-", stdout=write)
    os.close(write)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(b"Broken pipe; the dump is kept on the volume")
    assert f"DELETE /v1/dumps/{ID}" not in dumping.asked


def test_standard_input_is_sent_in_pieces(restoring: Fake) -> None:
    output, errors = (process := start("restore", "-", "--yes", stdin=subprocess.PIPE)).communicate(TAR, timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert f"369 memories restored from standard input (sha256 {HASH})".encode() in output
    assert restoring.server.received == [TAR]
    assert restoring.headers("PUT /v1/restores")["Transfer-Encoding"] == "chunked"


def test_nothing_on_standard_input_is_not_sent(restoring: Fake) -> None:
    _, errors = (process := start("restore", "-", "--yes")).communicate(timeout=60)
    assert (process.returncode, errors) == (4, b"nothing came on standard input; nothing was replaced\n")
    assert restoring.asked == ["GET /v1/status"]


def test_ctrl_c_cancels_the_operation_and_a_second_one_leaves(dumping: Fake) -> None:
    looked_at, cancelling, may_end = threading.Event(), threading.Event(), threading.Event()

    def look(_: Handler) -> Any:
        looked_at.set()
        return 200, operation(outcome="running")

    def cancel(_: Handler) -> Any:
        cancelling.set()
        may_end.wait(60)
        return 200, operation(outcome="cancelled", error="it was cancelled; nothing was replaced")

    dumping.table |= {"GET /v1/operations/op-1": look, "DELETE /v1/operations/op-1": cancel}
    process = start("dump")
    assert looked_at.wait(60)
    process.send_signal(signal.SIGINT)
    assert cancelling.wait(60)
    assert process.poll() is None
    may_end.set()
    assert process.communicate(timeout=60)[1] == b"dump cancelled: it was cancelled; nothing was replaced\n"
    assert process.returncode == 1

    for event in (looked_at, cancelling, may_end):
        event.clear()
    process = start("dump")
    assert looked_at.wait(60)
    process.send_signal(signal.SIGINT)
    assert cancelling.wait(60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    may_end.set()
    assert process.returncode == 1
    assert errors.startswith(b"left while the sidecar may still work at it")
