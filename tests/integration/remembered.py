"""The 369 memories of the fixture as one version of hindsight-api stored them, made once for all tests of a run."""

import fcntl
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made
from administrator import archive_of
from faults import sql
from harness import RunningSidecar, reachable_directory

from sidecar.archive import DUMP

COUNT = 369
QUESTIONS = 50


@dataclass(frozen=True)
class Remembered:
    """What was stored, and what came back.

    Attributes:
        archive: of the memories, as `dump` gives it.
        answers: the texts that each question brought back by its meaning, best first.
        dump: the file of pg_dump in the archive, readable for the sidecar's user.

    """

    archive: bytes
    answers: list[list[str]]
    dump: Path


def remembered(version: str, model_dir: Path, memories: dict[str, Any], shared: Path, directory: Path) -> Remembered:
    """Return what a version makes of the memories: made by whoever comes first, and kept in `shared`.

    The file of pg_dump is written into `directory`.
    """
    archive, answers = shared / f"remembered-{version}.tar", shared / f"remembered-{version}.json"
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answers.exists():  # the last that is written
            found = _make(version, model_dir, memories)
            archive.write_bytes(found[0])
            answers.write_text(json.dumps(found[1]), encoding="utf-8")
    dump = directory / f"{version}-{DUMP}"
    with tarfile.open(archive) as tar:
        member = tar.extractfile(DUMP)
        assert member is not None
        dump.write_bytes(member.read())
    dump.chmod(0o644)
    return Remembered(archive.read_bytes(), json.loads(answers.read_text(encoding="utf-8")), dump)


def _make(version: str, model_dir: Path, memories: dict[str, Any]) -> tuple[bytes, list[list[str]]]:
    """Have a sidecar of a version store the memories and answer the questions."""
    with reachable_directory() as directory:
        directory.chmod(0o777)
        sidecar = RunningSidecar(directory, made.api_venv(version), model_dir)
        try:
            sidecar.start_ready()
            for bank, items in memories["banks"].items():
                sidecar.retain(bank, [item["content"] for item in items])
            return archive_of(sidecar), recalls(sidecar, memories)
        finally:
            sidecar.end()


def recalls(sidecar: RunningSidecar, memories: dict[str, Any]) -> list[list[str]]:
    """Return the texts that each question brings back by its meaning, best first.

    Hindsight ranks by keywords too, and leaves it to Postgres which of two with the same rank comes first. That goes by
    the plan, and the plan changes when autovacuum has its first look at a table; so the look is taken here.
    """
    with sql(sidecar) as connection:
        connection.execute("ANALYZE")
    return [
        [
            result["text"]
            for result in sidecar.recall(question["bank"], question["query"])
            if result["scores"].get("semantic") is not None
        ]
        for question in memories["paraphrases"][:QUESTIONS]
    ]
