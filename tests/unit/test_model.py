import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar import model
from sidecar.errors import BlockedError, Reason
from sidecar.model import Hashes, Identity, check_content, check_files, read

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
    assert {name: file.size for name, file in found.files.items()} == {"model.onnx": 7, "tokenizer.json": 2}
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


BOTH = {"model.onnx": b"weights", "model.safetensors": b"tensors", "tokenizer.json": b"{}"}


def test_a_byte_that_changed_is_a_changed_model(bake: Bake) -> None:
    found = read(bake(), "onnx")
    check_content(found, Hashes())
    (found.directory / "model.onnx").write_bytes(b"weighty")
    check_files(found)
    error = blocked(lambda: check_content(found, Hashes()))
    assert error.reason is Reason.MODEL_CHANGED
    assert "model.onnx has other content than when it was baked" in error.detail


def test_what_another_flavour_alone_loads_is_not_read(bake: Bake) -> None:
    directory = bake(BOTH)
    (directory / "model.safetensors").write_bytes(b"TENSORS")
    check_content(read(directory, "onnx"), Hashes())
    assert "model.safetensors" in blocked(lambda: check_content(read(directory, "torch"), Hashes())).detail


def test_content_that_cannot_be_read_is_a_changed_model(bake: Bake) -> None:
    found = read(bake(), "onnx")
    (found.directory / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be read" in blocked(lambda: check_content(found, Hashes())).detail


def test_a_file_is_read_again_once_it_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hashes = tmp_path / "file", Hashes()
    path.write_bytes(b"one")
    first = hashes.of(path)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)  # whoever reads it fails
        assert hashes.of(path) == first == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"two, longer")
    assert hashes.of(path) == hashlib.sha256(b"two, longer").hexdigest()


def test_the_content_of_a_model_is_that_of_what_its_flavour_loads(bake: Bake) -> None:
    onnx, torch = read(bake(BOTH), "onnx").content, read(bake(BOTH), "torch").content
    assert onnx != torch
    assert read(bake({**BOTH, "model.safetensors": b"TENSORS"}), "onnx").content == onnx
    assert read(bake({**BOTH, "model.onnx": b"WEIGHTS"}), "onnx").content != onnx
    assert read(bake({**BOTH, "tokenizer.json": b"[]"}), "onnx").content != onnx


def test_differences_are_named_with_both_sides(bake: Bake) -> None:
    mine = read(bake(), "onnx").identity
    other = Identity.from_json({**mine.to_json(), "dimension": 768, "pooling": "mean"})
    assert mine.differences(other) == ["dimension: 384, not 768", "pooling: 'cls', not 'mean'"]
    assert mine.differences(mine) == []
