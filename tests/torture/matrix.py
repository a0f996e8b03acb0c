"""The matrix: its cases, what came of their rounds, and how many of them a budget of time allows."""

import random
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

TRIES = 3  # of a round whose moment was over before its victim was hit


class MissedError(Exception):
    """The moment was over before anything could be done to it: the round says nothing, and is done again."""


class LostError(AssertionError):
    """Acknowledged memories are not there."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(f"{len(texts)} acknowledged memories are lost: {texts[:3]}")
        self.count = len(texts)


class Subject(Protocol):
    """What the cases of a group work on."""

    def evidence(self) -> str:
        """Return what a failure needs to be understood."""
        ...

    def new_home(self) -> object:
        """Leave what a failure left behind, and begin with nothing."""
        ...


@dataclass(frozen=True)
class Round:
    """What was seen in one round that went as it should.

    Attributes:
        acknowledged: memories that were looked for, and found once each.
        outage: seconds from the fault to being ready again, None where it was ready all the time.

    """

    acknowledged: int
    outage: float | None = None


@dataclass(frozen=True)
class Case:
    """One kind of fault at one kind of moment.

    Attributes:
        run: does one round; its argument is where in the moment, in [0, 1). Whatever it raises is a failure of the
            product, but for MissedError.
        rounds: how many the whole matrix has.
        short: whether it is a part of the short form, with one round.

    """

    group: str
    name: str
    run: Callable[[float], Round]
    rounds: int = 1
    short: bool = False


@dataclass
class Row:
    """What came of a case so far."""

    case: Case
    rounds: int = 0
    survived: int = 0
    acknowledged: int = 0
    lost: int = 0
    longest_outage: float | None = None
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(
    cases: Iterable[Case],
    budget: float,
    chance: random.Random,
    *,
    short: bool,
    most: int,
    failed: Callable[[Case, str], None],
    say: Callable[[str], None],
    note: Callable[[list[Row]], None],
) -> list[Row]:
    """Do the rounds of the cases in turn, each case's first before any second one, for at most `budget` seconds.

    No case has more rounds than `most`, where that is not 0. Each case's rounds are spread evenly over its moment, with
    a random beginning. `failed` is told of each failure, before the next round begins; `note` of all that came of the
    run so far, after each round.
    """
    rows = [Row(case) for case in cases if case.short or not short]
    shifts = [chance.random() for _ in rows]
    deadline = time.monotonic() + budget
    most = 1 if short else most or max((row.case.rounds for row in rows), default=0)
    for number in range(most):
        for row, shift in zip(rows, shifts, strict=True):
            if number >= row.case.rounds:
                continue
            if time.monotonic() > deadline:
                return rows
            place = ((number + shift) / row.case.rounds) % 1.0
            _do(row, place, failed)
            say(f"{row.case.group:<9} {row.case.name:<52} {_told(row)}")
            note(rows)
    return rows


def _told(row: Row) -> str:
    outcome = "ok" if row.survived == row.rounds else f"{row.rounds - row.survived} FAILED"
    outage = "" if row.longest_outage is None else f"  longest outage {row.longest_outage:.1f} s"
    return f"{row.rounds}/{row.case.rounds} {outcome}{outage}"


def _do(row: Row, place: float, failed: Callable[[Case, str], None]) -> None:
    began = time.monotonic()
    row.rounds += 1
    try:
        seen = _hit(row.case, place)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table tells of it, and the others go on
        row.failures.append(f"at {place:.3f}: {''.join(traceback.format_exception(error)[-6:])}")
        if isinstance(error, LostError):
            row.lost += error.count
        failed(row.case, row.failures[-1])
    else:
        row.survived += 1
        row.acknowledged += seen.acknowledged
        if seen.outage is not None:
            row.longest_outage = max(row.longest_outage or 0.0, seen.outage)
    row.seconds += time.monotonic() - began


def _hit(case: Case, place: float) -> Round:
    """Do a round, nearer to the moment's beginning each time that it was over too soon."""
    for _ in range(TRIES - 1):
        try:
            return case.run(place)
        except MissedError:
            place /= 2
    return case.run(place)


def faults(rows: list[Row]) -> list[str]:
    """Say what makes a run one that proves nothing, or proves that something is wrong."""
    found = [f"{row.case.group}: {row.case.name}: {failure}" for row in rows for failure in row.failures]
    missing = [row.case.name for row in rows if row.rounds == 0]
    if not rows:
        found.append("no case was chosen: nothing was tested")
    elif missing:
        found.append(
            f"the budget ended before {len(missing)} of {len(rows)} cases had a round: {', '.join(missing[:5])}"
        )
    return found
