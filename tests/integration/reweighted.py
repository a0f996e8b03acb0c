"""A baked model with other weights under the same name, as a botched training, export or copy leaves it.

Every weight of a matrix has a random sign (a random value, where it is a byte). So all is finite and of the right shape,
vectors have the right dimension and length, and mean nothing.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_GRAPH, _INITIALIZER = 7, 5  # fields of ONNX's ModelProto and GraphProto
_TYPE, _DATA = 2, 9  # of its TensorProto
_FLOATS, _BYTE_TYPES = {1}, {2, 3}  # its data types
_MATRIX = 4096  # bytes; what is smaller is a bias or a scale
Span = tuple[int, int]


def reweighted(model: Path, directory: Path, seed: int) -> Path:
    """Copy a baked model, for the flavours that it has, and return the copy; its manifest is right about it."""
    shutil.copytree(model, directory)
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    for name in {flavor["model"] for flavor in manifest["flavors"].values()}:
        path = directory / name
        path.write_bytes(_other_weights(path, random.Random(seed)))
    for file in manifest["files"]:
        file["sha256"] = hashlib.sha256((directory / file["path"]).read_bytes()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


def _other_weights(path: Path, chance: random.Random) -> bytes:
    content = bytearray(path.read_bytes())
    spans = _in_onnx(content) if path.suffix == ".onnx" else _in_safetensors(content)
    changed = 0
    for (begin, end), size in spans:
        if end - begin >= _MATRIX:
            content[begin:end] = _changed(content[begin:end], size, chance)
            changed += end - begin
    assert changed > len(content) // 2, f"{path} has {changed} bytes of weights in {len(content)}"
    return bytes(content)


def _changed(weights: bytearray, size: int, chance: random.Random) -> bytes:
    noise = chance.randbytes(len(weights))
    if size == 1:
        return noise
    signs = int.from_bytes(b"\0\0\0\x80" * (len(weights) // size), "big")
    return (int.from_bytes(weights, "big") ^ (int.from_bytes(noise, "big") & signs)).to_bytes(len(weights), "big")


def _in_safetensors(content: bytearray) -> Iterator[tuple[Span, int]]:
    """Yield where each tensor is, and the size of its elements."""
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, tensor in json.loads(content[8:begin]).items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            first, last = tensor["data_offsets"]
            yield (begin + first, begin + last), 4


def _in_onnx(content: bytearray) -> Iterator[tuple[Span, int]]:
    for graph in _fields(content, (0, len(content)), _GRAPH):
        for tensor in _fields(content, graph, _INITIALIZER):
            [(kind, _)] = _fields(content, tensor, _TYPE)
            size = 4 if kind in _FLOATS else 1
            if kind in _FLOATS | _BYTE_TYPES:
                yield from ((span, size) for span in _fields(content, tensor, _DATA))


def _fields(content: bytearray, within: Span, wanted: int) -> list[Span]:
    """Return where the content of each field of a number is; of a number, its value."""
    found = []
    at, end = within
    while at < end:
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(content, at)
            span = (value, value)
        else:
            length, at = _varint(content, at) if wire == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[wire], at)
            span = (at, at + length)
            at += length
        if number == wanted:
            found.append(span)
    return found


def _varint(content: bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
