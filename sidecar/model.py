"""The baked model: what its manifest says, and whether its files are still those that were baked."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from sidecar.errors import BlockedError, Reason

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """What makes two embeddings comparable; the same for torch and full-precision ONNX.

    Attributes:
        id: name on the model hub.
        revision: commit on the hub.
        precision: `float32` or `int8`.
        dimension: components of a vector.
        pooling: `cls` or `mean`.
        normalize: whether vectors have unit length.
        query_prefix: put before a query, mostly empty.
        passage_prefix: put before a stored text, mostly empty.

    """

    id: str
    revision: str
    precision: str
    dimension: int
    pooling: str
    normalize: bool
    query_prefix: str
    passage_prefix: str

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Make an identity from its JSON object; unknown members are an error."""
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` takes."""
        return asdict(self)

    def differences(self, other: "Identity") -> list[str]:
        """Name what differs, as `member: ours, not theirs`."""
        theirs = other.to_json()
        return [
            f"{name}: {mine!r}, not {theirs[name]!r}" for name, mine in self.to_json().items() if mine != theirs[name]
        ]


@dataclass(frozen=True)
class File:
    """A file as it was baked: size in bytes, SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Baked:
    """A baked directory, as its manifest describes it, seen from one flavour.

    Attributes:
        directory: where the files are.
        name: as `hindsight-bake` calls it.
        weights: the file that this flavour loads, relative to `directory`.
        max_tokens: longest input in tokens; what is longer is cut.
        stand_in: whether this is not the model that the image is made for.
        files: by relative path.
        loaded: the paths that this flavour has a use for: all but the weights of others.

    """

    directory: Path
    name: str
    weights: str
    max_tokens: int
    stand_in: bool
    files: dict[str, File]
    loaded: frozenset[str]


@dataclass(frozen=True)
class Model(Baked):
    """The embedding model.

    Attributes:
        identity: of this flavour.

    """

    identity: Identity

    @property
    def content(self) -> str:
        """What is in its files: one hash over the names and hashes of those that are loaded."""
        lines = [f"{self.files[name].sha256} {name}\n" for name in sorted(self.loaded)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return what `/health` tells about the model."""
        return {"name": self.name, "stand_in": self.stand_in, **self.identity.to_json()}


def read(directory: Path, flavor: str) -> Model:
    """Read a baked embedding model's manifest.

    Raises:
        BlockedError: `model-missing` where there is no usable manifest for this flavour.

    """
    return _read(directory, flavor, "embedding", "HINDSIGHT_SIDECAR_MODEL_DIR", _model)


def read_reranker(directory: Path, flavor: str) -> Baked:
    """Read a baked reranker's manifest.

    Raises:
        BlockedError: `model-missing` where there is no usable manifest for this flavour.

    """
    return _read(directory, flavor, "reranker", "HINDSIGHT_SIDECAR_RERANKER_DIR", lambda baked, _: Baked(**baked))


def _model(baked: dict[str, Any], chosen: dict[str, Any]) -> Model:
    return Model(**baked, identity=Identity.from_json(chosen["identity"]))


T = TypeVar("T")


def _read(
    directory: Path, flavor: str, kind: str, setting: str, make: Callable[[dict[str, Any], dict[str, Any]], T]
) -> T:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["kind"] != kind:
            raise BlockedError(
                Reason.MODEL_MISSING,
                f"{path} has format {manifest['format']}, kind {manifest['kind']!r}; expected format {FORMAT}, "
                f"kind {kind!r}: bake the model again with this version's hindsight-bake",
            )
        if flavor not in manifest["flavors"]:
            raise BlockedError(
                Reason.MODEL_MISSING,
                f"{directory} was baked for {', '.join(sorted(manifest['flavors']))}, and HINDSIGHT_SIDECAR_FLAVOR is "
                f"{flavor}; bake it with `--flavor {flavor}`, or set the flavour that is there",
            )
        chosen = manifest["flavors"][flavor]
        files = {file["path"]: File(file["size"], file["sha256"]) for file in manifest["files"]}
        others = {other["model"] for other in manifest["flavors"].values()} - {chosen["model"]}
        baked = {
            "directory": directory,
            "name": manifest["name"],
            "weights": chosen["model"],
            "max_tokens": manifest["max_tokens"],
            "stand_in": manifest["stand_in"],
            "files": files,
            "loaded": frozenset(files.keys() - others),
        }
        return make(baked, chosen)
    except FileNotFoundError:
        raise BlockedError(
            Reason.MODEL_MISSING,
            f"there is no {path}; set {setting} to a directory made by `hindsight-bake snapshot`",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BlockedError(
            Reason.MODEL_MISSING,
            f"{path} cannot be used ({type(error).__name__}: {error}); bake the model again",
        ) from error


def check_files(model: Baked) -> None:
    """Compare names and sizes with the manifest.

    Raises:
        BlockedError: `model-changed`, naming the first file that differs.

    """
    for name, file in model.files.items():
        path = model.directory / name
        try:
            seen = path.stat().st_size
            readable = path.open("rb")
        except OSError as error:
            raise BlockedError(
                Reason.MODEL_CHANGED,
                f"{path} cannot be read ({error.strerror}); its manifest lists it: bake the model again",
            ) from error
        readable.close()
        if seen != file.size:
            raise BlockedError(
                Reason.MODEL_CHANGED,
                f"{path} has {seen} bytes and its manifest says {file.size}; bake the model again",
            )


class Hashes:
    """Hashes of files, which are read again only where the file system says that they are others or were written to."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def of(self, path: Path) -> str:
        """Return a file's SHA-256. Raises OSError."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            found = hashlib.file_digest(file, "sha256").hexdigest()
        self._known[path] = (stamp, found)
        return found


def check_content(model: Baked, hashes: Hashes) -> None:
    """Compare what is in the files that are loaded with the manifest: one wrong byte makes a vector wrong, not an error.

    It takes 0.1 s for 100 MB, and reads what hindsight-api reads next.

    Raises:
        BlockedError: `model-changed`, naming the first file that differs.

    """
    for name in sorted(model.loaded):
        path = model.directory / name
        try:
            seen = hashes.of(path)
        except OSError as error:
            raise BlockedError(
                Reason.MODEL_CHANGED,
                f"{path} cannot be read ({error.strerror}); its manifest lists it: bake the model again",
            ) from error
        if seen != model.files[name].sha256:
            raise BlockedError(
                Reason.MODEL_CHANGED,
                f"{path} has other content than when it was baked (SHA-256 {seen[:12]}…, and its manifest says "
                f"{model.files[name].sha256[:12]}…); bake the model again",
            )
