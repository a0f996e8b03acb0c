"""Runs the probe with hindsight-api's interpreter, without network, in an environment of its own."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bake.errors import BakeError
from bake.lock import Flavor
from bake.manifest import Manifest

PROBE = Path(__file__).with_name("probe.py")
TIMEOUT = 600.0  # seconds: a cold disk, two slow cores and 130 MB of weights
NEEDS: dict[Flavor, tuple[str, ...]] = {"onnx": ("onnxruntime", "transformers"), "torch": ("sentence_transformers",)}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
STDERR_TAIL = 4000  # characters of it that are worth reading


@dataclass(frozen=True)
class Probed:
    """The probe's answer (see probe.py), and how the network was kept out."""

    answer: dict[str, Any]
    isolation: str


def settings(directory: Path, manifest: Manifest, flavor: Flavor) -> dict[str, str]:
    """HINDSIGHT_API_* with which hindsight-api loads this flavour in production. Nothing comes from its defaults."""
    entry = manifest.flavors[flavor]
    identity = entry.identity
    model = str(directory / entry.model)
    if manifest.kind == "reranker":
        if flavor == "torch":
            return {"HINDSIGHT_API_RERANKER_PROVIDER": "local", "HINDSIGHT_API_RERANKER_LOCAL_MODEL": str(directory)}
        return {
            "HINDSIGHT_API_RERANKER_PROVIDER": "onnx",
            "HINDSIGHT_API_RERANKER_ONNX_MODEL_PATH": model,
            "HINDSIGHT_API_RERANKER_ONNX_TOKENIZER_NAME_OR_PATH": str(directory),
            "HINDSIGHT_API_RERANKER_ONNX_MAX_TOKENS": str(manifest.max_tokens),
        }
    without_reranker = {"HINDSIGHT_API_RERANKER_PROVIDER": "rrf"}
    if flavor == "torch":
        return {
            **without_reranker,
            "HINDSIGHT_API_EMBEDDINGS_PROVIDER": "local",
            "HINDSIGHT_API_EMBEDDINGS_LOCAL_MODEL": str(directory),
            "HINDSIGHT_API_EMBEDDINGS_LOCAL_TRUST_REMOTE_CODE": "false",
        }
    return {
        **without_reranker,
        "HINDSIGHT_API_EMBEDDINGS_PROVIDER": "onnx",
        "HINDSIGHT_API_EMBEDDINGS_ONNX_MODEL_PATH": model,
        # Both paths, or the tokenizer is fetched from the hub; empty prefixes, or E5's are put before every text.
        "HINDSIGHT_API_EMBEDDINGS_ONNX_TOKENIZER_NAME_OR_PATH": str(directory),
        "HINDSIGHT_API_EMBEDDINGS_ONNX_DIMENSIONS": str(identity.dimension),
        "HINDSIGHT_API_EMBEDDINGS_ONNX_MAX_TOKENS": str(manifest.max_tokens),
        "HINDSIGHT_API_EMBEDDINGS_ONNX_POOLING": str(identity.pooling),
        "HINDSIGHT_API_EMBEDDINGS_ONNX_NORMALIZE": str(identity.normalize).lower(),
        "HINDSIGHT_API_EMBEDDINGS_ONNX_QUERY_PREFIX": identity.query_prefix or "",
        "HINDSIGHT_API_EMBEDDINGS_ONNX_PASSAGE_PREFIX": identity.passage_prefix or "",
    }


def lacking(interpreter: Path, flavor: Flavor) -> str | None:
    """Name the first module the flavour needs that the interpreter has not. Raises BakeError."""
    wanted = ("hindsight_api", *NEEDS[flavor])
    script = f"import importlib.util as u, json; print(json.dumps([m for m in {wanted!r} if u.find_spec(m) is None]))"
    done = _run([str(interpreter), "-P", "-c", script], "", {"PATH": os.defpath}, Path("/"))
    if done.returncode != 0:
        raise BakeError(f"{interpreter} does not run as a Python 3.11 or later: {done.stderr.strip()[-STDERR_TAIL:]}")
    missing: list[str] = json.loads(done.stdout)
    return missing[0] if missing else None


def probe(interpreter: Path, directory: Path, manifest: Manifest, flavor: Flavor, request: dict[str, Any]) -> Probed:
    """Load the flavour and have the request answered. Raises BakeError if the probe itself does not answer."""
    scratch = Path(tempfile.mkdtemp(prefix="hindsight-bake-"))
    try:
        home, working = scratch / "home", scratch / "empty"
        home.mkdir()
        working.mkdir()
        environment = {
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            # C13: libraries write wherever one of these points, and some die if none does.
            **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR"), str(home)),
            **OFFLINE,
            **settings(directory, manifest, flavor),
        }
        command = [*namespace(), str(interpreter), "-P", str(PROBE)]
        done = _run(command, json.dumps({**request, "kind": manifest.kind}), environment, working)
        if done.returncode != 0 or not done.stdout:
            raise BakeError(
                f"the probe under {interpreter} ended with status {done.returncode} and no answer:\n"
                f"{done.stderr.strip()[-STDERR_TAIL:]}"
            )
        isolation = "network namespace and audit hook" if namespace() else "audit hook (no namespace to be had here)"
        return Probed(answer=json.loads(done.stdout), isolation=isolation)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@functools.cache
def namespace() -> tuple[str, ...]:
    """Command prefix for an empty network namespace, or nothing where the kernel or a sandbox forbids them.

    The audit hook sees Python only; the namespace stops what native code does by itself (ONNX Runtime's telemetry).
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    for prefix in ((unshare, "-n"), (unshare, "-r", "-n")):
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return ()


def _run(command: list[str], text: str, environment: dict[str, str], working: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            env=environment,
            cwd=working,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except OSError as error:
        raise BakeError(f"cannot run {command[0]}: {error}") from error
    except subprocess.TimeoutExpired:
        raise BakeError(f"{command[0]} gave no answer within {TIMEOUT:.0f} s") from None
