"""What makes vectors comparable, read from the model's own files and never assumed."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from bake.errors import VerificationError
from bake.layout import POOLING, read_json, read_object
from bake.lock import LockedFlavor, LockedModel

Pooling = Literal["cls", "mean"]
MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
# hindsight-api's ONNX provider does what these three do and nothing else.
MODULE_CLASSES = ("Transformer", "Pooling", "Normalize")


class Identity(BaseModel):
    """Two sets of vectors may be compared if all of this is equal.

    Attributes:
        dimension, pooling, normalize, query_prefix, passage_prefix: None for a reranker, which makes no vectors.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    revision: str
    precision: str
    dimension: int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None


def read_identity(root: Path, model: LockedModel, flavor: LockedFlavor) -> Identity:
    """Read the identity of a flavour out of the directory. Raises VerificationError naming the file."""
    space = {} if model.kind == "reranker" else read_vector_space(root)
    return Identity(id=model.id, revision=flavor.revision or model.revision, precision=flavor.precision, **space)


def read_vector_space(root: Path) -> dict[str, Any]:
    """Dimension, pooling, normalisation and prefixes of an embedding model. Raises VerificationError."""
    query_prefix, passage_prefix = _prefixes(root)
    return {
        "dimension": _dimension(root),
        "pooling": _pooling(root),
        "normalize": _normalize(root),
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
    }


def read_max_tokens(root: Path) -> int:
    """Tokens after which the model cuts a text: its own limit, else that of its position table."""
    for path, key in (("sentence_bert_config.json", "max_seq_length"), ("config.json", "max_position_embeddings")):
        if path == "config.json" or (root / path).is_file():
            value = read_object(root, path).get(key)
            if isinstance(value, int) and value > 0:
                return value
    raise VerificationError(
        ["config.json: no max_position_embeddings, and no sentence_bert_config.json that says more"]
    )


def _normalize(root: Path) -> bool:
    modules = read_json(root, MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise VerificationError([f"{MODULES}: not a list of modules"])
    kinds = []
    for module in modules:
        package, _, kind = str(module.get("type")).rpartition(".")
        if kind not in MODULE_CLASSES or package.split(".")[0] != "sentence_transformers":
            raise VerificationError([f"{MODULES}: has {module.get('type')}, expected only {', '.join(MODULE_CLASSES)}"])
        if kind == "Pooling" and module.get("path") != "1_Pooling":
            raise VerificationError([f"{MODULES}: Pooling is in {module.get('path')!r}, expected '1_Pooling'"])
        kinds.append(kind)
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise VerificationError([f"{MODULES}: {', '.join(kinds) or 'empty'}; expected Transformer, then Pooling"])
    return "Normalize" in kinds


def _pooling(root: Path) -> Pooling:
    config = read_object(root, POOLING)
    # sentence-transformers 6 writes one name (or a list); earlier versions one switch a mode.
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named) if isinstance(named, list) else []
    if not modes:
        modes = [
            key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on
        ]
    if len(modes) == 1 and modes[0] in {"cls", "cls_token"}:
        return "cls"
    if len(modes) == 1 and modes[0] in {"mean", "mean_tokens"}:
        return "mean"
    raise VerificationError([f"{POOLING}: pooling is {', '.join(map(str, modes)) or 'not said'}, expected cls or mean"])


def _dimension(root: Path) -> int:
    pooling = read_object(root, POOLING)
    config = read_object(root, "config.json")
    pooled = pooling.get("word_embedding_dimension", pooling.get("embedding_dimension"))
    hidden = config.get("hidden_size")
    if not isinstance(pooled, int) or pooled != hidden:
        raise VerificationError([f"{POOLING}: dimension {pooled}, config.json says hidden_size {hidden}"])
    return pooled


def _prefixes(root: Path) -> tuple[str, str]:
    if not (root / PROMPTS).is_file():
        return "", ""
    config = read_object(root, PROMPTS)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise VerificationError([f"{PROMPTS}: prompts is not a JSON object"])
    prompts = {key: value for key, value in prompts.items() if isinstance(value, str)}
    default = prompts.get(config.get("default_prompt_name"), "")
    passage = next((prompts[key] for key in ("document", "passage", "corpus") if key in prompts), default)
    return prompts.get("query", default), passage
