"""Cancelled at any moment, an adoption leaves the cluster its name; what is kept is deleted whole or listed whole."""

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar import adoption, cluster_exchange
from sidecar.administration import Administration
from sidecar.adoption import Adoption
from sidecar.foreign_cluster import Foreign
from sidecar.operations import BusyError, Kind, Operation
from sidecar.restoring import Wish
from sidecar.settings import Settings


class Served:
    """What is asked of a supervisor, done at once."""

    async def take_postgres_down(self, operation: str) -> None:
        pass

    async def bring_postgres_up(self) -> None:
        pass

    async def bring_api_back(self) -> None:
        pass

    def over(self) -> None:
        pass


@pytest.fixture
def pgdata(tmp_path: Path) -> Path:
    for name in ("pgdata", "pgdata.adopting-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    return tmp_path / "pgdata"


async def _cancelled_in_the_exchange(pgdata: Path, operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, begun, go = cluster_exchange.exchange, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(*names: Path) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(10)
        exchange(*names)

    restoring: Any = SimpleNamespace(served=Served())
    new = pgdata.with_name("pgdata.adopting-new")
    staged: Any = None
    with monkeypatch.context() as patch:
        patch.setattr(cluster_exchange, "exchange", slow)
        foreign = Foreign.seen(pgdata, 18)
        task = asyncio.create_task(Adoption(restoring)._serve(foreign, new, staged, Wish(), operation))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_cancelled_in_the_middle_of_the_exchange(pgdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Operation(Kind.ADOPT)
    asyncio.run(_cancelled_in_the_exchange(pgdata, operation, monkeypatch))
    assert (pgdata / "is").read_text() == "pgdata"
    assert (operation.report, operation.phase) == ({}, "serve")
    assert adoption.kept(pgdata) == []


def test_what_is_half_deleted_is_not_listed(pgdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = pgdata.with_name("pgdata.kept-20260101t000000z")
    kept.mkdir()
    assert [one.name for one in adoption.kept(pgdata)] == [kept.name]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda _: None)  # killed before it did anything
        adoption.drop_kept(kept)
    assert adoption.kept(pgdata) == []
    removed: list[str] = []
    adoption.sweep(pgdata, lambda _, *, path: removed.append(Path(path).name))
    assert removed == ["pgdata.adopting-dropped-20260101t000000z", "pgdata.adopting-new"]
    assert [path.name for path in pgdata.parent.iterdir()] == ["pgdata"]


def test_a_foreign_cluster_has_no_kept_databases_and_may_have_clusters_beside_it(pgdata: Path) -> None:
    (pgdata / "PG_VERSION").write_text("18\n")
    pgdata.with_name("pgdata.kept-20260101t000000z").mkdir()
    nothing: Any = None
    administration = Administration(Settings(PGDATA=pgdata, run_dir=pgdata.parent), nothing, nothing)
    assert asyncio.run(administration.kept()) == []
    assert [one.name for one in asyncio.run(administration.kept_clusters())] == ["pgdata.kept-20260101t000000z"]


def test_what_an_operation_may_have_to_serve_again_is_not_dropped(pgdata: Path) -> None:
    kept = pgdata.with_name("pgdata.kept-20260101t000000z")
    kept.mkdir()
    nothing: Any = None

    async def drop() -> None:
        administration = Administration(Settings(PGDATA=pgdata, run_dir=pgdata.parent), nothing, nothing)
        go = asyncio.Event()

        async def work(operation: Operation) -> None:
            operation.report["kept"] = kept.name
            await go.wait()

        administration.operations.start(Kind.ADOPT, work)
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await administration.drop_kept(kept.name)
        await administration.operations.end()
        await administration.drop_kept(kept.name)

    asyncio.run(drop())
    assert not kept.exists()
