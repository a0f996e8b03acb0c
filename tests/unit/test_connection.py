"""Connections as raw bytes, against a server of ours on loopback."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import structlog

from sidecar import accepting, connection
from sidecar.connection import HEADERS_MAX, connections_allowed
from sidecar.listeners import Server, bind_tcp
from sidecar.settings import Address

T = TypeVar("T")
WITHIN = 20.0  # seconds, for what takes none
REQUEST = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"
BIG = 16 << 20  # bytes, more than the kernel keeps for a client
PROBE = "/probe"
UPLOAD = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WITHIN):
            return await work

    return asyncio.run(bounded())


class Rig:
    """A server whose application waits for leave to answer.

    Attributes:
        seen: requests that it got.
        answers: set while it may answer.
        gone: how many clients went before that.
        refused: how many it did not get, as there was no room.

    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.server: Server | None = None
        self.seen = 0
        self.gone = 0
        self.refused = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._open: list[asyncio.StreamWriter] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen += 1
        if scope["path"] == "/read":
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
        if scope["path"] == "/fault":
            raise ValueError("the words of a fault")
        if scope["path"] == "/big":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(BIG).encode())]}
            )
            await send({"type": "http.response.body", "body": bytes(BIG)})
            return
        if scope["path"] != PROBE:
            await self.answers.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    def refuse(self, _: Any) -> None:
        self.refused += 1

    @property
    def connections(self) -> int:
        """How many there are."""
        assert self.server is not None
        return len(self.server._server.server_state.connections)

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._open.append(writer)
        writer.write(data)
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - numbers, no events
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        for writer in self._open:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def rig(connections: int | None = None) -> AsyncIterator[Rig]:
    listener = bind_tcp("HINDSIGHT_SIDECAR_LISTEN", Address("127.0.0.1", 0))
    made = Rig(listener.getsockname()[1])
    server = made.server = Server(made.app, listener, probes={PROBE}, refused=made.refuse, connections=connections)
    try:
        await server.listening()
        yield made
    finally:
        made.answers.set()
        await made.end()
        await server.end(1.0)
        listener.close()


def parsed(raw: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    is_json = headers.get("content-type", "").endswith("json")
    return int(first.split()[1]), headers, json.loads(body) if is_json else body


# A client that closes its own direction ------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 3])
def test_a_client_that_closed_its_own_direction_gets_all_its_answers(requests: int) -> None:
    async def work() -> None:
        async with rig() as it:
            it.answers.clear()
            reader, writer = await it.connect(REQUEST * requests)
            writer.write_eof()
            await it.until(lambda: it.seen == 1)
            it.answers.set()
            raw = await reader.read()
            assert raw.count(b"HTTP/1.1 200 OK") == requests
            assert raw.endswith(b"ok")

    run(work())


def test_its_answer_has_to_come_in_time_as_one_that_is_gone_looks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ONE_WAY_TIME", 0.1)

    async def work() -> None:
        async with rig() as it:
            it.answers.clear()
            reader, writer = await it.connect(REQUEST)
            writer.write_eof()
            assert await reader.read() == b""

    run(work())


@pytest.mark.parametrize("half", [b"GET / HT", UPLOAD + b"abc"])
def test_half_a_request_and_then_the_end_is_no_request(half: bytes) -> None:
    async def work() -> None:
        async with rig() as it:
            reader, writer = await it.connect(half.replace(b"/x", b"/read"))
            writer.write_eof()
            assert await reader.read() == b""
            await it.until(lambda: it.gone == it.seen)

    run(work())


# What is no HTTP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx\x00: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: b\x00\r\n\r\n", 400),
        (b"GET /\x7f\x00 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"x" * 2 * HEADERS_MAX, 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * HEADERS_MAX, 431),
    ],
)
def test_what_is_no_http_is_answered_with_a_problem(raw: bytes, status: int) -> None:
    async def work() -> bytes:
        async with rig() as it:
            reader, _ = await it.connect(raw)
            answer = await reader.read()
            assert it.seen == 0
            return answer

    found, headers, body = parsed(run(work()))
    assert found == status == body["status"]
    assert headers["content-type"] == "application/problem+json"
    assert headers["connection"] == "close"
    assert body["title"]
    assert body["detail"]


def test_a_fault_is_a_problem_and_the_connection_ends() -> None:
    async def work() -> bytes:
        async with rig() as it:
            reader, _ = await it.connect(REQUEST.replace(b"/x", b"/fault"))
            return await reader.read()

    found, headers, body = parsed(run(work()))
    assert (found, headers["content-type"]) == (500, "application/problem+json")
    assert "the words of a fault" not in json.dumps(body)
    assert "Traceback" not in json.dumps(body)


def test_a_body_that_stops_being_one_ends_the_connection_of_an_answer_under_way() -> None:
    async def work() -> None:
        async with rig() as it:
            chunked = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            reader, writer = await it.connect(chunked)
            assert b"200 OK" in await reader.readuntil(b"ok")
            writer.write(b"no length\r\n")
            assert await reader.read() == b""

    run(work())


# Slow senders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", REQUEST, REQUEST * 2])
def test_half_a_header_is_not_waited_for_longer_than_a_moment(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_TIME", 0.3)

    async def work() -> None:
        async with rig() as it:
            reader, writer = await it.connect(before)
            for _ in range(before.count(b"GET")):
                await reader.readuntil(b"ok")
            for byte in b"GET / HTTP/1.1\r\nx: " + b"y" * 1000:  # more than can come in the time
                if reader.at_eof() or reader.exception() is not None:  # it was closed while a byte came
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""

    run(work())


def test_a_connection_at_rest_between_two_requests_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_TIME", 0.1)

    async def work() -> None:
        async with rig() as it:
            reader, writer = await it.connect()
            for _ in range(3):
                writer.write(REQUEST[:10])
                await writer.drain()
                writer.write(REQUEST[10:])
                await reader.readuntil(b"ok")
                await asyncio.sleep(0.3)  # that long nothing may happen

    run(work())


def test_the_rest_of_a_body_that_was_answered_already_is_taken_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_TIME", 0.3)

    async def work() -> None:
        async with rig() as it:
            reader, writer = await it.connect(UPLOAD)
            await reader.readuntil(b"ok")
            writer.write(bytes(100) + REQUEST)  # a client that sends it all the same goes on
            await reader.readuntil(b"ok")
            writer.write(UPLOAD)
            await reader.readuntil(b"ok")
            assert await reader.read() == b""  # and one that never does is left

    run(work())


# Many of them --------------------------------------------------------------------------------------------------


def test_one_more_takes_the_place_of_the_one_that_was_silent_for_longest() -> None:
    async def work() -> None:
        async with rig(connections=3) as it:
            first, _ = await it.connect()
            await it.until(lambda: True)
            second, second_writer = await it.connect(REQUEST)
            await second.readuntil(b"ok")
            third, third_writer = await it.connect(REQUEST)
            await third.readuntil(b"ok")
            fourth, _ = await it.connect(REQUEST)
            await fourth.readuntil(b"ok")
            assert await first.read() == b""
            for reader, writer in ((second, second_writer), (third, third_writer)):
                writer.write(REQUEST)
                await reader.readuntil(b"ok")

    run(work())


def test_a_call_under_way_keeps_its_place_and_what_finds_none_is_told_so() -> None:
    async def work() -> None:
        async with rig(connections=2) as it:
            it.answers.clear()
            busy = [await it.connect(REQUEST) for _ in range(2)]
            await it.until(lambda: it.seen == 2)
            reader, _ = await it.connect(REQUEST)
            found, headers, body = parsed(await reader.read())
            assert (found, headers["retry-after"], body["title"]) == (503, "2", "Too many connections")
            it.answers.set()
            for one, _ in busy:
                await one.readuntil(b"ok")
            reader, _ = await it.connect(REQUEST)
            await reader.readuntil(b"ok")

    run(work())


def test_where_no_place_is_left_probes_are_answered_and_the_others_counted() -> None:
    async def work() -> None:
        async with rig(connections=2) as it:
            it.answers.clear()
            for _ in range(2):
                await it.connect(REQUEST)
            await it.until(lambda: it.seen == 2)
            for method, status in ((b"GET", 200), (b"HEAD", 200), (b"POST", 503)):
                reader, _ = await it.connect(REQUEST.replace(b"/x", PROBE.encode()).replace(b"GET", method))
                found, headers, _ = parsed(await reader.read())
                assert (found, headers["connection"]) == (status, "close")
            assert (it.seen, it.refused) == (4, 1)
            reader, _ = await it.connect(REQUEST)
            assert parsed(await reader.read())[0] == 503
            assert it.refused == 2
            assert it.server is not None

    with structlog.testing.capture_logs() as lines:
        run(work())
    assert [line["event"] for line in lines] == ["every connection of an address is in use"]
    assert lines[0]["address"].startswith("127.0.0.1:")


# Who does not take its answer ----------------------------------------------------------------------------------


@contextlib.contextmanager
def taking_nothing(port: int, requests: int) -> Iterator[None]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(REQUEST.replace(b"/x", b"/big") * requests)
        yield


@pytest.mark.parametrize("requests", [1, 3])
def test_who_takes_nothing_of_its_answer_is_left_after_a_time(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_TIME", 0.5)

    async def work() -> None:
        async with rig() as it:
            with taking_nothing(it.port, requests):
                await it.until(lambda: it.seen > 0)
                await it.until(lambda: it.connections == 0)

    run(work())


def test_who_takes_nothing_of_its_answer_makes_room_at_once_with_its_descriptor() -> None:
    async def work() -> None:
        async with rig(connections=1) as it:
            with taking_nothing(it.port, 1):
                await it.until(lambda: it.seen > 0)
                reader, _ = await it.connect(REQUEST)
                await reader.readuntil(b"ok")
                await it.until(lambda: it.connections == 1)

    run(work())


def test_one_at_rest_makes_room_before_one_whose_answer_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOMENT", 0.0)

    async def work() -> None:
        async with rig(connections=2) as it:
            slow, _ = await it.connect(REQUEST.replace(b"/x", b"/big"))
            await slow.readuntil(b"\r\n\r\n")
            rests, _ = await it.connect(REQUEST)
            await rests.readuntil(b"ok")
            reader, _ = await it.connect(REQUEST)
            await reader.readuntil(b"ok")
            assert await rests.read() == b""
            assert len(await slow.readexactly(BIG)) == BIG

    run(work())


def test_a_slow_reader_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_TIME", 3.0)

    async def work() -> None:
        async with rig() as it:
            reader, writer = await it.connect(REQUEST.replace(b"/x", b"/big"))
            await reader.readuntil(b"\r\n\r\n")
            left = BIG
            while left:
                left -= len(await reader.readexactly(min(left, 1 << 20)))
                await asyncio.sleep(0.25)  # longer than the bound in all
            writer.write(REQUEST)
            await reader.readuntil(b"ok")

    run(work())


def test_many_that_find_no_place_are_told_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOMENT", 3.0)

    async def work() -> None:
        async with rig(connections=2) as it:
            it.answers.clear()
            for _ in range(2):
                await it.connect(REQUEST)
            await it.until(lambda: it.seen == 2)
            began = time.monotonic()
            for reader, _ in [await it.connect(REQUEST) for _ in range(10)]:
                assert parsed(await reader.read())[0] == 503
            assert time.monotonic() - began < 3.0, "one had to wait until the moment of another was over"

    run(work())


def test_any_number_of_silent_ones_and_slow_senders_keeps_nobody_out() -> None:
    async def work() -> None:
        async with rig(connections=8) as it:
            for number in range(200):
                await it.connect([b"", b"GET / HT", UPLOAD.replace(b"/x", b"/read")][number % 3])
            reader, _ = await it.connect(REQUEST)
            await reader.readuntil(b"ok")

    run(work())


def test_who_comes_in_a_burst_is_heard_before_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOMENT", 0.5)

    async def work() -> None:
        async with rig(connections=8) as it:
            with contextlib.ExitStack() as stack:
                # None is taken up meanwhile, as this has the event loop.
                made = [socket.create_connection(("127.0.0.1", it.port)) for _ in range(20)]
                slow = [stack.enter_context(one) for one in made][3]
                await it.until(lambda: it.connections == 8)
                slow.sendall(REQUEST)
                slow.settimeout(0)
                assert b"ok" in await asyncio.get_running_loop().sock_recv(slow, 1000)
                assert it.connections == 8
                reader, _ = await it.connect(REQUEST)
                await reader.readuntil(b"ok")

    run(work())


def test_without_a_descriptor_a_connection_waits_until_there_is_one() -> None:
    async def work() -> None:
        with structlog.testing.capture_logs() as lines:
            async with rig() as it:
                await starve(it, lines)
        assert [line["event"] for line in lines] == ["no connection can be accepted"]

    async def starve(it: Rig, lines: list[Any]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.create_connection(("127.0.0.1", it.port)) as client:
            client.sendall(REQUEST)
            client.settimeout(0)
            os.close(next_one := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
            try:
                await it.until(lambda: bool(lines))
                for _ in range(10):  # in which it is tried again
                    await asyncio.sleep(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert b"ok" in await asyncio.get_running_loop().sock_recv(client, 1000)

    run(work())


def test_a_defect_in_accepting_is_told_and_the_next_client_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([ValueError("a defect")])

    async def fails_once(newcomer: connection.Connection) -> None:
        for error in calls:
            raise error
        await connection.make_room(newcomer)

    monkeypatch.setattr(accepting, "make_room", fails_once)

    async def work() -> None:
        async with rig() as it:
            reader, _ = await it.connect()
            assert await reader.read() == b""
            reader, _ = await it.connect(REQUEST)
            await reader.readuntil(b"ok")

    with structlog.testing.capture_logs() as lines:
        run(work())
    assert [line["event"] for line in lines] == ["a connection met an unexpected fault"]


@pytest.mark.parametrize(
    ("descriptors", "allowed"),
    [(64, 8), (256, 32), (1024, 185), (65536, 1024), (resource.RLIM_INFINITY, 1024)],
)
def test_all_listeners_together_leave_descriptors(
    descriptors: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert connections_allowed() == allowed
