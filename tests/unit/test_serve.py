"""`serve` as a process, by the user it is made for: settings, exit codes, and what it says while it is blocked."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import serve
from sidecar.probe import SocketConnection

SOURCE = Path(sys.modules["sidecar"].__path__[0]).parent
MAIN = "from sidecar.cli import main; main()"
# The volume hangs as a disk does that holds its caller in the kernel: no handler of a signal gets to run there.
HANGING = """
import contextlib, ctypes, os
from pathlib import Path
from sidecar import serve

def hang(seen):
    with contextlib.suppress(OSError):
        seen.touch()
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)

def hanging(look):
    volume = Path(os.environ["PGDATA"]).parent
    def asked(path, *words, **options):
        if isinstance(path, str | Path) and Path(path).is_relative_to(volume):
            hang(volume.parent / "looked")
        return look(path, *words, **options)
    return asked

os.stat, os.statvfs = hanging(os.stat), hanging(os.statvfs)
serve._OWNER_PATIENCE = serve._VOLUME_PATIENCE = {patience}
if os.geteuid() != 0 and {as_root}:
    os.geteuid = lambda: 0
"""
AS_OTHER = ["setpriv", "--reuid", "hindsight", "--regid", "hindsight", "--clear-groups"] if os.geteuid() == 0 else []
WITHIN = 30.0  # seconds


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Sidecar:
    """One that has an environment of hindsight-api in name only; nothing that it could run is there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        site = home / "api/lib/python3.11/site-packages"
        (site / "hindsight_api_slim-1.1.0.dist-info").mkdir(parents=True)
        (site / "hindsight_api").mkdir()
        self.port, self.control_port, api_port = free_ports(3)
        self.environ = {
            "PATH": os.defpath,
            "PYTHONPATH": str(SOURCE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PGDATA": str(home / "volume/pgdata"),
            "HINDSIGHT_SIDECAR_RUN_DIR": str(home / "run"),
            "HINDSIGHT_SIDECAR_LISTEN": f"127.0.0.1:{self.port}",
            "HINDSIGHT_SIDECAR_CONTROL_LISTEN": f"127.0.0.1:{self.control_port}",
            "HINDSIGHT_SIDECAR_API_LISTEN": f"127.0.0.1:{api_port}",
            "HINDSIGHT_SIDECAR_API_VENV": str(home / "api"),
            "HINDSIGHT_SIDECAR_MODEL_DIR": str(home / "model"),
            "HINDSIGHT_SIDECAR_EPHEMERAL": "true",
        }
        self.process: subprocess.Popen[str] | None = None
        self.program = [*AS_OTHER, sys.executable, "-c", MAIN, "serve"]

    def start(self, **environ: str) -> None:
        self.process = subprocess.Popen(
            self.program,
            env={**self.environ, **environ}, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        """Wait for its end, asked for by a signal; return exit code, standard output and error."""
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WITHIN)
        return self.process.returncode, out, err

    def run(self, **environ: str) -> tuple[int, str, str]:
        self.start(**environ)
        return self.end()

    def health(self) -> dict[str, Any] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.control_port, timeout=5)
        try:
            connection.request("GET", "/health")
            body: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError:
            return None
        finally:
            connection.close()
        return body

    def wait_state(self, state: str, subject: str | None) -> dict[str, Any]:
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.end()
            body = self.health()
            if body is not None and (body["state"], body["subject"]) == (state, subject):
                return body
            time.sleep(0.05)  # between two looks; the condition is what is waited for
        raise AssertionError(f"{state}({subject}) was not reached: {self.health()}")

    def stop_hard(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=WITHIN)


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    home = Path(tempfile.mkdtemp(prefix="hs-", dir="/var/tmp"))
    home.chmod(0o777)
    made = Sidecar(home)
    try:
        yield made
    finally:
        made.stop_hard()
        if (home / "run/empty").exists():
            (home / "run/empty").chmod(0o700)  # hindsight-api's working directory is read-only
        shutil.rmtree(home)


# Settings ------------------------------------------------------------------------------------------------------


def test_every_faulty_setting_is_a_line_on_standard_error(sidecar: Sidecar) -> None:
    code, out, err = sidecar.run(
        HINDSIGHT_SIDECAR_LISTN="x", HINDSIGHT_SIDECAR_FLAVOR="cuda", HINDSIGHT_SIDECAR_CONTROL_LISTEN="0.0.0.0:1",
        HINDSIGHT_DATABASE_URL="postgresql://x",
    )  # fmt: skip
    assert (code, out) == (serve.EXIT_SETTINGS, "")
    lines = err.splitlines()
    assert all(line.startswith("hindsight-sidecar: ") for line in lines)
    for said in (
        "did you mean HINDSIGHT_SIDECAR_LISTEN?",
        "HINDSIGHT_SIDECAR_FLAVOR",
        "CONTROL_LISTEN is",
        "HINDSIGHT_DATABASE_URL",
    ):
        assert len([line for line in lines if said in line]) == 1, said
    assert len(lines) == 4, "each once"
    assert not (sidecar.home / "run/control.sock").exists()


def test_a_run_directory_that_is_in_use_is_a_fault_of_the_settings(sidecar: Sidecar) -> None:
    sidecar.start()
    wait_for_socket(sidecar)
    second = subprocess.run(
        [*AS_OTHER, sys.executable, "-c", MAIN, "serve"],
        env=sidecar.environ, cwd="/", capture_output=True, text=True, timeout=WITHIN, check=False,
    )  # fmt: skip
    assert second.returncode == serve.EXIT_SETTINGS
    assert "another sidecar uses the run directory" in second.stderr


def wait_for_socket(sidecar: Sidecar) -> None:
    deadline = time.monotonic() + WITHIN
    while not (sidecar.home / "run/control.sock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # between two looks; the condition is what is waited for


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HINDSIGHT_SIDECAR_API_VENV": "/nonexistent"}, "HINDSIGHT_SIDECAR_API_VENV is /nonexistent"),
        ({"HINDSIGHT_SIDECAR_PG_BINDIR": "/nonexistent"}, "HINDSIGHT_SIDECAR_PG_BINDIR is /nonexistent"),
    ],
)
def test_what_the_settings_name_and_is_not_there_is_a_fault_of_the_settings(
    environ: dict[str, str], said: str, sidecar: Sidecar
) -> None:
    code, out, err = sidecar.run(**environ)
    assert code == serve.EXIT_SETTINGS
    assert said in err.splitlines()[-1]
    assert "Traceback" not in out + err


# Blocked -------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(sidecar: Sidecar) -> Sidecar:
    pgdata = sidecar.home / "volume/pgdata"
    pgdata.mkdir(parents=True)
    (pgdata / "base").write_text("")
    if os.geteuid() == 0:
        for path in (pgdata, pgdata.parent):
            shutil.chown(path, "hindsight", "hindsight")
    return sidecar


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_blocked_is_alive_and_says_why_and_ends_when_asked(number: signal.Signals, damaged: Sidecar) -> None:
    damaged.start()
    body = damaged.wait_state("blocked", "damaged-cluster")
    assert "no PG_VERSION" in body["detail"]
    for port in (damaged.port, damaged.control_port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503
        connection.close()
    connection = SocketConnection(damaged.home / "run/control.sock")
    if os.geteuid() in (0, (damaged.home / "run").stat().st_uid):
        connection.request("GET", "/v1/status")
        assert connection.getresponse().status == 200
    connection.close()
    assert (damaged.home / "run").stat().st_mode & 0o777 == 0o700
    code, out, err = damaged.end(number)
    assert (code, err) == (serve.EXIT_STOPPED, "")
    assert "stopping why=" + number.name in out
    assert [path.name for path in (damaged.home / "volume/pgdata").iterdir()] == ["base"]


def test_blocked_for_too_long_is_given_up_where_that_is_wanted(damaged: Sidecar) -> None:
    code, _, err = damaged.run(HINDSIGHT_SIDECAR_BLOCKED_EXIT_AFTER="0.5")
    assert code == serve.EXIT_GAVE_UP
    assert err.startswith("hindsight-sidecar: blocked(damaged-cluster) for too long: PGDATA ")


def test_what_was_wrong_is_looked_at_again(damaged: Sidecar) -> None:
    damaged.start(HINDSIGHT_SIDECAR_PG_BINDIR="/nonexistent")
    damaged.wait_state("blocked", "damaged-cluster")
    (damaged.home / "volume/pgdata/base").unlink()
    code, _, err = damaged.end()  # one step further it finds that there is no Postgres
    assert code == serve.EXIT_SETTINGS
    assert "HINDSIGHT_SIDECAR_PG_BINDIR" in err


# A volume that hangs, and root ---------------------------------------------------------------------------------


def hang(sidecar: Sidecar, *, patience: float, as_root: bool = True) -> None:
    """Have it started as root, or nearly so, on a volume that hangs."""
    main = HANGING.format(patience=patience, as_root=as_root) + MAIN
    sidecar.program = [sys.executable, "-c", main, "serve"]


def test_root_that_cannot_see_whom_to_become_says_so_and_ends(sidecar: Sidecar) -> None:
    hang(sidecar, patience=0.5)
    code, out, err = sidecar.run()
    assert (code, out) == (serve.EXIT_SETTINGS, "")
    (line,) = err.splitlines()
    assert line.startswith(f"hindsight-sidecar: PGDATA {sidecar.home}/volume/pgdata gave no answer within 0.5 s")
    assert "name the owner in HINDSIGHT_SIDECAR_RUN_AS" in line
    assert not (sidecar.home / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_root_that_waits_for_the_volume_ends_when_asked(number: signal.Signals, sidecar: Sidecar) -> None:
    hang(sidecar, patience=2 * WITHIN)
    sidecar.start()
    deadline = time.monotonic() + WITHIN
    while not (sidecar.home / "looked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # between two looks; the condition is what is waited for
    assert sidecar.end(number) == (serve.EXIT_STOPPED, "", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_that_is_told_whom_to_become_starts_and_tells_what_hangs(sidecar: Sidecar) -> None:
    hang(sidecar, patience=0.5, as_root=False)
    sidecar.start(HINDSIGHT_SIDECAR_RUN_AS="hindsight")
    sidecar.wait_state("starting", "volume")
    deadline = time.monotonic() + WITHIN
    while "gave no answer within 2 s" not in str(sidecar.wait_state("starting", "volume")["detail"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # between two looks; the condition is what is waited for
    code, _, err = sidecar.end(signal.SIGTERM)
    assert (code, err) == (serve.EXIT_STOPPED, "")


# The last sentence ---------------------------------------------------------------------------------------------


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(serve, "TERMINATION_LOG", tmp_path / "termination-log")
    return tmp_path / "termination-log"


def test_kubernetes_gets_the_sentence_too(termination_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    termination_log.touch()
    assert serve.leave(serve.EXIT_GAVE_UP, "blocked for too long") == serve.EXIT_GAVE_UP
    assert termination_log.read_text() == "blocked for too long\n"
    assert capsys.readouterr().err == "hindsight-sidecar: blocked for too long\n"


def test_nothing_is_made_where_there_is_no_kubernetes(
    termination_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.leave(serve.EXIT_FAULT, "x") == serve.EXIT_FAULT
    assert not termination_log.exists()
    assert "x" in capsys.readouterr().err


def test_a_good_end_says_nothing(termination_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    termination_log.touch()
    assert serve.leave(serve.EXIT_STOPPED, "x") == 0
    assert termination_log.read_text() == ""
    assert capsys.readouterr().err == ""


def test_a_sentence_that_cannot_be_written_changes_nothing(
    termination_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    termination_log.mkdir()
    assert serve.leave(serve.EXIT_HARD_STOP, "x") == serve.EXIT_HARD_STOP
    assert "cannot be written" in capsys.readouterr().err
