import os
import signal
from collections.abc import Callable

import pytest
from lanes import Lane, LaneError, Note, run_lanes
from matrix import Row
from torture import ALONE, Order, matrix, titles


def lane(*names: str, then: Callable[[], object] = lambda: None) -> Lane:
    def work(note: Note) -> None:
        rows = [Row("g", name) for name in names]
        for row in rows:
            row.rounds = 1
            note(rows)
        then()

    return work


def test_the_rows_of_all_lanes_are_told_as_they_come_and_returned() -> None:
    told: list[list[tuple[str, int]]] = []
    rows = run_lanes([lane("a", "b"), lane("c")], lambda rows: told.append([(row.case, row.rounds) for row in rows]))
    assert [row.title for row in rows] == ["g: a", "g: b", "g: c"]
    assert len(told) == 3
    assert told[-1] == [("a", 1), ("b", 1), ("c", 1)]
    assert run_lanes([], told.append) == []  # type: ignore[arg-type]


def test_lanes_run_side_by_side() -> None:
    read, write = os.pipe()

    def waits(_: Note) -> None:
        assert os.read(read, 1) == b"x"

    def writes(_: Note) -> None:
        os.write(write, b"x")

    run_lanes([waits, writes], lambda _: None)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("then", "code"), [(killed, -9), (lambda: 1 / 0, 1)])
def test_a_lane_that_does_not_come_to_its_end_is_an_error_once_the_others_have(
    then: Callable[[], object], code: int
) -> None:
    told: list[str] = []
    with pytest.raises(LaneError, match=f"1 of 2 lanes .* exit codes .{code}."):
        run_lanes([lane("a", then=then), lane("b")], lambda rows: told.extend(row.case for row in rows))
    assert {"a", "b"} == set(told)


def test_each_case_is_in_one_part_and_those_that_run_alone_have_one_round() -> None:
    alone, others = titles(Order(until=0))
    nothing = None
    cases = matrix(nothing, nothing, nothing)  # type: ignore[arg-type]
    assert sorted([*alone, *others]) == sorted(case.title for case in cases)
    assert {case.rounds for case in cases if case.title in alone} == {1}
    assert {case.group for case in cases} >= ALONE


def test_what_is_asked_for_is_in_the_parts_and_nothing_else() -> None:
    assert titles(Order(until=0, only="SIGTERM twice")) == [["stop: SIGTERM twice"], []]
    alone, others = titles(Order(until=0, short=True))
    assert (len(alone) > 0, len(others) > 0, len(alone) + len(others) < 12) == (True, True, True)
