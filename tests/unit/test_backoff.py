import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.backoff import CRASH_CEILING, CRASH_WINDOW, End, Restarts, how


def test_nothing_ended_means_no_wait() -> None:
    restarts = Restarts()
    assert restarts.delay(5.0) == 0.0
    assert restarts.due(5.0) == 5.0
    assert not restarts.looping(5.0)


def test_waits_double_from_half_a_second_to_twenty() -> None:
    restarts = Restarts()
    seen = []
    for _ in range(8):
        restarts.record(10.0, End.FAILED)
        seen.append(restarts.delay(10.0))
    assert seen == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]


def test_a_wait_counts_from_the_last_end() -> None:
    restarts = Restarts()
    restarts.record(10.0, End.FAILED)
    restarts.record(12.0, End.FAILED)
    assert restarts.due(12.4) == 13.0


def test_more_than_the_ceiling_in_the_window_is_a_loop() -> None:
    restarts = Restarts()
    for second in range(CRASH_CEILING):
        restarts.record(float(second), End.FAILED)
        assert not restarts.looping(float(second))
    restarts.record(CRASH_WINDOW, End.FAILED)
    assert restarts.looping(CRASH_WINDOW)


def test_ends_further_apart_than_the_window_are_no_loop() -> None:
    restarts = Restarts()
    for number in range(20):
        restarts.record(number * (CRASH_WINDOW / CRASH_CEILING + 1), End.FAILED)
        assert not restarts.looping(number * (CRASH_WINDOW / CRASH_CEILING + 1))
    assert restarts.total == 20


def test_a_loop_is_over_once_nothing_ended_for_a_window() -> None:
    restarts = Restarts()
    for _ in range(CRASH_CEILING + 1):
        restarts.record(0.0, End.FAILED)
    assert restarts.looping(CRASH_WINDOW)
    assert not restarts.looping(CRASH_WINDOW + 1)
    restarts.record(CRASH_WINDOW + 2, End.FAILED)
    assert not restarts.looping(CRASH_WINDOW + 2)
    assert restarts.delay(CRASH_WINDOW + 2) == 0.5
    assert restarts.total == CRASH_CEILING + 2


@given(st.lists(st.floats(0, 200), max_size=40), st.floats(0, 1000))
def test_the_wait_is_bounded_and_never_before_the_last_end(pauses: list[float], later: float) -> None:
    restarts = Restarts()
    now = 0.0
    for pause in pauses:
        now += pause
        restarts.record(now, End.FAILED)
    assert restarts.total == len(pauses)
    if sum(now - end <= CRASH_WINDOW for end in _ends(pauses)) > CRASH_CEILING:
        assert restarts.looping(now)
    assert now <= restarts.due(now) <= now + 20.0
    assert 0.0 <= restarts.delay(now + later) <= 20.0
    assert restarts.due(now + later) >= now


def _ends(pauses: list[float]) -> list[float]:
    total, ends = 0.0, []
    for pause in pauses:
        total += pause
        ends.append(total)
    return ends


@pytest.mark.parametrize("pause", [60.0, 61.5, 120.0, 299.0])
def test_a_loop_stays_a_loop_while_every_try_of_it_ends(pause: float) -> None:
    restarts = Restarts()
    for _ in range(CRASH_CEILING + 1):
        restarts.record(0.0, End.FAILED)
    for number in range(1, 30):
        restarts.record(number * pause, End.FAILED)
        assert restarts.looping(number * pause)


@pytest.mark.parametrize(
    ("status", "end"),
    [(0, End.EXITED), (1, End.FAILED), (137, End.FAILED), (-signal.SIGKILL, End.KILLED), (-signal.SIGSEGV, End.SIGNAL)],
)
def test_how_a_component_ended_is_told_by_its_exit_status(status: int, end: End) -> None:
    assert how(status) is end


def test_every_end_is_counted_by_how_it_came() -> None:
    restarts = Restarts()
    for second, end in enumerate([End.KILLED, End.HUNG, End.KILLED]):
        restarts.record(second * CRASH_WINDOW, end)
    assert restarts.ends == {End.KILLED: 2, End.HUNG: 1}
    assert restarts.total == 3


def test_an_end_for_a_cause_that_is_told_makes_no_crash_loop() -> None:
    restarts = Restarts()
    for _ in range(20):
        restarts.record_excused(End.NO_SPACE)
    assert restarts.total == 20
    assert restarts.due(5.0) == 5.0
    assert not restarts.looping(5.0)
