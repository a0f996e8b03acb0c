"""A full volume: told as what it is, nothing acknowledged is lost, and freeing some is enough."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import on_a_small_volume, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small volume")
SIZE = 320  # MiB, of which a fresh database takes half


@pytest.fixture
def sidecar(make_sidecar: Any) -> Iterator[Any]:
    """Return a sidecar on a small volume of its own."""
    made = make_sidecar()
    with on_a_small_volume(made, SIZE):
        yield made


def fill(path: Path) -> None:
    with path.open("wb") as filler:
        try:
            while True:
                filler.write(b"x" * 2**20)
                filler.flush()
        except OSError:
            return


def test_a_volume_that_fills_up_and_is_freed(sidecar: Any) -> None:
    sidecar.start_ready()
    sidecar.retain("full", ["The ferryman counts his passengers twice."])
    filler = sidecar.volume / "filler"
    fill(filler)

    def refused() -> bool:
        items = {"items": [{"content": "A note that finds no room. " * 50} for _ in range(20)], "async": False}
        return sidecar.memory("/banks/full/memories", "POST", items, timeout=60).status != 200

    wait_for(refused, 60, "a memory refused")
    body = sidecar.wait_state("blocked(no-space)")
    assert str(sidecar.volume) in body["detail"]
    assert sidecar.health_status() == 503
    filler.unlink()
    sidecar.wait_ready(60)
    found = sidecar.memory("/banks/full/memories/list?limit=1000").json()["items"]
    assert "The ferryman counts his passengers twice." in [item["text"] for item in found]
    assert sidecar.stop() == 0
