"""Make a model directory: fetch or copy, compare with the lock and the hub, describe, publish."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bake import hub
from bake.errors import BakeError, UsageError, VerificationError
from bake.fingerprint import Fingerprint, differences, is_lfs_pointer
from bake.layout import MANIFEST, content_faults, plain_file_faults
from bake.lock import Flavor, LockedFile, LockedModel
from bake.manifest import (
    Manifest,
    build_manifest,
    file_faults,
    fingerprints,
    pin_faults,
    read_manifest,
)
from bake.staging import empty, publish, staging


@dataclass(frozen=True)
class Snapshot:
    """What became of the call.

    Attributes:
        directory: where the model is.
        made: False when it was there already.
        unpinned: files compared with nothing but themselves (``--from-dir`` and no pin in the lock).

    """

    directory: Path
    made: bool
    manifest: Manifest
    unpinned: tuple[str, ...] = ()


def snapshot(name: str, model: LockedModel, flavors: list[Flavor], into: Path, from_dir: Path | None) -> Snapshot:
    """Bring ``into``/``name`` about. Raises BakeError and its subclasses; nothing half made is left there."""
    missing = [flavor for flavor in flavors if flavor not in model.flavors]
    if missing and model.kind != "tokenizer-table":
        raise UsageError(f"{name} has no flavour {missing[0]}; it has: {', '.join(sorted(model.flavors))}")
    flavors = [flavor for flavor in flavors if flavor in model.flavors]
    target = into.resolve() / name
    with staging(target) as staged:
        try:
            present = current(target, name, model, flavors)
            if present is not None:
                shutil.rmtree(staged)
                return Snapshot(directory=target, made=False, manifest=present)
            if not model.hub and from_dir is None:
                raise UsageError(f"{name} is not fetched from the hub: {model.how}")
            return _make(name, model, flavors, staged=staged, target=target, from_dir=from_dir)
        except VerificationError:
            # What failed is not what the next run should build upon.
            shutil.rmtree(staged)
            raise
        except BakeError:
            if not any(staged.iterdir()):
                staged.rmdir()
            raise


def current(target: Path, name: str, model: LockedModel, flavors: list[Flavor]) -> Manifest | None:
    """Give the manifest of a target that is already what is asked for; None if there is something to do.

    Raises BakeError for a directory that is not ours to replace.
    """
    if not target.exists() and not target.is_symlink():
        return None
    if target.is_symlink() or not target.is_dir():
        raise BakeError(f"{target} is not a directory; move it away")
    if not any(target.iterdir()):
        return None
    try:
        found = read_manifest(target)
    except VerificationError as error:
        raise BakeError(f"{target} is not a directory hindsight-bake made ({error}); move it away") from error
    if found.name != name:
        raise BakeError(f"{target} holds {found.name} according to its {MANIFEST}; move it away")
    seen = fingerprints(target)
    try:
        faults = [
            *plain_file_faults(target),
            *content_faults(target, model.kind, [model.flavors[flavor].model for flavor in flavors]),
            *file_faults(found, seen),
            *pin_faults(model, seen),
        ]
        if faults or not found.same_model(build_manifest(target, name, model, flavors)):
            return None
    except VerificationError:
        return None
    return found


def _make(
    name: str, model: LockedModel, flavors: list[Flavor], *, staged: Path, target: Path, from_dir: Path | None
) -> Snapshot:
    wanted = model.files_for(flavors)
    offers: dict[str, hub.Advertised] = {}
    if from_dir is None:
        offers = hub.advertised(model.id, model.revision)
        wanted = _present(wanted, lambda file: file.path in offers, f"{model.id} at {model.revision} has no such file")
        conflicts = [fault for file in wanted for fault in hub.conflicts(file, offers[file.path])]
        if conflicts:
            raise VerificationError(conflicts)
        hub.download(model.id, model.revision, [file.path for file in wanted], staged)
    else:
        source = from_dir
        wanted = _present(wanted, lambda file: _within(source, file).is_file(), f"not in {from_dir}")
        _copy(wanted, from_dir, staged)
    empty(staged, keep=frozenset(file.path for file in wanted))
    seen = fingerprints(staged)
    faults = [fault for file in wanted for fault in _faults(file, staged, seen, offers.get(file.path))]
    if faults:
        raise VerificationError(faults)
    faults = content_faults(staged, model.kind, [model.flavors[flavor].model for flavor in flavors])
    if faults:
        raise VerificationError(faults)
    manifest = build_manifest(staged, name, model, flavors)
    (staged / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    publish(staged, target)
    unpinned = () if offers else tuple(file.path for file in wanted if file.sha256 is None)
    return Snapshot(directory=target, made=True, manifest=manifest, unpinned=unpinned)


def _present(
    wanted: tuple[LockedFile, ...], present: Callable[[LockedFile], bool], otherwise: str
) -> tuple[LockedFile, ...]:
    absent = [file for file in wanted if not present(file)]
    faults = [f"{file.path}: {otherwise}" for file in absent if not file.optional]
    if faults:
        raise VerificationError(faults)
    return tuple(file for file in wanted if file not in absent)


def _within(source: Path, file: LockedFile) -> Path:
    return source / (file.source or file.path)


def _copy(wanted: tuple[LockedFile, ...], source: Path, staged: Path) -> None:
    empty(staged)
    for file in wanted:
        copied = staged / file.path
        copied.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Links are followed: the hub client's cache is made of them, and a copy has to stand on its own.
            shutil.copyfile(_within(source, file), copied)
        except OSError as error:
            raise BakeError(f"{file.path}: cannot be copied from {source}: {error}") from error


def _faults(file: LockedFile, staged: Path, seen: dict[str, Fingerprint], offer: hub.Advertised | None) -> list[str]:
    if file.path not in seen:
        return [f"{file.path}: missing"]
    found = seen[file.path]
    if is_lfs_pointer(staged / file.path):
        # Said by name: a size that differs would hide what happened.
        return [
            f"{file.path}: a Git LFS pointer ({found.size} bytes) and not the file itself; run `git lfs pull` there"
        ]
    faults = differences(file.path, found, size=file.size, sha256=file.sha256, by="the lock")
    if not faults and offer is not None:
        faults = hub.advertised_faults(file.path, found, offer)
    return faults
