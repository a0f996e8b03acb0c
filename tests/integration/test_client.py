"""Hindsight's own client against the gateway, and the commands that an operator runs beside it."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest
from agent import client_at
from harness import RunningSidecar, wait_for
from hindsight_client import Hindsight
from hindsight_client_api.exceptions import BadRequestException, NotFoundException, ServiceException
from psycopg import sql

from sidecar.rehearsal import CANARY_BANK, MEMORIES, SMOKE_BANK_PREFIX, words

TEXTS = [memory.text for memory in MEMORIES]
Rows = dict[str, int]


def make_bank(client: Hindsight, bank: str) -> None:
    made = client.create_bank(bank, retain_extraction_mode="chunks", enable_observations=False)
    assert made.bank_id == bank


def recalled(client: Hindsight, bank: str, question: str) -> list[str]:
    return [result.text for result in client.recall(bank, question, budget="low").results]


def test_the_clients_calls(ready_sidecar: RunningSidecar) -> None:
    with client_at(ready_sidecar.port) as client:
        version = client.get_version()
        assert version.api_version == "1.1.0"
        assert version.features.mcp
        make_bank(client, "book")
        assert client.retain("book", TEXTS[0], tags=["harbour"], metadata={"from": "a test"}).success
        stored = client.retain_batch("book", [{"content": text, "document_id": text[:9]} for text in TEXTS[1:]])
        assert (stored.success, stored.items_count) == (True, len(TEXTS) - 1)
        for memory in MEMORIES:
            assert not words(memory.text) & words(memory.question) - {"was", "the", "a", "to"}
            assert recalled(client, "book", memory.question)[0] == memory.text
        [result] = client.recall("book", MEMORIES[0].question, tags=["harbour"], tags_match="any_strict").results
        assert result.metadata == {"from": "a test"}
        listed = client.list_memories("book", limit=2)
        assert (listed.total, len(listed.items)) == (len(TEXTS), 2)
        assert client.get_bank_config("book")["overrides"]["retain_extraction_mode"] == "chunks"
        with pytest.raises(NotFoundException):
            client.get_mental_model("book", "none")
        client.delete_bank("book")


def test_a_refusal_reaches_the_clients_caller(ready_sidecar: RunningSidecar) -> None:
    with client_at(ready_sidecar.port) as client:
        make_bank(client, "unreflected")
        with pytest.raises(BadRequestException) as caught:
            client.reflect("unreflected", "What do you think?")
        assert "set to 'none'" in json.loads(caught.value.body)["detail"]
        client.delete_bank("unreflected")


def test_many_calls_at_once(ready_sidecar: RunningSidecar) -> None:
    async def work() -> None:
        client = Hindsight(base_url=f"http://127.0.0.1:{ready_sidecar.port}")
        try:
            await client.acreate_bank("busy", retain_extraction_mode="chunks", enable_observations=False)
            stores = [client.aretain("busy", f"{text} ({number})") for number in range(8) for text in TEXTS]
            assert all(answer.success for answer in await asyncio.gather(*stores))
            asked = [client.arecall("busy", memory.question, budget="low") for _ in range(8) for memory in MEMORIES]
            for answer, memory in zip(await asyncio.gather(*asked), MEMORIES * 8, strict=True):
                assert answer.results[0].text.startswith(memory.text)
            assert (await client.alist_memories("busy", limit=1)).total == len(stores)
            await client.adelete_bank("busy")
        finally:
            await client.aclose()

    asyncio.run(work())


@pytest.mark.alone
def test_a_stored_memory_is_counted_within_two_seconds(ready_sidecar: RunningSidecar) -> None:
    before = rows(ready_sidecar)["public.memory_units"]
    with client_at(ready_sidecar.port) as client:
        make_bank(client, "counted")
        client.retain_batch("counted", [{"content": text} for text in TEXTS])
        wait_for(lambda: ready_sidecar.health()["memory_count"] == before + len(TEXTS), 2, "all memories counted")
        client.delete_bank("counted")
    wait_for(lambda: ready_sidecar.health()["memory_count"] == before, 2, "no deleted memory counted")


def test_memories_and_commands_over_a_restart(make_sidecar: Any) -> None:
    sidecar: RunningSidecar = make_sidecar()
    check_not_reachable(sidecar)
    sidecar.start()
    wait_for(lambda: sidecar.health_status() == 503, 30, "an answer")
    check_not_ready(sidecar)
    sidecar.wait_ready()
    with client_at(sidecar.port) as client:
        make_bank(client, "lasting")
        client.retain_batch("lasting", [{"content": text} for text in TEXTS])
    assert sidecar.stop() == 0
    check_not_reachable(sidecar)
    sidecar.start_ready()
    assert sidecar.health()["memory_count"] == len(TEXTS)
    with client_at(sidecar.port) as client:
        for memory in MEMORIES:
            assert recalled(client, "lasting", memory.question)[0] == memory.text
    assert sidecar.command("smoke").returncode == 0
    assert sidecar.stop() == 0


def check_not_reachable(sidecar: RunningSidecar) -> None:
    """Check the commands where no sidecar runs: exit code 3, and a sentence about the socket."""
    for command in ("health", "status", "smoke"):
        for option in ([], ["--json"]):
            done = sidecar.command(command, *option)
            assert (done.returncode, done.stdout) == (3, ""), done
            assert str(sidecar.run_dir / "control.sock") in done.stderr
            assert "Traceback" not in done.stderr


def check_not_ready(sidecar: RunningSidecar) -> None:
    """Check the commands and the client while the sidecar starts."""
    done = sidecar.command("health")
    assert done.returncode == 1, done
    assert done.stdout.startswith("starting(")
    done = sidecar.command("health", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "starting")
    with client_at(sidecar.port) as client:
        assert client.get_version().api_version == "1.1.0"
        began = time.monotonic()
        with pytest.raises(ServiceException) as caught:
            client.retain("early", "Nothing is there yet.")
        assert time.monotonic() - began < 1
    assert caught.value.status == 503
    assert int(caught.value.headers["retry-after"]) > 0
    assert "nothing was stored" in json.loads(caught.value.body)["detail"]
    done = sidecar.command("status")
    assert done.returncode == 1, done
    assert done.stdout.startswith("state     starting(")


def test_health_of_a_ready_sidecar(ready_sidecar: RunningSidecar) -> None:
    done = ready_sidecar.command("health")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
    done = ready_sidecar.command("health", "--json")
    shown, told = json.loads(done.stdout), ready_sidecar.health()
    assert done.returncode == 0
    assert shown | {"sample_age_seconds": 0} == told | {"sample_age_seconds": 0}


def test_status_of_a_ready_sidecar(ready_sidecar: RunningSidecar) -> None:
    done = ready_sidecar.command("status")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("state     ready since ")
    health = ready_sidecar.health()
    for component in ("postgres", "hindsight-api"):
        shown = [component, "up,", "pid", f"{health['components'][component]['pid']},"]
        assert shown in [line.split()[:4] for line in lines]
    assert any("STAND-IN" in line for line in lines)
    assert f"  PGDATA={ready_sidecar.pgdata}" in lines
    done = ready_sidecar.command("status", "--json")
    body = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(body) == {"health", "settings"}
    assert body["health"]["status"] == "healthy"
    assert {name: body["settings"][name] for name in ready_sidecar.settings if name.endswith("LISTEN")} == {
        name: value for name, value in ready_sidecar.settings.items() if name.endswith("LISTEN")
    }


def database(sidecar: RunningSidecar) -> psycopg.Connection:
    return psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight", autocommit=True)


def rows(sidecar: RunningSidecar) -> Rows:
    """Count the rows of every table of the database."""
    with database(sidecar) as connection:
        tables = connection.execute(
            "SELECT schemaname, relname FROM pg_stat_user_tables ORDER BY schemaname, relname"
        ).fetchall()
        found = {}
        for schema, table in tables:
            query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, table))
            [count] = connection.execute(query).fetchone() or [0]
            found[f"{schema}.{table}"] = count
        return found


def unchanging_rows(sidecar: RunningSidecar) -> Rows:
    """Count the rows once hindsight-api has written its traces, and the sidecar has removed those of its own bank."""
    seen: list[tuple[float, Rows]] = []

    def settled() -> Rows | None:
        now, found = time.monotonic(), rows(sidecar)
        if not seen or seen[-1][1] != found:
            seen.append((now, found))
        return found if now - seen[-1][0] > 3 else None

    return wait_for(settled, 60, "three seconds in which no count of rows changed", every=0.2)


def rows_about(sidecar: RunningSidecar, bank: str) -> Rows:
    """Count the rows that name a bank, in every table that has a column for it."""
    with database(sidecar) as connection:
        tables = connection.execute(
            "SELECT table_schema, table_name FROM information_schema.columns c JOIN pg_stat_user_tables t "
            "ON (t.schemaname, t.relname) = (c.table_schema, c.table_name) WHERE column_name = 'bank_id'"
        ).fetchall()
        found = {}
        for schema, table in tables:
            query = sql.SQL("SELECT count(*) FROM {} WHERE bank_id LIKE %s").format(sql.Identifier(schema, table))
            [count] = connection.execute(query, (bank,)).fetchone() or [0]
            found[f"{schema}.{table}"] = count
        return found


def test_nothing_of_the_first_recall_is_left(ready_sidecar: RunningSidecar) -> None:
    unchanging_rows(ready_sidecar)
    left = rows_about(ready_sidecar, CANARY_BANK)
    assert len(left) > 5
    assert not any(left.values()), left


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_smoke_passes_and_leaves_every_table_as_it_was(ready_sidecar: RunningSidecar, option: list[str]) -> None:
    before = unchanging_rows(ready_sidecar)
    assert len(before) > 20
    done = ready_sidecar.command("smoke", *option)
    assert (done.returncode, done.stderr) == (0, ""), done
    if option:
        report = json.loads(done.stdout)
        steps = [step["step"] for step in report["steps"]]
        assert (report["passed"], report["fault"]) == (True, None)
    else:
        *shown, last = done.stdout.splitlines()
        steps = [line.removeprefix("ok    ")[:32].strip() for line in shown]
        assert last == "smoke passed: memories come back by their meaning"
    recalls = ["recall by meaning"] * len(MEMORIES) + ["recall, all types", "recall as Hermes asks by default"]
    assert steps == ["create bank", "retain", *recalls, "list", "delete bank"]
    assert unchanging_rows(ready_sidecar) == before
    assert not any(rows_about(ready_sidecar, f"{SMOKE_BANK_PREFIX}%").values())


Results = list[dict[str, Any]]


def without_embeddings(results: Results, _: str) -> Results:
    """Return what keyword search alone brings: the same texts, had the question any word of them."""
    return [{**result, "scores": {**result["scores"], "semantic": None}} for result in results]


def keywords_only(results: Results, question: str) -> Results:
    return [result for result in results if words(result["text"]) & words(question) - {"the", "was", "to"}]


def all_alike(results: Results, _: str) -> Results:
    """Return every memory with one score, as a model gives it that sees no difference between texts."""
    return [{**results[0], "text": text, "scores": {**results[0]["scores"], "semantic": 0.97}} for text in TEXTS]


def another_first(results: Results, _: str) -> Results:
    """Return the right memory with its score, and another that is supposed to be still closer."""
    other = next(text for text in TEXTS if text != results[0]["text"])
    return [*results, {**results[0], "text": other, "scores": {**results[0]["scores"], "semantic": 0.99}}]


@contextlib.contextmanager
def spoiled(sidecar: RunningSidecar, spoil: Callable[[Results, str], Results]) -> Iterator[str]:
    """Have a proxy before the gateway whose recalls are those of a broken model; tells its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=60)
            try:
                connection.request(self.command, self.path, body or None, {"content-type": "application/json"})
                response = connection.getresponse()
                content = response.read()
            finally:
                connection.close()
            if self.path.endswith("/recall"):
                answer = json.loads(content)
                answer["results"] = spoil(answer["results"], json.loads(body)["query"])
                content = json.dumps(answer).encode()
            self.send_response(response.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_PATCH = do_POST = do_DELETE = pass_on  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_embeddings, "did not come back by its meaning"),
        (keywords_only, "did not come back by its meaning"),
        (all_alike, "the embeddings do not carry meaning"),
        (another_first, "the embeddings do not carry meaning"),
    ],
)
def test_smoke_fails_where_the_embeddings_are_broken(
    ready_sidecar: RunningSidecar, spoil: Callable[[Results, str], Results], sentence: str
) -> None:
    with spoiled(ready_sidecar, spoil) as url:
        done = ready_sidecar.command("smoke", "--url", url)
    assert done.returncode == 1, done
    *steps, last = done.stdout.splitlines()
    assert last.startswith("FAILED  ")
    assert sentence in last
    assert [step.split()[1] for step in steps] == ["create", "retain"]
    listed = ready_sidecar.memory("/banks").json()["banks"]
    assert not [bank for bank in listed if bank["bank_id"].startswith(SMOKE_BANK_PREFIX)]


def test_smoke_through_an_address_that_passes_everything_on(ready_sidecar: RunningSidecar) -> None:
    with spoiled(ready_sidecar, lambda results, _: results) as url:
        done = ready_sidecar.command("smoke", "--json", "--url", url)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["passed"]
