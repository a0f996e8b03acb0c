"""Memories move with proof: from one sidecar to another, and back to what was served before."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from administrator import archive_of, ask, finished
from harness import RunningSidecar, wait_for
from remembered import QUESTIONS, Remembered, recalls


def fill(sidecar: RunningSidecar, memories: dict[str, Any]) -> None:
    for bank, items in memories["banks"].items():
        sidecar.retain(bank, [item["content"] for item in items])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("there", "here"), [("1.1.0", "1.1.0"), ("0.8.4", "1.1.0")])
def test_369_memories_come_across(
    make_sidecar: Any, memories: dict[str, Any], remembered: Callable[[str], Remembered], there: str, here: str
) -> None:
    source = remembered(there)
    target = make_sidecar(here).start_ready()
    restored = finished(target, ask(target, "PUT", "/v1/restores", source.archive))
    assert restored["outcome"] == "done", restored["error"]
    report = restored["report"]
    assert (report["memories"], report["unproved"]) == (369, [])
    assert report["recalled"]["memories"] == 10
    assert report["recalled"]["median_similarity"] > 0.8
    assert report["comparison"]["faults"] == []
    assert all(line["equal"] in (True, None) for line in report["comparison"]["tables"])
    wait_for(lambda: target.health()["memory_count"] == 369, 5, "369 memories counted")
    assert target.health()["origin"]["memories"] == 369
    after = recalls(target, memories)
    if there == here:
        assert after == source.answers
        assert len(after) == QUESTIONS
    for bank, items in memories["banks"].items():
        listed = target.memory(f"/banks/{bank}/memories/list?limit=500").json()
        assert sorted(item["text"] for item in listed["items"]) == sorted(item["content"] for item in items)
    assert target.stop() == 0
    assert target.start_ready().health()["memory_count"] == 369, "and after a restart"


@pytest.mark.timeout(600)
def test_369_memories_come_from_a_sidecar_that_runs(make_sidecar: Any, memories: dict[str, Any]) -> None:
    token = "a-token-of-the-source"  # noqa: S105 - no secret
    source = make_sidecar("0.8.4", HINDSIGHT_SIDECAR_TOKEN=token).start_ready()
    target = make_sidecar("0.8.4", HINDSIGHT_SIDECAR_SOURCE_TOKEN=token).start_ready()
    fill(source, memories)
    before = recalls(source, memories)
    done = target.command("migrate", "--from", f"http://127.0.0.1:{source.control_port}", "--yes")
    assert (done.returncode, done.stderr) == (0, ""), done
    line = done.stdout.splitlines()[-1]
    assert f"369 memories restored from http://127.0.0.1:{source.control_port} (sha256 " in line
    assert not {"LATER", "UNPROVED"} & set(done.stdout.split())
    assert recalls(target, memories) == before
    assert len(before) == QUESTIONS
    assert ask(source, "GET", "/v1/dumps").json() == {"dumps": []}
    assert source.health()["memory_count"] == 369
    assert token not in done.stdout + target.log_text() + source.log_text()


@pytest.mark.timeout(600)
def test_a_newer_version_keeps_a_copy_and_the_older_one_can_serve_it_again(make_sidecar: Any) -> None:
    old = make_sidecar("0.8.4").start_ready()
    old.retain("book", ["The spare key is under the blue flower pot."])
    assert old.stop() == 0
    new = make_sidecar("1.1.0", PGDATA=str(old.pgdata)).start_ready()
    new.retain("book", ["Anna drinks her tea without sugar."])
    [kept] = ask(new, "GET", "/v1/databases").json()["kept"]
    assert kept["name"].endswith("_before_1_1_0")
    assert new.stop() == 0
    new.start_ready()
    assert len(ask(new, "GET", "/v1/databases").json()["kept"]) == 1, "nothing to migrate, nothing to copy"
    assert new.stop() == 0
    old.start().wait_state("blocked(schema-newer)", 60)
    served = finished(old, ask(old, "POST", "/v1/rollback"))
    assert served["outcome"] == "done", served["error"]
    old.wait_ready()
    assert [found["text"] for found in old.recall("book", "Where can I find the key to the house?")] == [
        "The spare key is under the blue flower pot."
    ]
    assert old.stop() == 0


@pytest.mark.timeout(600)
def test_what_is_stored_meanwhile_is_not_lost_silently(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    sidecar.retain("book", ["The spare key is under the blue flower pot."])
    archive = archive_of(sidecar)
    over, acknowledged = threading.Event(), []

    def write() -> None:
        while not over.is_set():
            number = len(acknowledged)
            answer = sidecar.memory(
                "/banks/book/memories", "POST", {"items": [{"content": f"Memory number {number}."}], "async": False}
            )
            if answer.status == 200:
                acknowledged.append(f"Memory number {number}.")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        refused = finished(sidecar, ask(sidecar, "PUT", "/v1/restores", archive))
    finally:
        over.set()
        writer.join()
    assert refused["outcome"] == "refused", refused
    assert "public.memory_units: +" in refused["error"]
    sidecar.wait_ready()
    assert texts(sidecar) >= set(acknowledged)
    assert len(acknowledged) > 1

    done = finished(sidecar, ask(sidecar, "PUT", "/v1/restores", archive))
    assert done["outcome"] == "done", done["error"]
    assert texts(sidecar) == {"The spare key is under the blue flower pot."}
    assert (
        finished(sidecar, ask(sidecar, "POST", "/v1/rollback", {"database": done["report"]["kept"]}))["outcome"]
        == "done"
    )
    assert texts(sidecar) >= set(acknowledged)


def texts(sidecar: RunningSidecar) -> set[str]:
    listed = sidecar.memory("/banks/book/memories/list?limit=5000").json()
    return {item["text"] for item in listed["items"]}


def test_one_operation_at_a_time_and_what_cannot_be_meant(ready_sidecar: RunningSidecar) -> None:
    ready_sidecar.retain("book", ["The spare key is under the blue flower pot."])
    first = ask(ready_sidecar, "POST", "/v1/dumps")
    second = ask(ready_sidecar, "PUT", "/v1/restores", b"x" * 1000)
    assert (second.status, second.json()["operation"]) == (409, first.json()["id"])
    assert finished(ready_sidecar, first)["outcome"] == "done"
    for body, told in (
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>502</html>", "is an HTML page"),
        (b"\x1f\x8b\x08rest", "is a gzip file"),
        (b"--\n-- PostgreSQL database dump\n--\n", "is plain SQL"),
    ):
        refused = finished(ready_sidecar, ask(ready_sidecar, "PUT", "/v1/restores", body))
        assert (refused["outcome"], refused["report"]) == ("refused", {})
        assert told in refused["error"]
    assert ready_sidecar.health_status() == 200
    assert not [path.name for path in (ready_sidecar.volume / "dumps").iterdir() if path.name.startswith(".")]
