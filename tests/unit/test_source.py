"""A Postgres that memories come from: which can be read here, and what is told of it."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

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


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, None),
        ({"dimensions": {"public": 384, "tenant": -1}}, None),
        (
            {"dimensions": {"public": 768}},
            "the memories have 768 in schema public dimensions, and the model at hand 384; use the model",
        ),
        (
            {"extensions": ["plpgsql", "vector", "hstore"]},
            "postgresql://anna@db/m has extensions that hindsight-api does not use, and",
        ),
        (
            {"revisions": {"public": ["newer"]}},
            "the schema of postgresql://anna@db/m is at revision newer, which the hindsight-api here",
        ),
    ],
)
def test_a_source_is_looked_at_before_anything_is_read_or_frozen(
    found: dict[str, Any], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows:
        async def fetchall(self) -> list[dict[str, str]]:
            return [{"name": name} for name in found.get("extensions", ["plpgsql", "vector", "pg_trgm", "btree_gin"])]

    class Connection:
        info = SimpleNamespace(server_version=180001)

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def execute(self, _: str) -> Rows:
            return Rows()

    monkeypatch.setattr(source, "memory_schemas", lambda _: asyncio.sleep(0, found.get("dimensions", {"public": 384})))
    monkeypatch.setattr(
        source, "alembic_revisions", lambda _: asyncio.sleep(0, found.get("revisions", {"public": ["head"]}))
    )
    address: Any = SimpleNamespace(
        parameters={"host": "db", "user": "anna", "dbname": "m"}, connect=lambda: asyncio.sleep(0, Connection())
    )
    looked = source.check(address, Operation(Kind.MIGRATE), 18, frozenset({"head"}), 384)
    if told is None:
        asyncio.run(looked)
        return
    with pytest.raises(RefusedError) as refused:
        asyncio.run(looked)
    assert str(refused.value).startswith(told)


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


@pytest.mark.parametrize(
    ("value", "frozen"),
    [
        (None, False),
        ("on", True),
        ("TRUE", True),
        ("yes", True),
        ("1", True),
        ("off", False),
        ("no", False),
        ("0", False),
    ],
)
def test_whether_a_database_is_frozen_is_what_it_says_itself(value: str | None, frozen: bool) -> None:  # noqa: FBT001 - a parameter
    class Connection:
        async def execute(self, query: str, _: object) -> Any:
            assert "pg_db_role_setting" in query, "of a session a role's own setting hides it"
            row = None if value is None else {"value": value}
            return SimpleNamespace(fetchone=lambda: asyncio.sleep(0, row))

    connection: Any = Connection()
    assert asyncio.run(freezing._is_frozen(connection)) is frozen


def test_a_note_that_was_left_is_told(tmp_path: Path) -> None:
    told: list[Any] = []
    freezing.warn_of_frozen(tmp_path, lambda event, **more: told.append((event, more)))
    assert told == []
    (tmp_path / "frozen.json").write_text(json.dumps({"source": "postgresql://a@b/c", "undo": "SET ..."}))
    freezing.warn_of_frozen(tmp_path, lambda event, **more: told.append((event, more)))
    [(event, more)] = told
    assert "may still accept no writes" in event
    assert more == {"source": "postgresql://a@b/c", "undo": "SET ..."}


@pytest.mark.parametrize(
    "content", [b"", b'{"source": "postg', b"[]", b"{}", b"null", b"\xff\xfe", bytes(100), b"[" * 100_000]
)
def test_a_note_that_cannot_be_read_is_told_too(content: bytes, tmp_path: Path) -> None:
    told: list[Any] = []
    (tmp_path / "frozen.json").write_bytes(content)
    freezing.warn_of_frozen(tmp_path, lambda event, **more: told.append((event, more)))
    [(event, more)] = told
    assert event.endswith("may still accept no writes, and the note of it cannot be read")
    assert more["undo"].endswith('ALTER DATABASE "DATABASE" RESET default_transaction_read_only;')


class KilledError(BaseException):
    """The process ends here."""


@contextlib.asynccontextmanager
async def _nobody() -> AsyncIterator[None]:
    yield


def test_a_note_is_there_whole_or_not_at_all_and_before_anything_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut in the middle of its writing left half of it, and then every start ended with a fault."""

    def killed(*_: object) -> None:
        raise KilledError

    async def not_so(*_: object) -> bool:
        return False

    async def migrate() -> None:
        address: Any = SimpleNamespace(
            parameters={"host": "db", "user": "anna", "dbname": "m"}, connect=lambda: asyncio.sleep(0, _nobody())
        )
        async with freezing.frozen(address, tmp_path, Operation(Kind.MIGRATE)):
            pytest.fail("it was frozen without a note on the disk")

    monkeypatch.setattr(freezing, "_is_frozen", not_so)
    monkeypatch.setattr(freezing, "_freeze", pytest.fail)
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KilledError):
        asyncio.run(migrate())
    assert not (tmp_path / "frozen.json").exists()


def test_no_note_is_told_where_there_can_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    freezing.warn_of_frozen(tmp_path / "file", pytest.fail)
    freezing.warn_of_frozen(tmp_path / "gone", pytest.fail)
