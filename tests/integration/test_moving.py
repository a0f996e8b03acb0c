"""Memories move with proof: from one sidecar to another, and back to what was served before."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from administrator import archive_of, ask, finished
from harness import PROGRAM, RunningSidecar, wait_for
from remembered import QUESTIONS, Remembered, recalls

KEY, TEA = "The spare key is under the blue flower pot.", "Anna drinks her tea without sugar."
VERIFICATION_FAILED = 5  # as docs/commands.md has it


def sql(sidecar: RunningSidecar, *statements: str) -> list[Any]:
    """Run statements as the role that owns the memories; return what the last one gives."""
    with psycopg.connect(
        host=str(sidecar.run_dir), user="hindsight", dbname="hindsight", autocommit=True
    ) as connection:
        cursors = [connection.execute(statement) for statement in statements]
        return cursors[-1].fetchall() if cursors[-1].description else []


def kept(sidecar: RunningSidecar) -> list[str]:
    return [one["name"] for one in ask(sidecar, "GET", "/v1/databases").json()["kept"]]


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
    assert kept(target) == [report["kept"]], "no copy of what its source has as it is"
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
    assert kept(target) == [report["kept"]]


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
    old.retain("book", [KEY])
    # A tenant that nobody serves any more: hindsight-api migrates the schema that it serves alone.
    sql(old, "CREATE SCHEMA left_over", "CREATE TABLE left_over.alembic_version AS TABLE public.alembic_version")
    assert old.stop() == 0
    new = make_sidecar("1.1.0", PGDATA=str(old.pgdata)).start_ready()
    new.retain("book", [TEA])
    [copy] = kept(new)
    assert copy.endswith("_before_1_1_0")
    assert f"{copy}  20" in new.command("databases").stdout, "until when it was served"
    assert new.stop() == 0
    new.start_ready()
    assert kept(new) == [copy], "nothing to migrate, nothing to copy"
    assert new.stop() == 0
    old.start().wait_state("blocked(schema-newer)", 60)
    served = finished(old, ask(old, "POST", "/v1/rollback"))
    assert served["outcome"] == "done", served["error"]
    old.wait_ready()
    assert [found["text"] for found in old.recall("book", "Where can I find the key to the house?")] == [KEY]
    assert old.stop() == 0


@pytest.mark.long  # a unit test has what is decided
@pytest.mark.timeout(600)
def test_what_is_brought_back_and_migrated_is_copied_and_the_way_back_is_what_was_served(make_sidecar: Any) -> None:
    old = make_sidecar("0.8.4").start_ready()
    old.retain("book", [KEY])
    assert old.stop() == 0
    new = make_sidecar("1.1.0", PGDATA=str(old.pgdata)).start_ready()
    new.retain("book", [TEA])
    [copy] = kept(new)
    back = finished(new, ask(new, "POST", "/v1/rollback"))
    assert (back["outcome"], back["report"]["served"]) == ("done", copy), back
    assert texts(new) == {KEY}
    assert kept(new) == [back["report"]["kept"], f"{copy}_2"], "it is the only one of that revision"
    forth = finished(new, ask(new, "POST", "/v1/rollback"))
    assert (forth["outcome"], forth["report"]["served"]) == ("done", back["report"]["kept"]), forth
    assert texts(new) == {KEY, TEA}
    assert kept(new) == [forth["report"]["kept"], f"{copy}_2"]
    assert new.stop() == 0


@pytest.mark.timeout(600)
def test_what_hindsight_api_cannot_store_in_is_not_served(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    sidecar.retain("book", [KEY, TEA])
    sql(
        sidecar,
        "ALTER TABLE memory_units ADD COLUMN drifted text NOT NULL DEFAULT ''",
        "ALTER TABLE memory_units ALTER COLUMN drifted DROP DEFAULT",
    )
    file = sidecar.home / "drifted.tar"
    file.write_bytes(archive_of(sidecar))
    sql(sidecar, "ALTER TABLE memory_units DROP COLUMN drifted")
    done = subprocess.run(
        [PROGRAM, "restore", str(file), "--yes"],
        env=sidecar.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == VERIFICATION_FAILED, done
    assert re.search(r"it cannot be served \(\d+ tries\): could not recall a memory: ", done.stderr), done
    sidecar.wait_ready()
    assert texts(sidecar) == {KEY, TEA}
    assert sidecar.recall("book", "Where can I find the key to the house?")[0]["text"] == KEY
    assert (kept(sidecar), sidecar.health()["origin"]) == ([], None)
    assert sql(sidecar, "SELECT FROM pg_attribute WHERE attname = 'drifted'") == []
    names = "SELECT datname FROM pg_database WHERE datname NOT IN ('hindsight', 'postgres', 'template0', 'template1')"
    assert sql(sidecar, names) == []


@pytest.mark.long  # a unit test has what is decided
@pytest.mark.timeout(600)
def test_what_a_migration_loses_is_noticed_and_not_served(make_sidecar: Any) -> None:
    source, target = make_sidecar("0.8.4").start_ready(), make_sidecar("1.1.0").start_ready()
    source.retain("book", [KEY, TEA])
    [(head,)] = sql(target, "SELECT version_num FROM alembic_version")
    sql(
        source,
        "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN DELETE FROM public.memory_units WHERE text ~ 'tea'; RETURN NULL; END $$",
        f"CREATE TRIGGER lose AFTER UPDATE ON alembic_version FOR EACH ROW WHEN (NEW.version_num = '{head}') EXECUTE FUNCTION lose()",
    )
    done = finished(target, ask(target, "PUT", "/v1/restores", archive_of(source)))
    assert done["outcome"] == "verification-failed", done
    assert done["error"] == "schema public had 2 memories before hindsight-api was started, and has 1 now"
    target.wait_ready()
    assert (kept(target), target.health()["origin"]) == ([], None)


@pytest.mark.long  # a unit test has what is decided
@pytest.mark.timeout(600)
def test_memories_of_the_schema_that_is_served_are_recalled_and_others_are_told(make_sidecar: Any) -> None:
    sidecar = make_sidecar(HINDSIGHT_API_DATABASE_SCHEMA="ours").start_ready()
    sidecar.retain("book", [KEY, TEA])
    archive = archive_of(sidecar)
    done = finished(sidecar, ask(sidecar, "PUT", "/v1/restores", archive))
    assert done["outcome"] == "done", done
    assert (done["report"]["recalled"]["memories"], done["report"]["unproved"]) == (2, [])
    assert texts(sidecar) == {KEY, TEA}
    assert sidecar.stop() == 0
    del sidecar.settings["HINDSIGHT_API_DATABASE_SCHEMA"]
    sidecar.start_ready()
    done = finished(sidecar, ask(sidecar, "PUT", "/v1/restores", archive))
    assert done["outcome"] == "done", done
    assert "recalled" not in done["report"]
    assert [sentence.split(" (")[0] for sentence in done["report"]["unproved"]] == [
        "none of its memories was recalled",
        "no memory was recalled of schema ours: hindsight-api answers the sidecar from public alone",
    ]


@pytest.mark.timeout(600)
def test_no_copy_is_kept_where_none_is_wanted(make_sidecar: Any) -> None:
    old = make_sidecar("0.8.4").start_ready()
    old.retain("book", ["The spare key is under the blue flower pot."])
    assert old.stop() == 0
    new = make_sidecar("1.1.0", PGDATA=str(old.pgdata), HINDSIGHT_SIDECAR_UPGRADE_COPY="false").start_ready()
    assert ask(new, "GET", "/v1/databases").json()["kept"] == []
    assert texts(new) == {"The spare key is under the blue flower pot."}
    assert new.stop() == 0


@contextlib.contextmanager
def writing(sidecar: RunningSidecar) -> Iterator[list[str]]:
    """Store one memory after another meanwhile; have the texts of those that were acknowledged."""
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
        yield acknowledged
    finally:
        over.set()
        writer.join()


@pytest.mark.timeout(600)
def test_what_is_stored_meanwhile_is_not_lost_silently(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    sidecar.retain("book", ["The spare key is under the blue flower pot."])
    archive = archive_of(sidecar)
    with writing(sidecar) as acknowledged:
        refused = finished(sidecar, ask(sidecar, "PUT", "/v1/restores", archive))
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


@pytest.mark.long  # a unit test has what is decided
@pytest.mark.timeout(600)
def test_what_is_stored_meanwhile_stays_in_the_old_database_where_that_is_allowed(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    sidecar.retain("book", ["The spare key is under the blue flower pot."])
    archive = archive_of(sidecar)
    with writing(sidecar) as acknowledged:
        done = finished(sidecar, ask(sidecar, "PUT", "/v1/restores?discard_newer=true", archive))
    assert done["outcome"] == "done", done["error"]
    assert [told for told in done["report"]["newer"] if told.startswith("public.memory_units: +")]
    served = texts(sidecar)
    assert "The spare key is under the blue flower pot." in served
    back = finished(sidecar, ask(sidecar, "POST", "/v1/rollback", {"database": done["report"]["kept"]}))
    assert back["outcome"] == "done", back["error"]
    assert set(acknowledged) - served, "some were stored before the exchange"
    assert texts(sidecar) | served >= set(acknowledged), "and none is in neither"


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


@contextlib.contextmanager
def asked_first(sidecar: RunningSidecar, length: int) -> Iterator[socket.socket]:
    """Send the headers of an upload to the control socket, and nothing of its body."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(sidecar.run_dir / "control.sock"))
        connection.sendall(
            b"PUT /v1/restores?dry_run=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % length
        )
        yield connection


def answered(connection: socket.socket, status: int) -> Any:
    """Return the JSON of an answer, of which nothing came before."""
    assert connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 %d" % status
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        return json.loads(response.read())


def test_who_asks_first_sends_nothing_in_vain(ready_sidecar: RunningSidecar) -> None:
    with asked_first(ready_sidecar, 2**50) as connection:
        told = answered(connection, 422)
        assert told["detail"].startswith("the upload and what is unpacked of it take ")
    ready_sidecar.retain("book", ["The spare key is under the blue flower pot."])
    whole = archive_of(ready_sidecar)
    running = ask(ready_sidecar, "POST", "/v1/dumps")
    with asked_first(ready_sidecar, len(whole)) as connection:
        assert answered(connection, 409)["operation"] == running.json()["id"]
    assert finished(ready_sidecar, running)["outcome"] == "done"
    with asked_first(ready_sidecar, len(whole)) as connection:
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(whole)
        told = answered(connection, 202)
        assert told["kind"] == "restore"

    def ended() -> Any:
        operation = ask(ready_sidecar, "GET", f"/v1/operations/{told['id']}").json()
        return operation["outcome"] != "running" and operation

    operation = wait_for(ended, 60, "the end of the rehearsal")
    assert operation["outcome"] == "done", operation["error"]
    assert ask(ready_sidecar, "DELETE", f"/v1/restores/{operation['report']['upload']}").status == 204
