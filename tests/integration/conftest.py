"""Real parts for the integration tests: a baked model, and sidecars that run."""

import asyncio
import functools
import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made
import pytest
import remembered as making
from harness import RunningSidecar, reachable_directory, running_sidecar
from remembered import Remembered

FIXTURES = Path(__file__).parents[1] / "fixtures"
MakeSidecar = Callable[..., RunningSidecar]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this directory."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Let what a test leaves open warn in that test, and not in whichever the collector runs in."""
    yield
    asyncio.set_event_loop(None)
    gc.collect()


@pytest.fixture(scope="session")
def models() -> Iterator[Path]:
    """Bake the stand-in for both flavours, as `make run` does where no hub is reachable."""
    with reachable_directory() as directory:
        made.baked(directory, "both")
        yield directory


@pytest.fixture(scope="session")
def model_dir(models: Path) -> Path:
    """Return the stand-in's directory."""
    return models / made.MODEL


@pytest.fixture
def make_sidecar(model_dir: Path) -> Iterator[MakeSidecar]:
    """Return a function that makes a sidecar, not yet started, in a directory of its own; all are ended afterwards."""
    running: list[RunningSidecar] = []
    with reachable_directory() as directory:

        def make(version: str = "1.1.0", flavor: str = "onnx", **settings: str) -> RunningSidecar:
            home = directory / str(len(running))
            home.mkdir(mode=0o711)
            home.chmod(0o777)
            settings.setdefault("HINDSIGHT_SIDECAR_MODEL_DIR", str(model_dir))
            chosen = Path(settings.pop("HINDSIGHT_SIDECAR_MODEL_DIR"))
            sidecar = RunningSidecar(home, made.api_venv(version, flavor), chosen, flavor, **settings)
            running.append(sidecar)
            return sidecar

        yield make
        for sidecar in running:
            sidecar.end()


@pytest.fixture(scope="module")
def ready_sidecar(model_dir: Path) -> Iterator[RunningSidecar]:
    """Return one running sidecar for all tests of a module that leave it as it was."""
    with running_sidecar(model_dir) as sidecar:
        yield sidecar


@pytest.fixture(scope="session")
def memories() -> dict[str, Any]:
    """Return the standard input: 369 memories in three banks, and paraphrases of some."""
    found: dict[str, Any] = json.loads((FIXTURES / "memories.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def remembered(
    model_dir: Path, memories: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Remembered]]:
    """Return a function that gives the 369 memories as a version of hindsight-api stored them, once for all workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with reachable_directory() as directory:

        @functools.cache
        def by(version: str) -> Remembered:
            return making.remembered(version, model_dir, memories, shared, directory)

        yield by
