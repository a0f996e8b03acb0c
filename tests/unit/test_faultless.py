import asyncio
from typing import Any

import pytest
import structlog

from sidecar.faultless import Faultless

SECRET = "what the fault says"  # noqa: S105 - no secret


def served(*sent: dict[str, Any], method: str = "GET") -> list[dict[str, Any]]:
    """Serve one request by an application that sends this and then fails; return what the client gets."""
    got: list[dict[str, Any]] = []

    async def app(_: Any, __: Any, send: Any) -> None:
        for message in sent:
            await send(message)
        raise ValueError(SECRET)

    async def send(message: Any) -> None:
        got.append(message)

    scope = {"type": "http", "method": method, "path": "/x\n"}
    asyncio.run(Faultless(app)(scope, None, send))  # type: ignore[arg-type]
    return got


def test_a_fault_is_a_problem_without_its_words_and_a_log_line_with_its_trace() -> None:
    with structlog.testing.capture_logs() as lines:
        start, body = served()
    assert start["status"] == 500
    assert (b"content-type", b"application/problem+json") in start["headers"]
    assert SECRET.encode() not in body["body"]
    assert b"Traceback" not in body["body"]
    [line] = lines
    assert (line["event"], line["method"], line["path"]) == ("a request met an unexpected fault", "GET", "'/x\\n'")
    assert line["exc_info"] is True, "the log makes a trace of it"


def test_the_answer_to_head_has_no_body() -> None:
    assert served(method="HEAD")[1]["body"] == b""


def test_half_an_answer_is_the_servers_to_cut() -> None:
    with pytest.raises(ValueError, match=SECRET):
        served({"type": "http.response.start", "status": 200}, {"type": "http.response.body", "more_body": True})


def test_a_whole_answer_stays_as_it_is() -> None:
    sent = [{"type": "http.response.start", "status": 200}, {"type": "http.response.body", "body": b"x"}]
    assert served(*sent) == sent
