from pathlib import Path
from typing import Any

import pytest
from clearing import Clearing
from matrix import Case, LostError

CASE: Any = Case("kill", "one backend, a start", lambda _: None)  # type: ignore[arg-type, return-value]


class Subject:
    """Does what it is told to, but for what fails."""

    def __init__(self, *fails: str) -> None:
        self._fails = fails
        self.done: list[str] = []

    def _do(self, what: str) -> str:
        self.done.append(what)
        if what in self._fails:
            raise OSError(f"no {what}")
        return f"the {what}"

    def evidence(self) -> str:
        return self._do("evidence")

    def keep(self, directory: Path, *, whole: bool) -> None:
        (directory / "log").write_text("whole" if whole else "log alone")
        self._do("keep")

    def new_home(self) -> None:
        self._do("home")


@pytest.mark.parametrize(("error", "kept"), [(LostError(["x"]), "whole"), (OSError("no"), "log alone")])
def test_what_a_failure_left_is_kept_in_a_place_of_its_own(tmp_path: Path, error: Exception, kept: str) -> None:
    said: list[str] = []
    clearing = Clearing(tmp_path / "kept", said.append)
    told = [clearing.after(Subject(), CASE, "it failed\n", error) for _ in range(2)]
    for number, text in enumerate(told, 1):
        place = tmp_path / "kept" / f"{number}-kill-one-backend-a-start"
        assert str(place) in text
        assert (place / "log").read_text() == kept
        assert all(part in (place / "why").read_text() for part in ("it failed", "the evidence"))
    assert all(part in said[0] for part in ("FAILED kill: one backend, a start", "it failed", "the evidence"))


@pytest.mark.parametrize("fails", ["evidence", "keep", "home"])
def test_none_of_it_is_left_out_because_another_part_fails(tmp_path: Path, fails: str) -> None:
    subject = Subject(fails)
    told = Clearing(tmp_path, lambda _: None).after(subject, CASE, "it failed\n", OSError("no"))
    assert subject.done == ["evidence", "keep", "home"]
    assert f"no {fails}" in told


def test_the_failures_of_an_earlier_run_stay(tmp_path: Path) -> None:
    for _ in range(2):
        Clearing(tmp_path, lambda _: None).after(Subject(), CASE, "it failed\n", OSError("no"))
    assert len(list(tmp_path.iterdir())) == 2
