"""Load one model the way hindsight-api does, and tell what came of it. Runs under hindsight-api's interpreter.

Self-contained on purpose: nothing of this package can be imported there. The settings come as HINDSIGHT_API_*
in the environment, the request as JSON on stdin, the answer is JSON on stdout:

    request  {"kind": "embedding", "documents": [text, ...], "queries": [text, ...]}
             {"kind": "reranker", "pairs": [[query, text], ...]}
    answer   {"hindsight_api": "1.1.0", "provider": "OnnxEmbeddings", ..., "warnings": [...], "network": [...]}
             or the same with "error"
"""

import asyncio
import inspect
import json
import logging
import os
import sys
import traceback
import warnings
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

LOOPBACK = ("127.", "::1", "localhost")
# Events of CPython's audit table that reach out, and where in their arguments the peer is.
REACHING_OUT = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
}


class NetworkRefusedError(OSError):
    """The code under test tried to reach the network."""


def refuse_network(attempts: list[str]) -> None:
    """Refuse, and write down, every attempt of this process to leave the machine; it cannot be switched off again."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        position = REACHING_OUT.get(event)
        if position is None:
            return
        peer = arguments[position]
        # A string or None as address means a Unix socket, or no peer at all.
        if event.startswith(("socket.connect", "socket.send")) and not isinstance(peer, tuple):
            return
        host = peer[0] if isinstance(peer, tuple) else peer
        if isinstance(host, bytes):
            host = host.decode(errors="replace")
        if host is None or str(host).startswith(LOOPBACK):
            return
        attempts.append(f"{event} {host}")
        raise NetworkRefusedError(f"network is forbidden here: {event} {host}")

    sys.addaudithook(hook)


class Remembering(logging.Handler):
    """Keeps what was warned about."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message with its logger's name."""
        self.kept.append(f"{record.name}: {record.getMessage()}")


def find_tokenizer_table() -> None:
    """hindsight-api 0.8.x dies on import without tiktoken's table; litellm, which it depends on, carries one."""
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        return
    spec = util.find_spec("litellm")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        table = Path(location) / "litellm_core_utils" / "tokenizers"
        if table.is_dir():
            os.environ["TIKTOKEN_CACHE_DIR"] = str(table)


async def settled(value: Any) -> Any:  # noqa: ANN401 - upstream's own, plain in 0.8.x, awaitable from 1.0 on
    """Wait for the value if it has to be waited for."""
    return await value if inspect.isawaitable(value) else value


def configured(provider: Any) -> dict[str, Any]:  # noqa: ANN401 - one of upstream's provider classes
    """Tell what the loaded provider really does, asked from what was loaded and not from the settings."""
    model = getattr(provider, "_model", None)
    if model is None:
        return {
            "pooling": provider.pooling,
            "normalize": provider.normalize,
            "max_tokens": provider.max_tokens,
            "query_prefix": provider.query_prefix,
            "passage_prefix": provider.passage_prefix,
        }
    modules = {type(module).__name__: module for module in model}
    pooling = modules.get("Pooling")
    mode = getattr(pooling, "pooling_mode", None)
    if mode is None and pooling is not None:
        mode = pooling.get_pooling_mode_str()
    return {
        "pooling": mode,
        "normalize": "Normalize" in modules,
        "max_tokens": model.max_seq_length,
        # Applied by the model itself; what this version of hindsight-api makes of them shows in the vectors.
        "query_prefix": None,
        "passage_prefix": None,
    }


async def embed(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Encode the documents twice and the queries once."""
    embeddings = import_module("hindsight_api.engine.embeddings")

    provider = embeddings.create_embeddings_from_env()
    answer["provider"] = type(provider).__name__
    await settled(provider.initialize())
    answer["dimension"] = provider.dimension
    answer.update(configured(provider))
    answer["documents"] = await settled(provider.encode_documents(request["documents"]))
    answer["again"] = await settled(provider.encode_documents(request["documents"]))
    answer["queries"] = await settled(provider.encode_query(request["queries"]))


async def rerank(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Score the pairs twice."""
    cross_encoder = import_module("hindsight_api.engine.cross_encoder")

    provider = cross_encoder.create_cross_encoder_from_env()
    answer["provider"] = type(provider).__name__
    await settled(provider.initialize())
    pairs = [(query, text) for query, text in request["pairs"]]
    answer["scores"] = [float(score) for score in await settled(provider.predict(pairs))]
    answer["again"] = [float(score) for score in await settled(provider.predict(pairs))]


def main() -> None:
    """Answer one request. A model that cannot be loaded is an answer too: exit status 0 with "error"."""
    # Libraries print; only the answer may be on stdout.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {"warnings": [], "network": []}
    refuse_network(answer["network"])
    logging.getLogger().addHandler(Remembering(answer["warnings"]))
    warnings.showwarning = lambda message, *_args, **_kwargs: answer["warnings"].append(str(message))
    find_tokenizer_table()
    try:
        answer["hindsight_api"] = metadata.version("hindsight-api-slim")
        asyncio.run(rerank(request, answer) if request["kind"] == "reranker" else embed(request, answer))
    except Exception as error:  # noqa: BLE001 - whatever stops upstream from loading it is the finding
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    json.dump(answer, output)
    output.close()
    # Threads of the libraries have nothing left to do here, and some never end.
    os._exit(0)


if __name__ == "__main__":
    main()
