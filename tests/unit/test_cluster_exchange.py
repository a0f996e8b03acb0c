"""A kill at any moment of an exchange leaves the one data directory or the other, after the next start."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from sidecar import cluster_exchange
from sidecar.cluster_exchange import JOURNAL, exchange, finish
from sidecar.errors import BlockedError, Reason


class KilledError(BaseException):
    """The process ends here."""


@pytest.fixture
def pgdata(tmp_path: Path) -> Path:
    for name in ("pgdata", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    return tmp_path / "pgdata"


def names(pgdata: Path) -> dict[str, str]:
    return {path.name: (path / "is").read_text() for path in pgdata.parent.iterdir() if path.is_dir()}


def test_both_get_their_names(pgdata: Path) -> None:
    exchange(pgdata, pgdata.with_name("new"), pgdata.with_name("old"))
    assert names(pgdata) == {"pgdata": "new", "old": "pgdata"}
    assert finish(pgdata) is None
    assert not list(pgdata.parent.glob(".exchange*"))


@pytest.mark.parametrize("killed_at", range(9))
def test_killed_at_any_step(killed_at: int, pgdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(100))

    def counted(deed: Any) -> Any:
        def do(*arguments: Any, **options: Any) -> Any:
            if next(steps) == killed_at:
                raise KilledError
            return deed(*arguments, **options)

        return do

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr(cluster_exchange.os, "fsync", counted(lambda _: None))
        patch.setattr(cluster_exchange.volume, "sync", counted(lambda _: None))
        with pytest.raises(KilledError):
            exchange(pgdata, pgdata.with_name("new"), pgdata.with_name("old"))
    written = (pgdata.parent / JOURNAL).exists()
    finish(pgdata)
    untouched, exchanged = {"pgdata": "pgdata", "new": "new"}, {"pgdata": "new", "old": "pgdata"}
    assert names(pgdata) in (untouched, exchanged)
    assert names(pgdata) == exchanged or not written
    assert finish(pgdata) is None


@pytest.mark.parametrize("failing", ["new", "pgdata"])
def test_a_rename_that_fails_changes_nothing(failing: str, pgdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == failing:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="Input/output error"):
            exchange(pgdata, pgdata.with_name("new"), pgdata.with_name("old"))
    assert names(pgdata) == {"pgdata": "pgdata", "new": "new"}
    assert finish(pgdata) is None


def test_a_name_that_is_taken(pgdata: Path) -> None:
    pgdata.with_name("old").mkdir()
    with pytest.raises(FileExistsError, match="is there already; move it away"):
        exchange(pgdata, pgdata.with_name("new"), pgdata.with_name("old"))
    assert not (pgdata.parent / JOURNAL).exists()


def test_what_was_to_come_is_gone(pgdata: Path) -> None:
    (pgdata.parent / JOURNAL).write_text('{"incoming": "new", "outgoing": "old"}')
    pgdata.rename(pgdata.with_name("old"))
    shutil.rmtree(pgdata.with_name("new"))
    finish(pgdata)
    assert names(pgdata) == {"pgdata": "pgdata"}


def test_what_cannot_be_read_is_left_alone(pgdata: Path) -> None:
    (pgdata.parent / JOURNAL).write_text("{")
    with pytest.raises(
        BlockedError, match="says which data directories are to be exchanged, and cannot be read"
    ) as error:
        finish(pgdata)
    assert error.value.reason is Reason.DAMAGED_CLUSTER
    assert names(pgdata) == {"pgdata": "pgdata", "new": "new"}


def test_names_alone_are_taken_from_it(pgdata: Path) -> None:
    (pgdata.parent / JOURNAL).write_text('{"incoming": "/etc/new", "outgoing": "../old"}')
    assert finish(pgdata) == "old"
    assert names(pgdata) == {"pgdata": "new", "old": "pgdata"}
