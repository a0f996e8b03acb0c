"""Embeds texts as hindsight-api does, and prints how much each vector agrees with a stored one, as one line of JSON.

Run as a file by hindsight-api's own interpreter, with what of its environment is about embedding. The argument is a JSON file,
`[[text, [component, ...]], ...]`; the answer has a cosine for each.
"""

import asyncio
import inspect
import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


async def settled(value: Any) -> Any:  # noqa: ANN401 - upstream's own, plain in 0.8, awaitable from 1.0 on
    """Wait for the value if it has to be waited for."""
    return await value if inspect.isawaitable(value) else value


async def embed(texts: list[str]) -> list[list[float]]:
    """Return the vectors that hindsight-api would store for these texts."""
    provider = import_module("hindsight_api.engine.embeddings").create_embeddings_from_env()
    await settled(provider.initialize())
    vectors: list[list[float]] = await settled(provider.encode_documents(texts))
    return vectors


def cosine(one: list[float], other: list[float]) -> float:
    """Return the cosine of two vectors; 0 where they cannot be compared."""
    lengths = math.hypot(*one) * math.hypot(*other)
    same = len(one) == len(other) and lengths > 0
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if same else 0.0


def main() -> None:
    """Answer for one file."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print
    stored = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    vectors = asyncio.run(embed([text for text, _ in stored]))
    found = [round(cosine(list(map(float, fresh)), kept), 4) for fresh, (_, kept) in zip(vectors, stored, strict=True)]
    output.write(f"{json.dumps(found)}\n")
    output.close()
    os._exit(0)  # threads of the libraries have nothing left to do, and some never end


if __name__ == "__main__":
    main()
