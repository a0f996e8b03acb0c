"""A full volume, in every phase: told as what it is, nothing acknowledged is lost, and freeing some is enough."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import made
import psycopg
import pytest
from administrator import ask, finished
from faults import Alive, Filler, FullOfFiles, fill_the_log, needs_root, on_a_disk, sql, wait_no_space
from harness import RunningSidecar, reachable_directory, store_as_they_are, wait_for

pytestmark = needs_root
SIZE = 512  # MiB, of which a fresh database takes a third
BANK = "full"
FIRST = "The ferryman counts his passengers twice."


@pytest.fixture(scope="module")
def home(model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a sidecar on a small disk of its own, not started yet."""
    with reachable_directory() as directory:
        directory.chmod(0o777)
        sidecar = RunningSidecar(directory, made.api_venv(), model_dir)
        with on_a_disk(sidecar, SIZE):
            yield sidecar


@pytest.fixture
def full(home: RunningSidecar) -> Iterator[RunningSidecar]:
    """Return it, ready, with a memory."""
    if home.process is None:
        home.start()
    home.wait_ready()
    if home.memory(f"/banks/{BANK}/memories/list").status != 200:
        store_as_they_are(home, BANK, [FIRST])
    yield home
    Filler(home).gone()


def stored(sidecar: RunningSidecar) -> list[str]:
    found = sidecar.memory(f"/banks/{BANK}/memories/list?limit=10000").json()["items"]
    return [item["text"] for item in found]


def test_a_disk_that_is_full_before_the_first_start_and_in_its_phases(home: RunningSidecar) -> None:
    filler = Filler(home)
    filler.leave(0)
    home.start()
    with Alive(home, from_now=False) as alive:
        wait_no_space(home)
        assert not home.pgdata.exists()
        filler.leave(30)  # enough for files to be made, and not for a cluster
        wait_for(lambda: home.log_text().count("making the cluster") >= 1, 30, "a cluster begun")
        wait_no_space(home)
        assert not home.pgdata.exists()
        filler.gone()
        wait_for(home.pgdata.exists, 60, "a cluster")
        filler.leave(0)  # before hindsight-api has made its tables
        wait_for(lambda: home.health()["subject"] == "no-space", 60, "that its migration finds no room")
        wait_no_space(home)
        filler.gone()
        home.wait_ready()
    alive.check()


def refused(sidecar: RunningSidecar) -> bool:
    items = {"items": [{"content": "A note that finds no room. " * 50} for _ in range(20)], "async": False}
    return sidecar.memory(f"/banks/{BANK}/memories", "POST", items, timeout=60).status != 200


def test_one_that_fills_up_when_ready(full: RunningSidecar) -> None:
    filler = Filler(full)
    filler.leave(0)
    acknowledged = []

    def next_one() -> bool:
        text = f"Note {len(acknowledged)} was stored while the disk filled up."
        answer = full.memory(f"/banks/{BANK}/memories", "POST", {"items": [{"content": text}], "async": False})
        if answer.status == 200:
            acknowledged.append(text)
        return answer.status != 200

    with Alive(full) as alive:
        wait_for(next_one, 90, "a memory refused")
        wait_no_space(full)
        filler.gone()
        full.wait_ready(60)
    alive.check()
    there = stored(full)
    assert FIRST in there
    lost = [text for text in acknowledged if text not in there]
    assert lost == [], f"{len(lost)} of {len(acknowledged)} are not among {there}"


def test_one_that_has_no_room_for_the_log(full: RunningSidecar) -> None:
    """Postgres ends where it cannot write its log, and cannot start before there is room."""
    Filler(full).leave(0)
    pid = full.pid_of("postgres")
    fill_the_log(full)
    wait_no_space(full)
    Filler(full).gone()
    full.wait_ready()
    assert FIRST in stored(full)
    assert full.health()["components"]["postgres"]["restarts"] >= (full.pid_of("postgres") != pid)


def test_one_that_has_no_room_for_a_checkpoint(full: RunningSidecar) -> None:
    with sql(full) as connection:
        connection.execute(
            "CREATE TABLE public.dirty AS SELECT i, repeat('x', 500) AS text FROM generate_series(1, 20000) i"
        )
        Filler(full).leave(0)
        with contextlib.suppress(psycopg.Error):
            connection.execute("INSERT INTO public.dirty SELECT i, repeat('x', 500) FROM generate_series(1, 200000) i")
        with contextlib.suppress(psycopg.Error):
            connection.execute("CHECKPOINT")
    wait_no_space(full)
    Filler(full).gone()
    full.wait_ready()
    with sql(full) as connection:
        assert connection.execute("SELECT count(*) FROM public.dirty").fetchone() == (20000,)
        connection.execute("DROP TABLE public.dirty")


def test_one_that_fills_up_under_a_dump_and_under_a_restore(full: RunningSidecar) -> None:
    """What is moved fails and says so; what is served is served, and nothing half done stays."""
    with sql(full) as connection:  # a third of a gigabyte would not fit a second time, and takes little in a dump
        connection.execute(
            "CREATE TABLE public.bulk AS SELECT i, repeat('y', 400) AS text FROM generate_series(1, 220000) i"
        )
        connection.execute("ALTER TABLE public.bulk OWNER TO hindsight")
        connection.execute("CHECKPOINT")
    made_one = finished(full, ask(full, "POST", "/v1/dumps"))
    assert made_one["outcome"] == "done", made_one
    Filler(full).leave(20)
    failed = finished(full, ask(full, "POST", "/v1/dumps"))
    assert failed["outcome"] == "refused"
    assert "MiB free" in failed["error"]
    identifier = made_one["report"]["dump"]["id"]
    raw = (full.volume / "dumps" / identifier / "memory.dump").read_bytes()
    Filler(full).leave(90)  # the dump is small, and its manifest says how large the database was
    begun = ask(full, "POST", "/v1/restores", {"dump": identifier, "dry_run": True})
    failed = finished(full, begun)
    assert (failed["outcome"], failed["phase"]) == ("refused", "check"), failed
    assert re.fullmatch(
        rf"restoring \d+ MiB may take \d+ MiB beside the live database, and {full.volume} has \d+ MiB free; "
        r"delete old dumps or kept databases, or grow the volume \(or dump anew after VACUUM FULL there, where much was deleted\)",
        failed["error"],
    )
    too_large = ask(full, "PUT", "/v1/restores", bytes(20 * 2**20))
    assert too_large.status == 422, too_large.body
    assert too_large.json()["detail"].startswith("the upload and what is unpacked of it take 40 MiB, and ")
    assert [path.name for path in (full.volume / "dumps").iterdir()] == [identifier]
    assert full.health_status() == 200
    failed = finished(full, ask(full, "PUT", "/v1/restores?dry_run=true", raw))  # nothing tells it of this one
    assert failed["outcome"] == "failed", failed
    assert "No space left" in failed["error"], failed
    assert [path.name for path in (full.volume / "dumps").iterdir()] == [identifier]
    Filler(full).gone()
    full.wait_ready()
    assert FIRST in stored(full)
    with sql(full) as connection:
        staged = "SELECT datname FROM pg_database WHERE datname ~ 'staging'"
        wait_for(lambda: not connection.execute(staged).fetchall(), 20, "that what was staged is dropped")
        connection.execute("DROP TABLE public.bulk")
    assert ask(full, "DELETE", f"/v1/dumps/{made_one['report']['dump']['id']}").status == 204


def test_one_that_has_no_inodes_left(full: RunningSidecar) -> None:
    files = FullOfFiles(full)
    files.fill()
    try:
        with sql(full) as connection, pytest.raises(psycopg.Error, match="No space left on device"):
            connection.execute("CREATE TABLE public.none_left ()")
        wait_no_space(full, says=" MiB and 0 inodes free now")
    finally:
        files.gone()
    full.wait_ready()
    assert FIRST in stored(full)
    assert full.stop() == 0
