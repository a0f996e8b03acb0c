"""`make image`: what it builds, what it tells in the end, and what it refuses in one sentence."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from bake.image import bench
from bake.image.build import ACCOUNT, directory_of, inspect
from bake.image.engine import Engine
from bake.layout import REQUIRED

ROOT = Path(__file__).parents[2]
TAG = "localhost/hindsight-sidecar:made-by-a-test"


def make_image(engine: Engine, *variables: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = ["make", "image", f"ENGINE={engine.name}", f"TAG={TAG}", *variables]
    # What the `make` that runs the tests was given is not meant for this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(words, cwd=ROOT, env=env | environ, capture_output=True, text=True, timeout=1200, check=False)


def test_it_gives_an_account(engine: Engine, image: str) -> None:
    into = directory_of(image)
    assert (into / ACCOUNT).is_file(), f"dist/ has no account of {image}; build it in this checkout with `make image`"
    told = (into / ACCOUNT).read_text(encoding="utf-8")
    assert told.startswith(f"image   {image}\nsize ")
    assert re.search(r"[MG]B  /opt/hindsight-api/$", told, re.MULTILINE)
    assert re.search(r"\d s  api$", told, re.MULTILINE)
    labels = inspect(engine, image)["Config"]["Labels"]
    inventory = {path.name: versions(path) for path in into.glob("*.cdx.json")}
    api, debian = inventory["hindsight-api.cdx.json"], inventory["debian.cdx.json"]
    assert api["hindsight-api-slim"] == labels["hindsight-sidecar.hindsight-api"]
    assert "onnxruntime" in api
    assert ("torch" in api) == (labels["hindsight-sidecar.flavor"] == "torch")
    assert {"hindsight-sidecar", "fastapi"} <= inventory["sidecar.cdx.json"].keys()
    [server] = [name for name in debian if re.fullmatch(r"postgresql-\d+", name)]
    assert {f"{server}-pgvector", "tini", "libc6"} <= debian.keys()
    assert not {"apt", "perl", "pip", "gcc"} & set().union(*inventory.values())


def versions(path: Path) -> dict[str, str]:
    """Return the version of each part that an inventory names."""
    components = json.loads(path.read_text(encoding="utf-8"))["components"]
    return {component["name"]: component.get("version", "") for component in components}


def test_it_is_small(engine: Engine, image: str) -> None:
    if inspect(engine, image)["Config"]["Labels"]["hindsight-sidecar.flavor"] == "torch":
        pytest.skip("the limit is the onnx flavour's")
    size = bench.measure(engine, image)
    assert size.reported > 0.5e9
    assert size.real <= bench.LIMIT


def test_without_a_hub_it_stops_with_one_sentence(engine: Engine) -> None:
    stopped = make_image(engine, HF_ENDPOINT="http://127.0.0.1:9")
    assert stopped.returncode != 0
    [sentence] = [line for line in stopped.stderr.splitlines() if not line.startswith("make:")]
    assert sentence.startswith("the model hub cannot be reached: ")
    assert sentence.endswith(
        "give the model's files with MODEL_DIR=DIR, or ask for the stand-in by name with STAND_IN=1"
    )
    assert not engine.has_image(TAG)


def test_a_model_directory_with_other_files_is_refused(engine: Engine, tmp_path: Path) -> None:
    for name in (*REQUIRED["embedding"], "onnx/model.onnx", "sentence_bert_config.json", "tokenizer_config.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}", encoding="utf-8")
    stopped = make_image(engine, f"MODEL_DIR={tmp_path}")
    assert stopped.returncode != 0
    assert "onnx/model.onnx" in stopped.stderr
    assert not engine.has_image(TAG)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (["HINDSIGHT_VERSION=9.9"], "HINDSIGHT_VERSION is '9.9'; there are locks for 1.1.0, 0.8.4"),
        (["SUITE=sid"], "SUITE is 'sid'; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)"),
        (["MODEL_DIR=/nowhere"], "MODEL_DIR is '/nowhere', which is no directory"),
    ],
)
def test_what_cannot_be_built_is_said_at_once(engine: Engine, variables: list[str], sentence: str) -> None:
    stopped = make_image(engine, *variables)
    assert stopped.returncode != 0
    assert stopped.stderr.startswith(sentence)
    assert "==>" not in stopped.stdout
