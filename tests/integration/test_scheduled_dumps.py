"""Dumps that the sidecar makes by a schedule: made up for at a start, verified, told, kept by count, failing in plain sight.

The schedule's time comes once a year and not within months, so that what is made is what was missed, and nothing else.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from administrator import ask, finished
from harness import RunningSidecar, call, on_a_small_volume, wait_for

from sidecar import archive
from sidecar.archive import DUMP, Archive

YEARLY = f"0 0 1 {(datetime.now(UTC).month + 5) % 12 + 1} *"
SETTINGS = {"HINDSIGHT_SIDECAR_DUMP_SCHEDULE": YEARLY, "HINDSIGHT_SIDECAR_DUMP_KEEP": "1"}
TEXT = "The lighthouse keeper feeds two goats."
SIZE = 320  # MiB of the small volume, of which a fresh database takes half


def metrics(sidecar: RunningSidecar) -> dict[str, float]:
    """Return the samples about scheduled dumps."""
    prefix = "hindsight_sidecar_scheduled_"
    lines = call(sidecar.control_port, "/metrics").body.decode().splitlines()
    samples = (line.removeprefix(prefix).rpartition(" ") for line in lines if line.startswith(prefix))
    return {name: float(value) for name, _, value in samples}


def ends(sidecar: RunningSidecar) -> dict[str, float]:
    """Return how scheduled dumps of this start ended, without the outcomes that none had."""
    counts = {name: value for name, value in metrics(sidecar).items() if name.startswith("dumps_total")}
    assert counts, "no schedule"
    return {name.partition('"')[2].rstrip('"}'): value for name, value in counts.items() if value}


def begun(sidecar: RunningSidecar) -> list[dict[str, Any]]:
    """Return the operations of this start that the schedule began."""
    found = ask(sidecar, "GET", "/v1/operations").json()["operations"]
    return [one for one in found if one["report"].get("scheduled")]


def listed(sidecar: RunningSidecar) -> dict[str, bool]:
    """Return the dumps by id, and whether the schedule made each."""
    return {one["id"]: one["scheduled"] for one in ask(sidecar, "GET", "/v1/dumps").json()["dumps"]}


def age(sidecar: RunningSidecar, identifier: str) -> str:
    """Let a dump on the volume be three years old, with nothing else changed; return its id then."""
    directory = sidecar.volume / "dumps"
    manifest = Archive.open(directory / identifier).manifest
    made = manifest.made - timedelta(days=3 * 366)
    older = directory / archive.new_id(made)
    (directory / identifier).rename(older)
    archive.finish(older, replace(manifest, id=older.name, made=made))
    return older.name


def test_what_was_missed_is_made_up_for_and_the_oldest_goes(make_sidecar: Callable[..., RunningSidecar]) -> None:
    sidecar = make_sidecar(**SETTINGS).start_ready()
    # A volume without any gets its first at once.
    wait_for(lambda: ends(sidecar), 60, "a scheduled dump")
    assert ends(sidecar) == {"done": 1}
    (operation,) = begun(sidecar)
    (first,) = listed(sidecar)
    assert (operation["kind"], operation["outcome"], operation["phase"]) == ("dump", "done", "delete old dumps")
    assert (operation["report"]["dump"]["id"], operation["report"]["deleted"]) == (first, [])
    phases = [
        event["phase"]
        for event in sidecar.events()
        if event.get("operation") == operation_name(operation) and "phase" in event
    ]
    assert phases == ["dump", "hash", "verify", "delete old dumps"]
    told = sidecar.health()["dumps"]
    assert (told["schedule"], told["last_failure"]) == (YEARLY, None)
    assert told["last_success"] == {"time": operation["report"]["dump"]["made"], "id": first}
    assert datetime.fromisoformat(told["next"]) > datetime.now(UTC)
    made = datetime.fromisoformat(told["last_success"]["time"])
    assert metrics(sidecar)["dump_last_success_timestamp_seconds"] == pytest.approx(made.timestamp())
    assert "dump_last_failure_timestamp_seconds" not in metrics(sidecar)

    # By hand there is another, with a memory in it.
    sidecar.retain("scheduled", [TEXT])
    by_hand = finished(sidecar, ask(sidecar, "POST", "/v1/dumps"))["report"]["dump"]["id"]
    assert listed(sidecar) == {first: True, by_hand: False}
    assert [line.split()[4] for line in sidecar.command("dumps").stdout.splitlines()[1:]] == ["hand", "schedule"]
    assert f"dumps     latest {first[:4]}" in sidecar.command("status").stdout
    assert sidecar.stop() == 0

    # Years later: one is made for all the times that were missed, and the oldest of the schedule goes.
    first, by_hand = age(sidecar, first), age(sidecar, by_hand)
    sidecar.start_ready()
    wait_for(lambda: ends(sidecar), 60, "a scheduled dump")
    assert ends(sidecar) == {"done": 1}
    (operation,) = begun(sidecar)
    second = operation["report"]["dump"]["id"]
    assert operation["report"]["deleted"] == [first]
    assert listed(sidecar) == {second: True, by_hand: False}
    assert sidecar.health()["dumps"]["last_success"]["id"] == second
    # What it made is what an operator fetches, and it holds the memory.
    fetched = sidecar.home / "fetched.tar"
    assert sidecar.command("dump", "--id", second, "-o", str(fetched)).returncode == 0
    verified = sidecar.command("verify", str(fetched))
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "memories  1\n" in verified.stdout
    assert sidecar.stop() == 0

    # Soon after, nothing is due; what the volume tells is told at once.
    sidecar.start_ready()
    assert (ends(sidecar), begun(sidecar)) == ({}, [])
    assert sidecar.health()["dumps"]["last_success"]["id"] == second
    assert sidecar.stop() == 0


def test_one_that_cannot_be_written_fails_in_plain_sight(make_sidecar: Callable[..., RunningSidecar]) -> None:
    sidecar = make_sidecar(**SETTINGS).start_ready()
    wait_for(lambda: ends(sidecar), 60, "a scheduled dump")
    (first,) = listed(sidecar)
    assert sidecar.stop() == 0
    first = age(sidecar, first)
    dumps = sidecar.volume / "dumps"
    dumps.chmod(0o500)
    sidecar.start_ready()
    wait_for(lambda: ends(sidecar), 60, "the end of a scheduled dump")
    dumps.chmod(0o700)
    assert ends(sidecar) == {"failed": 1}
    told = sidecar.health()["dumps"]
    assert "Permission denied" in told["last_failure"]["reason"]
    assert str(dumps) in told["last_failure"]["reason"]
    assert told["last_success"]["id"] == first
    seen = metrics(sidecar)
    assert seen["dump_last_failure_timestamp_seconds"] > seen["dump_last_success_timestamp_seconds"]
    assert sidecar.health_status() == 200
    assert "last failure" in sidecar.command("status").stdout
    assert listed(sidecar) == {first: True}
    assert [event for event in sidecar.events() if event["event"].startswith("a scheduled dump failed")]
    assert len(begun(sidecar)) == 1  # and it is not tried again before the next time
    assert sidecar.stop() == 0


@contextlib.contextmanager
def held_up(sidecar: RunningSidecar) -> Iterator[None]:
    """Let no dump get on: pg_dump waits for a table that is locked, from before the sidecar is ready."""

    def connect() -> psycopg.Connection | None:
        with contextlib.suppress(psycopg.OperationalError):
            return psycopg.connect(host=str(sidecar.run_dir), user="hindsight", dbname="hindsight")
        return None

    connection = wait_for(connect, 60, "Postgres up")
    try:
        connection.execute("LOCK TABLE public.held")
        yield
    finally:
        connection.close()


def running(sidecar: RunningSidecar) -> str | None:
    """Return the id of the scheduled dump that runs."""
    return next((str(one["id"]) for one in begun(sidecar) if one["outcome"] == "running"), None)


@pytest.mark.long
def test_one_that_runs_is_an_operation_like_any_other_and_a_stop_ends_it(
    make_sidecar: Callable[..., RunningSidecar],
) -> None:
    sidecar = make_sidecar(**SETTINGS).start_ready()
    wait_for(lambda: ends(sidecar), 60, "a scheduled dump")
    with psycopg.connect(
        host=str(sidecar.run_dir), user="hindsight", dbname="hindsight", autocommit=True
    ) as connection:
        connection.execute("CREATE TABLE public.held ()")
    (first,) = listed(sidecar)
    assert sidecar.stop() == 0
    first = age(sidecar, first)

    sidecar.start()
    with held_up(sidecar):
        sidecar.wait_ready()
        identifier = wait_for(lambda: running(sidecar), 30, "a scheduled dump that runs")
        another = ask(sidecar, "POST", "/v1/dumps")
        assert (another.status, another.json()["operation"]) == (409, identifier)
        assert ask(sidecar, "DELETE", f"/v1/operations/{identifier}").json()["outcome"] == "cancelled"
        wait_for(lambda: ends(sidecar), 30, "its end told")
        assert ends(sidecar) == {"cancelled": 1}
        assert "cancelled" in sidecar.health()["dumps"]["last_failure"]["reason"]
        assert [path.name for path in (sidecar.volume / "dumps").iterdir()] == [first]
        assert sidecar.stop() == 0

    # What was cancelled counts as missed after the next start; a stop ends it as well, and leaves nothing.
    sidecar.start()
    with held_up(sidecar):
        sidecar.wait_ready()
        wait_for(lambda: running(sidecar), 30, "a scheduled dump that runs")
        assert sidecar.stop() == 0
        assert [path.name for path in (sidecar.volume / "dumps").iterdir()] == [first]

    sidecar.start_ready()
    wait_for(lambda: ends(sidecar), 60, "a scheduled dump")
    assert ends(sidecar) == {"done": 1}
    assert first not in listed(sidecar)
    assert sidecar.stop() == 0


def operation_name(operation: dict[str, Any]) -> str:
    """Return what the log calls it."""
    return f"{operation['kind']} {operation['id']}"


@pytest.fixture
def small(make_sidecar: Callable[..., RunningSidecar]) -> Iterator[RunningSidecar]:
    """Return a sidecar on a small volume of its own."""
    made = make_sidecar(**SETTINGS)
    with on_a_small_volume(made, SIZE):
        yield made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small volume")
def test_where_space_is_short_nothing_is_deleted_for_a_new_one(small: RunningSidecar) -> None:
    small.start_ready()
    wait_for(lambda: ends(small), 60, "a scheduled dump")
    (first,) = listed(small)
    assert small.stop() == 0
    first = age(small, first)
    # Enough to serve memories, too little for a dump.
    free = os.statvfs(small.volume).f_bavail * os.statvfs(small.volume).f_frsize
    (small.volume / "filler").write_bytes(bytes(free - 60 * 2**20))
    small.start_ready()
    wait_for(lambda: ends(small), 60, "the end of a scheduled dump")
    assert ends(small) == {"refused": 1}
    told = small.health()["dumps"]
    assert "MiB free, and a dump of this database may take" in told["last_failure"]["reason"]
    assert told["last_success"]["id"] == first
    assert listed(small) == {first: True}
    assert (small.volume / "dumps" / first / DUMP).stat().st_size > 0
    assert small.health_status() == 200
    assert small.stop() == 0
