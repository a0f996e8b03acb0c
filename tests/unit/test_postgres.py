import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.errors import Reason
from sidecar.initscripts import InitScripts
from sidecar.machine import Server
from sidecar.postgres import Postgres
from sidecar.settings import Settings
from sidecar.sizing import GIB, MIB
from sidecar.volume import Space

FULL = '2026-11-29 18:00:00 UTC [1] ERROR:  could not extend file "base/5/1": No space left on device'


def component(tmp_path: Path, changed: asyncio.Event, space: Callable[[], Space | None] = lambda: None) -> Postgres:
    settings = Settings(PGDATA=tmp_path / "pgdata", run_dir=tmp_path)
    return Postgres(settings, InitScripts(tmp_path, tmp_path, "info"), {}, "UTC", changed.set, space)


@pytest.mark.parametrize(
    ("short", "says"),
    [(Space(0, 5000, GIB), "0 MiB and 5000 inodes free now"), (Space(512 * MIB, 0, GIB), "512 MiB and 0 inodes")],
)
def test_a_want_of_space_is_told_until_there_is_enough(tmp_path: Path, short: Space, says: str) -> None:
    space = short
    changed = asyncio.Event()
    it = component(tmp_path, changed, lambda: space)
    assert it.wants_space(0.0) is None, "a nearly full volume alone is no fault"
    it.watch.hear(FULL)
    assert changed.is_set()
    said = it.watch.no_space_at
    assert said is not None
    told = it.wants_space(said + 1)
    assert told is not None
    assert str(tmp_path) in told
    assert says in told
    assert it.wants_space(said + 60) is not None
    space = Space(512 * MIB, 5000, GIB)
    # A quota may be what is short: what is free does not end it at once.
    assert it.wants_space(said + 1) is not None
    assert it.wants_space(said + 60) is None
    assert it.wants_space(said + 61) is None
    space = short
    assert it.wants_space(said + 62) is None, "it is over until Postgres says so again"


def test_a_child_that_ended_for_want_of_space_or_quota_is_told_apart(tmp_path: Path) -> None:
    it = component(tmp_path, asyncio.Event())

    def reason(*lines: str) -> Reason | None:
        child: Any = SimpleNamespace(name="initdb", tail=lines)
        found = it.no_space(child)
        return None if found is None else found.reason

    assert (
        reason("creating directory ... ok", 'initdb: error: could not write file "x": Disk quota exceeded')
        is Reason.NO_SPACE
    )
    assert reason(FULL, "2026-11-29 18:00:00 UTC [1] LOG:  database system is shut down") is Reason.NO_SPACE
    assert reason(f"2026-11-29 18:00:00 UTC [1] STATEMENT:  SELECT '{FULL}") is None
    assert reason() is None


def test_a_recovery_is_told_by_postgres_own_lines(tmp_path: Path) -> None:
    it = component(tmp_path, asyncio.Event())
    line = "LOG:  database system was not properly shut down; automatic recovery in progress"
    it.watch.hear(line)
    assert it.watch.server is Server.DOWN, "nothing runs"
    it.watch.server = Server.STARTING
    it.watch.hear(line)
    assert it.watch.server is Server.RECOVERING
    assert it.watch.fault == "Postgres is about to replay its log"
    it.watch.hear("LOG:  redo in progress, elapsed time: 10.00 s, current LSN: 0/5A3F2C8")
    assert it.watch.fault == "Postgres replays its log"
    it.watch.server = Server.UP
    it.watch.hear(line)
    assert it.watch.server is Server.RECOVERING, "it began again before anybody looked"
