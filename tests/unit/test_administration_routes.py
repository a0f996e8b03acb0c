"""What the administration endpoints answer where nothing can be done: a sentence, before anything was sent or touched."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from sidecar import control, control_listener, database
from sidecar.administration import Administration
from sidecar.errors import TransientError
from sidecar.metrics import Metrics
from sidecar.settings import Settings
from sidecar.status import Status

BRINGING_IN: list[dict[str, Any]] = [
    {"method": "PUT", "url": "/v1/restores", "content": b"PGDMP"},
    {"method": "POST", "url": "/v1/restores", "json": {"dump": "20240301T101112Z-ab12"}},
    {"method": "POST", "url": "/v1/restores", "json": {"upload": "20240301T101112Z-ab12"}},
    {"method": "POST", "url": "/v1/migrations", "json": {"from": "postgresql://anna@db/m"}},
]


class Parts(SimpleNamespace):
    """What is at hand, but for PostgreSQL's programs where `why` says so."""

    model, known_revisions = object(), frozenset[str]()
    why: str | None = None

    @property
    def programs(self) -> object:
        if self.why is not None:
            raise TransientError(self.why)
        return object()


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def administration(parts: Any, tmp_path: Path) -> Administration:
    nobody: Any = None
    return Administration(Settings(PGDATA=tmp_path / "pgdata", run_dir=tmp_path), parts, nobody)


@pytest.fixture
def asked(administration: Administration) -> Callable[..., Any]:
    """Return a function that sends one request to the socket's listener."""
    status, nobody = Status(), Settings()
    app = control.build(nobody, status, Metrics(status))
    administration.attach_to(app)
    client = TestClient(control_listener.Marked(app, control_listener.SOCKET, None), base_url="http://localhost")
    return client.request


def refused(answer: Any, status: int) -> str:
    """Return the sentence of a problem."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    if status == 503:
        assert answer.headers["retry-after"] == "2"
    sentence = str(answer.json()["detail"])
    assert "\n" not in sentence
    return sentence


# Bringing memories in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", BRINGING_IN, ids=lambda one: f"{one['method']} {one['url']} {one.get('json')}")
def test_where_it_cannot_be_done_the_state_says_so_and_no_body_is_taken(
    request_: dict[str, Any], asked: Any, parts: Parts, administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.why = "damaged-cluster: PGDATA has files and no PG_VERSION"
    monkeypatch.setattr(administration, "receive", pytest.fail)
    assert refused(asked(**request_), 503) == parts.why
    assert not administration.dumps_directory.exists()


@pytest.mark.parametrize("request_", BRINGING_IN, ids=lambda one: f"{one['method']} {one['url']} {one.get('json')}")
def test_into_a_cluster_without_our_database_nothing_is_brought(
    request_: dict[str, Any], asked: Any, administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> None:
        raise psycopg.OperationalError('connection failed: FATAL:  database "hindsight" does not exist\n')

    monkeypatch.setattr(database, "connect", gone)
    monkeypatch.setattr(administration, "receive", pytest.fail)
    sentence = refused(asked(**request_), 422)
    assert 'database "hindsight" does not exist' in sentence
    assert "put a copy of the volume back, or move" in sentence


# Files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "there is no space for it"),
        (errno.EDQUOT, "there is no space for it"),
        (errno.EACCES, "the volume cannot be used for it"),
        (errno.EIO, "the volume cannot be used for it"),
    ],
)
def test_a_disk_that_fails_is_no_defect_of_ours(
    number: int, told: str, asked: Any, administration: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(administration.dumps_directory)

    async def possible() -> None:
        pass

    def fails(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(administration, "check_possible", possible)
    for name in ("_make_incoming", "open_dump", "dumps", "delete_dump"):
        monkeypatch.setattr(administration, name, fails)
    for method, url in (
        ("PUT", "/v1/restores"),
        ("GET", "/v1/dumps"),
        ("GET", "/v1/dumps/20240301T101112Z-ab12"),
        ("DELETE", "/v1/dumps/20240301T101112Z-ab12"),
    ):
        sentence = refused(asked(method, url), 503)
        assert sentence.startswith(f"{told} ({path}: {os.strerror(number)}); ")


def test_a_directory_that_the_sidecar_may_not_write_is_told(asked: Any, administration: Administration) -> None:
    administration.dumps_directory.parent.joinpath("dumps").write_text("a file, which no directory can be made in")
    sentence = refused(asked("GET", "/v1/dumps/20240301T101112Z-ab12"), 503)
    assert "Not a directory" in sentence
