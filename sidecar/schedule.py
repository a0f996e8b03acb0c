"""When a dump is due and which ones go: decisions alone, of times that are given; `scheduler.py` acts on them.

Every time is in UTC, so no hour comes twice or is left out; the clock itself may still be set back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from cronsim import CronSim, CronSimError

_FIELDS = 5


@dataclass(frozen=True)
class Times:
    """The times that a cron expression stands for, in UTC and as Debian's cron reads it.

    Attributes:
        expression: of five fields.

    """

    expression: str

    @classmethod
    def parse(cls, text: str, now: datetime) -> "Times":
        """Return what an operator wrote.

        Raises:
            ValueError: it is no expression, or its time never comes.

        """
        fields = text.split()
        times = cls(" ".join(fields))
        if len(fields) != _FIELDS:
            raise _no_schedule(text, f"it has {len(fields)} fields")
        try:
            comes = times.after(now) is not None
        except (CronSimError, ValueError) as error:  # the latter of a number with thousands of digits
            raise _no_schedule(text, str(error)[:60].lower()) from error
        if not comes:
            raise _no_schedule(text, "its time never comes")
        return times

    def after(self, now: datetime) -> datetime | None:
        """Return the next time; None where it never comes."""
        return next(CronSim(self.expression, now), None)

    def until(self, now: datetime) -> datetime | None:
        """Return the latest time that has come; None where none has."""
        return next(CronSim(self.expression, now.replace(microsecond=0) + timedelta(seconds=1), reverse=True), None)


def _no_schedule(text: str, why: str) -> ValueError:
    return ValueError(
        f"{text[:60]!r} is no schedule ({why}); expected five fields as cron has them, minute, hour, day of the month, month "
        "and day of the week, in UTC, such as '17 3 * * *'"
    )


class Made(NamedTuple):
    """A dump that a schedule made: its id, and when its snapshot was taken."""

    id: str
    made: datetime


def latest(dumps: Sequence[Made], now: datetime) -> Made | None:
    """Return the latest of some dumps; one of the future was made before the clock was set back."""
    return max(dumps, key=lambda dump: (dump.made <= now, dump.made), default=None)


def due(times: Times, now: datetime, last: datetime | None, tried: datetime | None) -> datetime | None:
    """Return the time that a dump has to be made for now, None where none has.

    However many times were missed, it is the latest alone. A clock that is set back costs one dump more, and no dump is
    missed for it.

    Args:
        times: of the schedule.
        now: the time.
        last: when the latest dump of the schedule was made.
        tried: the time that a dump was last begun for; it is not tried again before the next one.

    """
    time = times.until(now)
    if time is None or time == tried:
        return None
    return None if last is not None and time <= last <= now else time


@dataclass(frozen=True)
class Retention:
    """What is kept of the dumps that a schedule made.

    Attributes:
        count: how many, at least 1.
        days: how old they may get; None for no limit.

    """

    count: int
    days: float | None = None


def superfluous(dumps: Sequence[Made], newest: str, now: datetime, retention: Retention) -> list[Made]:
    """Return the dumps that are kept no longer, the oldest last.

    The newest one, which was just made and verified, always stays: whatever its age, and however the clock was set.
    """
    ordered = sorted(dumps, key=lambda dump: (dump.id == newest, dump.made <= now, dump.made), reverse=True)
    oldest = None if retention.days is None else now - timedelta(days=retention.days)
    return [
        dump
        for place, dump in enumerate(ordered)
        if dump.id != newest and (place >= retention.count or (oldest is not None and dump.made < oldest))
    ]


class Failure(NamedTuple):
    """A scheduled dump that did not end well: when that was, and why in one sentence."""

    time: datetime
    reason: str


@dataclass(frozen=True)
class Record:
    """What is told of a schedule.

    Attributes:
        schedule: its expression.
        next: when the next dump is to be made.
        success: the latest good dump; of an earlier start too, as long as it is on the volume.
        failure: the latest failure since this start.
        outcomes: how many ended how since this start.

    """

    schedule: str
    next: datetime | None = None
    success: Made | None = None
    failure: Failure | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as `/health` shows it."""
        success, failure = self.success, self.failure
        return {
            "schedule": self.schedule,
            "next": _text(self.next),
            "last_success": success and {"time": _text(success.made), "id": success.id},
            "last_failure": failure and {"time": _text(failure.time), "reason": failure.reason},
        }


def _text(time: datetime | None) -> str | None:
    return time.isoformat(timespec="milliseconds") if time else None
