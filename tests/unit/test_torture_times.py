"""How long moments take, and where in them somebody is."""

import time

import kills
import pytest
from faults import Alive
from matrix import MissedError


@pytest.mark.parametrize(("warm", "runs"), [(True, 2), (False, 1)])
def test_the_last_measurement_counts(*, warm: bool, runs: int) -> None:
    times, figures = kills.Times(), iter([9.0, 3.0])
    times.warm = warm
    assert times.of("start", lambda: next(figures)) == times.of("start", lambda: 0.0) == [9.0, 3.0][runs - 1]


def test_a_place_in_a_moment_is_reached() -> None:
    times = kills.Times()
    times.of("start", lambda: 0.4)
    began = time.monotonic()
    times.reach("start", 0.5, lambda: True)
    assert time.monotonic() - began >= 0.2


def test_a_moment_that_was_over_sooner_is_as_long_as_it_took() -> None:
    times = kills.Times()
    times.of("start", lambda: 30.0)
    looks = iter([True, True, False])
    with pytest.raises(MissedError) as missed:
        times.reach("start", 0.9, lambda: next(looks))
    assert not missed.value.nearer
    assert times.of("start", lambda: 0.0) < 10


def liveness(**took: list[float]) -> Alive:
    alive = Alive(None)  # type: ignore[arg-type] - nobody is asked
    alive.took |= {"control": [0.01] * 3, "socket": [0.01] * 3, "gateway": [0.01] * 3} | took
    return alive


def test_one_slow_answer_to_liveness_is_told_and_two_in_a_row_or_a_very_slow_one_are_none() -> None:
    alive = liveness(socket=[0.01, 1.2, 0.01, 1.3, 0.01])
    alive.check_none_missing()
    assert alive.slowest == 1.3
    for took in ([0.01, 1.2, 1.1], [0.01, 5.5, 0.01], [0.01]):
        with pytest.raises(AssertionError, match="of socket"):
            liveness(socket=took).check_none_missing()


def test_a_wrong_answer_to_liveness_is_one_too_many() -> None:
    alive = liveness()
    alive.failed.append("socket: IncompleteRead(0 bytes read)")
    with pytest.raises(AssertionError, match="IncompleteRead"):
        alive.check_none_missing()
