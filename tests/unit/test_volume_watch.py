import asyncio
import errno
import threading
from pathlib import Path

import pytest

from sidecar import volume_watch
from sidecar.machine import Server
from sidecar.volume import Space
from sidecar.volume_watch import VolumeWatch


def test_a_volume_that_hangs_and_goes_on_is_seen_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_watch, "INTERVAL", 0.0)
    monkeypatch.setattr(volume_watch, "TIMEOUT", 0.05)
    free, asked = threading.Event(), threading.Event()

    def space(_: Path) -> Space:
        asked.set()
        free.wait(20)
        return Space(1, 2, 3)

    monkeypatch.setattr(volume_watch.volume, "space", space)
    seen: list[tuple[Server, str | None]] = []

    async def work() -> None:
        over = asyncio.Event()

        def changed() -> None:
            seen.append((made.server, made.fault))
            if made.server is Server.UNRESPONSIVE:
                free.set()
            if made.server is Server.UP:
                over.set()

        made = VolumeWatch(tmp_path, changed)
        watching = asyncio.ensure_future(made.run())
        async with asyncio.timeout(20):
            await over.wait()
        watching.cancel()
        await asyncio.wait({watching})
        assert made.space == Space(1, 2, 3)

    asyncio.run(work())
    assert [server for server, _ in seen] == [Server.UNRESPONSIVE, Server.UP]
    assert str(seen[0][1]).startswith(f"{tmp_path} gave no answer within 0.05 s")


@pytest.mark.parametrize(
    ("error", "server"),
    [(FileNotFoundError(errno.ENOENT, "No such file"), Server.DOWN), (PermissionError(errno.EACCES, "no"), Server.DOWN),
     (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), Server.UNRESPONSIVE)],
)  # fmt: skip
def test_a_volume_that_is_not_there_is_no_fault_and_one_that_fails_is(error: OSError, server: Server) -> None:
    async def work() -> VolumeWatch:
        async def fail() -> Space:
            raise error

        made = VolumeWatch(Path("/volume"), lambda: None)
        made.server, made.space = Server.UP, Space(1, 2, 3)
        look = asyncio.ensure_future(fail())
        await asyncio.wait({look})
        made._take(look)
        return made

    made = asyncio.run(work())
    assert made.server is server
    assert (made.fault is None) == (server is Server.DOWN)
    if made.fault:
        assert "cannot be looked at (Transport endpoint is not connected)" in made.fault
