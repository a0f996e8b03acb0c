"""What stands before `/v1/`, by raw ASGI: nothing of a body is read before it is known who sends it."""

import asyncio
import hmac
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sidecar.administrators import BODY_MAX, MAY, Administrators
from sidecar.attempts import BURST
from sidecar.control_listener import MARK, SOCKET, TCP
from sidecar.settings import Settings

TOKEN = "the-token"  # noqa: S105 - no secret
RIGHT, WRONG = [(b"authorization", b"Bearer the-token")], [(b"authorization", b"Bearer the-tokem")]


class Rig:
    """An application behind the judgement; it reads whole bodies.

    Attributes:
        read: bytes of bodies that were asked for.
        seen: scopes of the requests that came through.

    """

    def __init__(self, **settings: Any) -> None:
        self.read = 0
        self.seen: list[dict[str, Any]] = []
        self._administrators = Administrators(self._app, Settings(**settings))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope)
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(
        self,
        path: str,
        headers: Any = (),
        method: str = "POST",
        listener: str = TCP,
        pieces: Iterable[bytes] = (),
    ) -> tuple[int, dict[bytes, bytes], dict[str, Any]]:
        sent: list[Any] = []
        left = iter(pieces)

        async def receive() -> Any:
            piece = next(left, None)
            self.read += len(piece or b"")
            return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": list(headers), MARK: listener}
        asyncio.run(self._administrators(scope, receive, send))
        body = sent[1]["body"]
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(body) if body else {}


def endless() -> Iterator[bytes]:
    while True:
        yield bytes(65536)


@pytest.mark.parametrize("path", ["/v1/dumps", "/v1/restores", "/v1/nothing", "/v1/"])
@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
def test_nothing_of_a_body_is_read_of_whoever_may_not(path: str, method: str) -> None:
    for settings, headers, status in (({}, RIGHT, 403), ({"token": TOKEN}, WRONG, 401), ({"token": TOKEN}, [], 401)):
        rig = Rig(**settings)
        assert rig.ask(path, headers, method, pieces=endless())[0] == status
        assert (rig.read, rig.seen) == (0, [])


@pytest.mark.parametrize(
    ("listener", "headers", "settings"),
    [(SOCKET, [], {}), (SOCKET, WRONG, {"token": TOKEN}), (TCP, RIGHT, {"token": TOKEN})],
)
def test_administrators_get_through_and_are_marked(listener: str, headers: Any, settings: Any) -> None:
    rig = Rig(**settings)
    assert rig.ask("/v1/dumps", headers, listener=listener)[0] == 204
    assert rig.seen[0][MAY] is True


@pytest.mark.parametrize("path", ["/health", "/v1", "/V1/dumps", "//v1/dumps", "/x/../v1/dumps", "/nothing"])
def test_nothing_else_is_marked(path: str) -> None:
    rig = Rig(token=TOKEN)
    assert rig.ask(path, RIGHT, listener=SOCKET)[0] == 204
    assert MAY not in rig.seen[0]


def test_the_token_is_compared_in_constant_time_and_in_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: not compared.append(both))
    assert Rig(token=TOKEN).ask("/v1/dumps", WRONG)[0] == 204
    assert compared == [(WRONG[0][1], RIGHT[0][1])]


def test_too_many_wrong_tokens_are_told_so_and_the_right_one_still_passes() -> None:
    rig = Rig(token=TOKEN)
    answers = [rig.ask("/v1/status", WRONG, "GET") for _ in range(BURST + 50)]
    assert [status for status, _, _ in answers[:BURST]] == [401] * BURST
    status, headers, body = answers[-1]
    assert (status, headers[b"retry-after"], headers[b"content-type"]) == (429, b"1", b"application/problem+json")
    assert TOKEN not in json.dumps(body)
    assert rig.ask("/v1/status", RIGHT, "GET")[0] == 204
    assert rig.ask("/v1/status", [], "GET")[0] == 401, "no token is no guess"
    assert rig.ask("/health", WRONG, "GET")[0] == 204


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    rig = Rig()
    length = [(b"content-length", str(BODY_MAX + 1).encode())]
    status, _, body = rig.ask("/v1/dumps", length, listener=SOCKET, pieces=endless())
    assert (status, rig.read, rig.seen) == (413, 0, [])
    assert str(BODY_MAX) in body["detail"]


def test_a_body_that_says_nothing_is_read_no_further_than_that() -> None:
    rig = Rig()
    with pytest.raises(Exception, match="413"):
        rig.ask("/v1/dumps", listener=SOCKET, pieces=endless())
    assert rig.read == 2 * 65536


def test_a_body_as_large_as_may_be_is_read_whole() -> None:
    rig = Rig()
    assert rig.ask("/v1/dumps", listener=SOCKET, pieces=iter([bytes(BODY_MAX)]))[0] == 204


def test_an_upload_has_no_such_bound() -> None:
    rig = Rig()
    pieces = iter([bytes(BODY_MAX)] * 10)
    headers = [(b"content-length", str(10 * BODY_MAX).encode())]
    assert rig.ask("/v1/restores", headers, "PUT", SOCKET, pieces)[0] == 204
    assert rig.read == 10 * BODY_MAX
