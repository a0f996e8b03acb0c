"""models.lock: which models there are, at which revision, made of which files."""

import tomllib
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from bake.errors import UsageError

Flavor = Literal["onnx", "torch"]
Kind = Literal["embedding", "reranker", "tokenizer-table"]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _inner(path: str) -> str:
    # It is joined to a directory, and has to stay inside.
    if path.startswith("/") or not set(path.split("/")).isdisjoint({"", ".", ".."}):
        raise ValueError(f"{path!r} is not a path below the model directory")
    return path


InnerPath = Annotated[str, AfterValidator(_inner)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*$")]


class Entry(BaseModel):
    """Base of everything in the lock: immutable, and a key nobody knows is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LockedFile(Entry):
    """One file of a model.

    Attributes:
        path: where it is in the repository and in the model directory.
        flavor: the flavour that needs it; None means all.
        size: bytes, where a trustworthy figure is known.
        sha256: likewise.
        optional: taken if the source has it.
        source: where it is under --from-dir, if elsewhere than ``path``.

    """

    path: InnerPath
    flavor: Flavor | None = None
    size: int | None = Field(default=None, ge=0)
    sha256: Sha256 | None = None
    optional: bool = False
    source: InnerPath | None = None


class LockedFlavor(Entry):
    """What hindsight-api loads for one flavour."""

    model: InnerPath
    precision: str
    revision: str | None = None


class KnownAnswer(Entry):
    """A published vector: the first components for ``text``, each right within ``tolerance``."""

    text: str
    first: tuple[float, ...] = Field(min_length=3)
    tolerance: float = Field(gt=0)


class LockedModel(Entry):
    """One model.

    Attributes:
        id: the repository on the hub, and the identity recorded in manifests.
        revision: the commit. For a source other than the hub, whatever names the version exactly.
        hub: False where the model is to be had from a directory only; ``how`` then says how to get that.

    """

    kind: Kind
    id: str
    revision: str
    license: str
    stand_in: bool = False
    hub: bool = True
    how: str = ""
    flavors: dict[Flavor, LockedFlavor] = {}
    files: tuple[LockedFile, ...] = Field(min_length=1)
    known_answer: KnownAnswer | None = None

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if (self.kind == "tokenizer-table") == bool(self.flavors):
            raise ValueError("a tokenizer-table has no flavors, everything else has at least one")
        paths = {file.path for file in self.files}
        for flavor, entry in self.flavors.items():
            if entry.model not in paths:
                raise ValueError(f"flavors.{flavor}.model {entry.model} is not among the files")
        return self

    def files_for(self, flavors: Collection[Flavor]) -> tuple[LockedFile, ...]:
        """Files the flavours need, ONNX external data included, sorted by path."""
        files = {file.path: file for file in self.files if file.flavor is None or file.flavor in flavors}
        if "onnx" in flavors and "onnx" in self.flavors:
            # ONNX keeps tensors beyond 2 GiB in a file beside the graph; hindsight-api looks for the same name.
            graph = next(file for file in self.files if file.path == self.flavors["onnx"].model)
            data = f"{graph.path}_data"
            source = f"{graph.source}_data" if graph.source else None
            files.setdefault(data, LockedFile(path=data, flavor="onnx", optional=True, source=source))
        return tuple(files[path] for path in sorted(files))


class Lock(Entry):
    """The whole file."""

    format: Literal[1]
    models: dict[Name, LockedModel]

    def model(self, name: str) -> LockedModel:
        """Raise UsageError, with the names there are, for one that is not there."""
        try:
            return self.models[name]
        except KeyError:
            raise UsageError(f"no model {name!r} in the lock; it has: {', '.join(sorted(self.models))}") from None


def read_lock(path: Path | None = None) -> Lock:
    """Read the lock at ``path``, or the one that is shipped. Raises UsageError."""
    try:
        if path is None:
            text = resources.files("bake").joinpath("models.lock").read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
        return Lock.model_validate(tomllib.loads(text))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the lock {path or 'models.lock'}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"the lock {path or 'models.lock'} is wrong at {where}: {first['msg']}") from error
