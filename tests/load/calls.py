"""One memory call after another over a connection that is kept, as agents' clients keep theirs."""

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from harness import RunningSidecar

PATIENCE = 60.0  # seconds for one call
_BUSY = frozenset({429, 503})
_SHOWN = 200  # characters of an answer that should not have been


@dataclass(frozen=True)
class Address:
    """Where the memory API is.

    Attributes:
        port: on 127.0.0.1.
        headers: sent with every call.

    """

    port: int
    headers: Mapping[str, str] = field(default_factory=dict)


def gateway(sidecar: RunningSidecar) -> Address:
    """Return where agents call it."""
    return Address(sidecar.port)


def direct(sidecar: RunningSidecar) -> Address:
    """Return where the same hindsight-api answers without the gateway, with its own key."""
    return Address(sidecar.api_port, {"Authorization": f"Bearer {sidecar.tenant_key()}"})


@dataclass(frozen=True)
class Answered:
    """How a call ended.

    Attributes:
        status: 0 where no whole answer came.
        began, seconds: monotonic seconds when it was sent, and until the whole answer was there.
        body: the JSON of a 200, else what was said.
        retry_after: seconds, None where the answer has none.

    """

    status: int
    began: float
    seconds: float
    body: Any
    retry_after: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it was refused for now, as it may be."""
        return self.status in _BUSY and self.retry_after is not None


class Caller:
    """Calls one address over one connection, made anew after whatever went wrong."""

    def __init__(self, address: Address) -> None:
        self._headers = {"content-type": "application/json", **address.headers}
        self._connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._connection.close()

    def prepare(self, bank: str) -> Answered:
        """Make a bank that makes nothing of its own of what it holds."""
        as_they_are = {"retain_extraction_mode": "chunks", "enable_observations": False}
        return self._call("PUT", f"/v1/default/banks/{bank}", as_they_are)

    def retain(self, bank: str, text: str) -> Answered:
        """Store one text, and wait for it to be stored."""
        items = {"items": [{"content": text}], "async": False}
        return self._call("POST", f"/v1/default/banks/{bank}/memories", items)

    def recall(self, bank: str, query: str) -> Answered:
        """Ask for what is known of something."""
        return self._call("POST", f"/v1/default/banks/{bank}/memories/recall", {"query": query, "budget": "low"})

    def list(self, bank: str, limit: int, offset: int) -> Answered:
        """Ask for a page of all memories of a bank."""
        return self._call("GET", f"/v1/default/banks/{bank}/memories/list?limit={limit}&offset={offset}")

    def _call(self, method: str, path: str, body: Any = None) -> Answered:
        sent = json.dumps(body) if body is not None else None
        began = time.monotonic()
        try:
            self._connection.request(method, path, sent, self._headers)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            return Answered(0, began, time.monotonic() - began, f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - began
        told = json.loads(content) if response.status == 200 else content[:_SHOWN].decode(errors="replace")
        after = response.headers.get("retry-after")
        return Answered(response.status, began, seconds, told, float(after) if after is not None else None)
