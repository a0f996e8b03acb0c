"""`hindsight-sidecar health`: one question over the control socket, with the standard library alone.

A probe has a second on a busy node, so nothing heavy is imported here.
"""

import http.client
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from sidecar import paths
from sidecar.control_characters import written_out, written_out_lines

EXIT_READY = 0
EXIT_NOT_READY = 1
EXIT_NOT_REACHABLE = 3
_TIMEOUT = 5.0  # seconds


class SocketConnection(http.client.HTTPConnection):
    """HTTP over the control socket."""

    def __init__(self, path: Path, timeout: float = _TIMEOUT) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def control_socket() -> Path:
    """Return where the control socket is, by the environment of this command."""
    return Path(os.environ.get("HINDSIGHT_SIDECAR_RUN_DIR") or paths.RUN_DIR) / "control.sock"


def nobody(error: Exception) -> str:
    """Say that no sidecar answers, and what that may come from."""
    return (
        f"no sidecar answers at {control_socket()} ({error}); is it running, is this its user (or root), "
        "and does HINDSIGHT_SIDECAR_RUN_DIR name its run directory?"
    )


def ask(path: str) -> tuple[int, Any]:
    """Ask the running sidecar; return the status code and the JSON body.

    Raises:
        OSError: there is none to ask.

    """
    connection = SocketConnection(control_socket())
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"what answers there is no sidecar: {error}") from error
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Print the health and return the probe's exit code."""
    try:
        status, body = ask("/health")
    except OSError as error:
        sys.stderr.write(f"{nobody(error)}\n")
        return EXIT_NOT_REACHABLE
    if "--json" in arguments:
        sys.stdout.write(written_out_lines(json.dumps(body, indent=2, ensure_ascii=False)) + "\n")
    else:
        subject = f"({body['subject']})" if body.get("subject") else ""
        detail = f": {body['detail']}" if body.get("detail") else ""
        sys.stdout.write(f"{written_out(body['state'] + subject + detail)}\n")
    return EXIT_READY if status == http.client.OK else EXIT_NOT_READY
