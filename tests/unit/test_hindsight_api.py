"""A second model is not loaded where the whole container would end for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar import hindsight_api, processes, sizing
from sidecar.errors import TransientError
from sidecar.hindsight_api import HindsightApi
from sidecar.sizing import MIB


@pytest.mark.parametrize(
    ("left", "together", "runs", "refused"),
    [(100, True, True, True), (800, True, True, False), (100, False, True, False), (100, True, False, False),
     (None, True, True, False)],
)  # fmt: skip
def test_a_model_too_many(
    *, left: int | None, together: bool, runs: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "memory_left", lambda: None if left is None else left * MIB)
    monkeypatch.setattr(sizing, "die_together", lambda: together)
    monkeypatch.setattr(processes, "memory", lambda _: 700 * MIB)
    api: Any = SimpleNamespace(child=SimpleNamespace(pid=1) if runs else None)
    if not refused:
        HindsightApi._check_memory(api)
        return
    with pytest.raises(TransientError, match=r"has 700 MiB, 100 MiB are left .* would be ended for want of memory"):
        HindsightApi._check_memory(api)


@pytest.mark.parametrize(("own", "given"), [(0, 500), (-997, 500), (450, 550), (930, 1000), (1000, 1000)])
def test_short_of_memory_the_kernel_takes_hindsight_api_first(
    own: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"{own}\n")
    assert hindsight_api._oom_score() == given
