import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torture
from harness import PORTS, Ports
from lanes import Lane, Note, run_lanes
from matrix import Row
from torture import ALONE, Order, wanted


def lane(*names: str, then: Callable[[], object] = lambda: None) -> Lane:
    def work(note: Note) -> None:
        rows = [Row("g", name) for name in names]
        for row in rows:
            row.rounds = 1
            note(rows)
        then()

    return work


def test_the_rows_of_all_lanes_are_told_as_they_come() -> None:
    told: list[tuple[str, int]] = []
    assert run_lanes([lane("a", "b"), lane("c")], lambda rows: told.append((rows[-1].title, rows[-1].rounds))) == []
    assert sorted(told) == [("g: b", 0), ("g: b", 1), ("g: c", 1)]
    assert run_lanes([], lambda _: None) == []


def test_lanes_run_side_by_side_and_share_the_ports_out() -> None:
    read, write = os.pipe()

    def waits(_: Note) -> None:
        assert os.read(read, 4) == b"x"
        assert {port // 2 % 2 for port in PORTS.free(5)} == {0}

    def writes(_: Note) -> None:
        os.write(write, b"x")
        assert {port // 2 % 2 for port in PORTS.free(5)} == {1}

    assert run_lanes([waits, writes], lambda _: None) == []
    assert len(set(Ports().free(5))) == 5


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("then", "code"), [(killed, -9), (lambda: 1 / 0, 1)])
def test_a_lane_that_does_not_come_to_its_end_is_told_once_the_others_have(
    then: Callable[[], object], code: int
) -> None:
    told: list[str] = []
    wrong = run_lanes([lane("a", then=then), lane("b")], lambda rows: told.extend(row.case for row in rows))
    assert wrong == [f"lane 0 ended with {code} before its end"]
    assert set(told) == {"a", "b"}


def test_where_nothing_can_be_noted_the_lanes_are_interrupted(tmp_path: Path) -> None:
    def waits(note: Note) -> None:
        try:
            note([])  # which may be where it is interrupted
            threading.Event().wait(60)
        except KeyboardInterrupt:
            (tmp_path / "interrupted").touch()

    def fails(_: list[Row]) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        run_lanes([waits], fails)
    assert (tmp_path / "interrupted").exists()


PARENT = """
import sys, threading
from lanes import run_lanes
def waits(note):
    try:
        print("waits", flush=True)
        threading.Event().wait(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
run_lanes([waits], print)
"""


def test_a_lane_whose_parent_is_killed_ends_as_well() -> None:
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PATH": os.environ["PATH"]}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "waits\n"
        parent.kill()
        assert parent.stdout.read() == "interrupted\n"


def run_all(monkeypatch: pytest.MonkeyPatch, parts: list[list[str]], then: list[Callable[[], object]]) -> Any:
    """Have a matrix of three cases run, the first of them alone, by what does nothing with each part."""

    def do(_: Order, chosen: list[str], note: Note) -> None:
        parts.append(chosen)  # of this lane alone
        rows = [row for row in torture.rows_for(wanted(Order(until=0)), 1) if row.title in chosen]
        for row in rows:
            row.rounds = row.survived = 1
        then[len(rows) % 2]()
        note(rows)

    monkeypatch.setattr(torture, "do", do)
    noted: list[list[Row]] = []
    rows, wrong = torture.torture(Order(until=0, only="one backend"), noted.append)
    return rows, wrong, noted


def test_every_case_has_a_row_from_the_beginning_in_the_order_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, wrong, noted = run_all(monkeypatch, [], [lambda: None, lambda: None])
    titles = [case.title for case in wanted(Order(until=0, only="one backend"))]
    assert len(titles) > 5
    assert all([row.title for row in told] == titles for told in (rows, *noted))
    assert {row.rounds for row in noted[0]} == {0}
    assert {row.survived for row in rows} == {1}
    assert wrong == []


def test_what_a_lane_that_was_killed_did_not_come_to_has_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, wrong, _ = run_all(monkeypatch, [], [killed, lambda: None])
    assert wrong
    assert all("ended with -9" in sentence for sentence in wrong)
    assert 0 in {row.rounds for row in rows}


def test_those_that_run_alone_have_one_round() -> None:
    cases = wanted(Order(until=0))
    assert {case.group for case in cases} > ALONE
    assert {case.rounds for case in cases if case.group in ALONE} == {1}
