"""Check a model directory: its files first, then, if those are right, what hindsight-api makes of it."""

from dataclasses import dataclass, field
from pathlib import Path

from bake import checks
from bake.checks import Check
from bake.errors import UsageError, VerificationError
from bake.identity import read_max_tokens, read_vector_space
from bake.interpreter import lacking, probe
from bake.layout import content_faults, plain_file_faults
from bake.lock import Flavor, KnownAnswer, Lock, LockedModel
from bake.manifest import Manifest, file_faults, fingerprints, pin_faults, read_manifest


@dataclass
class Report:
    """What was checked, in order.

    Attributes:
        name: the model, or the directory where not even that could be read.

    """

    name: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return all(check.passed is not False for check in self.checks)

    def add(self, name: str, faults: list[str], otherwise: str) -> None:
        """Add one failed line a fault, or one line that says what was right."""
        self.checks += [Check(name, passed=False, detail=fault) for fault in faults]
        if not faults:
            self.checks.append(Check(name, passed=True, detail=otherwise))


def check_files(directory: Path, lock: Lock) -> tuple[Report, Manifest | None]:
    """Check everything that can be told without loading the model."""
    report = Report(directory.name)
    try:
        manifest = read_manifest(directory)
    except VerificationError as error:
        report.add("manifest", list(error.faults), "")
        return report, None
    report.name = manifest.name
    report.add("plain files", plain_file_faults(directory), "no links, readable by any uid")
    if not report.passed:
        return report, manifest
    seen = fingerprints(directory)
    size = sum(file.size for file in manifest.files)
    report.add(
        "files", file_faults(manifest, seen), f"{len(manifest.files)} files, {size} bytes, sha256 as in the manifest"
    )
    models = [flavor.model for flavor in manifest.flavors.values()]
    report.add("content", content_faults(directory, manifest.kind, models), "complete, no code, no pickles")
    model = lock.models.get(manifest.name)
    if model is None:
        report.checks.append(
            Check("lock", passed=None, detail=f"{manifest.name} is not in the lock: nothing is pinned")
        )
    else:
        report.add("lock", [*_lock_faults(manifest, model), *pin_faults(model, seen)], f"revision {model.revision}")
    if report.passed and manifest.kind != "tokenizer-table":
        report.add("identity", _identity_faults(directory, manifest), "as the model's own files say")
    return report, manifest


def verify(directory: Path, lock: Lock, interpreter: Path | None, asked: list[Flavor]) -> Report:
    """Check files, then load each flavour.

    ``asked`` empty means every flavour there is, as far as the interpreter can load it; one that is asked for has to be
    loadable. Raises UsageError, and BakeError if the interpreter does not run.
    """
    report, manifest = check_files(directory, lock)
    if manifest is None or not report.passed or manifest.kind == "tokenizer-table":
        return report
    absent = [flavor for flavor in asked if flavor not in manifest.flavors]
    if absent:
        raise UsageError(f"{directory} has no flavour {absent[0]}; it has: {', '.join(manifest.flavors)}")
    if interpreter is None:
        raise UsageError(f"--interpreter is needed: {manifest.name} has to be loaded by hindsight-api's own Python")
    known = model.known_answer if (model := lock.models.get(manifest.name)) else None
    _check_loaded(report, directory.resolve(), manifest, known, interpreter=interpreter.absolute(), asked=asked)
    return report


def _check_loaded(
    report: Report,
    directory: Path,
    manifest: Manifest,
    known: KnownAnswer | None,
    *,
    interpreter: Path,
    asked: list[Flavor],
) -> None:
    texts = checks.documents(known)
    vectors = {}
    loaded = 0
    for flavor in asked or sorted(manifest.flavors):
        missing = lacking(interpreter, flavor)
        if missing:
            detail = f"{interpreter} has no {missing}"
            report.checks.append(Check(f"{flavor}: load", passed=False if flavor in asked else None, detail=detail))
            continue
        loaded += 1
        request = {"documents": texts, "queries": texts[:1], "pairs": checks.PAIRS}
        probed = probe(interpreter, directory, manifest, flavor, request)
        if manifest.kind == "reranker":
            found = checks.reranker_checks(probed.answer)
        else:
            identity = manifest.flavors[flavor].identity
            found = checks.embedding_checks(probed.answer, identity, manifest.max_tokens or 0, known)
        for check in found:
            detail = f"{check.detail} ({probed.isolation})" if check.name == "network" else check.detail
            report.checks.append(Check(f"{flavor}: {check.name}", passed=check.passed, detail=detail))
        # Comparable once they are finite and of the right shape, whatever else is wrong with them.
        if any(check.name == "norm" for check in found):
            vectors[flavor] = probed.answer["documents"]
    if not loaded and not asked:
        report.add("load", [f"{interpreter} can load none of: {', '.join(manifest.flavors)}"], "")
    if vectors.keys() >= {"onnx", "torch"}:
        precisions = [manifest.flavors[flavor].identity.precision for flavor in vectors]
        report.checks.append(checks.agreement_check(vectors["torch"], vectors["onnx"], precisions))
    elif manifest.kind == "embedding" and len(manifest.flavors) > 1:
        report.checks.append(Check("agreement", passed=None, detail="only with both flavours loaded"))


def _lock_faults(manifest: Manifest, model: LockedModel) -> list[str]:
    faults = []
    for key in ("kind", "license", "stand_in"):
        seen, expected = getattr(manifest, key), getattr(model, key)
        if seen != expected:
            faults.append(f"manifest.json: {key} is {seen!r}, the lock says {expected!r}")
    for flavor, entry in manifest.flavors.items():
        pinned = model.flavors.get(flavor)
        if pinned is None:
            faults.append(f"manifest.json: has flavour {flavor}, the lock has not")
            continue
        expected = (model.id, pinned.revision or model.revision, pinned.precision, pinned.model)
        seen = (entry.identity.id, entry.identity.revision, entry.identity.precision, entry.model)
        if seen != expected:
            faults.append(f"manifest.json: {flavor} is {' '.join(seen)}, the lock says {' '.join(expected)}")
    return faults


def _identity_faults(directory: Path, manifest: Manifest) -> list[str]:
    try:
        space = read_vector_space(directory) if manifest.kind == "embedding" else {}
        max_tokens = read_max_tokens(directory)
    except VerificationError as error:
        return list(error.faults)
    faults = [
        f"manifest.json: {key} of {flavor} is {getattr(entry.identity, key)!r}, the model's files say {value!r}"
        for flavor, entry in manifest.flavors.items()
        for key, value in space.items()
        if getattr(entry.identity, key) != value
    ]
    if max_tokens != manifest.max_tokens:
        faults.append(f"manifest.json: max_tokens is {manifest.max_tokens}, the model's files say {max_tokens}")
    return faults
