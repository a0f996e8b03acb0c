"""How large the image is, beside the same parts put together without a thought."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from bake.errors import BakeError
from bake.image.build import image_size, inspect
from bake.image.engine import Engine
from bake.image.plan import LABELS, MODEL, ROOT

LOCK = ROOT / "bake" / "models.lock"
NAIVE = Path(__file__).with_name("naive.Containerfile")
_MEGABYTE = 1e6
LIMIT = 1.2e9  # bytes of the onnx flavour, with the real model's weights
SHARE = 0.6  # of the naive image


@dataclass(frozen=True)
class Size:
    """An image's size in bytes.

    Attributes:
        reported: uncompressed, as the engine reports it.
        real: with the real model's weights where a stand-in is baked.

    """

    reported: int
    real: int


def measure(engine: Engine, image: str) -> Size:
    """Return an image's size, the stand-in's weights exchanged for the real ones by arithmetic.

    Raises:
        BakeError: the engine does not tell sizes, or the image has no model.

    """
    reported = image_size(engine, image)
    if reported is None:
        raise BakeError(f"{engine.name} does not report sizes; use podman or docker")
    labels = inspect(engine, image)["Config"].get("Labels") or {}
    if labels.get(f"{LABELS}.stand-in") != "true":
        return Size(reported, reported)
    return Size(reported, reported - baked_bytes(engine, image, labels) + real_bytes(labels[f"{LABELS}.flavor"]))


def baked_bytes(engine: Engine, image: str, labels: dict[str, str]) -> int:
    """Return the bytes of the baked model's files, from its manifest."""
    manifest = f"/opt/models/{labels[f'{LABELS}.model']}/manifest.json"
    told = engine.call("run", "--rm", "--network=none", "--entrypoint=/bin/cat", image, manifest)
    if told.returncode:
        raise BakeError(f"{image} has no {manifest}: {told.stderr.strip()}")
    return sum(int(file["size"]) for file in json.loads(told.stdout)["files"])


def real_bytes(flavor: str) -> int:
    """Return the bytes of the real model's files whose sizes are pinned: all but some kilobytes."""
    lock = tomllib.loads(LOCK.read_text(encoding="utf-8"))
    files = lock["models"][MODEL]["files"]
    return sum(file.get("size", 0) for file in files if file.get("flavor", flavor) == flavor)


def report(image: Size, naive: Size, flavor: str) -> tuple[str, bool]:
    """Return the comparison for a person, and whether the image is as small as it has to be."""
    share = image.reported / naive.reported
    passed = (flavor != "onnx" or image.real <= LIMIT) and share <= SHARE
    lines = [
        f"image  {image.reported / _MEGABYTE:7.0f} MB, {image.real / _MEGABYTE:.0f} MB with the real model (at most {LIMIT / _MEGABYTE:.0f})",
        f"naive  {naive.reported / _MEGABYTE:7.0f} MB",
        f"share  {share:7.2f} (at most {SHARE})",
    ]
    return "\n".join(lines), passed
