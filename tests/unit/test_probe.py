"""`health` and the other commands against a control socket that the test itself answers."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import probe
from sidecar.machine import Phase, State
from sidecar.status import Status

SOURCE = Path(sys.modules["sidecar"].__path__[0]).parent
MAIN = "import sys; sys.argv[0] = 'hindsight-sidecar'; from sidecar.cli import main; main()"


@pytest.fixture
def answers(short_path: Path) -> Iterator[dict[str, bytes]]:
    """Return the raw answers of a fake control socket by path; what it was asked is in `asked`."""
    found: dict[str, bytes] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short_path / "control.sock"))
    listener.listen()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                path = connection.recv(65536).split(b" ")[1].decode()
                if path == "/end":
                    return
                connection.sendall(found.get(path, b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield found
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(short_path / "control.sock"))
        end.sendall(b"GET /end HTTP/1.1\r\n\r\n")
    thread.join(20)
    listener.close()


def http(status: int, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def health(state: State) -> dict[str, Any]:
    status = Status()
    component = {"state": "up", "pid": 7, "restarts": 0, "fault": None}
    status.update(state=state, postgres=component, api=component, memory_count=369, pgdata="/opt/hindsight/pgdata")
    return status.body()


READY = health(State(Phase.READY))
BLOCKED = health(State(Phase.BLOCKED, "no-space", "the disk is full"))
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(short_path: Path) -> Run:
    def command(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            env={"PYTHONPATH": str(SOURCE), "HINDSIGHT_SIDECAR_RUN_DIR": str(short_path), "COLUMNS": "200", **environ},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    return command


# health --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "code", "line"),
    [(200, READY, 0, "ready\n"), (503, BLOCKED, 1, "blocked(no-space): the disk is full\n")],
)
def test_health_is_one_line_and_an_exit_code(
    status: int, body: Any, code: int, line: str, answers: dict[str, bytes], run: Run
) -> None:
    answers["/health"] = http(status, body)
    done = run("health")
    assert (done.returncode, done.stdout, done.stderr) == (code, line, "")
    done = run("health", "--json")
    assert done.returncode == code
    assert json.loads(done.stdout) == body


def test_health_without_a_sidecar(run: Run, short_path: Path) -> None:
    done = run("health")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"no sidecar answers at {short_path}/control.sock" in done.stderr


@pytest.mark.parametrize("raw", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno {json}"])
@pytest.mark.parametrize("command", ["health", "status", "smoke"])
def test_what_is_no_answer_is_no_sidecar(raw: bytes, command: str, answers: dict[str, bytes], run: Run) -> None:
    answers["/health"] = answers["/v1/status"] = raw
    done = run(command)
    assert done.returncode == 3
    assert done.stderr.startswith("no sidecar answers at ")
    assert "Traceback" not in done.stderr


def test_health_with_another_option_is_wrong_usage(run: Run) -> None:
    assert run("health", "--wrong").returncode == 2


HEAVY = ("typer", "click", "rich", "pydantic", "pydantic_settings", "fastapi", "starlette", "uvicorn", "httpx2", "psycopg",
         "structlog", "asyncio", "prometheus_client")  # fmt: skip


def test_health_imports_nothing_heavy() -> None:
    script = (
        "import sys\nsys.argv = ['hindsight-sidecar', 'health']\nfrom sidecar.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(SOURCE), "HINDSIGHT_SIDECAR_RUN_DIR": "/nonexistent"},
        capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    code, *modules = done.stdout.split()
    assert code == "3"
    assert "sidecar.probe" in modules
    assert not set(modules) & set(HEAVY)


def test_the_socket_is_where_the_run_directory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.control_socket() == Path("/run/hindsight/control.sock")
    monkeypatch.setenv("HINDSIGHT_SIDECAR_RUN_DIR", "")
    assert probe.control_socket() == Path("/run/hindsight/control.sock")
    monkeypatch.setenv("HINDSIGHT_SIDECAR_RUN_DIR", "/x")
    assert probe.control_socket() == Path("/x/control.sock")


# status --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "code"), [(READY, 0), (BLOCKED, 1)])
def test_status_shows_all_and_its_exit_code_is_readiness(
    body: dict[str, Any], code: int, answers: dict[str, bytes], run: Run
) -> None:
    whole = {"health": body, "settings": {"PGDATA": "/opt/hindsight/pgdata", "HINDSIGHT_SIDECAR_TOKEN": None}}
    answers["/v1/status"] = http(200, whole)
    done = run("status")
    assert done.returncode == code
    assert "memories  369 in /opt/hindsight/pgdata" in done.stdout
    assert "  PGDATA=/opt/hindsight/pgdata" in done.stdout
    if code:
        assert "blocked(no-space)" in done.stdout
        assert "the disk is full" in done.stdout
    done = run("status", "--json")
    assert done.returncode == code
    assert json.loads(done.stdout) == whole


def test_status_tells_of_a_stand_in_and_of_a_fault(answers: dict[str, bytes], run: Run) -> None:
    model = {"id": "a/b", "revision": "0123456789abcdef", "precision": "float32", "dimension": 384, "pooling": "mean"}
    body = {**READY, "model": model, "stand_in": True}
    body["components"] = {"postgres": {"state": "unresponsive", "pid": 1, "restarts": 2, "fault": "no answer"}}
    answers["/v1/status"] = http(200, {"health": body, "settings": {}})
    done = run("status")
    assert "a/b@0123456789ab float32, 384 dimensions, mean" in done.stdout
    assert "STAND-IN" in done.stdout
    assert "postgres      unresponsive, pid 1, 2 restarts, no answer" in done.stdout


def test_a_refusal_is_told_as_it_is(answers: dict[str, bytes], run: Run) -> None:
    answers["/v1/status"] = http(403, {"title": "Administration off", "detail": "set a token", "status": 403})
    done = run("status")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "Administration off: set a token\n")


def test_without_a_sidecar_every_command_says_so(run: Run) -> None:
    for command in ("status", "smoke"):
        done = run(command)
        assert (done.returncode, done.stdout) == (3, "")
        assert "no sidecar answers at" in done.stderr


# smoke ---------------------------------------------------------------------------------------------------------


def test_smoke_against_a_gateway_that_is_not_there_is_not_reachable(run: Run) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = run("smoke", "--url", url, "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert report["passed"] is False
    assert "found nobody" in report["fault"]


def test_the_version(run: Run) -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("hindsight-sidecar ")
