"""What is to be built, from what was asked for: decided here, done in `build.py`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bake.errors import UsageError

ROOT = Path(__file__).parents[2]
NAME = "hindsight-sidecar"
MODEL = "bge-small-en-v1.5"
STAND_IN = "all-MiniLM-L6-v2"
RERANKER = "ms-marco-MiniLM-L6-v2"
LABELS = "hindsight-sidecar"  # prefix of our own labels
STANDARD = "org.opencontainers.image"  # prefix of the OCI image specification's
REVISION = f"{STANDARD}.revision"
FLAVORS = ("onnx", "torch")
# Debian's own PostgreSQL and pgvector come with the suite.
SUITES = {"forky": "18", "trixie": "17"}
PYTHON = "python3.13"
_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
_PIP_CONFIGURATIONS = ("~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf")


@dataclass(frozen=True)
class Asked:
    """What was asked for; empty strings are what was not.

    Attributes:
        version: of hindsight-api.
        flavor: onnx or torch.
        suite: Debian's release: forky or trixie.
        base: another base image than the suite's.
        python: the package of the interpreter.
        model_dir: a directory with the model's files, instead of the hub.
        stand_in: bake the stand-in model.
        reranker: bake the reranker too.
        keep_claude_cli: keep the program that the LLM provider `claude-code` runs.
        torch_index: address of an index of CPU wheels.
        tag: another tag than the one made from all this.
        unless_built: do nothing where the same was built here from this very commit.

    """

    version: str = "1.1.0"
    flavor: str = "onnx"
    suite: str = "forky"
    base: str = ""
    python: str = PYTHON
    model_dir: str = ""
    stand_in: bool = False
    reranker: bool = False
    keep_claude_cli: bool = False
    torch_index: str = ""
    tag: str = ""
    unless_built: bool = False


@dataclass(frozen=True)
class Plan:
    """What an engine is told.

    Attributes:
        tag: of the image.
        base: the image that it starts from.
        arguments: build arguments.
        labels: of the image.
        contexts: name and directory of each additional context.
        secrets: name and file, or `env:NAME`, of each secret.

    """

    tag: str
    base: str
    arguments: Mapping[str, str]
    labels: Mapping[str, str]
    contexts: Mapping[str, Path]
    secrets: Mapping[str, str]


def versions() -> list[str]:
    """Return the versions of hindsight-api that have a lock, newest first."""
    names = (path.name for path in (ROOT / "locks").glob("hindsight-api-*-onnx.txt"))
    found = [name.removeprefix("hindsight-api-").removesuffix("-onnx.txt") for name in names]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


def own_version() -> str:
    """Return the sidecar's version."""
    text = (ROOT / "sidecar" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise UsageError("sidecar/__init__.py has no __version__; run this in a checkout")
    return found.group(1)


def faults(asked: Asked, environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each thing that cannot be asked for."""
    found = []
    if asked.version not in versions():
        found.append(f"HINDSIGHT_VERSION is {asked.version!r}; there are locks for {', '.join(versions())}")
    if asked.flavor not in FLAVORS:
        found.append(f"FLAVOR is {asked.flavor!r}; expected onnx or torch")
    if asked.suite not in SUITES:
        found.append(f"SUITE is {asked.suite!r}; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)")
    if asked.stand_in and asked.model_dir:
        found.append(
            "STAND_IN and MODEL_DIR are both set; the stand-in comes from the package index, so set one of them"
        )
    if asked.model_dir and not Path(asked.model_dir).is_dir():
        found.append(
            f"MODEL_DIR is {asked.model_dir!r}, which is no directory; name the one that has the model's files"
        )
    if asked.flavor == "torch" and not asked.torch_index and not _wheels(environ):
        found.append(
            "FLAVOR is torch, and the package index has only CUDA builds of it for most machines, some three gigabytes; "
            "give the address of PyTorch's own index of CPU wheels as TORCH_INDEX"
        )
    unnamed = [name for name in (MODEL, RERANKER) if not (Path(asked.model_dir) / name).is_dir()]
    if asked.reranker and Path(asked.model_dir or "/nowhere").is_dir() and unnamed:
        found.append(
            f"MODEL_DIR is {asked.model_dir!r}, and RERANKER needs one directory for each model in it; missing: {', '.join(unnamed)}"
        )
    if asked.reranker and asked.flavor == "onnx" and asked.version.startswith("0.8."):
        found.append(f"RERANKER is set, and hindsight-api {asked.version} loads one with torch alone; set FLAVOR=torch")
    return found


def make(asked: Asked, environ: Mapping[str, str], revision: str = "", base_digest: str = "") -> Plan:
    """Return what the engine is to be told. `revision` is the commit, `base_digest` the registry's, where known.

    Raises:
        UsageError: something cannot be asked for; a sentence each, a line each.

    """
    if found := faults(asked, environ):
        raise UsageError("\n".join(found))
    model = STAND_IN if asked.stand_in else MODEL
    arguments = {
        "BASE": base_of(asked),
        "POSTGRES": SUITES[asked.suite],
        "PYTHON": asked.python,
        "HINDSIGHT_VERSION": asked.version,
        "FLAVOR": asked.flavor,
        "MODEL": model,
    }
    optional = {
        "RERANKER": "1" if asked.reranker else "",
        "KEEP_CLAUDE_CLI": "1" if asked.keep_claude_cli else "",
        "TORCH_INDEX": asked.torch_index,
        "HF_ENDPOINT": ""
        if asked.model_dir or (asked.stand_in and not asked.reranker)
        else environ.get("HF_ENDPOINT", ""),
    }
    contexts = {"weights": Path(asked.model_dir).resolve()} if asked.model_dir else {}
    if asked.flavor == "torch" and (wheels := _wheels(environ)):
        contexts["wheels"] = wheels
    return Plan(
        tag=asked.tag or tag_of(asked),
        base=base_of(asked),
        arguments=arguments | {name: value for name, value in optional.items() if value},
        labels=_labels(asked, model, revision, base_digest),
        contexts=contexts,
        secrets=_secrets(environ),
    )


def base_of(asked: Asked) -> str:
    """Return the base image's name."""
    return asked.base or f"docker.io/library/debian:{asked.suite}-slim"


def tag_of(asked: Asked) -> str:
    """Return the image's name: version, flavour and whatever else makes it another image to its user."""
    parts = [asked.version, asked.flavor]
    parts += [asked.suite] if asked.suite != "forky" else []
    parts += ["reranker"] if asked.reranker else []
    parts += ["claude"] if asked.keep_claude_cli else []
    parts += ["standin"] if asked.stand_in else []
    return f"{NAME}:{'-'.join(parts)}"


def _labels(asked: Asked, model: str, revision: str, base_digest: str) -> dict[str, str]:
    standard = {
        "title": NAME,
        "description": "PostgreSQL, pgvector and hindsight-api as one supervised memory sidecar, offline at run time",
        "licenses": "MIT",
        "version": own_version(),
        "revision": revision,
        "base.name": base_of(asked),
        "base.digest": base_digest,
    }
    own = {
        "hindsight-api": asked.version,
        "flavor": asked.flavor,
        "model": model,
        "stand-in": str(asked.stand_in).lower(),
    }
    labels = {f"{STANDARD}.{name}": value for name, value in standard.items() if value}
    return labels | {f"{LABELS}.{name}": value for name, value in own.items()}


def _wheels(environ: Mapping[str, str]) -> Path | None:
    """Return the directory that this machine's pip looks into first."""
    path = Path(environ.get("PIP_FIND_LINKS", ""))
    return path if path.is_absolute() and path.is_dir() else None


def _secrets(environ: Mapping[str, str]) -> dict[str, str]:
    secrets = {}
    if bundle := _first([environ.get("SSL_CERT_FILE", ""), *_CA_BUNDLES]):
        secrets["ca"] = bundle
    # Where it is set pip reads no other, and /dev/null is its way to say none.
    if pip := _first([environ["PIP_CONFIG_FILE"]] if environ.get("PIP_CONFIG_FILE") else list(_PIP_CONFIGURATIONS)):
        secrets["pip"] = pip
    if environ.get("HF_TOKEN"):
        secrets["hub_token"] = "env:HF_TOKEN"  # noqa: S105 - its name
    return secrets


def _first(paths: list[str]) -> str:
    expanded = (Path(path).expanduser() for path in paths if path)
    return next((str(path) for path in expanded if path.is_file()), "")
