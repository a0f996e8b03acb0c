"""Makes dumps by a schedule: begins one when `schedule.due` says so, and tells how it went."""

from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from sidecar import log, schedule
from sidecar.errors import TransientError
from sidecar.kinds import Outcome
from sidecar.operations import Operation
from sidecar.schedule import Failure, Made, Record, Retention, Times


class Dumping(Protocol):
    """What of the administration is needed here."""

    @property
    def busy(self) -> bool:
        """Whether an operation runs, or an upload for one comes."""

    def dump(self, *, retention: Retention) -> Operation:
        """Begin a scheduled dump. Raises BusyError, TransientError."""

    def scheduled_dumps(self) -> list[Made]:
        """Return the good dumps on the volume that a schedule made. Raises OSError."""


class Scheduler:
    """Looks, once a second or so, whether a dump is due.

    One that is due while the sidecar is not ready or another operation runs waits for that, and stays one.

    Attributes:
        record: what is told of it.

    """

    def __init__(self, times: Times, retention: Retention, administration: Dumping) -> None:
        self._times = times
        self._retention = retention
        self._administration = administration
        self._log = log.get("schedule")
        self._tried: datetime | None = None
        self._running: Operation | None = None
        self._outcomes = Counter({outcome.value: 0 for outcome in Outcome if outcome is not Outcome.RUNNING})
        self.record = Record(times.expression, outcomes=dict(self._outcomes))

    def read_volume(self, now: datetime) -> None:
        """Take the latest good dump from the volume, which an earlier start may have made."""
        try:
            found = schedule.latest(self._administration.scheduled_dumps(), now)
        except OSError as error:
            self._log.warning(
                "the dumps on the volume cannot be listed; one is made as if there were none", error=str(error)
            )
            return
        self._tell(success=found)

    def look(self, now: datetime, *, ready: bool) -> None:
        """Take how the last one went, and begin one if it is due."""
        if self._running is not None and self._running.ended is not None:
            self._take(self._running, self._running.ended)
            self._running = None
        self._tell(next=self._times.after(now))
        if not ready or self._administration.busy:
            return
        success = self.record.success
        time = schedule.due(self._times, now, success and success.made, self._tried)
        if time is None:
            return
        try:
            self._running = self._administration.dump(retention=self._retention)
        except TransientError:
            return  # not so now: the next look tries again
        self._tried = time
        self._log.info("scheduled dump", operation=self._running.name, due=time.isoformat())

    def _take(self, operation: Operation, ended: datetime) -> None:
        """Note how one ended; one that failed in deleting old ones has made a good one all the same."""
        self._outcomes[operation.outcome.value] += 1
        self._tell(outcomes=dict(self._outcomes))
        dump = operation.report.get("dump")
        if dump is not None:
            self._tell(success=Made(str(dump["id"]), datetime.fromisoformat(dump["made"])))
        if operation.outcome is not Outcome.DONE:
            reason = operation.error or operation.outcome.value
            self._tell(failure=Failure(ended, reason))
            if dump is None:
                self._log.error(
                    "a scheduled dump failed; those before it are kept", operation=operation.name, error=reason
                )
            else:
                self._log.error(
                    "a scheduled dump was made, and not every old one was deleted",
                    operation=operation.name,
                    error=reason,
                )

    def _tell(self, **changes: Any) -> None:  # noqa: ANN401 - the fields of Record
        self.record = replace(self.record, **changes)
