"""The image under test, an engine that runs it, and containers that are gone afterwards."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from container import BANK, KEPT, Container, Image, Start, Volume, directory_volume, look_for_engine, named_volume

from bake.image.engine import Engine, NoEngineError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this directory."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.image)


def pytest_runtest_setup() -> None:
    """Skip all that is here where no engine is, with one reason; where REQUIRE_ENGINE is set it fails instead."""
    name = os.environ.get("HINDSIGHT_TEST_IMAGE")
    if name and not os.environ.get("REQUIRE_ENGINE"):
        found = look_for_engine(name)
        if isinstance(found, NoEngineError):
            pytest.skip(f"{str(found).splitlines()[0]}; `make engine` says why, and this needs {name}")


@pytest.fixture(scope="session")
def image() -> str:
    """Return the name of the image under test."""
    name = os.environ.get("HINDSIGHT_TEST_IMAGE")
    # An error and not a skip: a run without it would have tested nothing.
    assert name, "HINDSIGHT_TEST_IMAGE names no image; run these tests with `make image-test`, which builds one"
    return name


@pytest.fixture(scope="session")
def engine(image: str) -> Engine:
    """Return what runs its containers."""
    found = look_for_engine(image)
    if isinstance(found, NoEngineError):
        raise found
    return found


@pytest.fixture(scope="session")
def tested(engine: Engine, image: str) -> Image:
    """Return the image under test."""
    return Image(engine, image)


@pytest.fixture
def volume(tested: Image) -> Iterator[Volume]:
    """Return an empty volume."""
    with directory_volume(tested) as made:
        yield made


@pytest.fixture
def start(tested: Image, volume: Volume) -> Iterator[Start]:  # the volume goes after the containers
    """Return a function that starts a container, strictly and on the test's volume unless told otherwise."""
    with contextlib.ExitStack() as stack:

        def started(*more: str, options: list[str] | None = None) -> Container:
            chosen = [*tested.strict(), volume.option] if options is None else options
            container = tested.start(*chosen, *more)
            stack.callback(container.remove)
            return container

        yield started


@pytest.fixture(scope="session")
def ready(tested: Image) -> Iterator[Container]:
    """Return one ready container on a fresh volume of the engine's, for all tests that leave it as it was."""
    with named_volume(tested) as made:
        container = tested.start(*tested.strict(), made.option)
        try:
            yield container.wait_ready()
        finally:
            container.remove()


@pytest.fixture(scope="session")
def kept(tested: Image) -> Iterator[Volume]:
    """Return the volume of a container that stored memories and was stopped."""
    with directory_volume(tested) as made:
        container = tested.start(*tested.strict(), made.option)
        try:
            container.wait_ready().retain(BANK, list(KEPT))
            assert container.stop() == 0
        finally:
            container.remove()
        yield made


@pytest.fixture
def with_memories(volume: Volume, kept: Volume) -> Volume:
    """Return the test's volume with those memories."""
    volume.fill_from(kept)
    return volume
