"""Recalls through the gateway beside recalls of the same hindsight-api without it, in turns."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from calls import Address, Caller

DIRECT, GATEWAY = "direct", "gateway"
_WARM_UP = 2.0  # seconds that are not counted, of each address


@dataclass(frozen=True)
class Course:
    """What is compared.

    Attributes:
        direct, gateway: the two addresses.
        questions: banks, each with something to ask it.
        callers: how many ask at once.
        turns: of each address.
        seconds: of each turn.

    """

    direct: Address
    gateway: Address
    questions: list[tuple[str, str]]
    callers: int
    turns: int
    seconds: float


@dataclass
class Compared:
    """What came of it: the seconds of every answer, turn by turn, and what was no answer."""

    direct: list[list[float]] = field(default_factory=list)
    gateway: list[list[float]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


def run(course: Course) -> Compared:
    """Ask directly, through the gateway, directly, and so on; for a process of its own."""
    compared = Compared()
    for address in (course.direct, course.gateway):
        _turn(course, address, _WARM_UP, compared.faults)
    for _ in range(course.turns):
        compared.direct.append(_turn(course, course.direct, course.seconds, compared.faults))
        compared.gateway.append(_turn(course, course.gateway, course.seconds, compared.faults))
    return compared


def _turn(course: Course, address: Address, seconds: float, faults: Counter[str]) -> list[float]:
    end = time.monotonic() + seconds
    took: list[list[float]] = [[] for _ in range(course.callers)]

    def ask(number: int) -> None:
        place = number
        with Caller(address) as caller:
            while time.monotonic() < end:
                bank, text = course.questions[place % len(course.questions)]
                place += course.callers
                answered = caller.recall(bank, text)
                if answered.status == 200:
                    took[number].append(answered.seconds)
                else:
                    faults[f"{answered.status} {answered.body}"] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(course.callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for each in took for one in each]
