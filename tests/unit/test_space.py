import os
import threading
from pathlib import Path

import pytest

from sidecar import space
from sidecar.space import Space, SpaceWatch, measure

WITHIN = 20.0  # seconds


def test_the_volume_and_the_log_on_it_are_measured(tmp_path: Path) -> None:
    log = tmp_path / "pgdata/pg_wal"
    (log / "archive_status").mkdir(parents=True)
    (log / "000000010000000000000001").write_bytes(b"x" * 1000)
    (log / "archive_status/000000010000000000000001.ready").write_bytes(b"y" * 10)
    found = measure(tmp_path / "pgdata")
    status = os.statvfs(tmp_path)
    assert found is not None
    assert found.wal == 1010
    assert found.size == status.f_blocks * status.f_frsize
    assert 0 < found.free <= found.size


def test_before_there_is_a_cluster_the_volume_is_measured_all_the_same(tmp_path: Path) -> None:
    found = measure(tmp_path / "pgdata")
    assert found is not None
    assert found.wal is None


def test_what_cannot_be_looked_at_is_not_known(tmp_path: Path) -> None:
    assert measure(tmp_path / "none/pgdata") is None


def test_a_watch_looks_again_and_again_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "INTERVAL", 0.0)
    monkeypatch.setattr(space, "SHARE", 0)
    looks, several = [], threading.Event()

    def look(pgdata: Path) -> Space:
        looks.append(pgdata)
        if len(looks) > 5:
            several.set()
        return Space(3, len(looks), None)

    monkeypatch.setattr(space, "measure", look)
    watch = SpaceWatch(tmp_path)
    assert watch.space is None
    watch.start()
    assert several.wait(WITHIN)
    watch.end()
    assert watch.space is not None
    (left,) = [thread for thread in threading.enumerate() if thread.name == "space"] or [None]
    if left is not None:
        left.join(WITHIN)
        assert not left.is_alive()


def test_a_volume_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hang(_: Path) -> None:
        asked.set()
        go_on.wait(WITHIN)

    monkeypatch.setattr(space, "measure", hang)
    watch = SpaceWatch(tmp_path)
    watch.start()
    assert asked.wait(WITHIN)
    watch.end()
    (left,) = [thread for thread in threading.enumerate() if thread.name == "space"]
    assert left.daemon  # which the end of the process does not wait for
    go_on.set()
    left.join(WITHIN)
    assert not left.is_alive()
