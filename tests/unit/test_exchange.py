import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sidecar import exchange
from sidecar.exchange import Exchange, ExchangeError, NotThereError
from sidecar.settings import Address

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEADERS = [(b"host", b"127.0.0.1"), (b"connection", b"close")]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LARGE = 8 * 2**20


@contextlib.asynccontextmanager
async def talking(serve: Serve) -> AsyncIterator[Exchange]:
    """Have an exchange with an upstream that does this with its connection."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    made = Exchange(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
    try:
        yield made
    finally:
        made.close()
        server.close()
        await server.wait_closed()


def saying(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    return serve


async def asked(made: Exchange) -> tuple[int, bytes]:
    response = await made.begin("GET", b"/", HEADERS, None)
    return response.status_code, b"".join([piece async for piece in made.pieces()])


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 2**16


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nok",  # to the end of the connection
        b"HTTP/1.1 102 Processing\r\n\r\n" + OK,
        OK.replace(b"\r\n", b"\r\nx-long: " + b"l" * 90_000 + b"\r\n", 1),
    ],
)
def test_an_answer_is_taken_to_its_end(answer: bytes) -> None:
    async def ask() -> tuple[int, bytes]:
        async with talking(saying(answer)) as made:
            return await asked(made)

    assert asyncio.run(ask()) == (200, b"ok")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
def test_what_is_no_whole_answer_is_a_fault(answer: bytes) -> None:
    async def ask() -> None:
        async with talking(saying(answer)) as made:
            await asked(made)

    with pytest.raises(ExchangeError) as caught:
        asyncio.run(ask())
    assert not isinstance(caught.value, NotThereError)


def test_nobody_there_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NotThereError, match="ConnectionRefusedError"):
        asyncio.run(Exchange(Address("127.0.0.1", port)).begin("GET", b"/", HEADERS, None))


def test_an_answer_that_comes_before_the_whole_body_was_taken_is_passed_on() -> None:
    """As hindsight-api's admission does: it answers from the headers, and closes on a body that nobody reads."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 4\r\n\r\nbusy")
        await writer.drain()

    async def ask() -> tuple[int, bytes]:
        async with talking(refuse) as made:
            length = (b"content-length", str(128 * 2**16).encode())

            async def slowly() -> AsyncIterator[bytes]:
                async for piece in pieces(128):
                    yield piece
                    await asyncio.sleep(0)

            response = await made.begin("POST", b"/", [*HEADERS, length], slowly())
            return response.status_code, b"".join([piece async for piece in made.pieces()])

    assert asyncio.run(ask()) == (503, b"busy")


def test_a_connection_that_is_reset_is_a_fault() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        ours = writer.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def ask() -> None:
        async with talking(reset) as made:
            await asked(made)

    with pytest.raises(ExchangeError, match="ConnectionResetError"):
        asyncio.run(ask())


def test_a_large_body_waits_for_a_server_that_is_slow_to_take_it() -> None:
    sent = 0

    async def ask() -> int:
        let_go = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await let_go.wait()
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(LARGE)
            writer.write(OK)
            await writer.drain()

        async def counted() -> AsyncIterator[bytes]:
            nonlocal sent
            async for piece in pieces(LARGE // 2**16):
                sent += len(piece)
                yield piece

        async with talking(slow) as made:
            length = (b"content-length", str(LARGE).encode())
            work = asyncio.create_task(made.begin("POST", b"/", [*HEADERS, length], counted()))
            before = -1
            while before != sent:  # until no more is taken
                before = sent
                await asyncio.sleep(0.1)
            held = sent
            let_go.set()
            assert (await work).status_code == 200
        return held

    assert asyncio.run(ask()) < LARGE
    assert sent == LARGE


def test_a_large_answer_waits_for_a_client_that_is_slow_to_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_READ_AHEAD", 2**16)
    written = 0

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % LARGE)
        async for piece in pieces(LARGE // 2**16):
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    async def ask() -> tuple[int, int]:
        async with talking(large) as made:
            await made.begin("GET", b"/", HEADERS, None)
            before = -1
            while before != written:
                before = written
                await asyncio.sleep(0.1)
            held = written
            return held, sum([len(piece) async for piece in made.pieces()])

    held, taken = asyncio.run(ask())
    assert held < LARGE
    assert taken == LARGE
