"""What several unit tests make: a baked model and an installed hindsight-api, as far as the sidecar looks at them."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from sidecar import model
from sidecar.upstream import Upstream

# The same examples in every run, and no stop-watch on a busy machine.
settings.register_profile("unit", derandomize=True, deadline=None)
settings.load_profile("unit")

IDENTITY = {
    "id": "BAAI/bge-small-en-v1.5",
    "revision": "5c38ec7c405ec4b44b94cc5a9bb96e735b38267a",
    "precision": "float32",
    "dimension": 384,
    "pooling": "cls",
    "normalize": True,
    "query_prefix": "",
    "passage_prefix": "",
}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a directory with a name short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        yield Path(directory)


@pytest.fixture
def bake(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a model directory; keywords change its manifest."""

    def make(content: dict[str, bytes] | None = None, **changes: Any) -> Path:
        directory = tmp_path / changes.get("kind", "model")
        directory.mkdir(exist_ok=True)
        content = {"model.onnx": b"weights", "tokenizer.json": b"{}"} if content is None else content
        for name, data in content.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        manifest: dict[str, Any] = {
            "format": 1,
            "kind": "embedding",
            "name": "bge-small-en-v1.5",
            "license": "MIT",
            "stand_in": False,
            "max_tokens": 512,
            "flavors": {
                "onnx": {"identity": IDENTITY, "model": "model.onnx"},
                "torch": {"identity": IDENTITY, "model": "model.safetensors"},
            },
            "files": [
                {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in content.items()
            ],
            "made_by": "hindsight-bake 0.1.0",
            **changes,
        }
        (directory / model.MANIFEST).write_text(json.dumps(manifest))
        return directory

    return make


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., Upstream]:
    """Return a function that makes hindsight-api's environment: its metadata, and sources that name variables."""

    def make(version: str = "1.1.0", names: tuple[str, ...] = ()) -> Upstream:
        venv = tmp_path / f"api-{version}"
        site = venv / "lib/python3.11/site-packages"
        (site / f"hindsight_api_slim-{version}.dist-info").mkdir(parents=True)
        (site / "hindsight_api").mkdir()
        text = "".join(f'ENV = "HINDSIGHT_API_{name}"\n' for name in names)
        (site / "hindsight_api/config.py").write_text(text)
        return Upstream(venv, version, site / "hindsight_api")

    return make


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Return a function that sets this process' environment for the test, and returns it."""

    def set_all(**variables: str) -> dict[str, str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return dict(os.environ)

    return set_all
