import asyncio
import contextlib
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from sidecar import connection, listeners
from sidecar.asgi import Receive, Send
from sidecar.errors import SettingsError
from sidecar.listeners import Listeners, bind_tcp, bind_unix, lock_run_dir
from sidecar.settings import Address, Settings


def taken() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.listen()
    return listener


def test_an_address_that_stays_taken_names_the_setting_that_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_TAKEN_PATIENCE", 0.1)
    with taken() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SettingsError) as caught:
            bind_tcp("HINDSIGHT_SIDECAR_LISTEN", Address("127.0.0.1", port))
    (fault,) = caught.value.faults
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in fault
    assert "set HINDSIGHT_SIDECAR_LISTEN to a free address" in fault


def test_an_address_that_is_left_meanwhile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = taken()
    address = Address(*listener.getsockname())
    monkeypatch.setattr(listeners.time, "sleep", lambda _: listener.close())  # the first pause is when it ends
    with bind_tcp("X", address) as second:
        assert second.getsockname() == tuple(address)


def test_an_address_that_is_not_ours_names_the_setting_too() -> None:
    with pytest.raises(SettingsError, match="HINDSIGHT_SIDECAR_LISTEN"):
        bind_tcp("HINDSIGHT_SIDECAR_LISTEN", Address("203.0.113.7", 8888))


def test_an_address_just_left_can_be_taken_again() -> None:
    with bind_tcp("X", Address("127.0.0.1", _free())) as first:
        address = Address(*first.getsockname())
        with socket.create_connection(address) as client:
            served, _ = first.accept()
            served.close()  # the closing side waits in TIME_WAIT
            client.recv(1)
    with bind_tcp("X", address) as second:
        assert second.getsockname() == tuple(address)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ipv6_is_bound_as_such() -> None:
    with bind_tcp("X", Address("::1", _free())) as listener:
        assert listener.family is socket.AF_INET6


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The control socket --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_is_sent_in_pieces_without_waiting_for_their_acknowledgement(host: str) -> None:
    async def taken_up() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ours: socket.socket = writer.get_extra_info("socket")
            accepted.set_result(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind_tcp("X", Address(host, 0))
        async with await asyncio.start_server(take, sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname()[:2])
            found = await accepted
            client.close()
            await client.wait_closed()
        return found

    assert asyncio.run(taken_up()) != 0


def test_the_control_socket_is_ours_alone_whatever_the_umask(short_path: Path) -> None:
    before = os.umask(0)
    try:
        with bind_unix(short_path / "control.sock"):
            mode = (short_path / "control.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert mode & 0o777 == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_the_socket_of_a_sidecar_that_was_killed_is_replaced(short_path: Path) -> None:
    path = short_path / "control.sock"
    bind_unix(path).close()
    assert path.exists()
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


# The run directory ---------------------------------------------------------------------------------------------


def test_a_run_directory_has_one_sidecar(tmp_path: Path) -> None:
    first = lock_run_dir(tmp_path)
    assert not os.get_inheritable(first)
    with pytest.raises(SettingsError, match=r"another sidecar uses the run directory .* HINDSIGHT_SIDECAR_RUN_DIR"):
        lock_run_dir(tmp_path)
    os.close(first)
    os.close(lock_run_dir(tmp_path))


def test_a_link_in_place_of_its_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "sidecar.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="symbolic links"):
        lock_run_dir(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["sidecar.lock", "control.sock"])
def test_a_directory_in_place_of_its_files_is_a_fault_of_the_settings(name: str, short_path: Path) -> None:
    (short_path / name).mkdir()
    with pytest.raises(SettingsError, match=name):
        lock_run_dir(short_path) if name == "sidecar.lock" else bind_unix(short_path / name)


async def nobody(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError("half a request is none")


def test_a_connection_that_sends_half_a_header_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_TIME", 0.2)

    async def work() -> bytes:
        listener = bind_tcp("HINDSIGHT_SIDECAR_LISTEN", Address("127.0.0.1", _free()))
        server = listeners.Server(nobody, listener)
        await server.listening()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: local")
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        finally:
            writer.close()
            await server.end(1.0)

    assert asyncio.run(work()) == b""


@pytest.mark.parametrize("stuck", [False, True])
def test_an_answer_that_nobody_takes_holds_no_end_up(stuck: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001
    ended: list[str] = []
    answering = asyncio.Event()

    async def endless(_scope: object, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def stream() -> None:
            while True:
                await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
                answering.set()

        streaming = asyncio.ensure_future(stream())
        while (await receive())["type"] != "http.disconnect":
            pass
        streaming.cancel()
        await asyncio.wait({streaming})
        ended.append("the client is gone")
        if stuck:
            await asyncio.Event().wait()

    async def work() -> float:
        listener = bind_tcp("X", Address("127.0.0.1", _free()))
        server = listeners.Server(endless, listener)
        await server.listening()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await answering.wait()
            began = time.monotonic()
            await server.end(0.1)
            return time.monotonic() - began

    assert asyncio.run(work()) < 1.5
    assert ended == ["the client is gone"]
    assert stuck or [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_burst_of_connections_waits_for_nobodys_second_try() -> None:
    async def work() -> None:
        listener = bind_tcp("X", Address("127.0.0.1", _free()))
        server = listeners.Server(nobody, listener, connections=8)
        await server.listening()
        with contextlib.ExitStack() as stack:
            for _ in range(300):  # none is taken up meanwhile, as this has the event loop
                stack.enter_context(socket.create_connection(listener.getsockname(), timeout=0.5))
        await server.end(1.0)

    asyncio.run(work())


def test_all_listeners_of_one_sidecar(short_path: Path) -> None:
    ports = [_free() for _ in range(4)]
    settings = Settings(
        run_dir=short_path,
        listen=Address("127.0.0.1", ports[0]),
        control_listen=Address("127.0.0.1", ports[1]),
        metrics_listen=Address("127.0.0.1", ports[2]),
        api_listen=Address("127.0.0.1", ports[3]),
    )
    made = Listeners(settings)
    assert made.metrics is not None
    bound = [made.gateway, made.control, made.metrics]
    assert [one.getsockname()[1] for one in bound] == ports[:3]
    with socket.create_server(("127.0.0.1", ports[3])):  # left for hindsight-api
        pass
    for one in (*bound, made.socket):
        one.close()
    os.close(made._run_lock)
