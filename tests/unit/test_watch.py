import asyncio
import math
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import psycopg
import pytest

from sidecar import watch
from sidecar.machine import Server
from sidecar.watch import ApiWatch, PostgresWatch, postgres_state


@pytest.mark.parametrize(
    ("said", "server"),
    [
        ("FATAL:  the database system is starting up", Server.STARTING),
        ("FATAL:  the database system is not yet accepting connections\nDETAIL:  Consistent recovery state has not been yet reached.",
         Server.RECOVERING),
        ("FATAL:  the database system is in recovery mode", Server.RECOVERING),
        ('connection to server on socket "/run/hindsight/.s.PGSQL.5432" failed: No such file or directory', Server.STARTING),
        ("FATAL:  sorry, too many clients already", Server.STARTING),
    ],
)  # fmt: skip
def test_what_postgres_is_doing_is_told_by_how_it_refuses(said: str, server: Server) -> None:
    assert postgres_state(psycopg.OperationalError(said)) is server


def test_postgres_own_beginnings_are_heard(tmp_path: Path) -> None:
    watch = PostgresWatch(tmp_path, tmp_path, lambda: None)
    watch.hear("2026-11-29 17:08:40 UTC [7] LOG:  server process (PID 12) was terminated by signal 9: Killed")
    assert watch.reinitialized == 0
    watch.hear("2026-11-29 17:08:40 UTC [7] LOG:  all server processes terminated; reinitializing")
    assert watch.reinitialized == 1


@pytest.mark.parametrize(
    "begin", ["STATEMENT:  SELECT '", "DETAIL:  Key (text)=(", "CONTEXT:  COPY notes, line 1: ", "\t"]
)
def test_what_postgres_only_repeats_is_not_heard(begin: str, tmp_path: Path) -> None:
    changes: list[None] = []
    watch = PostgresWatch(tmp_path, tmp_path, lambda: changes.append(None))
    watch.server = Server.UP
    for words in (
        "all server processes terminated; reinitializing",
        "database system was not properly shut down; automatic recovery in progress",
        "redo starts at 0/1000028",
        'could not extend file "base/5/1": No space left on device',
    ):
        watch.hear(f"{begin}2026-11-29 17:08:40.123 UTC [7] LOG:  {words}")
    assert (watch.server, watch.recovery, watch.reinitialized, watch.no_space_at) == (Server.UP, None, 0, None)
    assert changes == []


def test_a_recovery_is_heard_whatever_was_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = PostgresWatch(tmp_path, tmp_path, lambda: None)
    measured: list[int | None] = []
    monkeypatch.setattr(heard, "_measure", lambda recovery: measured.append(recovery.begins))
    heard.server = Server.UP
    for line in (
        "all server processes terminated; reinitializing",
        "database system was interrupted; last known up at 2026-11-30 10:00:00 UTC",
    ):
        heard.hear(f"2026-11-30 10:00:00 UTC [7] LOG:  {line}")
        assert (heard.server, heard.recovery) == (Server.UP, None)
    heard.hear("LOG:  syncing data directory (fsync), elapsed time: 10.00 s, current path: ./base/5")
    first = heard.recovery
    assert first is not None
    assert heard.server is Server.RECOVERING
    assert heard.fault == "Postgres brings its files to the disk before it replays its log (10 s)"
    heard.hear("LOG:  database system was not properly shut down; automatic recovery in progress")
    heard.hear("LOG:  redo starts at 0/1000028")
    assert heard.recovery is first, "one recovery, whatever it says first"
    assert measured == [None, None, 0x1000028]
    heard.hear("LOG:  all server processes terminated; reinitializing")
    heard.hear("LOG:  redo in progress, elapsed time: 10.00 s, current LSN: 0/2000028")
    assert heard.recovery is None, "of which recovery is not known"
    heard.hear("LOG:  database system was not properly shut down; automatic recovery in progress")
    assert heard.recovery not in (None, first)


Answer = Callable[[httpx2.Request], httpx2.Response]


def never() -> float:
    return -math.inf


async def there() -> None:
    """Be who listens."""


def looked(
    answers: list[Answer], monkeypatch: pytest.MonkeyPatch, not_there: Callable[[], Awaitable[str | None]] = there
) -> list[tuple[Server, str | None]]:
    """Return what a watch saw at each change, with these answers and then none."""
    monkeypatch.setattr(watch, "INTERVAL", 0.0)
    monkeypatch.setattr(watch, "_EAGER", 0.0)
    seen: list[tuple[Server, str | None]] = []

    async def work() -> None:
        done = asyncio.Event()

        async def answer(request: httpx2.Request) -> httpx2.Response:
            if not answers:
                done.set()
                await asyncio.Event().wait()
            return answers.pop(0)(request)

        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://api") as client:
            made = ApiWatch(client, never, not_there, lambda: seen.append((made.server, made.fault)))
            watching = asyncio.ensure_future(made.run())
            async with asyncio.timeout(20):
                await done.wait()
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(work())
    return seen


def test_nothing_is_asked_before_hindsight_api_is_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["not yet", "another program listens", "another program listens"]

    async def not_there() -> str | None:
        return said.pop(0) if said else None

    def answer(_: httpx2.Request) -> httpx2.Response:
        assert said == []
        return httpx2.Response(200)

    assert looked([answer], monkeypatch, not_there) == [
        (Server.STARTING, None),
        (Server.STARTING, "not yet"),
        (Server.STARTING, "another program listens"),
        (Server.UP, None),
    ]


def refuse(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("refused", request=request)


def well(_: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200)


def ill(_: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(503, text="no database")


def test_an_api_that_was_not_up_yet_is_starting_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = looked([refuse, refuse, ill, well, well], monkeypatch)
    assert seen == [
        (Server.STARTING, None),
        (Server.STARTING, "refused"),
        (Server.STARTING, "/health answered 503: no database"),
        (Server.UP, None),
    ]


def test_an_api_that_was_up_is_unresponsive_until_it_answers_well_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = looked([well, ill, refuse, well], monkeypatch)
    assert [server for server, _ in seen] == [
        Server.STARTING, Server.UP, Server.UNRESPONSIVE, Server.UNRESPONSIVE, Server.UP,
    ]  # fmt: skip


@pytest.mark.parametrize("busy", [0, 3])
def test_an_api_that_hangs_is_seen_as_such_and_a_busy_one_is_up(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TIMEOUT", 0.05)
    seen: list[tuple[Server, str | None]] = []
    excused = probes = 0

    async def work() -> None:
        hung = asyncio.Event()
        first = True

        async def answer(_: httpx2.Request) -> httpx2.Response:
            nonlocal first, probes
            probes += 1
            if not first:
                await asyncio.Event().wait()
            first = False
            return httpx2.Response(200)

        def at_work() -> float:
            nonlocal excused
            if made.server is not Server.UP or excused == busy:
                return -math.inf
            excused += 1
            return time.monotonic()

        def changed() -> None:
            seen.append((made.server, made.fault))
            if made.server is Server.UNRESPONSIVE:
                hung.set()

        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://api") as client:
            made = ApiWatch(client, at_work, there, changed)
            watching = asyncio.ensure_future(made.run())
            async with asyncio.timeout(20):
                await hung.wait()
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(work())
    assert [server for server, _ in seen] == [Server.STARTING, Server.UP, Server.UNRESPONSIVE]
    assert seen[-1] == (Server.UNRESPONSIVE, "no answer to /health within 0.05 s")
    assert excused == busy
    assert probes == 2, "one probe was waited for, as long as it was excused"


def test_an_api_is_not_busy_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TIMEOUT", 0.01)
    monkeypatch.setattr(watch, "_BUSY", 0.2)

    async def work() -> None:
        hung = asyncio.Event()

        async def answer(_: httpx2.Request) -> httpx2.Response:
            await asyncio.Event().wait()
            raise AssertionError

        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://api") as client:
            made = ApiWatch(client, time.monotonic, there, lambda: hung.set() if made.fault else None)
            made.server = Server.UP
            began = time.monotonic()
            watching = asyncio.ensure_future(made.run())
            async with asyncio.timeout(20):
                await hung.wait()
            assert 0.2 <= time.monotonic() - began < 0.2 + 5.0
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(work())


def test_a_stopped_process_of_postgres_is_named(tmp_path: Path) -> None:
    async def named(pid: int) -> str | None:
        made = PostgresWatch(tmp_path, tmp_path, lambda: None)
        assert await made._stopped() is None
        made.postmaster = pid
        return await made._stopped()

    def wait_named(pid: int) -> str:
        deadline = time.monotonic() + 20
        while (told := asyncio.run(named(pid))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return told

    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert asyncio.run(named(parent.pid)) is None
            os.kill(child, signal.SIGSTOP)
            told = wait_named(parent.pid)
            assert told.startswith(f"PostgreSQL process {child} (")
            assert told.endswith(f") is stopped; `kill -CONT {child}` lets it go on")
            os.kill(child, signal.SIGCONT)
            os.kill(parent.pid, signal.SIGSTOP)
            told = wait_named(parent.pid)
            assert f"process {parent.pid}" in told
        finally:
            for pid in (child, parent.pid):
                os.kill(pid, signal.SIGKILL)
    assert asyncio.run(named(parent.pid)) is None


@pytest.mark.parametrize("seen", [Server.STARTING, Server.UP])
def test_a_stopped_hindsight_api_is_named_also_before_its_first_answer(seen: Server) -> None:
    async def told(pid: int | None) -> str | None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(well), base_url="http://api") as client:
            made = ApiWatch(client, never, there, lambda: None)
            made.server, made.process = seen, pid
            made._failed("it does not listen on 127.0.0.1:8887 yet")
            assert made.server is (Server.STARTING if seen is Server.STARTING else Server.UNRESPONSIVE)
            fault = made.fault
            made.end()
            assert made.process is None
            return fault

    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            for pid in (None, process.pid):
                assert asyncio.run(told(pid)) == "it does not listen on 127.0.0.1:8887 yet"
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert asyncio.run(told(process.pid)) == (
                f"hindsight-api (process {process.pid}) is stopped; `kill -CONT {process.pid}` lets it go on"
            )
        finally:
            process.kill()
    assert asyncio.run(told(process.pid)) == "it does not listen on 127.0.0.1:8887 yet"
