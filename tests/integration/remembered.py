"""The 369 memories of the fixture as one version of hindsight-api stored them, made once for all tests of a run."""

import contextlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made
from administrator import archive_of
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
        directory: where `dump` is, readable for the sidecar's user.

    """

    archive: bytes
    answers: list[list[str]]
    directory: Path

    @property
    def dump(self) -> Path:
        """The file of pg_dump in the archive."""
        return self.directory / DUMP


@contextlib.contextmanager
def remembered(version: str, model_dir: Path, memories: dict[str, Any]) -> Iterator[Remembered]:
    """Have a sidecar of a version store the memories and answer the questions; it has ended when this is entered."""
    with reachable_directory() as directory:
        home = directory / "sidecar"
        home.mkdir()
        home.chmod(0o777)
        sidecar = RunningSidecar(home, made.api_venv(version), model_dir)
        try:
            sidecar.start_ready()
            for bank, items in memories["banks"].items():
                sidecar.retain(bank, [item["content"] for item in items])
            answers = recalls(sidecar, memories)
            archive = archive_of(sidecar)
        finally:
            sidecar.end()
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.extractfile(DUMP)
            assert member is not None
            (directory / DUMP).write_bytes(member.read())
        (directory / DUMP).chmod(0o644)
        yield Remembered(archive, answers, directory)


def recalls(sidecar: RunningSidecar, memories: dict[str, Any]) -> list[list[str]]:
    """Return the texts that each question brings back by its meaning, best first."""
    return [
        [
            result["text"]
            for result in sidecar.recall(question["bank"], question["query"])
            if result["scores"].get("semantic") is not None
        ]
        for question in memories["paraphrases"][:QUESTIONS]
    ]
