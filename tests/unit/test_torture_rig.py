"""What the rig takes from a log, and how it leaves a home."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig import Rig


def line(component: str, event: str, level: str = "info", **more: Any) -> str:
    return json.dumps({"component": component, **more, "event": event, "level": level})


def rig_with(*lines: str) -> Any:
    """Return a rig whose sidecar said some lines, and does nothing else."""

    def health() -> Any:
        raise ConnectionRefusedError

    rig: Any = object.__new__(Rig)
    rig._log_begins = 0
    rig.sidecar = SimpleNamespace(log_text=lambda: "\n".join(lines), health=health)
    return rig


def test_ends_are_counted_that_nobody_asked_for() -> None:
    rig = rig_with(
        line("sidecar", "postgres ended", "warning", reason="killed"),
        line("sidecar", "hindsight-api ended", "warning", reason="failed"),
        line("sidecar", "hindsight-api ended", "warning", reason="killed"),
        line("sidecar", "postgres ended", reason="asked"),
        line("hindsight-api", "postgres ended", "warning", reason="killed"),
        "a line of a program that died",
        '{"component": "sidecar", "event": "half a li',
        "7",
    )
    assert rig.ends_told() == {"postgres": 1, "hindsight-api": 2}
    assert rig_with().ends_told() == {}


def test_the_evidence_has_all_but_what_hindsight_api_says_in_between() -> None:
    told = rig_with(
        line("hindsight-api", "GET /health 200"),
        line("hindsight-api", "Error in /memories", "error"),
        line("postgres", "redo starts at 0/1"),
    ).evidence()
    assert "GET /health" not in told
    assert all(text in told for text in ("ConnectionRefusedError", "Error in /memories", "redo starts"))


def test_another_home_is_taken_where_the_one_before_cannot_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise AssertionError("Postgres gone was not so")

    monkeypatch.setattr("made.api_venv", lambda: tmp_path)
    rig = rig_with()
    rig._directory, rig._model_dir, rig._homes, rig.settings = tmp_path, tmp_path, 0, {}
    first = rig.new_home()
    monkeypatch.setattr(rig, "left", list)
    monkeypatch.setattr(first, "end", fails)
    with pytest.raises(AssertionError, match="Postgres gone"):
        rig.new_home()
    assert rig.sidecar is not first
    assert rig.sidecar.home.is_dir()
    assert not first.home.exists()
