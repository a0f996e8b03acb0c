"""The matrix: its cases, what came of their rounds, and how many of them a budget of time allows."""

import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

TRIES = 3  # of a round whose moment was over before its victim was hit
SLOW_TRIES = 2  # of a round in which something took too long, once: on a busy machine that says little
LIMIT = 600.0  # seconds for a round; the longest take some three minutes
CLEARING = 180.0  # seconds for clearing up after a round
_FRAMES = 6  # of a failure's trace


class MissedError(Exception):
    """The moment was over before anything could be done to it: the round says nothing, and is done again.

    Attributes:
        nearer: whether to do it nearer to the moment's beginning; not where the moment was measured anew.

    """

    def __init__(self, why: str = "the moment was over", *, nearer: bool = True) -> None:
        super().__init__(why)
        self.nearer = nearer


class SlowError(AssertionError):
    """Something took longer than it may: it counts where that is so twice."""


class OverdueError(Exception):
    """A round does not come to its end. No AssertionError and no OSError, which a round may wait through."""


class LostError(AssertionError):
    """Acknowledged memories are not there."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(f"{len(texts)} acknowledged memories are lost: {texts[:3]}")
        self.count = len(texts)


def check_each_is_there_once(acknowledged: Iterable[str], listed: Iterable[str]) -> None:
    """Check that all that was acknowledged is in a list, and nothing is there twice."""
    there = Counter(listed)
    if lost := [text for text in acknowledged if text not in there]:
        raise LostError(lost)
    twice = [text for text, count in there.items() if count > 1]
    assert twice == [], f"{len(twice)} memories are there twice: {twice[:3]}"


class Subject(Protocol):
    """What the cases of a group work on."""

    def evidence(self) -> str:
        """Return what a failure needs to be understood."""
        ...

    def keep(self, directory: Path, *, whole: bool) -> object:
        """Have what a failure left copied to a directory: the log and the ledger, or all of it."""
        ...

    def new_home(self) -> object:
        """Leave what a failure left behind, and begin with nothing."""
        ...


@dataclass(frozen=True)
class Round:
    """What was seen in one round that went as it should.

    Attributes:
        looked_for: acknowledged memories that were looked for, and found once each.
        outage: seconds from the fault to being ready again, None where it was ready all the time.
        slowest: seconds of the slowest answer to liveness, None where it was not watched.

    """

    looked_for: int
    outage: float | None = None
    slowest: float | None = None


@dataclass(frozen=True)
class Case:
    """One kind of fault at one kind of moment.

    Attributes:
        run: does one round; its argument is where in the moment, in [0, 1). Whatever it raises is a failure of the
            product, but for MissedError, and SlowError the first time.
        rounds: how many the whole matrix has.
        short: whether it is a part of the short form, with one round.

    """

    group: str
    name: str
    run: Callable[[float], Round]
    rounds: int = 1
    short: bool = False

    @property
    def title(self) -> str:
        """Return what it is called among all cases."""
        return f"{self.group}: {self.name}"


@dataclass
class Row:
    """What came of a case so far.

    Attributes:
        of: how many rounds the whole matrix has of it.
        planned: how many rounds it is to have.
        place: where in its moment it was tried last.
        again: why rounds were done again: that the moment was over, or how long something took.

    """

    group: str
    case: str
    of: int = 1
    planned: int = 1
    rounds: int = 0
    survived: int = 0
    looked_for: int = 0
    lost: int = 0
    longest_outage: float | None = None
    slowest_answer: float | None = None
    seconds: float = 0.0
    place: float | None = None
    again: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Return what its case is called among all."""
        return f"{self.group}: {self.case}"


def rows_for(cases: Iterable[Case], most: int) -> list[Row]:
    """Return the rows of cases that had no round yet; none has more rounds than `most`, where that is not 0."""
    return [Row(case.group, case.name, case.rounds, min(case.rounds, most) if most else case.rounds) for case in cases]


Failed = Callable[[Case, str, Exception], str]


def run(
    cases: Iterable[Case],
    budget: float,
    seed: int,
    *,
    most: int,
    failed: Failed,
    say: Callable[[str], None],
    note: Callable[[list[Row]], None],
) -> list[Row]:
    """Do the rounds of the cases in turn, each case's first before any second one, for at most `budget` seconds.

    No case has more rounds than `most`, where that is not 0. Each case's rounds are spread evenly over its moment, with
    a beginning that follows from the seed and the case's name alone. `failed` clears up after each failure, before the
    next round begins, and returns what else there is to tell of it; `note` is told of all that came of the run so far,
    after each round.
    """
    chosen = list(cases)
    rows = rows_for(chosen, most)
    deadline = time.monotonic() + budget
    for number in range(max((row.planned for row in rows), default=0)):
        for case, row in zip(chosen, rows, strict=True):
            if number >= row.planned:
                continue
            if time.monotonic() > deadline:
                return rows
            shift = random.Random(f"{seed} {case.title}").random()
            _do(case, row, ((number + shift) / case.rounds) % 1.0, failed)
            say(f"{row.group:<9} {row.case:<52} {_told(row)}")
            note(rows)
    return rows


def _told(row: Row) -> str:
    outcome = "ok" if row.survived == row.rounds else f"{row.rounds - row.survived} FAILED"
    again = f"  {len(row.again)} again" if row.again else ""
    outage = "" if row.longest_outage is None else f"  longest outage {row.longest_outage:.1f} s"
    return f"{row.rounds}/{row.of} {outcome}{again}{outage}"


@contextmanager
def limited(seconds: float, again: float = CLEARING) -> Iterator[None]:
    """Raise OverdueError in the main thread where this is not done in so many seconds, and again where clearing up takes long.

    Whoever had the alarm set before, as pytest's time limit has, gets it back.
    """

    def overdue(*_: object) -> NoReturn:
        raise OverdueError(f"not done within {seconds:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, overdue)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:
            signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - began), 0.001))


def traced(error: BaseException) -> str:
    """Return an error with the end of its trace."""
    return "".join(traceback.format_exception(error, limit=-_FRAMES))


def _do(case: Case, row: Row, place: float, failed: Failed) -> None:
    began = time.monotonic()
    row.rounds += 1
    try:
        seen = _hit(case, row, place)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table tells of it, and the others go on
        failure = f"at {row.place:.3f}: {traced(error)}"
        if isinstance(error, LostError):
            row.lost += error.count
        row.failures.append(failure + _cleared(failed, case, failure, error))
    else:
        row.survived += 1
        row.looked_for += seen.looked_for
        row.longest_outage = _longer(row.longest_outage, seen.outage)
        row.slowest_answer = _longer(row.slowest_answer, seen.slowest)
    row.seconds += time.monotonic() - began


def _cleared(failed: Failed, case: Case, failure: str, error: Exception) -> str:
    try:
        with limited(CLEARING):
            return failed(case, failure, error)
    except Exception as another:  # noqa: BLE001 - the next round shows whether it can go on
        return f"and while clearing up: {traced(another)}"


def _longer(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _hit(case: Case, row: Row, place: float) -> Round:
    """Do a round, again where that says nothing: nearer to the moment's beginning where it was over too soon."""
    misses = slow = 0
    while True:
        row.place = place
        try:
            with limited(LIMIT):
                return case.run(place)
        except MissedError as error:
            misses += 1
            if misses == TRIES:
                raise
            row.again.append(f"at {place:.3f}: {error}")
            if error.nearer or misses > 1:
                place /= 2
        except SlowError as error:
            slow += 1
            if slow == SLOW_TRIES:
                raise
            row.again.append(f"at {place:.3f}: {error}")


def unfinished(rows: list[Row]) -> str | None:
    """Say how much of what was planned the budget allowed, None where it was all."""
    done, planned = sum(row.rounds for row in rows), sum(row.planned for row in rows)
    return None if done == planned else f"the budget ended after {done} of {planned} rounds"


def faults(rows: list[Row], *, what_fits: bool = False) -> list[str]:
    """Say what makes a run one that proves nothing, or proves that something is wrong.

    With `what_fits` somebody asked for what fits into a budget: it is enough that every case had a round.
    """
    found = [f"{row.title}: {failure}" for row in rows for failure in row.failures]
    missing = [row.case for row in rows if row.rounds == 0]
    told = unfinished(rows)
    if not rows:
        found.append("no case was chosen: nothing was tested")
    elif missing:
        found.append(
            f"the budget ended before {len(missing)} of {len(rows)} cases had a round: {', '.join(missing[:5])}"
        )
    elif told and not what_fits:
        found.append(told)
    return found
