"""The gateway between a raw client and a raw upstream, both on loopback: what one wrote is what the other read."""

import asyncio
import contextlib
import gzip
import hmac
import json
import math
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import structlog

from sidecar import gateway
from sidecar.attempts import BURST
from sidecar.gateway import Gateway
from sidecar.listeners import Server, bind_tcp
from sidecar.machine import Phase, State
from sidecar.settings import Address, Settings
from sidecar.status import STALE_AFTER, Status
from sidecar.tenant import Tenant

T = TypeVar("T")
WITHIN = 20.0  # seconds, for what takes none
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
KEY = "the-key"
READY = State(Phase.READY)
# Where the operator has hindsight-api ask for a key, every header is passed on.
THEIRS = {"HINDSIGHT_API_TENANT_EXTENSION": "theirs:Extension"}


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WITHIN):
            return await work

    return asyncio.run(bounded())


def noise(size: int) -> bytes:
    """Return bytes of every value, in an order that shows any displacement."""
    return b"".join(number.to_bytes(4, "little") for number in range(0, size * 1000, 4001))[:size].ljust(size, b"\0")


def free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


@dataclass
class Message:
    """A request or an answer as it was on the wire."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def status(self) -> int:
        return int(self.start.split()[1])

    @property
    def target(self) -> bytes:
        return self.start.split(b" ")[1]

    def json(self) -> Any:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> Message:
    start, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return Message(start, [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)])


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]


async def read_message(reader: asyncio.StreamReader, *, bodiless: bool = False) -> Message:
    """Read a message with its body; raises IncompleteReadError where it breaks off."""
    head = await read_head(reader)
    if bodiless:
        return head
    if head.all(b"transfer-encoding") == [b"chunked"]:
        while chunk := await read_chunk(reader):
            head.body += chunk
    elif lengths := head.all(b"content-length"):
        head.body = await reader.readexactly(int(lengths[0]))
    return head


Answer = Callable[[Message, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Rig:
    """A gateway that is ready, with the upstream behind it.

    Attributes:
        seen: the requests that got through.
        answer: what the upstream does with one; it closes the connection afterwards.

    """

    tenant: Tenant
    status: Status
    settings: Settings
    gateway: Gateway
    port: int
    seen: list[Message] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    answer: Answer | bytes = OK

    async def upstream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if callable(self.answer):
                await self.answer(await read_head(reader), reader, writer)
            else:
                self.seen.append(await read_message(reader))
                writer.write(self.answer)
                await writer.drain()
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def call(self, head: str | bytes, body: bytes = b"", host: str = "127.0.0.1:8888") -> Message:
        """Send a request: its first line and headers, joined by line feeds; return the answer."""
        raw = head.encode() if isinstance(head, str) else head
        lines = raw.split(b"\n")
        first = lines[0] if lines[0].endswith(b"HTTP/1.1") else lines[0] + b" HTTP/1.1"
        async with self.connection() as (reader, writer):
            writer.write(b"\r\n".join([first, *([b"host: " + host.encode()] if host else []), *lines[1:], b"", body]))
            return await read_message(reader, bodiless=raw.startswith(b"HEAD "))


@contextlib.asynccontextmanager
async def rig(*, with_upstream: bool = True, environ: Mapping[str, str] = THEIRS, **changes: Any) -> AsyncIterator[Rig]:
    upstream_address = free_address()
    listener = bind_tcp("HINDSIGHT_SIDECAR_LISTEN", Address("127.0.0.1", free_address().port))
    settings = Settings(api_listen=upstream_address, **changes)
    status = Status()
    refusals: Counter[str] = Counter()
    tenant = Tenant(settings, environ)
    served = Gateway(settings, status, tenant, lambda reason: refusals.update([reason]))
    made = Rig(tenant, status, settings, served, listener.getsockname()[1], refusals=refusals)
    status.update(
        state=READY,
        postgres={"state": "up"},
        upstream_version={"api_version": "1.1.0", "features": {"mcp": True}},
    )
    serving = Server(served, listener)
    server = await asyncio.start_server(made.upstream, *upstream_address) if with_upstream else None
    try:
        yield made
    finally:
        await serving.end(1.0)
        if server is not None:
            server.close()
            await server.wait_closed()
        listener.close()


# Requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_request_body_of_known_length_arrives_byte_for_byte(size: int) -> None:
    body = noise(size)

    async def work() -> None:
        async with rig() as it:
            await it.call(f"POST /v1/default/banks/b/memories\ncontent-length: {size}", body)
            (seen,) = it.seen
            assert seen.start == b"POST /v1/default/banks/b/memories HTTP/1.1"
            assert seen.body == body
            assert seen.all(b"content-length") == [str(size).encode()]
            assert not seen.all(b"transfer-encoding")

    run(work())


def test_a_chunked_request_body_arrives_byte_for_byte_and_chunked() -> None:
    async def work() -> None:
        async with rig() as it:
            chunked = b"5\r\nab\r\nc\r\n1;x=y\r\n\0\r\n0\r\n\r\n"
            await it.call("POST /x\ntransfer-encoding: chunked", chunked)
            (seen,) = it.seen
            assert seen.body == b"ab\r\nc\0"
            assert seen.all(b"transfer-encoding") == [b"chunked"]
            assert not seen.all(b"content-length")

    run(work())


def test_a_request_without_a_body_gets_none() -> None:
    async def work() -> None:
        async with rig() as it:
            await it.call("GET /x")
            await it.call("DELETE /x")
            for seen in it.seen:
                assert not seen.all(b"content-length")
                assert not seen.all(b"transfer-encoding")

    run(work())


def test_a_request_body_streams_through_before_it_is_complete() -> None:
    async def work() -> None:
        first = asyncio.get_running_loop().create_future()

        async def answer(_: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first.set_result(await reader.readexactly(3))
            assert await reader.readexactly(3) == b"def"
            writer.write(OK)

        async with rig() as it:
            it.answer = answer
            async with it.connection() as (reader, writer):
                writer.write(b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 6\r\n\r\nabc")
                assert await first == b"abc"
                writer.write(b"def")
                assert (await read_message(reader)).body == b"ok"

    run(work())


def test_a_client_that_waits_for_continue_gets_it() -> None:
    async def work() -> None:
        async with rig() as it, it.connection() as (reader, writer):
            writer.write(b"POST /x HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
            assert (await read_head(reader)).status == 100
            writer.write(b"abc")
            assert (await read_message(reader)).status == 200
            assert it.seen[0].body == b"abc"

    run(work())


def test_path_and_query_arrive_as_they_were_sent() -> None:
    targets = [
        "/v1/default/banks/a%2Fb/memories",
        "/v1/a%2fb/%C3%A9/%41",
        "/v1/banks/x?q=a%20b&q=a+b&empty=&flag",
        "/v1/../up/./here//twice",
        "/v1/%2e%2e/x",
        '/odd/|^{}[]<>"`\\',
        "/lone%/percent%zz?and=100%&x=%",
        "/x?a=b?c=d#",
        "/x;p=1,2?;&=;",
        "/x?q=" + "y" * 40_000,
    ]

    async def work() -> None:
        async with rig() as it:
            for target in targets:
                await it.call(f"GET {target}")
            assert [seen.target.decode() for seen in it.seen] == targets

    run(work())


def test_every_method_passes() -> None:
    methods = ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"]

    async def work() -> None:
        async with rig() as it:
            for method in methods:
                assert (await it.call(f"{method} /x")).body == b"ok"
            assert [seen.start.decode() for seen in it.seen] == [f"{method} /x HTTP/1.1" for method in methods]

    run(work())


def test_request_headers_pass_but_for_those_of_the_connection() -> None:
    async def work() -> None:
        async with rig() as it:
            await it.call(
                "GET /x\naccept-encoding: br\naccept: a\naccept: b\nuser-agent: agent/1\ncookie: a=1\ncookie: b=2\n"
                "authorization: Bearer tenant\nx-forwarded-for: 10.0.0.1\nx-latin: caf\u00e9\n"
                "connection: keep-alive, X-Mine, Host, authorization\nx-mine: 1\nkeep-alive: timeout=5\nte: trailers\n"
                "proxy-authorization: Basic eA==\nproxy-connection: keep-alive\nupgrade: h2c\ntrailer: x".encode(
                    "latin-1"
                )
            )
            names = [name.lower() for name, _ in it.seen[0].headers]
            assert names == [
                b"host", b"accept-encoding", b"accept", b"accept", b"user-agent", b"cookie", b"cookie", b"authorization",
                b"x-forwarded-for", b"x-latin", b"connection",
            ]  # fmt: skip
            seen = it.seen[0]
            assert seen.all(b"accept") == [b"a", b"b"]
            assert seen.all(b"cookie") == [b"a=1", b"b=2"]
            assert seen.all(b"host") == [b"127.0.0.1:8888"]
            assert seen.all(b"authorization") == [b"Bearer tenant"]
            assert seen.all(b"x-latin") == [b"caf\xe9"]
            assert seen.all(b"connection") == [b"close"]

    run(work())


@pytest.mark.parametrize("given", ["", "\nauthorization: Bearer their-own", "\nAuthorization: x\nauthorization: y"])
def test_hindsight_apis_key_takes_the_place_of_what_a_client_sent(given: str) -> None:
    async def work() -> None:
        async with rig(environ={}) as it:
            for _ in range(2):
                it.tenant.renew()  # hindsight-api starts
                assert (await it.call(f"GET /x\naccept: a{given}\nx-mine: 1")).body == b"ok"
                seen = it.seen[-1]
                assert it.tenant.key is not None
                key = f"Bearer {it.tenant.key.get_secret_value()}".encode()
                assert sorted((name.lower(), value) for name, value in seen.headers) == [
                    (b"accept", b"a"), (b"authorization", key), (b"connection", b"close"),
                    (b"host", b"127.0.0.1:8888"), (b"x-mine", b"1"),
                ]  # fmt: skip
            assert it.seen[0].all(b"authorization") != it.seen[1].all(b"authorization")

    run(work())


def test_hindsight_apis_key_is_not_the_gateways() -> None:
    async def work() -> None:
        async with rig(environ={}, api_key=KEY) as it:
            assert it.tenant.key is not None
            inner = it.tenant.key.get_secret_value()
            assert (await it.call(f"GET /x\nauthorization: Bearer {inner}")).status == 401
            assert (await it.call("GET /x")).status == 401
            assert (await it.call(f"GET /x\nauthorization: Bearer {KEY}")).status == 200
            assert [seen.all(b"authorization") for seen in it.seen] == [[f"Bearer {inner}".encode()]]

    run(work())


def test_a_call_of_http_1_0_without_a_host_passes_where_hosts_are_not_looked_at() -> None:
    async def work() -> None:
        async with rig(listen=Address("0.0.0.0", 8888), api_key=KEY) as it:  # noqa: S104 - nobody listens there
            async with it.connection() as (reader, writer):
                writer.write(b"GET /x HTTP/1.0\r\nauthorization: Bearer %s\r\n\r\n" % KEY.encode())
                assert (await read_head(reader)).status == 200
            assert it.seen[0].all(b"host") == [b"hindsight-api"]

    run(work())


# Answers -------------------------------------------------------------------------------------------------------


def test_an_encoded_answer_is_passed_as_it_is() -> None:
    packed = gzip.compress(b"memories" * 1000)

    async def work() -> None:
        async with rig() as it:
            it.answer = (
                b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
            ) + packed
            answer = await it.call("GET /x\naccept-encoding: gzip")
            assert answer.body == packed
            assert answer.all(b"content-encoding") == [b"gzip"]
            assert answer.all(b"content-length") == [str(len(packed)).encode()]

    run(work())


def test_answer_headers_pass_but_for_those_of_the_connection() -> None:
    async def work() -> None:
        async with rig() as it:
            it.answer = (
                b"HTTP/1.1 418 Short And Stout\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nserver: uvicorn\r\n"
                b"date: Mon, 01 Jan 2024 00:00:00 GMT\r\nX-Mixed: Case\r\nretry-after: 9\r\nconnection: close, X-Mine\r\n"
                b"x-mine: 1\r\nkeep-alive: timeout=5\r\nupgrade: h2c\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n"
            )
            answer = await it.call("GET /x")
            assert answer.status == 418
            assert answer.all(b"set-cookie") == [b"a=1", b"b=2"]
            assert answer.all(b"server") == [b"uvicorn"]
            assert answer.all(b"date") == [b"Mon, 01 Jan 2024 00:00:00 GMT"]
            assert answer.all(b"x-mixed") == [b"Case"]
            assert answer.all(b"location") == [b"http://elsewhere/"]
            for name in (b"keep-alive", b"upgrade", b"x-mine"):
                assert not answer.all(name)

    run(work())


def test_a_redirect_is_the_clients_to_follow() -> None:
    async def work() -> None:
        async with rig() as it:
            it.answer = b"HTTP/1.1 307 Temporary\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n"
            assert (await it.call("GET /x")).status == 307
            assert len(it.seen) == 1

    run(work())


def test_a_head_answer_keeps_its_length_and_has_no_body() -> None:
    async def work() -> None:
        async with rig() as it:
            it.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n"
            async with it.connection() as (reader, writer):
                writer.write(b"HEAD /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                assert (await read_head(reader)).all(b"content-length") == [b"1234"]
                assert await reader.read() == b""
            assert it.seen[0].start == b"HEAD /x HTTP/1.1"

    run(work())


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_an_answer_that_has_no_body_by_its_status(status: bytes) -> None:
    async def work() -> None:
        async with rig() as it:
            it.answer = b"HTTP/1.1 %s\r\netag: x\r\n\r\n" % status
            async with it.connection() as (reader, writer):
                writer.write(b"GET /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                answer = await read_head(reader)
                assert answer.status == int(status[:3])
                assert answer.all(b"etag") == [b"x"]
                assert await reader.read() == b""

    run(work())


def test_events_arrive_as_they_are_sent() -> None:
    async def work() -> None:
        heard = asyncio.Event()

        async def answer(_: Message, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await heard.wait()  # the second is sent only once the first has been read at the other end
            writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        async with rig() as it:
            it.answer = answer
            async with it.connection() as (reader, writer):
                writer.write(b"GET /mcp HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await read_head(reader)).all(b"content-type") == [b"text/event-stream"]
                assert await read_chunk(reader) == b"data: 1\n\n"
                heard.set()
                assert await read_chunk(reader) == b"data: 2\n\n"
                assert await read_chunk(reader) == b""

    run(work())


def test_a_stream_may_take_longer_than_the_time_for_an_answer() -> None:
    async def work() -> None:
        async def answer(_: Message, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
            await asyncio.sleep(1.3)  # what is tested is a time limit, and 1 s is the shortest that can be set
            writer.write(b"cd")

        async with rig(gateway_timeout=1.0) as it:
            it.answer = answer
            assert (await it.call("GET /x")).body == b"abcd"

    run(work())


def test_a_large_answer_arrives_whole() -> None:
    body = noise(3_000_000)

    async def work() -> None:
        async with rig() as it:
            it.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n" + body
            assert (await it.call("GET /x")).body == body

    run(work())


def test_one_connection_of_the_client_serves_many_calls() -> None:
    async def work() -> None:
        async with rig() as it, it.connection() as (reader, writer):
            for _ in range(3):
                before = time.monotonic()
                writer.write(b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nhi")
                assert (await read_message(reader)).body == b"ok"
                assert before <= it.gateway.answered <= time.monotonic()
            assert len(it.seen) == 3

    run(work())


# Ends ----------------------------------------------------------------------------------------------------------


def test_a_client_that_goes_is_gone_for_the_upstream_too() -> None:
    async def work() -> None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def answer(_: Message, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            asked.set()
            assert await reader.read() == b""
            gone.set()

        async with rig() as it:
            it.answer = answer
            async with it.connection() as (_, writer):
                writer.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await asked.wait()
                assert it.gateway.in_flight == 1
                assert it.gateway.answered == -math.inf, "one that was asked may hang"
            await gone.wait()
            while it.gateway.in_flight:  # noqa: ASYNC110 - a number, no event
                await asyncio.sleep(0.005)
            assert not it.refusals

    run(work())


def test_a_client_that_goes_in_the_middle_of_its_body_leaves_half_a_request() -> None:
    async def work() -> None:
        asked, ended = asyncio.Event(), asyncio.Event()

        async def answer(_: Message, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            assert await reader.readexactly(3) == b"abc"
            asked.set()
            assert await reader.read() == b""
            ended.set()

        async with rig() as it:
            it.answer = answer
            async with it.connection() as (_, writer):
                writer.write(b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 6\r\n\r\nabc")
                await asked.wait()
            await ended.wait()
            while it.gateway.in_flight:  # noqa: ASYNC110 - a number, no event
                await asyncio.sleep(0.005)

    run(work())


@pytest.mark.parametrize(
    "half",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
def test_half_an_answer_does_not_look_like_a_whole_one(half: bytes) -> None:
    async def work() -> None:
        async with rig() as it:
            it.answer = half
            with pytest.raises(asyncio.IncompleteReadError):
                await it.call("GET /x")

    run(work())


def test_an_upstream_that_ends_before_it_answers_is_502() -> None:
    async def work() -> None:
        async with rig() as it:
            for last_words in (b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n"):
                it.answer = last_words
                answer = await it.call("POST /x\ncontent-length: 2", b"hi")
                assert answer.status == 502, last_words
                assert "may have been stored" in answer.json()["detail"]
                assert answer.all(b"content-type") == [b"application/problem+json"]
            assert it.refusals == {"failed": 3}

    run(work())


def test_an_upstream_that_is_not_there_is_503_and_nothing_was_sent() -> None:
    async def work() -> None:
        async with rig(with_upstream=False) as it:
            answer = await it.call("POST /x\ncontent-length: 2", b"hi")
            assert answer.status == 503
            assert "nothing was sent" in answer.json()["detail"]
            assert answer.all(b"retry-after") == [b"2"]

    run(work())


def test_no_answer_in_time_is_504() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def answer(_: Message, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            await reader.read()
            ended.set()

        async with rig(gateway_timeout=1.0) as it:
            it.answer = answer
            response = await it.call("GET /x")
            assert response.status == 504
            assert "no answer within 1 s" in response.json()["detail"]
            await ended.wait()
            assert it.refusals == {"timeout": 1}

    run(work())


# What it answers itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (State(Phase.STARTING, "recovery"), "starting(recovery)"),
        (State(Phase.BLOCKED, "no-space", "full"), "blocked(no-space)"),
        (State(Phase.MAINTENANCE, "dump"), "maintenance(dump)"),
    ],
)
def test_while_not_ready_a_call_is_503_at_once_with_the_phase(state: State, phase: str) -> None:
    async def work() -> None:
        async with rig() as it:
            it.status.update(state=state)
            for path in ("/v1/default/banks", "/health/other", "/"):
                # Answered without waiting for the body.
                answer = await it.call(f"POST {path}\ncontent-length: 100000")
                assert answer.status == 503
                assert answer.all(b"retry-after") == [b"2"]
                assert answer.all(b"content-type") == [b"application/problem+json"]
                assert phase in answer.json()["detail"]
                assert (answer.json()["state"], answer.json()["subject"]) == (state.phase, state.subject)
            assert not it.seen
            assert it.refusals == {"not-ready": 3}

    run(work())


def test_an_old_sample_is_not_trusted() -> None:
    async def work() -> None:
        async with rig() as it:
            it.status.update(sampled=it.status.picture.sampled - STALE_AFTER - 1)
            answer = await it.call("GET /v1/default/banks")
            assert answer.status == 503
            assert "degraded(sampling)" in answer.json()["detail"]
            assert (await it.call("GET /health")).status == 503

    run(work())


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_health_is_answered_here_ready_or_not(path: str) -> None:
    async def work() -> None:
        async with rig(with_upstream=False) as it:
            answer = await it.call(f"GET {path}")
            assert answer.status == 200
            assert answer.json()["status"] == "healthy"
            assert answer.json()["database"] == "connected"
            assert not answer.all(b"retry-after")
            it.status.update(state=State(Phase.STARTING, "postgres"))
            answer = await it.call(f"GET {path}")
            assert answer.status == 503
            assert answer.json()["status"] == "unhealthy"
            assert answer.all(b"retry-after") == [b"2"]
            head = await it.call(f"HEAD {path}")
            assert head.status == 503
            assert int(head.all(b"content-length")[0]) > 100
            assert not it.refusals

    run(work())


def test_live_and_version_are_answered_here_in_any_state() -> None:
    async def work() -> None:
        async with rig(with_upstream=False) as it:
            it.status.update(state=State(Phase.BLOCKED, "permissions"))
            alive = (await it.call("GET /health/live")).json()
            assert alive.pop("uptime_seconds") >= 0
            assert alive == {"status": "alive", "version": "1.1.0"}
            for path in ("/version", "/v1/version"):
                answer = await it.call(f"GET {path}")
                assert answer.status == 200
                assert answer.json() == {"api_version": "1.1.0", "features": {"mcp": True}}

    run(work())


# Who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/default/banks"])
def test_a_foreign_host_is_refused_everywhere(path: str) -> None:
    async def work() -> None:
        async with rig() as it:
            for host in ("evil.example", "127.0.0.1.evil.example:8888", "", "localhost.evil"):
                answer = await it.call(f"GET {path}" if host else f"GET {path}\nhost:", host=host)
                assert answer.status == 421, host
                assert "HINDSIGHT_SIDECAR_ALLOWED_HOSTS" in answer.json()["detail"]
            assert not it.seen
            assert it.refusals == {"foreign-host": 4}

    run(work())


def test_our_own_hosts_pass() -> None:
    async def work() -> None:
        async with rig(allowed_hosts=("hermes",)) as it:
            for host in ("localhost", "LOCALHOST:1", "[::1]:8888", "127.0.0.1", "hermes:8888"):
                assert (await it.call("GET /x", host=host)).status == 200, host

    run(work())


def test_a_key_is_demanded_where_one_is_set() -> None:
    tried = [
        "accept: */*",
        "authorization: Bearer wrong",
        "authorization: Bearer the-key2",
        "authorization: Basic the-key",
        "authorization: Bearer the-key\nauthorization: Bearer the-key",
        "x-api-key: the-key",
    ]

    async def work() -> None:
        async with rig(api_key=KEY) as it:
            for given in tried:
                answer = await it.call(f"GET /x\n{given}")
                assert answer.status == 401, given
                assert answer.all(b"www-authenticate") == [b"Bearer"]
                assert KEY.encode() not in answer.body
            assert not it.seen
            assert it.refusals == {"unauthorized": len(tried)}

    run(work())


def test_probes_need_no_key_and_calls_pass_with_it() -> None:
    async def work() -> None:
        async with rig(api_key=KEY) as it:
            for path in ("/health", "/health/ready", "/health/live", "/version", "/v1/version"):
                assert (await it.call(f"GET {path}")).status == 200
            assert (await it.call("POST /health\ncontent-length: 0")).status == 401
            assert (await it.call(f"GET /x\nauthorization: Bearer {KEY}")).status == 200
            assert len(it.seen) == 1

    run(work())


def test_the_key_is_compared_in_constant_time_and_in_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: not compared.append(both))

    async def work() -> None:
        async with rig(api_key=KEY) as it:
            assert (await it.call("GET /x\nauthorization: Bearer wrong")).status == 200
        assert compared == [(b"Bearer wrong", f"Bearer {KEY}".encode())]

    run(work())


def test_too_many_wrong_keys_are_told_so_and_the_right_one_still_passes() -> None:
    async def work() -> None:
        async with rig(api_key=KEY) as it:
            for _ in range(BURST):
                assert (await it.call("GET /x\nauthorization: Bearer wrong")).status == 401
            while (refused := await it.call("GET /x\nauthorization: Bearer wrong")).status == 401:
                pass  # as many as time gave
            assert refused.status == 429
            assert refused.all(b"retry-after") == [b"1"]
            assert KEY.encode() not in refused.body
            assert (await it.call("GET /x")).status == 401, "no key is no guess"
            assert (await it.call(f"GET /x\nauthorization: Bearer {KEY}")).status == 200
            assert (await it.call("GET /health\nauthorization: Bearer wrong")).status == 200
            assert it.refusals["too-many-attempts"] == 1

    run(work())


@pytest.mark.parametrize("path", ["/health", "/v1/default/banks", "/openapi.json"])
@pytest.mark.parametrize(
    "page", ["origin: http://evil.example", "origin: null", "sec-fetch-site: cross-site", "sec-fetch-site: same-site"]
)
def test_a_page_of_another_origin_gets_nothing(path: str, page: str) -> None:
    async def work() -> None:
        async with rig() as it:
            for request in (f"GET {path}", f"OPTIONS {path}\naccess-control-request-method: DELETE",
                            f"POST {path}\ncontent-type: text/plain\ncontent-length: 2"):  # fmt: skip
                answer = await it.call(f"{request}\n{page}", b"{}" if "content-length" in request else b"")
                assert answer.status == 403
                assert answer.json()["title"] == "Foreign Origin"
                assert not [name for name, _ in answer.headers if name.lower().startswith(b"access-control")]
            assert not it.seen
            assert it.refusals == {"foreign-origin": 3}

    run(work())


def test_our_own_pages_and_allowed_ones_pass() -> None:
    async def work() -> None:
        async with rig(allowed_origins=("http://localhost:6274",)) as it:
            for origin in ("http://127.0.0.1:8888", "http://localhost:6274"):
                assert (await it.call(f"GET /x\norigin: {origin}")).status == 200
            assert [seen.all(b"origin") for seen in it.seen] == [[b"http://127.0.0.1:8888"], [b"http://localhost:6274"]]

    run(work())


def test_a_target_that_names_another_host_is_refused_whatever_the_header_says() -> None:
    async def work() -> None:
        async with rig() as it:
            assert (await it.call("GET http://evil.example/v1/default/banks")).status == 421
            assert (await it.call("CONNECT evil.example:443")).status == 421
            assert not it.seen
            assert (await it.call("GET http://127.0.0.1:8888/v1/default/banks")).status == 200
            assert it.seen[0].target == b"http://127.0.0.1:8888/v1/default/banks"

    run(work())


def test_a_body_that_stops_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_BODY_PAUSE", 0.2)

    async def work() -> None:
        ended = asyncio.Event()

        async def answer(_: Message, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            assert await reader.read() == b"ab"
            ended.set()

        async with rig() as it:
            it.answer = answer
            refused = await it.call("POST /x\ncontent-length: 3", b"ab")
            assert refused.status == 408
            assert refused.all(b"connection") == [b"close"]
            await ended.wait()
            assert it.refusals == {"stalled": 1}
            assert not it.gateway.in_flight

    run(work())


def test_a_client_that_closed_its_own_direction_gets_its_answer() -> None:
    async def work() -> None:
        async with rig() as it, it.connection() as (reader, writer):
            writer.write(b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nhi")
            writer.write_eof()
            assert (await read_message(reader)).body == b"ok"
            assert await reader.read() == b""

    run(work())


def test_a_path_is_logged_as_it_was_sent_and_not_at_any_length() -> None:
    async def work() -> None:
        async with rig(with_upstream=False) as it:
            await it.call("GET /%0aforged%1b[2J?secret=1" + "x" * 5000)
            await it.call("GET /" + "x" * 5000)

    with structlog.testing.capture_logs() as lines:
        run(work())
    assert [line["path"] for line in lines] == ["/%0aforged%1b[2J", "/" + "x" * 199]


def test_a_websocket_is_refused() -> None:
    async def work() -> None:
        sent = []

        async def send(message: Any) -> None:
            sent.append(message)

        async with rig() as it:
            await it.gateway({"type": "websocket"}, None, send)  # type: ignore[arg-type]
            await it.gateway({"type": "lifespan"}, None, send)  # type: ignore[arg-type]
        assert sent == [{"type": "websocket.close", "code": 1003}]

    run(work())
