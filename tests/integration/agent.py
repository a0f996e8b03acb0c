"""What an agent has: the real hindsight-client."""

import asyncio
import contextlib
from collections.abc import Iterator

from hindsight_client import Hindsight


@contextlib.contextmanager
def client_at(port: int) -> Iterator[Hindsight]:
    """Have a client on an event loop of its own: it would make one and leave it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        with Hindsight(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        asyncio.set_event_loop(None)
        loop.close()
