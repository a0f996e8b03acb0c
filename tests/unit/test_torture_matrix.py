import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import (
    LIMIT,
    Case,
    LostError,
    MissedError,
    OverdueError,
    Round,
    SlowError,
    check_each_is_there_once,
    faults,
    limited,
    run,
    unfinished,
)
from table import as_json, markdown
from torture import Order, seconds, wanted

DOCUMENT = Path(__file__).parents[2] / "docs/reliability.md"
NAMED = {"hang", "space", "container"}  # groups whose cases the document names word by word

Run = Callable[[float], Round]


def rows_of(*cases: Case, budget: float = 60.0, seed: int = 1, most: int = 0, **more: Any) -> list[Any]:
    options: dict[str, Any] = {"failed": lambda *_: "", "say": lambda _: None, "note": lambda _: None} | more
    return run(cases, budget, seed, most=most, **options)


def survives(_: float) -> Round:
    return Round(5, 1.5, 0.02)


def raising(error: Exception) -> Run:
    def fails(_: float) -> Round:
        raise error

    return fails


def test_each_case_has_its_first_round_before_any_has_a_second() -> None:
    order: list[str] = []

    def noting(name: str) -> Run:
        return lambda _: order.append(name) or Round(0)  # type: ignore[func-returns-value]

    rows = rows_of(*(Case("g", name, noting(name), rounds) for name, rounds in (("a", 3), ("b", 1), ("c", 2))))
    assert order == ["a", "b", "c", "a", "c", "a"]
    assert [(row.rounds, row.survived) for row in rows] == [(3, 3), (1, 1), (2, 2)]
    assert faults(rows) == []


def test_make_leaves_nothing_of_it_out_by_itself() -> None:
    root = DOCUMENT.parents[1]
    told = subprocess.run(
        ["/usr/bin/make", "-n", "torture"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    [command] = re.findall(r"tests/torture/torture\.py((?:.*\\\n)*.*)", told.stdout)
    assert not re.search(r"--\w+", command), command


def test_the_rounds_of_a_case_are_spread_over_its_moment() -> None:
    places: list[float] = []

    def noting(place: float) -> Round:
        places.append(place)
        return Round(0)

    rows_of(Case("g", "a", noting, 24))
    gaps = {round(b - a, 6) for a, b in itertools.pairwise(sorted(places))}
    assert len(places) == 24
    assert gaps == {round(1 / 24, 6)}
    assert all(0 <= place < 1 for place in places)


def test_a_seed_makes_the_same_places_whichever_cases_are_chosen() -> None:
    def places(*names: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in names}

        def noting(name: str) -> Run:
            return lambda place: found[name].append(place) or Round(0)  # type: ignore[func-returns-value]

        rows_of(*(Case("g", name, noting(name), 3) for name in names), seed=7)
        return found

    both = places("a", "b")
    assert places("b")["b"] == both["b"] != both["a"]


def test_the_short_form_is_one_round_of_its_cases() -> None:
    order = Order(until=0, short=True)
    assert {case.title for case in wanted(order)} == {case.title for case in all_cases() if case.short}
    assert order.most == 1
    assert Order(until=0, rounds=3).most == 3


def test_no_case_has_more_rounds_than_asked_for() -> None:
    assert [row.rounds for row in rows_of(Case("g", "a", survives, 9), Case("g", "b", survives, 1), most=2)] == [2, 1]


def test_all_that_was_seen_so_far_is_told_after_each_round() -> None:
    seen: list[list[int]] = []
    cases = [Case("g", "a", survives, 2), Case("g", "b", raising(ValueError("no")))]
    rows_of(*cases, note=lambda rows: seen.append([row.survived for row in rows]))
    assert seen == [[1, 0], [1, 0], [2, 0]]


def test_a_budget_that_ends_too_early_is_a_fault() -> None:
    def slow(_: float) -> Round:
        time.sleep(0.02)
        return Round(0)

    rows = rows_of(Case("g", "a", slow, 2), Case("g", "b", survives), budget=0.01)
    assert [row.rounds for row in rows] == [1, 0]
    assert faults(rows) == ["the budget ended before 1 of 2 cases had a round: b"]
    assert faults(rows, what_fits=True) == faults(rows)


def test_rounds_that_were_not_done_are_a_fault_but_for_who_asked_for_what_fits() -> None:
    def slow(_: float) -> Round:
        time.sleep(0.02)
        return Round(0)

    rows = rows_of(Case("g", "a", slow, 3), budget=0.01)
    assert (unfinished(rows), faults(rows, what_fits=True)) == ("the budget ended after 1 of 3 rounds", [])
    assert faults(rows) == [unfinished(rows)]
    assert unfinished(rows_of(Case("g", "a", survives, 3), most=1)) is None


def test_a_run_that_tested_nothing_is_a_fault() -> None:
    assert faults(rows_of()) == ["no case was chosen: nothing was tested"]


@pytest.mark.parametrize(
    ("error", "lost"), [(LostError(["x", "y"]), 2), (AssertionError("odd"), 0), (OSError("no"), 0)]
)
def test_a_failure_is_told_and_the_others_go_on(error: Exception, lost: int) -> None:
    told: list[tuple[str, str]] = []
    rows = rows_of(
        Case("g", "bad", raising(error), 2),
        Case("g", "good", survives),
        failed=lambda case, why, _: told.append((case.name, why)) or "kept there",
    )
    bad, good = rows
    assert (bad.rounds, bad.survived, bad.lost) == (2, 0, 2 * lost)
    assert (good.rounds, good.survived, good.looked_for, good.longest_outage) == (1, 1, 5, 1.5)
    assert [name for name, _ in told] == ["bad", "bad"]
    assert len(faults(rows)) == 2
    assert str(error) in faults(rows)[0]
    assert "kept there" in faults(rows)[0]


def test_a_failure_while_clearing_up_is_told_and_the_others_go_on() -> None:
    rows = rows_of(
        Case("g", "bad", raising(ValueError("first"))),
        Case("g", "good", survives),
        failed=lambda *_: raising(OSError("second"))(0),
    )
    assert [row.survived for row in rows] == [0, 1]
    assert all(text in faults(rows)[0] for text in ("first", "second"))


def test_a_round_that_does_not_end_is_a_failure_and_whoever_had_the_alarm_set_has_it_again() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    left = signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        with pytest.raises(OverdueError), limited(0.05):
            threading.Event().wait(30)
        with limited(LIMIT):
            pass
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] < 100
        signal.raise_signal(signal.SIGALRM)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


def test_what_is_lost_and_what_is_there_twice() -> None:
    check_each_is_there_once(["a", "b"], ["b", "a", "never acknowledged"])
    with pytest.raises(LostError) as lost:
        check_each_is_there_once(["a", "b", "c"], ["b", "b"])
    assert lost.value.count == 2
    with pytest.raises(AssertionError, match="twice"):
        check_each_is_there_once(["a"], ["a", "a"])


def test_a_missed_moment_is_tried_nearer_to_its_beginning() -> None:
    places: list[float] = []

    def early_only(place: float) -> Round:
        places.append(place)
        if place > 0.1:
            raise MissedError
        return Round(1)

    [row] = rows_of(Case("g", "a", early_only, 1))
    assert row.survived == 1 or len(places) == 3
    assert places == [places[0] / 2**number for number in range(len(places))]
    assert (len(row.again), row.place) == (len(places) - 1, places[-1])


def test_a_moment_that_was_measured_anew_is_tried_at_the_same_place_once() -> None:
    places: list[float] = []

    def never(place: float) -> Round:
        places.append(place)
        raise MissedError("over", nearer=False)

    [row] = rows_of(Case("g", "a", never))
    assert places == [places[0], places[0], places[0] / 2]
    assert f"at {places[-1]:.3f}: " in row.failures[0]


def test_what_took_too_long_once_is_done_again_and_twice_is_a_failure() -> None:
    said: list[str] = []
    outcomes = iter([SlowError("told after 3.2 s"), None, SlowError("told after 3.3 s"), SlowError("told after 3.4 s")])

    def told(_: float) -> Round:
        if (error := next(outcomes)) is not None:
            raise error
        return Round(1)

    [row] = rows_of(Case("g", "a", told, 2), say=said.append)
    assert (row.rounds, row.survived) == (2, 1)
    assert [text.partition(": ")[2] for text in row.again] == ["told after 3.2 s", "told after 3.3 s"]
    assert "told after 3.4 s" in row.failures[0]
    assert "1 again" in said[0]


def test_a_moment_that_is_always_missed_is_a_fault() -> None:
    [row] = rows_of(Case("g", "a", raising(MissedError("over"))))
    assert (row.rounds, row.survived) == (1, 0)
    assert "MissedError: over" in faults([row])[0]


def test_the_table_and_the_json_have_every_row_and_a_sum() -> None:
    rows = rows_of(Case("g", "a", survives, 2), Case("h", "b", lambda _: Round(1)))
    assert markdown(rows).splitlines() == [
        "| case | rounds | survived | looked for | lost | longest outage |",
        "|------|--------|----------|------------|------|----------------|",
        "| g: a | 2      | 2        | 10         | 0    | 1.5 s          |",
        "| h: b | 1      | 1        | 1          | 0    | -              |",
        "| all  | 3      | 3        | 11         | 0    | 1.5 s          |",
    ]
    found = json.loads(json.dumps(as_json(rows, seed=7)))
    assert found["seed"] == 7
    assert [(case["case"], case["rounds"]) for case in found["cases"]] == [("a", 2), ("b", 1)]
    assert [(case["again"], case["slowest_answer"]) for case in found["cases"]] == [([], 0.02), ([], None)]


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5h", 5400)])
def test_a_budget_is_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


def documented() -> dict[str, str]:
    """Return what the document's table has of each group."""
    found: dict[str, str] = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| group |"):
            group, rest = line.removeprefix("| ").split(" | ", 1)
            found[group] = f"{found.get(group, '')}{rest}\n"
    return found


def all_cases() -> list[Case]:
    return wanted(Order(until=0))


def test_the_document_has_every_group_and_no_other() -> None:
    assert set(documented()) == {case.group for case in all_cases()}


def test_the_document_names_every_fault_and_every_moment() -> None:
    told = documented()
    unnamed = [
        f"{case.group}: {part}"
        for case in all_cases()
        if case.group in NAMED
        for part in case.name.split(", ")
        if part not in told[case.group]
    ]
    assert unnamed == []


def test_the_cases_have_names_of_their_own_and_enough_rounds() -> None:
    cases = all_cases()
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    kills = [case.rounds for case in cases if case.group == "kill" or case.name.startswith("kill -9 ")]
    assert sum(kills) >= 200
    assert max(kills) >= 24
    assert {case.group for case in cases if case.short} >= {"kill", "stop", "hang", "space"}
