"""A baked model with other weights under the same name, as a botched training, export or copy leaves it.

Two kinds. *Turned*: random components of every vector have the other sign, by the last layer's scale and bias. Such a model
means as much as the one it comes from, so whatever it stores it finds again, and what the other stored it does not.
*Scrambled*: every weight of a matrix has a random sign (a random value, where it is a byte), so vectors have the right
dimension and length, and mean nothing.
"""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_GRAPH, _INITIALIZER = 7, 5  # fields of ONNX's ModelProto and GraphProto
_TYPE, _NAME, _DATA = 2, 8, 9  # of its TensorProto
_FLOATS, _BYTE_TYPES = {1}, {2, 3}  # its data types
_MATRIX = 4096  # bytes; what is smaller is a bias or a scale
_LAST = re.compile(r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(?:weight|bias)$")
Span = tuple[int, int]
Tensor = tuple[str, Span, int]  # its name, where it is, and the size of its elements


def turned(model: Path, directory: Path, seed: int) -> Path:
    """Copy a baked model with other signs, for the flavours that it has, and return the copy; its manifest is right about it."""
    return _reweighted(model, directory, seed, _last_layer)


def scrambled(model: Path, directory: Path, seed: int) -> Path:
    """Copy a baked model with random weights, in the same way."""
    return _reweighted(model, directory, seed, _matrices)


def _reweighted(model: Path, directory: Path, seed: int, which: Callable[[list[Tensor]], list[Tensor]]) -> Path:
    """Copy a baked model, for the flavours that it has, and return the copy; its manifest is right about it."""
    shutil.copytree(model, directory)
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    for name in {flavor["model"] for flavor in manifest["flavors"].values()}:
        path = directory / name
        path.write_bytes(_other_weights(path, seed, which))
    for file in manifest["files"]:
        file["sha256"] = hashlib.sha256((directory / file["path"]).read_bytes()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


def _other_weights(path: Path, seed: int, which: Callable[[list[Tensor]], list[Tensor]]) -> bytes:
    content = bytearray(path.read_bytes())
    found = list(_in_onnx(content) if path.suffix == ".onnx" else _in_safetensors(content))
    for _, (begin, end), size in which(found):
        # The same chance for each: a component's scale and its bias change together.
        content[begin:end] = _changed(content[begin:end], size, random.Random(seed))
    return bytes(content)


def _last_layer(tensors: list[Tensor]) -> list[Tensor]:
    numbers = {tensor: int(found[1]) for tensor in tensors if (found := _LAST.search(tensor[0]))}
    [weight, bias] = [tensor for tensor, number in numbers.items() if number == max(numbers.values())]
    return [weight, bias]


def _matrices(tensors: list[Tensor]) -> list[Tensor]:
    found = [tensor for tensor in tensors if tensor[1][1] - tensor[1][0] >= _MATRIX]
    assert found, "no matrix is among the weights"
    return found


def _changed(weights: bytearray, size: int, chance: random.Random) -> bytes:
    noise = chance.randbytes(len(weights))
    if size == 1:
        return noise
    signs = int.from_bytes(b"\0\0\0\x80" * (len(weights) // size), "big")
    return (int.from_bytes(weights, "big") ^ (int.from_bytes(noise, "big") & signs)).to_bytes(len(weights), "big")


def _in_safetensors(content: bytearray) -> Iterator[Tensor]:
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, tensor in json.loads(content[8:begin]).items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            first, last = tensor["data_offsets"]
            yield name, (begin + first, begin + last), 4


def _in_onnx(content: bytearray) -> Iterator[Tensor]:
    for graph in _fields(content, (0, len(content)), _GRAPH):
        for tensor in _fields(content, graph, _INITIALIZER):
            [(kind, _)] = _fields(content, tensor, _TYPE)
            size = 4 if kind in _FLOATS else 1
            if kind in _FLOATS | _BYTE_TYPES:
                [(begin, end)] = _fields(content, tensor, _NAME)
                name = content[begin:end].decode()
                yield from ((name, span, size) for span in _fields(content, tensor, _DATA))


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
