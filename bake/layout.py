"""What a model directory may and must consist of, before anything is loaded from it."""

import json
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bake.errors import VerificationError
from bake.fingerprint import is_lfs_pointer
from bake.lock import Kind

MANIFEST = "manifest.json"
READ_FILE = 0o444
READ_DIRECTORY = 0o555
POOLING = "1_Pooling/config.json"
# C1: without modules.json or the pooling config sentence-transformers silently builds a mean-pooling model:
# right shape, wrong vectors. Current versions do not even warn.
REQUIRED: dict[Kind, tuple[str, ...]] = {
    "embedding": ("config.json", "modules.json", POOLING, "tokenizer.json"),
    "reranker": ("config.json", "tokenizer.json"),
    "tokenizer-table": (),
}
# C12: pickles run code when they are read, and transformers refuses them with an older torch.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_json(root: Path, path: str) -> Any:  # noqa: ANN401 - whatever the file holds
    """Parse a file of the directory. Raises VerificationError naming the file."""
    try:
        return json.loads((root / path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VerificationError([f"{path}: missing"]) from None
    except (OSError, ValueError) as error:
        raise VerificationError([f"{path}: cannot be read as JSON: {error}"]) from error


def read_object(root: Path, path: str) -> dict[str, Any]:
    """Parse a file that has to hold a JSON object. Raises VerificationError naming the file."""
    found = read_json(root, path)
    if not isinstance(found, dict):
        raise VerificationError([f"{path}: not a JSON object"])
    return found


def walk(root: Path) -> Iterator[Path]:
    """Everything below ``root``, symlinks not followed, in order of the path."""
    for path in sorted(root.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)


def plain_file_faults(root: Path) -> list[str]:
    """Whatever is not a plain, world-readable file or directory."""
    faults = []
    for path in walk(root):
        name = path.relative_to(root).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            # C8: a link that is copied into an image usually points at nothing there.
            faults.append(f"{name}: is a symlink to {path.readlink()}, expected a plain file")
        elif stat.S_ISDIR(mode):
            if mode & READ_DIRECTORY != READ_DIRECTORY:
                faults.append(f"{name}: mode {stat.S_IMODE(mode):04o}, expected 0755 (any uid has to read it)")
        elif not stat.S_ISREG(mode):
            faults.append(f"{name}: is neither a plain file nor a directory")
        elif mode & READ_FILE != READ_FILE:
            faults.append(f"{name}: mode {stat.S_IMODE(mode):04o}, expected 0644 (any uid has to read it)")
    return faults


def content_faults(root: Path, kind: Kind, models: Iterable[str]) -> list[str]:
    """Files missing, files that would run code, files that are only a pointer to their content."""
    faults = [f"{path}: missing" for path in (*REQUIRED[kind], *models) if not (root / path).is_file()]
    for path in walk(root):
        if not path.is_file():
            continue
        name = path.relative_to(root).as_posix()
        if path.suffix in PICKLES:
            faults.append(f"{name}: a pickle, which runs code when it is read; only safetensors and onnx are loaded")
        if is_lfs_pointer(path):
            faults.append(f"{name}: a Git LFS pointer and not the file itself; fetch it with `git lfs pull`")
    if faults or kind == "tokenizer-table":
        return faults
    try:
        config = read_object(root, "config.json")
    except VerificationError as error:
        return list(error.faults)
    if "auto_map" in config:
        faults.append("config.json: has auto_map, code of the model's own (trust_remote_code), which is never run here")
    return faults
