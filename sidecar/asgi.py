"""The parts of ASGI that gateway and control app share, with its own names."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


async def send_json(send: Send, status: int, body: Any, headers: Headers | None = None, *, head: bool = False) -> None:  # noqa: ANN401 - JSON
    """Answer with a JSON body, or for a HEAD request with its headers alone."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()  # as hindsight-api writes its own
    kind = b"application/problem+json" if isinstance(body, dict) and "title" in body else b"application/json"
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", kind),
                (b"content-length", str(len(content)).encode()),
                (b"cache-control", b"no-store"),
                *(headers or []),
            ],
        }
    )
    await send({"type": "http.response.body", "body": b"" if head else content})


def problem(status: int, title: str, detail: str, **members: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Return an RFC 9457 problem: what was seen, what was expected, what to do."""
    return {"status": status, "title": title, "detail": detail, **members}
