"""Builds the image as planned, and tells what came of it."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bake.errors import BakeError
from bake.image.engine import Engine
from bake.image.plan import LABELS, NAME, REVISION, ROOT, Plan
from bake.image.progress import Progress

CONTAINERFILE = ROOT / "Containerfile"
ACCOUNT = "image.txt"  # beside the inventory: what a person was told in the end
_ARGUMENTS = "arguments.sha256"  # beside it: of what the image was built with
INVENTORY = Path(__file__).with_name("inventory.Containerfile")
BASE_MADE_HERE = f"{LABELS}.base"  # label of a base image that came from no registry
_TAIL = 25  # lines of the output that are shown when a build fails
_MEGABYTE = 1e6
_UNREACHABLE = re.compile(r"^(?:#\d+ [\d.]+ )?hindsight-bake: the model hub .*", re.MULTILINE)


def arguments(engine: Engine, plan: Plan) -> list[str]:
    """Return an engine's arguments for a plan, without file and context."""
    docker = engine.name == "docker"
    words = ["build", "--network=host"]
    # HEALTHCHECK is no part of the OCI format, and buildah caches nothing by itself.
    words += ["--progress=plain"] if docker else ["--pull=never", "--format=docker", "--layers"]
    words += [f"--build-arg={name}={value}" for name, value in plan.arguments.items()]
    words += [f"--build-context={name}={path}" for name, path in plan.contexts.items()]
    for name, source in plan.secrets.items():
        kind, _, value = source.partition(":") if source.startswith("env:") else ("src", "", source)
        words.append(f"--secret=id={name},{kind}={value}")
    return words


def build(engine: Engine, plan: Plan, into: Path) -> Progress:
    """Build the image, and its inventory into a directory.

    Raises:
        BakeError: it could not be built; the sentence says where the build stopped.

    """
    into.mkdir(parents=True, exist_ok=True)
    labels = [f"--label={name}={value}" for name, value in plan.labels.items()]
    progress = run(engine, plan, CONTAINERFILE, into / "build.log", [*labels, f"--tag={plan.tag}"])
    for document in into.glob("*.cdx.json"):
        document.unlink()
    run(
        engine,
        plan,
        INVENTORY,
        into / "inventory.log",
        [*of_image(engine, plan.tag), f"--output=type=local,dest={into}"],
    )
    return progress


def of_image(engine: Engine, image: str) -> list[str]:
    """Return what tells a Containerfile which image to look at, and its id, so that no cache answers for another.

    BuildKit knows no image by its id, podman and buildah would look for a name without a registry elsewhere.
    """
    identifier = image_id(engine, image)
    return [
        f"--build-arg=IMAGE={image if engine.name == 'docker' else identifier}",
        f"--build-arg=IMAGE_ID={identifier}",
    ]


def run(engine: Engine, plan: Plan, containerfile: Path, log: Path, more: Sequence[str]) -> Progress:
    """Build one Containerfile with a plan's arguments, show what its steps say, and keep all of it in a log.

    Raises:
        BakeError: it could not be built.

    """
    progress = Progress(time.monotonic)
    words = [*arguments(engine, plan), *more, f"--file={containerfile}", str(ROOT)]
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            [engine.program, *words],
            env=engine.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            said = progress.read(line.rstrip("\n"))
            if said is not None:
                sys.stdout.write(f"{said}\n")
                sys.stdout.flush()
    progress.end()
    if process.returncode:
        raise BakeError(explain(log, containerfile))
    return progress


def explain(log: Path, containerfile: Path = CONTAINERFILE) -> str:
    """Return why a build stopped: the one sentence where there is one, else the end of what it printed."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if unreachable := _UNREACHABLE.search(text):
        seen = unreachable.group().partition("hindsight-bake: ")[2].partition(";")[0]
        return f"{seen}; give the model's files with MODEL_DIR=DIR, or ask for the stand-in by name with STAND_IN=1"
    tail = "\n".join(f"    {line}" for line in text.splitlines()[-_TAIL:])
    return f"{containerfile.name} could not be built; the end of {log}:\n{tail}"


def inspect(engine: Engine, image: str) -> dict[str, Any]:
    """Return what an engine knows of an image.

    Raises:
        BakeError: it has no such image.

    """
    told = engine.call("inspect", "--type", "image", image)
    found = json.loads(told.stdout) if told.returncode == 0 else []
    described: dict[str, Any] = found if isinstance(found, dict) else next(iter(found), {})
    if not described:
        raise BakeError(f"{engine.name} has no image {image}: {told.stderr.strip()}")
    return described


def image_id(engine: Engine, image: str) -> str:
    """Return an image's id."""
    described = inspect(engine, image)
    return str(described.get("Id") or described["FromImageID"])


def base_digest(engine: Engine, base: str) -> str:
    """Return the digest by which a registry knows the base image; empty where it was made here."""
    described = inspect(engine, base)
    configured = described.get("Config") or (described.get("OCIv1") or {}).get("config") or {}
    if isinstance(configured, dict) and BASE_MADE_HERE in (configured.get("Labels") or {}):
        return ""
    if engine.name == "buildah":
        return str(described.get("FromImageDigest", ""))
    return str(next(iter(described.get("RepoDigests") or [""]))).rpartition("@")[2]


def image_size(engine: Engine, image: str) -> int | None:
    """Return the uncompressed size in bytes as the engine reports it; None where it does not (buildah)."""
    return int(inspect(engine, image)["Size"]) if engine.runs_containers else None


def layers(engine: Engine, image: str) -> list[tuple[str, str]]:
    """Return size, as the engine words it, and target of each layer, first to last."""
    if not engine.runs_containers:
        return []
    told = engine.call("history", "--no-trunc", "--format={{.Size}}|{{.CreatedBy}}", image).stdout
    found = []
    for line in reversed(told.splitlines()):
        size, _, created = line.partition("|")
        if "COPY" in created:
            target = re.search(r"(?: in | )(/\S*)\s*(?:#.*)?$", created.strip())
            found.append((size, target.group(1) if target else created))
    return found


def revision() -> str:
    """Return the commit that is checked out, empty outside of a checkout and with changed or new files in it."""
    words = ["git", "-C", str(ROOT), "status", "--porcelain=v2", "--branch"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    commits = [line.removeprefix("# branch.oid ") for line in told if line.startswith("# branch.oid ")]
    return commits[0] if commits and all(line.startswith("# ") for line in told) else ""


def is_built(engine: Engine, plan: Plan, into: Path) -> bool:
    """Tell whether the image was built here from this very commit, with the same arguments, and its account is here.

    What comes from outside of the commit, such as a directory of models, may be another one today: it is built again then.
    """
    path = into / _ARGUMENTS
    known = REVISION in plan.labels and not plan.contexts and (into / ACCOUNT).is_file() and path.is_file()
    if not known or path.read_text(encoding="ascii") != _fingerprint(plan) or not engine.has_image(plan.tag):
        return False
    has = inspect(engine, plan.tag).get("Config", {}).get("Labels") or {}
    return all(has.get(name) == value for name, value in plan.labels.items())


def note(plan: Plan, told: str, into: Path) -> None:
    """Keep what a person was told of an image, and with what it was built."""
    (into / ACCOUNT).write_text(f"{told}\n", encoding="utf-8")
    (into / _ARGUMENTS).write_text(_fingerprint(plan), encoding="ascii")


def forget(into: Path) -> None:
    """Drop what was kept of an earlier image of that name."""
    for name in (ACCOUNT, _ARGUMENTS):
        (into / name).unlink(missing_ok=True)


def _fingerprint(plan: Plan) -> str:
    # Hashed, as the address of an index may have a password in it.
    return hashlib.sha256(json.dumps(dict(plan.arguments), sort_keys=True).encode()).hexdigest()


def summary(engine: Engine, plan: Plan, progress: Progress, into: Path) -> str:
    """Return what a person wants to know in the end: name, size, layers, time by stage."""
    size = image_size(engine, plan.tag)
    lines = [f"image   {plan.tag}", f"size    {size / _MEGABYTE:.0f} MB" if size else "size    (buildah does not tell)"]
    lines += ["layers", *(f"  {size:>9}  {target}" for size, target in layers(engine, plan.tag))]
    lines += ["time", *(f"  {seconds:7.1f} s  {stage}" for stage, seconds in progress.seconds.items())]
    inside = ", ".join(sorted(path.name for path in into.glob("*.cdx.json")))
    lines += [f"inside  {os.path.relpath(into)}: {inside}"]
    return "\n".join(lines)


def directory_of(tag: str) -> Path:
    """Return where an image's log and inventory go."""
    return ROOT / "dist" / tag.rpartition("/")[2].removeprefix(f"{NAME}:").replace(":", "-")
