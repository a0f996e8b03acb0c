import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bake import interpreter
from bake.errors import BakeError
from bake.interpreter import lacking, probe, settings
from bake.manifest import Manifest


def manifest(kind: str = "embedding") -> Manifest:
    identity: dict[str, object] = {"id": "i", "revision": "r", "precision": "float32"}
    if kind == "embedding":
        identity |= {
            "dimension": 384, "pooling": "cls", "normalize": True, "query_prefix": "", "passage_prefix": "",
        }  # fmt: skip
    return Manifest.model_validate(
        {
            "kind": kind,
            "name": "mini",
            "license": "MIT",
            "stand_in": False,
            "max_tokens": 256,
            "flavors": {
                "onnx": {"identity": identity, "model": "onnx/model.onnx"},
                "torch": {"identity": identity, "model": "model.safetensors"},
            },
            "files": [],
            "made_by": "test",
        }
    )


def test_nothing_of_the_onnx_provider_is_left_to_its_defaults() -> None:
    found = settings(Path("/m"), manifest(), "onnx")
    assert found["HINDSIGHT_API_EMBEDDINGS_PROVIDER"] == "onnx"
    onnx = {
        key.removeprefix("HINDSIGHT_API_EMBEDDINGS_ONNX_"): value for key, value in found.items() if "_ONNX_" in key
    }
    assert onnx == {
        "MODEL_PATH": "/m/onnx/model.onnx",
        "TOKENIZER_NAME_OR_PATH": "/m",
        "DIMENSIONS": "384",
        "MAX_TOKENS": "256",
        "POOLING": "cls",
        "NORMALIZE": "true",
        "QUERY_PREFIX": "",
        "PASSAGE_PREFIX": "",
    }


def test_torch_gets_the_directory_and_no_code_of_the_models_own() -> None:
    found = settings(Path("/m"), manifest(), "torch")
    assert found["HINDSIGHT_API_EMBEDDINGS_LOCAL_MODEL"] == "/m"
    assert found["HINDSIGHT_API_EMBEDDINGS_LOCAL_TRUST_REMOTE_CODE"] == "false"


def test_rerankers() -> None:
    assert settings(Path("/m"), manifest("reranker"), "torch") == {
        "HINDSIGHT_API_RERANKER_PROVIDER": "local",
        "HINDSIGHT_API_RERANKER_LOCAL_MODEL": "/m",
    }
    assert settings(Path("/m"), manifest("reranker"), "onnx")["HINDSIGHT_API_RERANKER_ONNX_MODEL_PATH"].endswith(
        ".onnx"
    )


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    source = interpreter.PROBE.read_text(encoding="utf-8")
    assert "from bake" not in source
    assert "import bake" not in source


def test_the_audit_hook_refuses_and_remembers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import importlib.util, json, socket
            spec = importlib.util.spec_from_file_location("probe", {str(interpreter.PROBE)!r})
            probe = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(probe)
            attempts, allowed = [], []
            probe.refuse_network(attempts)

            def attempt(what, action):
                try:
                    action()
                except probe.NetworkRefusedError:
                    return
                except OSError:
                    pass
                allowed.append(what)

            with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as unix:
                attempt("public", lambda: tcp.connect(("192.0.2.1", 1)))
                attempt("udp", lambda: udp.sendto(b"x", ("192.0.2.1", 1)))
                attempt("name", lambda: socket.getaddrinfo("example.invalid", 1))
                attempt("old name", lambda: socket.gethostbyname("example.invalid"))
                attempt("loopback", lambda: tcp.connect(("127.0.0.1", 1)))
                attempt("local name", lambda: socket.getaddrinfo("localhost", 1))
                attempt("unix", lambda: unix.connect("/nonexistent"))
            print(json.dumps([attempts, allowed]))
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    attempts, allowed = json.loads(done.stdout)
    assert attempts == [
        "socket.connect 192.0.2.1",
        "socket.sendto 192.0.2.1",
        "socket.getaddrinfo example.invalid",
        "socket.gethostbyname example.invalid",
    ]
    assert allowed == ["loopback", "local name", "unix"]


def test_an_interpreter_that_has_not_what_it_takes() -> None:
    assert lacking(Path(sys.executable), "onnx") == "hindsight_api"


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BakeError, match="cannot run"):
        lacking(tmp_path / "python", "onnx")
    with pytest.raises(BakeError, match="does not run as a Python"):
        lacking(Path("/bin/false"), "onnx")


def test_a_model_that_cannot_be_loaded_is_an_answer(tmp_path: Path) -> None:
    # This interpreter has no hindsight-api at all, which is where loading ends at the latest.
    found = probe(Path(sys.executable), tmp_path, manifest(), "onnx", {"documents": [], "queries": []})
    assert found.answer["error"].startswith("PackageNotFoundError")
    assert found.answer["network"] == []
    assert "audit hook" in found.isolation


def test_the_environment_is_made_and_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    told = tmp_path / "python"
    told.write_text(
        f"#!{sys.executable}\nimport json, os\n"
        "print(json.dumps({'environment': dict(os.environ), 'cwd': os.listdir('.'), 'home': os.listdir(os.environ['HOME'])}))\n"
    )
    told.chmod(0o755)
    found = probe(told, tmp_path, manifest(), "onnx", {}).answer
    environment = found["environment"]
    assert "HF_TOKEN" not in environment
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["ORT_DISABLE_TELEMETRY"] == "1"
    assert environment["HOME"] != os.environ.get("HOME")
    assert found["cwd"] == found["home"] == []
    assert not Path(environment["HOME"]).exists()


def test_a_probe_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho illegal instruction >&2\nexit 132\n")
    dying.chmod(0o755)
    with pytest.raises(BakeError, match=r"status 132(.|\n)*illegal instruction"):
        probe(dying, tmp_path, manifest(), "onnx", {})
