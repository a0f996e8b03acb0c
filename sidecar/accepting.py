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

    def __init__(self, listener: socket.socket, protocol: Callable[[], Connection], ended: Callable[[], None]) -> None:
        """Begin to accept; `protocol` makes what a connection is handed to, `ended` is called once nothing is accepted any more."""
        listener.settimeout(0)
        self._listener = listener
        self._protocol = protocol
        self._log = log.get("sidecar")
        self._accepting = asyncio.create_task(self._run())
        self._accepting.add_done_callback(lambda _: ended())

    def close(self) -> None:
        """Accept no more. Its socket may be closed at once."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing is taken up any more. Raises what it ended with, where that was a defect."""
        await asyncio.wait({self._accepting})
        if not self._accepting.cancelled():
            self._accepting.result()

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
            await self._take(client)

    async def _take(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(client.close)
            protocol = self._protocol()
            await make_room(protocol)
            with contextlib.suppress(ConnectionError):  # one that left meanwhile
                await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, client)
                unless_taken.pop_all()
