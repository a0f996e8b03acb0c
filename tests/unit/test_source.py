"""A Postgres that memories come from: which can be read here, and what is told of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar import freezing, source
from sidecar.errors import RefusedError
from sidecar.operations import Kind, Operation


@pytest.mark.parametrize(
    ("theirs", "told"),
    [(19, "is PostgreSQL 19, and this is 18, which cannot read a newer one"), (12, "can be proved from 13 on")],
)
def test_majors_that_cannot_be_read(theirs: int, told: str) -> None:
    with pytest.raises(RefusedError, match=told):
        source.check_major(theirs, 18, "postgresql://anna@db/m")


@pytest.mark.parametrize("theirs", [13, 16, 18])
def test_majors_that_can(theirs: int) -> None:
    source.check_major(theirs, 18, "postgresql://anna@db/m")


def test_what_a_driver_says_becomes_one_line() -> None:
    several = OSError(
        "connection failed: connection to server failed: FATAL:  no\nMultiple connection attempts failed."
    )
    assert source.said(several) == "connection to server failed: FATAL:  no"
    assert source.said(TimeoutError()) == "TimeoutError"


def test_cancelled_before_the_exchange_is_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError):
        source.check_served(Operation(Kind.MIGRATE), asyncio.CancelledError())


def test_cancelled_after_the_exchange_is_done_and_says_what_is_not_known() -> None:
    operation = Operation(Kind.MIGRATE, report={"kept": "hindsight_kept_x", "unproved": ["one"]})
    source.check_served(operation, asyncio.CancelledError())
    assert operation.report["unproved"] == [
        "one",
        "whether anything was written at the source since it was read is not known (it was cancelled before that)",
    ]


def test_the_sentence_that_undoes_a_freeze_quotes_the_name() -> None:
    assert freezing.by_hand('my"db').endswith('ALTER DATABASE "my""db" RESET default_transaction_read_only;')


def test_a_note_that_was_left_is_told(tmp_path: Path) -> None:
    told: list[Any] = []
    freezing.warn_of_frozen(tmp_path, lambda event, **more: told.append((event, more)))
    assert told == []
    (tmp_path / "frozen.json").write_text(json.dumps({"source": "postgresql://a@b/c", "undo": "SET ..."}))
    freezing.warn_of_frozen(tmp_path, lambda event, **more: told.append((event, more)))
    [(event, more)] = told
    assert "may still accept no writes" in event
    assert more == {"source": "postgresql://a@b/c", "undo": "SET ..."}
