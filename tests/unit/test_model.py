import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar import model
from sidecar.errors import BlockedError, Reason
from sidecar.model import Identity, check_files, read

Bake = Callable[..., Path]


def blocked(work: Callable[[], object]) -> BlockedError:
    with pytest.raises(BlockedError) as caught:
        work()
    return caught.value


def test_a_baked_model_is_read_as_its_manifest_says(bake: Bake) -> None:
    directory = bake()
    found = read(directory, "onnx")
    assert found.directory == directory
    assert found.identity.dimension == 384
    assert found.weights == "model.onnx"
    assert found.max_tokens == 512
    assert not found.stand_in
    assert found.files == {"model.onnx": 7, "tokenizer.json": 2}
    check_files(found)
    assert found.to_json()["id"] == "BAAI/bge-small-en-v1.5"
    assert Identity.from_json(found.identity.to_json()) == found.identity


def test_both_flavours_have_one_identity(bake: Bake) -> None:
    assert read(bake(), "onnx").identity == read(bake(), "torch").identity


def test_without_a_manifest_the_model_is_missing(tmp_path: Path) -> None:
    error = blocked(lambda: read(tmp_path / "none", "onnx"))
    assert error.reason is Reason.MODEL_MISSING
    assert "hindsight-bake snapshot" in error.detail


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"format": 2}, "has format 2"), ({"kind": "reranker"}, "kind 'reranker'"), ({"flavors": {}}, "was baked for"),
     ({"files": [{"path": "x"}]}, "KeyError"), ({"flavors": {"onnx": {"identity": {"id": "x"}, "model": "m"}}}, "TypeError")],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_missing_too(changes: dict[str, Any], said: str, bake: Bake) -> None:
    error = blocked(lambda: read(bake(**changes), "onnx"))
    assert error.reason is Reason.MODEL_MISSING
    assert said in error.detail


def test_a_flavour_that_was_not_baked_is_named_with_those_that_were(bake: Bake) -> None:
    directory = bake()
    manifest = json.loads((directory / model.MANIFEST).read_text())
    del manifest["flavors"]["onnx"]
    (directory / model.MANIFEST).write_text(json.dumps(manifest))
    error = blocked(lambda: read(directory, "onnx"))
    assert "was baked for torch, and HINDSIGHT_SIDECAR_FLAVOR is onnx" in error.detail


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"'])
def test_a_manifest_that_is_none_is_missing(content: bytes, bake: Bake) -> None:
    directory = bake()
    (directory / model.MANIFEST).write_bytes(content)
    assert blocked(lambda: read(directory, "onnx")).reason is Reason.MODEL_MISSING


def test_a_file_of_another_size_is_a_changed_model(bake: Bake) -> None:
    found = read(bake(), "onnx")
    (found.directory / "model.onnx").write_bytes(b"weight")
    error = blocked(lambda: check_files(found))
    assert error.reason is Reason.MODEL_CHANGED
    assert "has 6 bytes and its manifest says 7" in error.detail


def test_a_file_that_is_gone_is_a_changed_model(bake: Bake) -> None:
    found = read(bake(), "onnx")
    (found.directory / "tokenizer.json").unlink()
    error = blocked(lambda: check_files(found))
    assert error.reason is Reason.MODEL_CHANGED
    assert "tokenizer.json cannot be read" in error.detail


def test_a_file_that_cannot_be_opened_is_a_changed_model(bake: Bake, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(bake(), "onnx")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    assert "Permission denied" in blocked(lambda: check_files(found)).detail


def test_differences_are_named_with_both_sides(bake: Bake) -> None:
    mine = read(bake(), "onnx").identity
    other = Identity.from_json({**mine.to_json(), "dimension": 768, "pooling": "mean"})
    assert mine.differences(other) == ["dimension: 384, not 768", "pooling: 'cls', not 'mean'"]
    assert mine.differences(mine) == []
