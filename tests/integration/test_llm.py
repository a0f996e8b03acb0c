"""With an LLM, configured by hindsight's own variables: used by hindsight-api, waited for by nobody, its key told to no one."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopback_llm
import psycopg
import pytest
from harness import RunningSidecar, call, running_sidecar, wait_for
from loopback_llm import KEY, MARK, OBSERVED, Llm, variables
from psycopg import sql

STORY = "Anna keeps bees on a roof in Lisbon. Ben repairs church clocks at night."


@pytest.fixture(scope="module")
def llm() -> Iterator[Llm]:
    with loopback_llm.serving() as served:
        yield served


@pytest.fixture(scope="module")
def sidecar(llm: Llm, model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar with an LLM; nothing was stored yet."""
    settings = {"HINDSIGHT_SIDECAR_LOG_LEVEL": "debug", "HINDSIGHT_SIDECAR_CHILD_LOG_LEVEL": "debug"}
    with running_sidecar(model_dir, **settings, **variables(llm)) as running:
        assert not llm.requests, "the first recall, and the start, need no LLM"
        yield running


@pytest.fixture(scope="module")
def story(sidecar: RunningSidecar) -> str:
    """Return the bank in which the story was stored."""
    sidecar.retain("story", [STORY])
    return "story"


def recalled(sidecar: RunningSidecar, bank: str, question: str, kind: str) -> list[str]:
    body = {"query": question, "budget": "low", "types": [kind]}
    answer = sidecar.memory(f"/banks/{bank}/memories/recall", "POST", body)
    assert answer.status == 200, answer.body
    return [result["text"] for result in answer.json()["results"]]


def test_what_the_llm_makes_of_a_text_is_recalled(sidecar: RunningSidecar, story: str, llm: Llm) -> None:
    listed = sidecar.memory(f"/banks/{story}/memories/list?type=world").json()["items"]
    facts = [f"{MARK} {sentence}" for sentence in STORY.replace("Lisbon. ", "Lisbon.\n").splitlines()]
    assert sorted(item["text"] for item in listed) == facts
    assert {item["entities"] for item in listed} == {"Anna", "Ben"}
    assert recalled(sidecar, story, "Who mends old timepieces in the evening?", "world")[0] == facts[1]
    assert {request["authorization"] for request in llm.requests} == {f"Bearer {KEY}"}
    assert {request["model"] for request in llm.requests} == {"a-model"}


def test_observations_come_back_as_hermes_asks_for_them(sidecar: RunningSidecar, story: str) -> None:
    question = "Where does the beekeeper live?"
    seen = wait_for(lambda: recalled(sidecar, story, question, "observation"), 60, "an observation, made afterwards")
    assert seen[0] == f"{OBSERVED} Anna keeps bees on a roof in Lisbon."


def test_reflect_answers_from_the_memories(sidecar: RunningSidecar, story: str) -> None:
    body = {"query": "What does Ben do with church clocks?", "budget": "low"}
    answer = sidecar.memory(f"/banks/{story}/reflect", "POST", body, timeout=60)
    assert answer.status == 200, answer.body
    assert answer.json()["text"].startswith(f"I found this: {MARK}")
    assert f"{MARK} Ben repairs church clocks at night." in answer.json()["text"]


@pytest.mark.usefixtures("story")
def test_the_key_is_told_to_no_one_but_hindsight_api(sidecar: RunningSidecar) -> None:
    key = KEY.encode()
    assert key in environment_of(sidecar.pid_of("hindsight-api"))
    # Its children have what the postmaster has; they write their titles over what is seen of it.
    assert b"PGDATA=" in environment_of(sidecar.pid_of("postgres"))
    assert key not in environment_of(sidecar.pid_of("postgres"))
    assert KEY not in sidecar.log_text()
    for port in (sidecar.port, sidecar.control_port):
        for path in ("/health", "/version", "/metrics", "/openapi.json", "/v1/default/banks/story/config"):
            assert key not in call(port, path).body
    for command in (["status"], ["status", "--json"], ["health", "--json"]):
        done = sidecar.command(*command)
        assert done.returncode == 0
        assert KEY not in done.stdout + done.stderr
    assert tables_with(sidecar, "Lisbon"), "texts are found this way"
    assert not tables_with(sidecar, KEY)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def tables_with(sidecar: RunningSidecar, text: str) -> list[str]:
    """Return the tables that have a text in any of their columns."""
    with psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight", autocommit=True) as connection:
        tables = connection.execute("SELECT schemaname, relname FROM pg_stat_user_tables").fetchall()
        found = []
        for schema, table in tables:
            query = sql.SQL("SELECT 1 FROM {} AS t WHERE strpos(t::text, %s) > 0 LIMIT 1")
            if connection.execute(query.format(sql.Identifier(schema, table)), (text,)).fetchone():
                found.append(f"{schema}.{table}")
        return found


def test_an_llm_that_never_answers_holds_up_neither_start_nor_stop(make_sidecar: Any, llm: Llm) -> None:
    with loopback_llm.serving() as silent:
        silent.silent.set()
        sidecar: RunningSidecar = make_sidecar(**variables(silent))
        began = time.monotonic()
        sidecar.start_ready()
        took = time.monotonic() - began
        assert took < 60, f"ready after {took:.1f} s"  # hindsight-api gives an LLM 120 s, several times
        later = {"items": [{"content": STORY}], "async": True}
        assert sidecar.memory("/banks/later/memories", "POST", later).status == 200
        assert silent.asked.wait(30)
        # Memories are served meanwhile.
        chunks = {"updates": {"retain_extraction_mode": "chunks", "enable_observations": False}}
        assert sidecar.memory("/banks/now", "PUT", {}).status == 200
        assert sidecar.memory("/banks/now/config", "PATCH", chunks).status == 200
        sidecar.retain("now", ["Carla grows figs."])
        assert recalled(sidecar, "now", "figs", "world") == ["Carla grows figs."]
        began = time.monotonic()
        assert sidecar.stop() == 0
        took = time.monotonic() - began
        assert took < 9, f"stopped after {took:.1f} s"
    # What waited for an answer is taken up again by the next start.
    sidecar.settings |= variables(llm)
    sidecar.start_ready()
    wait_for(lambda: recalled(sidecar, "later", "church clocks", "world"), 60, "the text that waited for an LLM")
    assert recalled(sidecar, "now", "figs", "world") == ["Carla grows figs."]
    assert sidecar.stop() == 0
