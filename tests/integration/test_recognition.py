"""Other weights under the same name are noticed before anything is served or stored, and nothing else is taken for them."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from administrator import archive_of, ask, finished
from harness import RunningSidecar, reachable_directory
from reweighted import turned

BANK = "recognition"
TEXTS = [
    "The beekeeper moved her hives behind the old mill.",
    "Jonas plays the bassoon on Thursdays.",
    "The ferry to the island leaves at a quarter past six.",
    "Nobody may feed the goats before noon.",
]
COMPARES = '"comparing stored vectors with the model"'
# What hindsight-api keeps, but for what its background tasks note of themselves.
STORED = (
    "memory_units",
    "banks",
    "documents",
    "chunks",
    "entities",
    "memory_links",
    "async_operations",
    "llm_requests",
)


@pytest.fixture(scope="module")
def others(models: Path) -> Iterator[Path]:
    """Return a model of the stand-in's name that means as much, in vectors of another space; for both flavours."""
    with reachable_directory() as directory:
        [model] = [path for path in models.iterdir() if (path / "manifest.json").is_file()]
        yield turned(model, directory / "other", seed=7)


def sql(sidecar: RunningSidecar, statement: str) -> list[Any]:
    with psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight", autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def stored(sidecar: RunningSidecar) -> dict[str, Any]:
    """Return a hash over every row of what is kept, but for those of the sidecar's own bank."""
    query = (
        "SELECT count(*), md5(string_agg(t::text, '|' ORDER BY t::text)) FROM public.{} AS t "
        "WHERE to_jsonb(t) ->> 'bank_id' IS DISTINCT FROM 'hindsight-sidecar-canary'"
    )
    there = {name for (name,) in sql(sidecar, "SELECT relname::text FROM pg_class WHERE relkind IN ('r', 'p')")}
    return {table: sql(sidecar, query.format(table)) for table in STORED if table in there}


def compared(sidecar: RunningSidecar) -> int:
    return sidecar.log_text().count(COMPARES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "flavor"), [("1.1.0", "onnx"), pytest.param("0.8.4", "torch", marks=pytest.mark.long)]
)
def test_other_weights_of_the_same_name_are_blocked(
    make_sidecar: Any, model_dir: Path, others: Path, version: str, flavor: str
) -> None:
    sidecar = make_sidecar(version, flavor)
    model = sidecar.home / "model"
    shutil.copytree(model_dir, model)
    sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = str(model)
    sidecar.start_ready()
    sidecar.retain(BANK, TEXTS)
    assert sidecar.stop() == 0
    shutil.move(model, sidecar.home / "right")
    shutil.copytree(others, model)

    sidecar.start()
    body = sidecar.wait_state("blocked(model-mismatch)", 120)
    assert "4 of its memories were embedded anew" in body["detail"]
    assert "the same name and revision, and other weights" in body["detail"]
    assert body["components"]["hindsight-api"]["pid"] is None
    assert sidecar.memory(f"/banks/{BANK}/memories/list").status == 503
    before = stored(sidecar)
    assert before["memory_units"][0][0] == len(TEXTS)

    shutil.rmtree(model)
    shutil.move(sidecar.home / "right", model)
    sidecar.wait_ready()
    assert stored(sidecar) == before, "nothing was written meanwhile"
    assert next(found["text"] for found in sidecar.recall(BANK, TEXTS[0])) == TEXTS[0]
    assert compared(sidecar) == 1, "a model that is known is not compared, and one that was refused not again"
    assert sidecar.stop() == 0
    sidecar.start_ready()
    assert compared(sidecar) == 1
    assert sidecar.stop() == 0


@pytest.mark.timeout(300)
def test_what_says_nothing_of_a_model_is_served(make_sidecar: Any, others: Path) -> None:
    """Memories without vectors, observations and an empty database; and tenants are asked as well."""
    sidecar = make_sidecar()
    right = sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"]
    sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = str(others)
    sidecar.start_ready()  # nothing is stored yet: it takes any model
    assert compared(sidecar) == 0
    assert sidecar.stop() == 0
    sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = right
    sidecar.start_ready().retain(BANK, TEXTS)
    sql(
        sidecar,
        "UPDATE public.memory_units SET text = 'Something else entirely is said here now.' WHERE text LIKE 'Jonas%'",
    )
    sql(sidecar, "DELETE FROM hindsight_sidecar.facts WHERE name = 'embedder'")
    assert sidecar.stop() == 0
    sidecar.start_ready()  # one was edited, and the others agree
    assert compared(sidecar) == 1
    sql(sidecar, "CREATE SCHEMA tenant_two AUTHORIZATION hindsight")
    sql(sidecar, "CREATE TABLE tenant_two.memory_units (LIKE public.memory_units INCLUDING ALL)")
    sql(sidecar, "ALTER TABLE tenant_two.memory_units OWNER TO hindsight")
    sql(sidecar, "INSERT INTO tenant_two.memory_units (id, bank_id, text, fact_type, embedding, event_date) SELECT id, bank_id, text, fact_type, embedding, event_date FROM public.memory_units")  # fmt: skip
    sql(sidecar, "UPDATE public.memory_units SET embedding = NULL")
    assert sidecar.stop() == 0

    sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = str(others)
    sidecar.start()
    assert "embedded anew" in sidecar.wait_state("blocked(model-mismatch)", 120)["detail"]
    sql(sidecar, "DROP SCHEMA tenant_two CASCADE")
    sidecar.wait_ready()  # without a restart
    noted = sql(sidecar, "SELECT value ->> 'content' FROM hindsight_sidecar.facts WHERE name = 'embedder'")
    assert sidecar.stop() == 0
    sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = right
    sidecar.start_ready()
    assert sql(sidecar, "SELECT value ->> 'content' FROM hindsight_sidecar.facts WHERE name = 'embedder'") == noted
    assert sidecar.stop() == 0


@pytest.mark.timeout(300)
def test_memories_of_other_weights_are_served_where_that_was_forced(make_sidecar: Any, others: Path) -> None:
    source = make_sidecar().start_ready()
    source.retain(BANK, TEXTS)
    archive = archive_of(source)
    assert source.stop() == 0
    target = make_sidecar(HINDSIGHT_SIDECAR_MODEL_DIR=str(others)).start_ready()
    refused = finished(target, ask(target, "PUT", "/v1/restores", archive))
    assert (refused["outcome"], "embedded with another model" in refused["error"]) == ("verification-failed", True), (
        refused
    )
    forced = finished(target, ask(target, "PUT", "/v1/restores?force_model=true", archive))
    assert forced["outcome"] == "done", forced["error"]
    assert target.stop() == 0
    assert target.start_ready().health()["memory_count"] == len(TEXTS)
    assert compared(target) == 0
    assert target.stop() == 0
