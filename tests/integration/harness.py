"""Runs the real sidecar in a directory of its own, and waits for conditions with deadlines."""

import contextlib
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import made

from sidecar import processes

PROGRAM = Path(sys.prefix) / "bin" / "hindsight-sidecar"
_AT_A_TIME = 30  # memories in one call
READY_WITHIN = 120.0  # seconds; some 12 on an idle machine with two cores
T = TypeVar("T")


def wait_for(condition: Callable[[], T], within: float, what: str, every: float = 0.05) -> T:
    """Return the first true value of a condition, or fail after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} was not so within {within:g} s (last seen: {value!r})")
        time.sleep(every)


class Ports:
    """Ports that nobody listens on. Processes that share them out never have the same one."""

    def __init__(self) -> None:
        self._own, self._among = 0, 1

    def share(self, own: int, among: int) -> None:
        """Take from now on those of one of so many processes alone."""
        self._own, self._among = own, among

    def free(self, count: int) -> list[int]:
        """Return some."""
        found: list[int] = []
        with contextlib.ExitStack() as stack:
            while len(found) < count:
                one = stack.enter_context(socket.socket())
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
                if port // 2 % self._among == self._own:  # the kernel may prefer the odd ones, or the even
                    found.append(port)
        return found


PORTS = Ports()
free_ports = PORTS.free


@contextlib.contextmanager
def reachable_directory() -> Iterator[Path]:
    """Have a short-named directory that the user whom root becomes can enter; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="hs-", dir="/var/tmp"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Answer:
    """An HTTP answer: status, headers, body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)


def call(
    port: int,
    path: str,
    method: str = "GET",
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Answer:
    """Make one HTTP request to a port of this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    sent = {"content-type": "application/json", **(headers or {})} if body is not None else dict(headers or {})
    try:
        data = json.dumps(body) if body is not None and not isinstance(body, bytes | str) else body
        connection.request(method, path, data, sent)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def events_in(log: str) -> Iterator[dict[str, Any]]:
    """Return the events that stand in a log.

    What is no event is left out: what a process wrote there by itself, and half a line, which is what a log ends with
    while it is written, and what SIGKILL leaves of a line that crosses a page of the file.
    """
    for line in log.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                yield event


class RunningSidecar:
    """A sidecar with its volume, run directory and ports; started and stopped as often as a test likes."""

    def __init__(self, home: Path, api_venv: Path, model_dir: Path, flavor: str = "onnx", **settings: str) -> None:
        self.home = home
        self.volume = home / "volume"
        self.pgdata = self.volume / "pgdata"
        self.run_dir = home / "run"
        self.log_path = home / "log"
        self.port, self.control_port, self.api_port = free_ports(3)
        self.process: subprocess.Popen[bytes] | None = None
        self.settings = {
            "PGDATA": str(self.pgdata),
            "HINDSIGHT_SIDECAR_RUN_DIR": str(self.run_dir),
            "HINDSIGHT_SIDECAR_LISTEN": f"127.0.0.1:{self.port}",
            "HINDSIGHT_SIDECAR_CONTROL_LISTEN": f"127.0.0.1:{self.control_port}",
            "HINDSIGHT_SIDECAR_API_LISTEN": f"127.0.0.1:{self.api_port}",
            "HINDSIGHT_SIDECAR_API_VENV": str(api_venv),
            "HINDSIGHT_SIDECAR_MODEL_DIR": str(model_dir),
            "HINDSIGHT_SIDECAR_FLAVOR": flavor,
            "HINDSIGHT_SIDECAR_EPHEMERAL": "true",  # the tests' directory may be on a tmpfs
            "HINDSIGHT_SIDECAR_LOG_FORMAT": "json",
            **settings,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the sidecar and of its commands."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return {**kept, **self.settings}

    def start(self, wrapper: list[str] | None = None) -> "RunningSidecar":
        """Start it and return at once."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*(wrapper or []), str(PROGRAM), "serve"],
                env=self.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def start_ready(self, wrapper: list[str] | None = None) -> "RunningSidecar":
        """Start it and wait until it is ready."""
        return self.start(wrapper).wait_ready()

    def wait_ready(self, within: float = READY_WITHIN) -> "RunningSidecar":
        """Wait until the gateway's health is 200."""
        wait_for(self._ready_or_dead, within, f"ready; the log ends: {self.log_text()[-1500:]}")
        return self

    def _ready_or_dead(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the sidecar ended with {self.process.returncode}: {self.log_text()[-3000:]}")
        return self.health_status() == 200

    def health_status(self) -> int | None:
        """Return the gateway's health status, None where nobody answers."""
        try:
            return call(self.port, "/health", timeout=5).status
        except OSError:
            return None

    def health(self) -> dict[str, Any]:
        """Return the control API's health body, whatever its status."""
        body: dict[str, Any] = call(self.control_port, "/health", timeout=5).json()
        return body

    def wait_state(self, state: str, within: float = 30.0) -> dict[str, Any]:
        """Wait for a state such as `blocked(permissions)`; return the health body."""

        def seen() -> dict[str, Any] | None:
            try:
                body = self.health()
            except OSError:
                return None
            told = f"{body['state']}({body['subject']})" if body["subject"] else body["state"]
            return body if told == state else None

        return wait_for(seen, within, f"{state}; log: {self.log_text()[-1500:]}")

    def memory(self, path: str, method: str = "GET", body: Any = None, **options: Any) -> Answer:
        """Call the memory API through the gateway, below /v1/default."""
        return call(self.port, f"/v1/default{path}", method, body, **options)

    def tenant_key(self) -> str:
        """Return the key that the hindsight-api that runs asks for at its own address, as its environment has it."""
        environment = Path(f"/proc/{self.pid_of('hindsight-api')}/environ").read_bytes().split(b"\0")
        name = b"HINDSIGHT_API_TENANT_API_KEY="
        [key] = [entry.removeprefix(name).decode() for entry in environment if entry.startswith(name)]
        return key

    def retain(self, bank: str, texts: list[str]) -> None:
        """Store texts; each becomes one memory.

        A few at a time: with many in one call hindsight-api answers nobody for seconds where others use the machine.
        """
        for first in range(0, len(texts), _AT_A_TIME):
            items = [{"content": text} for text in texts[first : first + _AT_A_TIME]]
            answer = self.memory(f"/banks/{bank}/memories", "POST", {"items": items, "async": False}, timeout=120)
            assert answer.status == 200, answer.body

    def recall(self, bank: str, query: str) -> list[dict[str, Any]]:
        """Return what comes back for a query, best first."""
        answer = self.memory(f"/banks/{bank}/memories/recall", "POST", {"query": query, "budget": "low"})
        assert answer.status == 200, answer.body
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def command(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run one of the commands with the sidecar's own environment."""
        return subprocess.run(
            [str(PROGRAM), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **options,
        )

    def signal(self, number: signal.Signals) -> None:
        """Signal the sidecar itself."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait_end(self, within: float = 30.0) -> int:
        """Wait for its end and return its exit code."""
        assert self.process is not None
        return self.process.wait(within)

    def stop(self, within: float = 30.0) -> int:
        """Stop it with SIGTERM and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_end(within)

    def pid_of(self, component: str) -> int:
        """Return the pid of `postgres` or `hindsight-api`."""
        return int(self.health()["components"][component]["pid"])

    def postgres_pids(self) -> list[int]:
        """Return every live process that works in the data directory."""
        return processes.postgres_in(self.pgdata) if self.pgdata.is_dir() else []

    def events(self) -> list[dict[str, Any]]:
        """Return the log lines that are events."""
        return list(events_in(self.log_text()))

    def log_text(self) -> str:
        """Return the log so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def end(self) -> None:
        """End whatever still runs, and make sure that nothing is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        wait_for(lambda: not self.postgres_pids(), 20, "Postgres gone")


@contextlib.contextmanager
def running_sidecar(model_dir: Path, **settings: str) -> Iterator[RunningSidecar]:
    """Have a ready sidecar in a home of its own meanwhile."""
    with reachable_directory() as home:
        home.chmod(0o777)
        sidecar = RunningSidecar(home, made.api_venv(), model_dir, **settings)
        try:
            yield sidecar.start_ready()
        finally:
            sidecar.end()


def give_to_the_sidecar(path: Path) -> None:
    """Make a path belong to the user that the sidecar runs as."""
    if os.geteuid() == 0:
        shutil.chown(path, "hindsight", "hindsight")


@contextlib.contextmanager
def on_a_small_volume(sidecar: RunningSidecar, mebibytes: int) -> Iterator[RunningSidecar]:
    """Give a sidecar that was not started a tmpfs of a size as its volume, and end it before that goes; only root can."""
    sidecar.volume.mkdir()
    options = f"size={mebibytes}m,mode=700"
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(sidecar.volume)], check=True)
    try:
        give_to_the_sidecar(sidecar.volume)
        yield sidecar
        sidecar.end()
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(sidecar.volume)], check=True)


def store_as_they_are(sidecar: RunningSidecar, bank: str, texts: list[str]) -> None:
    """Store texts in a bank that makes nothing of its own of them, so that what it holds is known."""
    settings = {"retain_extraction_mode": "chunks", "enable_observations": False}
    assert sidecar.memory(f"/banks/{bank}", "PUT", settings).status == 200
    sidecar.retain(bank, texts)
