"""Takes up connections one after the other, so that each is heard before another may take its place."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from sidecar import log
from sidecar.connection import Connection, make_room

_OUT_OF_DESCRIPTORS = 0.05  # seconds until it is tried again


class Acceptor:
    """Accepts the connections of one listening socket, in place of asyncio's own server.

    asyncio takes up all that wait at once, however many may be open, and where descriptors run out it comes back after a
    second. Here the kernel keeps what there is no room for yet.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], Connection]) -> None:
        """Begin to accept; `protocol` makes what a connection is handed to."""
        listener.settimeout(0)
        self._listener = listener
        self._protocol = protocol
        self._log = log.get("sidecar")
        self._accepting = asyncio.create_task(self._run())

    def close(self) -> None:
        """Accept no more. Its socket may be closed at once."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing is taken up any more."""
        await asyncio.wait({self._accepting})

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        told = False
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except ConnectionError:
                continue  # a client that left before it was taken up
            except OSError as error:
                if not told:
                    self._log.error("no connection can be accepted", error=str(error))
                told = True
                await asyncio.sleep(_OUT_OF_DESCRIPTORS)
                continue
            told = False
            try:
                await self._take(client)
            except Exception:  # noqa: BLE001 - it is the matter of one client, and the others are to be served
                self._log.exception("a connection met an unexpected fault")

    async def _take(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(client.close)
            protocol = self._protocol()
            await make_room(protocol)
            with contextlib.suppress(ConnectionError):  # one that left meanwhile
                await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, client)
                unless_taken.pop_all()
