import tomllib
from pathlib import Path

import pytest

from bake.errors import UsageError
from bake.lock import LockedModel, read_lock

MINIMAL = """format = 1
[models.mini]
kind = "embedding"
id = "example/mini"
revision = "r"
license = "MIT"
files = [{ path = "config.json" }, { path = "m.onnx", flavor = "onnx" }, { path = "m.safetensors", flavor = "torch" }]
flavors.onnx = { model = "m.onnx", precision = "float32" }
flavors.torch = { model = "m.safetensors", precision = "float32" }
"""


def paths(model: LockedModel, *flavors: str) -> list[str]:
    return [file.path for file in model.files_for(flavors)]  # type: ignore[arg-type]


def test_the_shipped_lock() -> None:
    lock = read_lock()
    assert sorted(lock.models) == ["all-MiniLM-L6-v2", "bge-small-en-v1.5", "cl100k_base", "ms-marco-MiniLM-L6-v2"]
    assert [name for name, model in lock.models.items() if model.stand_in] == ["all-MiniLM-L6-v2"]
    bge = lock.model("bge-small-en-v1.5")
    assert bge.revision == "5c38ec7c405ec4b44b94cc5a9bb96e735b38267a"
    assert {file.path: file.size for file in bge.files if file.size} == {
        "model.safetensors": 133_466_304,
        "onnx/model.onnx": 133_093_490,
        "tokenizer.json": 711_396,
    }
    # Everything that comes from elsewhere than a hub is pinned to the last file: nothing else vouches for it.
    for model in lock.models.values():
        assert model.hub or all(file.sha256 and file.size for file in model.files)
        assert model.hub or model.how


def test_a_flavour_takes_its_own_files_and_the_common_ones(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(MINIMAL)
    model = read_lock(path).model("mini")
    assert paths(model, "torch") == ["config.json", "m.safetensors"]
    assert paths(model, "onnx") == ["config.json", "m.onnx", "m.onnx_data"]
    assert paths(model, "onnx", "torch") == ["config.json", "m.onnx", "m.onnx_data", "m.safetensors"]
    (data,) = (file for file in model.files_for(["onnx"]) if file.path == "m.onnx_data")
    assert data.optional


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no model 'bge'.*bge-small-en-v1.5"):
        read_lock().model("bge")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('path = "config.json"', 'path = "../config.json"', "files.0.path"),
        ('path = "config.json"', 'path = "/etc/passwd"', "files.0.path"),
        ('license = "MIT"', 'license = "MIT"\nlicence = "MIT"', "licence"),
        ('path = "config.json"', 'path = "config.json", sha256 = "12"', "files.0.sha256"),
        ('flavors.onnx = { model = "m.onnx"', 'flavors.onnx = { model = "n.onnx"', "n.onnx"),
        ('kind = "embedding"', 'kind = "tokenizer-table"', "tokenizer-table"),
        ("[models.mini]", '[models."../mini"]', "models"),
        ("format = 1", "format = 2", "format"),
        ("format = 1", "format =", "cannot read"),
    ],
)
def test_a_wrong_lock_is_refused_with_the_place(old: str, new: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(MINIMAL.replace(old, new))
    with pytest.raises(UsageError) as refused:
        read_lock(path)
    assert where in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_missing_lock(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the lock"):
        read_lock(tmp_path / "none")


def test_the_shipped_lock_is_plain_toml() -> None:
    text = (Path(__file__).parents[2] / "bake" / "models.lock").read_text(encoding="utf-8")
    assert tomllib.loads(text)["format"] == 1
