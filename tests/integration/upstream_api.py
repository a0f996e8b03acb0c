"""hindsight-api run as upstream runs it, without any sidecar: on a Postgres of the operator's, or on its own pg0."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import made
from harness import RunningSidecar, call, free_ports, wait_for
from postgres_server import UNPRIVILEGED


def environment_of(sidecar: RunningSidecar) -> dict[str, str]:
    """Return what a running sidecar gives its hindsight-api: the model, and that no network is asked; without its key."""
    content = Path(f"/proc/{sidecar.pid_of('hindsight-api')}/environ").read_bytes().decode()
    found = dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)
    return {name: value for name, value in found.items() if not name.startswith("HINDSIGHT_API_TENANT_")}


@contextlib.contextmanager
def running_api(
    sidecar: RunningSidecar, home: Path, changes: Mapping[str, str], version: str = "1.1.0"
) -> Iterator[int]:
    """Run one with a sidecar's environment and some changes; have its port once it is healthy."""
    [port] = free_ports(1)
    environment = {
        **environment_of(sidecar),
        "HOME": str(home),
        "HINDSIGHT_API_HOST": "127.0.0.1",
        "HINDSIGHT_API_PORT": str(port),
        "HINDSIGHT_API_RUN_MIGRATIONS_ON_STARTUP": "true",
        **changes,
    }
    argv = [
        "/usr/bin/setpriv",
        *UNPRIVILEGED,
        "--pdeathsig=KILL",
        "--",
        str(made.api_venv(version) / "bin" / "hindsight-api"),
    ]
    log_path = home / "hindsight-api.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:

        def healthy() -> bool:
            assert process.poll() is None, log_path.read_text(errors="replace")[-3000:]
            try:
                return call(port, "/health", timeout=5).status == 200
            except OSError:
                return False

        wait_for(healthy, 120, "upstream's hindsight-api healthy")
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)


def retain(port: int, bank: str, texts: list[str]) -> None:
    """Store texts; each becomes one memory."""
    items = {"items": [{"content": text} for text in texts], "async": False}
    answer = call(port, f"/v1/default/banks/{bank}/memories", "POST", items, timeout=120)
    assert answer.status == 200, answer.body
