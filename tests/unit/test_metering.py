import asyncio
from collections import Counter
from typing import Any

import pytest

from sidecar.asgi import Message, Receive, Scope, Send
from sidecar.metering import Metered


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.answers: list[float] = []
        self.refusals: list[str] = []

    def count_refusal(self, reason: str) -> None:
        self.refusals.append(reason)

    def count_request(self, method: str, status: str) -> None:
        self.requests[method, status] += 1

    def time_answer(self, seconds: float) -> None:
        self.answers.append(seconds)


def answering(status: int, fault: type[BaseException] | None = None) -> Any:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        if status:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if fault is not None:
            raise fault
        if status:
            await send({"type": "http.response.body", "body": b""})

    return app


def call(
    app: Any, method: str = "POST", path: str = "/v1/default/banks", kind: str = "http"
) -> tuple[Metrics, list[Message]]:
    metrics, sent = Metrics(), []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path}
    asyncio.run(Metered(app, metrics)(scope, receive, send))  # type: ignore[arg-type]
    return metrics, sent


@pytest.mark.parametrize(("status", "told"), [(200, "2xx"), (204, "2xx"), (307, "3xx"), (404, "4xx"), (503, "5xx")])
def test_a_call_is_counted_by_the_class_of_its_answer_and_timed_where_it_was_good(status: int, told: str) -> None:
    metrics, sent = call(answering(status))
    assert metrics.requests == {("POST", told): 1}
    assert len(metrics.answers) == (told == "2xx")
    assert [message.get("body") for message in sent] == [None, b"half", b""]


def test_a_client_that_went_away_before_its_answer_is_counted() -> None:
    metrics, _ = call(answering(0))
    assert metrics.requests == {("POST", "none"): 1}


@pytest.mark.parametrize(("status", "told"), [(200, "cut"), (0, "none")])
@pytest.mark.parametrize("fault", [ConnectionError, asyncio.CancelledError])
def test_an_answer_that_breaks_off_is_counted_and_breaks_off(
    status: int, told: str, fault: type[BaseException]
) -> None:
    metrics = Metrics()

    async def send(_: Message) -> None:
        pass

    async def work() -> None:
        with pytest.raises(fault):
            await Metered(answering(status, fault), metrics)(
                {"type": "http", "method": "GET", "path": "/x"}, send, send
            )  # type: ignore[arg-type]

    asyncio.run(work())
    assert metrics.requests == {("GET", told): 1}


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live", "/version", "/v1/version"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_the_sidecar_answers_itself_is_no_memory_call(path: str, method: str) -> None:
    metrics, sent = call(answering(200), method, path)
    assert not metrics.requests
    assert sent
    metrics, _ = call(answering(405), "POST", path)  # which goes to hindsight-api
    assert metrics.requests == {("POST", "4xx"): 1}


def test_methods_that_a_client_makes_up_are_one() -> None:
    for method in ("BREW", "x" * 1000):
        metrics, _ = call(answering(405), method)
        assert metrics.requests == {("other", "4xx"): 1}


def test_what_is_no_request_goes_through() -> None:
    seen = []

    async def app(scope: Scope, _: Receive, __: Send) -> None:
        seen.append(scope["type"])

    assert not call(app, kind="websocket")[0].requests
    assert seen == ["websocket"]


def test_what_is_refused_for_want_of_a_connection_is_a_call_as_well() -> None:
    metrics = Metrics()
    Metered(answering(200), metrics).refuse({"type": "http", "method": "BREW", "path": "/x"})  # type: ignore[arg-type]
    assert metrics.requests == {("other", "5xx"): 1}
    assert metrics.refusals == ["too-many-connections"]
