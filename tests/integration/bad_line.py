"""A line to a server on loopback that cuts one request or its answer after so many bytes, or flips one bit of it."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_END = b"\r\n\r\n"  # of an HTTP head


@dataclass
class BadLine:
    """What happens to the requests that begin like `prefix`; everything else passes.

    Attributes:
        port: where it listens.
        prefix: such as `GET /v1/dumps/`.
        to_server: whether it happens to the request's body, and not to the answer's.
        after: bytes of the body after which it happens; None cuts before anything is passed.
        flips: one bit of the next byte, instead of cutting.
        bodies: how many bytes of such bodies came through.

    """

    port: int
    prefix: bytes = b"nothing"
    to_server: bool = False
    after: int | None = None
    flips: bool = False
    bodies: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # the end
            thread = threading.Thread(target=self._carry, args=(client, port))
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def _carry(self, client: socket.socket, port: int) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            head = _head(client)
            chosen = head.startswith(self.prefix)
            if chosen and self.after is None:
                return
            server.sendall(head)
            back = threading.Thread(target=self._pass, args=(server, client, chosen and not self.to_server))
            back.start()
            self._pass(client, server, chosen and self.to_server, body=True)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, chosen: bool, *, body: bool = False) -> None:  # noqa: FBT001
        """Pass bytes on until one side closes; of what is chosen only so many of the body."""
        passed = 0
        with contextlib.suppress(OSError):
            if chosen and not body:
                head = _head(source)
                target.sendall(head)
            while data := source.recv(65536):
                if chosen and self.after is not None and passed + len(data) > self.after:
                    at = self.after - passed
                    if at >= 0 and self.flips:
                        data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
                    elif not self.flips:
                        target.sendall(data[:at])
                        break
                target.sendall(data)
                passed += len(data)
        self.bodies += passed if chosen else 0
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _head(source: socket.socket) -> bytes:
    """Read the head of a message and not a byte more."""
    found = b""
    while not found.endswith(_END):
        byte = source.recv(1)
        if not byte:
            break
        found += byte
    return found


@contextlib.contextmanager
def bad_line(port: int) -> Iterator[BadLine]:
    """Have a line to a port of this machine, which is a good one at first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = BadLine(listener.getsockname()[1])
        thread = threading.Thread(target=line.serve, args=(listener, port))
        thread.start()
        try:
            yield line
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            line.join()
