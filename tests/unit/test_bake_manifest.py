import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bake.errors import VerificationError
from bake.fingerprint import fingerprint, is_lfs_pointer
from bake.identity import read_max_tokens, read_vector_space
from bake.layout import content_faults, plain_file_faults
from bake.lock import Lock, LockedModel
from bake.manifest import build_manifest, file_faults, fingerprints, pin_faults, read_manifest
from bake.verify import check_files, verify

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def put(root: Path, name: str, value: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def model() -> LockedModel:
    names = ["config.json", "modules.json", "1_Pooling/config.json", "tokenizer.json", "m.safetensors"]
    return LockedModel.model_validate(
        {
            "kind": "embedding",
            "id": "example/mini",
            "revision": "r",
            "license": "MIT",
            "files": [{"path": name} for name in names],
            "flavors": {"torch": {"model": "m.safetensors", "precision": "float32"}},
        }
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "mini"
    put(directory, "config.json", {"hidden_size": 8, "max_position_embeddings": 512})
    put(directory, "modules.json", MODULES)
    put(directory, "1_Pooling/config.json", POOLING)
    put(directory, "tokenizer.json", {})
    put(directory, "m.safetensors", "weights")
    return directory


def written(root: Path, model: LockedModel) -> str:
    text = build_manifest(root, "mini", model, ["torch"]).text()
    put(root, "manifest.json", text)
    return text


def test_the_contract(root: Path, model: LockedModel) -> None:
    manifest = json.loads(written(root, model))
    assert list(manifest) == [
        "format",
        "kind",
        "name",
        "license",
        "stand_in",
        "max_tokens",
        "flavors",
        "files",
        "made_by",
    ]
    assert manifest["format"] == 1
    assert manifest["max_tokens"] == 512
    assert manifest["flavors"] == {
        "torch": {
            "identity": {
                "id": "example/mini",
                "revision": "r",
                "precision": "float32",
                "dimension": 8,
                "pooling": "cls",
                "normalize": True,
                "query_prefix": "",
                "passage_prefix": "",
            },
            "model": "m.safetensors",
        }
    }
    assert [file["path"] for file in manifest["files"]] == sorted(file["path"] for file in manifest["files"])
    assert list(manifest["files"][0]) == ["path", "size", "sha256"]
    assert manifest["made_by"].startswith("hindsight-sidecar ")


def test_the_same_inputs_give_the_same_bytes(root: Path, model: LockedModel) -> None:
    first = written(root, model)
    (root / "tokenizer.json").touch()
    assert written(root, model) == first
    assert read_manifest(root).text() == first


def test_a_rerankers_identity_is_its_name(root: Path, model: LockedModel) -> None:
    ranker = model.model_copy(update={"kind": "reranker"})
    manifest = json.loads(build_manifest(root, "mini", ranker, ["torch"]).text())
    assert manifest["flavors"]["torch"]["identity"] == {"id": "example/mini", "revision": "r", "precision": "float32"}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}, "mean"),
        ({"embedding_dimension": 8, "pooling_mode": "cls"}, "cls"),
        ({"embedding_dimension": 8, "pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling_as_old_and_new_versions_write_it(pooling: object, expected: str, root: Path) -> None:
    put(root, "1_Pooling/config.json", pooling)
    assert read_vector_space(root)["pooling"] == expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("1_Pooling/config.json", POOLING | {"pooling_mode_mean_tokens": True}, "pooling is cls_token, mean_tokens"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 8, "pooling_mode_max_tokens": True}, "max_tokens"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 8}, "pooling is not said"),
        ("1_Pooling/config.json", POOLING | {"word_embedding_dimension": 9}, "dimension 9, config.json says"),
        ("1_Pooling/config.json", [], "1_Pooling/config.json"),
        ("1_Pooling/config.json", "{", "cannot be read as JSON"),
        ("modules.json", MODULES[:1], "expected Transformer, then Pooling"),
        ("modules.json", [*MODULES, {"type": "sentence_transformers.models.Dense"}], "models.Dense"),
        ("modules.json", [{"type": "evil.Transformer"}], "evil.Transformer"),
        ("modules.json", [MODULES[0], MODULES[1] | {"path": "elsewhere"}], "'elsewhere'"),
        ("modules.json", {}, "not a list"),
        ("config.json", [], "config.json"),
    ],
)
def test_what_cannot_be_served_is_refused_by_file(name: str, value: object, said: str, root: Path) -> None:
    put(root, name, value)
    with pytest.raises(VerificationError) as refused:
        read_vector_space(root)
    assert said in str(refused.value)


def test_no_normalize_module_means_not_normalised(root: Path) -> None:
    put(root, "modules.json", MODULES[:2])
    assert read_vector_space(root)["normalize"] is False


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("", "")),
        ({"prompts": {"query": "q: ", "document": ""}}, ("q: ", "")),
        ({"prompts": {"query": "q: ", "passage": "p: "}}, ("q: ", "p: ")),
        ({"prompts": {"all": "a: "}, "default_prompt_name": "all"}, ("a: ", "a: ")),
        ({"prompts": None, "default_prompt_name": None}, ("", "")),
    ],
)
def test_prefixes_come_from_the_models_prompts(config: object, expected: tuple[str, str], root: Path) -> None:
    put(root, "config_sentence_transformers.json", config)
    space = read_vector_space(root)
    assert (space["query_prefix"], space["passage_prefix"]) == expected


def test_max_tokens_is_the_models_own_limit(root: Path) -> None:
    put(root, "sentence_bert_config.json", {"max_seq_length": 256})
    assert read_max_tokens(root) == 256
    put(root, "sentence_bert_config.json", {"max_seq_length": None})
    assert read_max_tokens(root) == 512
    put(root, "config.json", {})
    with pytest.raises(VerificationError, match="max_position_embeddings"):
        read_max_tokens(root)


def test_file_faults_name_the_file_and_both_values(root: Path, model: LockedModel) -> None:
    written(root, model)
    manifest = read_manifest(root)
    assert file_faults(manifest, fingerprints(root)) == []
    (root / "m.safetensors").write_text("Weights")
    (root / "tokenizer.json").write_text("{ }")
    (root / "config.json").unlink()
    (root / "extra").write_text("")
    faults = "\n".join(file_faults(manifest, fingerprints(root)))
    assert "extra: in the directory, not in manifest.json" in faults
    assert "config.json: missing" in faults
    assert "tokenizer.json: 3 bytes, manifest.json says 2" in faults
    assert f"m.safetensors: sha256 {fingerprint(root / 'm.safetensors').sha256}, manifest.json says" in faults


def test_pins_of_the_lock(root: Path, model: LockedModel) -> None:
    pinned = [file.model_copy(update={"sha256": "0" * 64}) for file in model.files if file.path == "config.json"]
    faults = pin_faults(model.model_copy(update={"files": tuple(pinned)}), fingerprints(root))
    assert len(faults) == 1
    assert faults[0].endswith(f"the lock says {'0' * 64}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its beginning"),
        ('{"format": 2}', "format"),
        ('{"format": 1, "files": [{"path": "../x"}]}', "manifest.json: wrong at"),
    ],
)
def test_a_manifest_that_is_none(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(VerificationError) as refused:
        read_manifest(tmp_path)
    assert said in str(refused.value)


def test_layout(root: Path) -> None:
    assert content_faults(root, "embedding", ["m.safetensors"]) == []
    put(root, "pytorch_model.bin", "x")
    put(root, "tokenizer.json", "version https://git-lfs.github.com/spec/v1\n")
    (root / "modules.json").unlink()
    faults = "\n".join(content_faults(root, "embedding", ["onnx/model.onnx"]))
    for said in (
        "modules.json: missing",
        "onnx/model.onnx: missing",
        "pytorch_model.bin: a pickle",
        "tokenizer.json: a Git LFS",
    ):
        assert said in faults


def test_links_and_locked_files(root: Path) -> None:
    assert plain_file_faults(root) == []
    (root / "dangling").symlink_to("nowhere")
    (root / "linked").symlink_to(root / "1_Pooling")
    (root / "config.json").chmod(0o600)
    (root / "1_Pooling").chmod(0o700)
    faults = "\n".join(plain_file_faults(root))
    for said in (
        "dangling: is a symlink to nowhere",
        "linked: is a symlink",
        "config.json: mode 0600",
        "1_Pooling: mode 0700",
    ):
        assert said in faults


def test_git_and_the_hub_would_name_a_file_like_this(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    assert fingerprint(tmp_path / "x").blob_id == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert not is_lfs_pointer(tmp_path / "x")


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((root / "manifest.json").read_text())
    change(manifest)
    put(root, "manifest.json", manifest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(stand_in=True), "stand_in is True, the lock says False"),
        (lambda m: m.update(max_tokens=9), "max_tokens is 9, the model's files say 512"),
        (lambda m: m["flavors"]["torch"]["identity"].update(revision="s"), "the lock says example/mini r float32"),
        (lambda m: m["flavors"]["torch"]["identity"].update(normalize=False), "normalize of torch is False"),
        (lambda m: m["flavors"].update(onnx=m["flavors"]["torch"]), "has flavour onnx, the lock has not"),
    ],
)
def test_a_manifest_that_claims_something_else(
    change: Callable[[dict[str, Any]], None], said: str, root: Path, model: LockedModel
) -> None:
    written(root, model)
    lock = Lock(format=1, models={"mini": model})
    assert check_files(root, lock)[0].passed
    edit(root, change)
    report, _ = check_files(root, lock)
    assert not report.passed
    assert said in "\n".join(check.detail for check in report.checks)
    # Nothing is loaded, so no interpreter is asked for.
    assert not verify(root, lock, None, []).passed


def test_a_directory_without_manifest(tmp_path: Path) -> None:
    report, manifest = check_files(tmp_path, Lock(format=1, models={}))
    assert manifest is None
    assert "hindsight-bake did not make" in report.checks[0].detail
