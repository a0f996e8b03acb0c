from pathlib import Path

from sidecar.settings import Settings
from sidecar.status import Picture
from sidecar.welcome import text

MODEL = {"id": "BAAI/bge-small-en-v1.5", "precision": "float32", "dimension": 384, "stand_in": False}
PICTURE = Picture(model=MODEL, memory_count=369, pgdata="/opt/hindsight/pgdata")


def test_it_names_addresses_memories_and_what_to_try() -> None:
    told = text(Settings(run_dir=Path("/run/hs")), PICTURE, has_llm=True, program="/opt/bin/hindsight-sidecar")
    assert "http://127.0.0.1:8888      (point the agent here)" in told
    assert "369 in /opt/hindsight/pgdata" in told
    assert "env HINDSIGHT_SIDECAR_RUN_DIR=/run/hs /opt/bin/hindsight-sidecar smoke" in told
    assert "STAND-IN" not in told
    assert "LLM" not in told


def test_it_tells_of_a_stand_in_and_of_a_missing_llm() -> None:
    picture = Picture(model={**MODEL, "stand_in": True}, memory_count=0)
    told = text(Settings(), picture, has_llm=False, program="x")
    assert "STAND-IN" in told
    assert "HINDSIGHT_API_LLM_PROVIDER" in told


def test_it_needs_no_model() -> None:
    assert "ready" in text(Settings(), Picture(), has_llm=True, program="x")
