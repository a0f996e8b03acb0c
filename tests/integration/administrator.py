"""Calls the administration endpoints over the control socket, and waits for operations."""

import http.client
import json
import socket
from typing import Any

from harness import Answer, RunningSidecar, wait_for


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def ask(sidecar: RunningSidecar, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Make one request; a body of bytes is sent as it is, another one as JSON."""
    connection = _Connection(str(sidecar.run_dir / "control.sock"))
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    try:
        connection.request(method, path, data, headers | ({} if data is body else {"content-type": "application/json"}))
        return Answer(connection.getresponse())
    finally:
        connection.close()


def finished(sidecar: RunningSidecar, begun: Answer, within: float = 180) -> dict[str, Any]:
    """Wait for the end of an operation that was just begun, and return it."""
    assert begun.status == 202, begun.body
    identifier = begun.json()["id"]

    def ended() -> dict[str, Any] | None:
        operation: dict[str, Any] = ask(sidecar, "GET", f"/v1/operations/{identifier}").json()
        return operation if operation["outcome"] != "running" else None

    return wait_for(ended, within, f"the end of {identifier}", every=0.2)


def archive_of(sidecar: RunningSidecar) -> bytes:
    """Dump what a sidecar serves, and return the archive."""
    dumped = finished(sidecar, ask(sidecar, "POST", "/v1/dumps"))
    assert dumped["outcome"] == "done", dumped
    answer = ask(sidecar, "GET", f"/v1/dumps/{dumped['report']['dump']['id']}")
    assert answer.status == 200
    return answer.body
