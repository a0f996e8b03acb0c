"""manifest.json: what a model directory is. The sidecar reads it; docs/bake.md describes it."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bake.errors import VerificationError
from bake.fingerprint import Fingerprint, differences, fingerprint
from bake.identity import Identity, read_identity, read_max_tokens
from bake.layout import MANIFEST, walk
from bake.lock import Flavor, InnerPath, Kind, LockedModel, Sha256

DISTRIBUTION = "hindsight-sidecar"


class Part(BaseModel):
    """Base of the manifest's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ManifestFlavor(Part):
    """One way to load the model; ``model`` is the file hindsight-api is given."""

    identity: Identity
    model: InnerPath


class ManifestFile(Part):
    """One file: path below the directory, bytes, hexadecimal sha256."""

    path: InnerPath
    size: int
    sha256: Sha256


class Manifest(Part):
    """The whole of manifest.json.

    Attributes:
        max_tokens: tokens after which the model cuts a text; None for a tokenizer table.

    """

    format: Literal[1] = 1
    kind: Kind
    name: str
    license: str
    stand_in: bool
    max_tokens: int | None
    flavors: dict[Flavor, ManifestFlavor]
    files: tuple[ManifestFile, ...]
    made_by: str

    def text(self) -> str:
        """Give the file's content: the same bytes for the same inputs."""
        content = self.model_dump(mode="json")
        for flavor in content["flavors"].values():
            # A reranker's identity is id, revision and precision.
            flavor["identity"] = {key: value for key, value in flavor["identity"].items() if value is not None}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def same_model(self, other: "Manifest") -> bool:
        """Equal but for the version that wrote it."""
        return self.model_copy(update={"made_by": ""}) == other.model_copy(update={"made_by": ""})


def build_manifest(root: Path, name: str, model: LockedModel, flavors: list[Flavor]) -> Manifest:
    """Describe the directory as it is. Raises VerificationError where its files contradict each other."""
    entries = {flavor: model.flavors[flavor] for flavor in sorted(flavors)}
    return Manifest(
        kind=model.kind,
        name=name,
        license=model.license,
        stand_in=model.stand_in,
        max_tokens=None if model.kind == "tokenizer-table" else read_max_tokens(root),
        flavors={
            flavor: ManifestFlavor(identity=read_identity(root, model, entry), model=entry.model)
            for flavor, entry in entries.items()
        },
        files=tuple(
            ManifestFile(path=path, size=seen.size, sha256=seen.sha256)
            for path, seen in sorted(fingerprints(root).items())
        ),
        made_by=made_by(),
    )


def read_manifest(root: Path) -> Manifest:
    """Read a directory's manifest. Raises VerificationError."""
    try:
        return Manifest.model_validate_json((root / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise VerificationError([f"{MANIFEST}: missing in {root}, which hindsight-bake did not make"]) from None
    except OSError as error:
        raise VerificationError([f"{MANIFEST}: cannot be read: {error}"]) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise VerificationError([f"{MANIFEST}: wrong at {where or 'its beginning'}: {first['msg']}"]) from error


def fingerprints(root: Path) -> dict[str, Fingerprint]:
    """Fingerprint of every file below the directory but the manifest; reads all of it."""
    files = (path for path in walk(root) if path.is_file() and not path.is_symlink())
    named = {path.relative_to(root).as_posix(): path for path in files}
    return {name: fingerprint(path) for name, path in named.items() if name != MANIFEST}


def file_faults(manifest: Manifest, seen: dict[str, Fingerprint]) -> list[str]:
    """Files missing, files too many, and files that are not the ones the manifest was written for."""
    listed = {file.path: file for file in manifest.files}
    faults = [f"{path}: in the directory, not in {MANIFEST}" for path in sorted(seen.keys() - listed.keys())]
    for path, file in listed.items():
        if path not in seen:
            faults.append(f"{path}: missing")
        else:
            faults += differences(path, seen[path], size=file.size, sha256=file.sha256, by=MANIFEST)
    return faults


def pin_faults(model: LockedModel, seen: dict[str, Fingerprint]) -> list[str]:
    """Files that are not the ones the lock pins."""
    pins = {file.path: file for file in model.files}
    return [
        fault
        for path, found in sorted(seen.items())
        if path in pins
        for fault in differences(path, found, size=pins[path].size, sha256=pins[path].sha256, by="the lock")
    ]


def made_by() -> str:
    """Distribution and version. Read beside this package, where a checkout has it too; nothing is imported."""
    source = Path(__file__).parents[1] / "sidecar" / "__init__.py"
    try:
        found = re.search(r'^__version__ = "([^"]+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return f"{DISTRIBUTION} {found.group(1) if found else metadata.version(DISTRIBUTION)}"
