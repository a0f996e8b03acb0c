"""`make run` as a person types it: in a terminal, twice, with Ctrl-C in between."""

import os
import pty
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import made
import pytest
from agent import client_at
from harness import call, free_ports, reachable_directory, wait_for

ROOT = Path(__file__).parents[2]
CTRL_C = b"\x03"


class Terminal:
    """A program in a terminal of its own, and what it printed."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.output = b""
        self.status: int | None = None
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(ROOT)
            os.execvpe(argv[0], argv, env)  # noqa: S606
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # the other side is gone
                return
            self.output += data

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def close(self) -> None:
        if not self.ended():
            self.press(CTRL_C)
            wait_for(self.ended, 30, "the end after Ctrl-C")
        self._reader.join()
        os.close(self._terminal)


@pytest.fixture
def home() -> Iterator[Path]:
    """Have a home for `make run` that has the environments already, and neither a model nor a volume."""
    with reachable_directory() as directory:
        for name in ("envs", "stand-in"):
            (directory / name).symlink_to(made.stand_in().parent / name)
        yield directory


def test_twice_with_ctrl_c_in_between(home: Path) -> None:
    port, control, api = free_ports(3)
    env = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME") or name.startswith(("PIP_", "SSL_"))
    } | {
        "HINDSIGHT_SIDECAR_LISTEN": f"127.0.0.1:{port}",
        "HINDSIGHT_SIDECAR_CONTROL_LISTEN": f"127.0.0.1:{control}",
        "HINDSIGHT_SIDECAR_API_LISTEN": f"127.0.0.1:{api}",
        # Nobody listens there, so that no run depends on what this machine can reach.
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    with running(home, env, port) as first:
        told = first.text
        assert "The memory sidecar is ready." in told
        assert "STAND-IN" in told
        assert f"http://127.0.0.1:{port}" in told
        assert str(home / "volume/pgdata") in told
        body = call(control, "/health").json()
        assert body["stand_in"] is True
        with client_at(port) as client:
            client.retain(bank_id="first", content="The spare key is under the blue flower pot.")
        assert len(commands(told)) == 3, "three commands to try"
        wait_for(lambda: call(port, "/health").json()["memory_count"] == 1, 5, "the memory counted")
    began = time.monotonic()
    with running(home, env, port) as second:
        assert time.monotonic() - began < 40  # 10 on an idle machine
        assert "==> The embedding model" not in second.text, "baked once"
        with client_at(port) as client:
            found = client.recall(bank_id="first", query="Where can I find the key to the house?")
        assert [result.text for result in found.results] == ["The spare key is under the blue flower pot."]


def commands(text: str) -> list[str]:
    return re.findall(r"^  ((?:curl|env) .*)$", text, re.MULTILINE)


@contextmanager
def running(home: Path, env: dict[str, str], port: int) -> Iterator[Terminal]:
    """Run it until it is ready; press Ctrl-C in the end and see it stop cleanly."""
    terminal = Terminal(["make", "run", f"HOME_DIR={home}"], env)
    try:
        wait_for(lambda: terminal.ended() or "Try:" in terminal.text, 180, "ready")
        assert not terminal.ended(), terminal.text
        assert call(port, "/health").status == 200
        yield terminal
        terminal.press(CTRL_C)
        wait_for(terminal.ended, 30, "the end after Ctrl-C")
        assert "clean=True" in terminal.text
    finally:
        terminal.close()
