from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.schedule import Failure, Made, Record, Retention, Times, due, latest, superfluous

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
DAILY = Times("17 3 * * *")
HOURLY = Times("0 * * * *")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def at(hour: int, minute: int = 0, second: int = 0, micro: int = 0) -> datetime:
    return NOW.replace(hour=hour, minute=minute, second=second, microsecond=micro)


# The expression ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["17 3 * * *", "*/5 * * * *", "0 0 1,15 * *", "0 22 * * MON-FRI", "30 4 L * *", "0 0 29 2 *", " 0\t3 * * 7 "],
)
def test_an_expression_of_cron_is_one(text: str) -> None:
    assert Times.parse(text, NOW).expression == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("61 * * * *", "bad minute"),
        ("0 24 * * *", "bad hour"),
        ("0 3 * * tomorrow", "bad day-of-week"),
        ("0 3 30 2 *", "bad day-of-month"),
        ("* * */20 * 1L", "its time never comes"),
        ("@daily", "it has 1 fields"),
        ("0 3 * *", "it has 4 fields"),
        ("*/10 * * * * *", "it has 6 fields"),  # of seconds: a dump each would be no schedule
        ("*/0 * * * *", "bad minute"),
        ("9" * 5000 + " * * * *", "exceeds the limit"),
        ("\x1b[2J * * * *", "bad minute"),
    ],
)
def test_another_one_is_refused_in_one_sentence(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="is no schedule") as refused:
        Times.parse(text, NOW)
    told = str(refused.value)
    assert f"is no schedule ({why}" in told
    assert told.endswith("in UTC, such as '17 3 * * *'")
    assert told.isprintable()
    assert len(told) < 330


def test_the_times_around_a_moment() -> None:
    assert DAILY.after(NOW) == at(3, 17) + DAY
    assert DAILY.until(NOW) == at(3, 17)
    for moment in (at(3, 17), at(3, 17, micro=1), at(3, 17, 59)):
        assert DAILY.until(moment) == at(3, 17)
        assert DAILY.after(moment) == at(3, 17) + DAY
    assert DAILY.until(at(3, 16, 59, 999_999)) == at(3, 17) - DAY


@pytest.mark.parametrize("day", [datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)])
def test_no_hour_is_left_out_or_comes_twice_when_clocks_change(day: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    times, moment = [], day
    while (found := Times("30 2 * * *").after(moment)) is not None and found < day + 2 * DAY:
        times.append(found)
        moment = found
    assert times == [day + timedelta(hours=2.5), day + timedelta(hours=26.5)]
    hours = [HOURLY.after(day + number * HOUR) for number in range(24)]
    assert [later - earlier for earlier, later in pairwise(filter(None, hours))] == [HOUR] * 23


# What is due ---------------------------------------------------------------------------------------------------


def test_without_any_dump_the_first_is_due_at_once() -> None:
    assert due(DAILY, NOW, None, None) == at(3, 17)


def test_it_is_due_from_its_time_on_and_done_once_it_is_made() -> None:
    before = at(3, 17) - DAY + timedelta(seconds=2)
    assert due(DAILY, at(3, 16, 59), before, None) is None
    assert due(DAILY, at(3, 17), before, None) == at(3, 17)
    assert due(DAILY, at(11), before, None) == at(3, 17)  # not ready or busy until now
    assert due(DAILY, at(11), at(3, 17), None) is None
    assert due(DAILY, at(11), at(10), None) is None  # the one that made up for it


def test_of_many_that_were_missed_one_is_made() -> None:
    last = NOW - 30 * DAY
    assert due(HOURLY, at(11, 30), last, None) == at(11)
    assert due(HOURLY, at(11, 31), at(11, 30), at(11)) is None
    assert due(HOURLY, at(12), at(11, 30), at(11)) == at(12)


def test_what_failed_is_not_tried_again_before_the_next_time() -> None:
    last = at(10, 0, 2)
    assert due(HOURLY, at(11, 0, 1), last, at(11)) is None
    assert due(HOURLY, at(11, 59, 59), last, at(11)) is None
    assert due(HOURLY, at(12), last, at(11)) == at(12)
    assert due(HOURLY, at(11, 30), last, None) == at(11)  # after a restart it is


def test_one_that_takes_longer_than_the_schedule_is_followed_by_one() -> None:
    every_minute = Times("* * * * *")
    assert due(every_minute, at(11, 5, 30), at(11, 1, 1), at(11, 1)) == at(11, 5)


def test_a_clock_that_is_set_back_costs_one_dump_and_stalls_nothing() -> None:
    ahead = NOW + 3650 * DAY  # it was ten years ahead, and a dump was made
    tried = HOURLY.until(ahead)
    assert due(HOURLY, NOW, ahead, tried) == NOW
    assert due(HOURLY, NOW + timedelta(seconds=9), NOW + timedelta(seconds=3), NOW) is None
    assert due(HOURLY, NOW + HOUR, NOW + timedelta(seconds=3), NOW) == NOW + HOUR


def test_a_clock_that_is_corrected_a_little_costs_nothing() -> None:
    last = at(11, 0, 2)
    assert due(HOURLY, at(11, 0, 1), last, at(11)) is None
    assert due(HOURLY, at(11, 0, 5), last, at(11)) is None


@given(
    minutes=st.lists(st.integers(-90, 400), min_size=1, max_size=60),
    fails=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_there_are_never_more_dumps_than_times_that_came(minutes: list[int], fails: list[bool]) -> None:
    now, last, tried, begun, back = NOW, None, None, 0, 0
    times = set()
    for minute, failed in zip(minutes, fails, strict=False):
        now += timedelta(minutes=minute)
        back += minute < 0
        times.add(HOURLY.until(now))
        time = due(HOURLY, now, last, tried)
        if time is not None:
            assert time == HOURLY.until(now)
            begun, tried = begun + 1, time
            last = last if failed else now
        assert due(HOURLY, now, last, tried) is None
    assert begun <= len(times) + 2 * back


# What is kept --------------------------------------------------------------------------------------------------


def made(*ages: float) -> list[Made]:
    """Return dumps of some ages in days, each named by it."""
    return [Made(f"{age:g}", NOW - timedelta(days=age)) for age in ages]


@pytest.mark.parametrize(
    ("ages", "newest", "retention", "gone"),
    [
        ([0], "0", Retention(1), []),
        ([0, 1], "0", Retention(1), ["1"]),
        ([0, 1, 2], "0", Retention(3), []),
        ([2, 0, 3, 1], "0", Retention(2), ["2", "3"]),
        ([0, 1, 2, 3], "0", Retention(7, 2), ["3"]),
        ([0, 1, 2.001, 3], "0", Retention(7, 2), ["2.001", "3"]),
        ([0, 1, 2, 3], "0", Retention(2, 2), ["2", "3"]),
        ([0, 40, 50], "0", Retention(7, 30), ["40", "50"]),
        ([0.5, 40], "0.5", Retention(7, 0.25), ["40"]),  # older than the limit itself, and the newest good one
        ([0, -1, 1], "0", Retention(2), ["-1"]),  # of a clock that was set back: older than what was made since
        ([0, -1, -2], "0", Retention(2), ["-1"]),
        ([0, -3650], "0", Retention(1), ["-3650"]),
        ([0, -3650], "0", Retention(2, 1), []),
    ],
)
def test_what_goes(ages: list[float], newest: str, retention: Retention, gone: list[str]) -> None:
    dumps = made(*ages)
    assert [dump.id for dump in superfluous(dumps, newest, NOW, retention)] == gone


@given(
    ages=st.lists(st.integers(-10, 100), min_size=1, max_size=20, unique=True),
    count=st.integers(1, 25),
    days=st.none() | st.integers(1, 50),
)
def test_the_newest_always_stays_and_never_more_than_the_count(ages: list[int], count: int, days: int | None) -> None:
    dumps = made(*ages)
    gone = superfluous(dumps, dumps[0].id, NOW, Retention(count, days))
    assert dumps[0] not in gone
    assert len(dumps) - len(gone) <= count
    assert superfluous([dump for dump in dumps if dump not in gone], dumps[0].id, NOW, Retention(count, days)) == []
    if len(dumps) <= count and days is None:
        assert gone == []


def test_the_latest_is_of_the_past_where_there_is_one() -> None:
    assert latest([], NOW) is None
    assert latest(made(3, 1, 2), NOW) == made(1)[0]
    assert latest(made(3, -1, 2), NOW) == made(2)[0]
    assert latest(made(-1, -2), NOW) == made(-2)[0]


# What is told --------------------------------------------------------------------------------------------------


def test_a_record_is_told_as_json() -> None:
    assert Record("17 3 * * *").to_json() == {
        "schedule": "17 3 * * *",
        "next": None,
        "last_success": None,
        "last_failure": None,
    }
    record = Record("17 3 * * *", NOW, Made("x", at(3, 17)), Failure(at(4), "no space"), {"done": 1})
    assert record.to_json() == {
        "schedule": "17 3 * * *",
        "next": "2026-11-29T12:00:00.000+00:00",
        "last_success": {"time": "2026-11-29T03:17:00.000+00:00", "id": "x"},
        "last_failure": {"time": "2026-11-29T04:00:00.000+00:00", "reason": "no space"},
    }
