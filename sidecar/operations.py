"""Long work, one at a time: its name, how far it is, how it ended, and a way to end it early."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from sidecar import log
from sidecar.archive import new_id
from sidecar.errors import RefusedError, SidecarError, VerificationError
from sidecar.kinds import Kind, Outcome
from sidecar.machine import OperationName

SERVE = "serve"  # phase in which what was served before is brought back
_REMEMBERED = 50  # finished operations that can still be asked about
T = TypeVar("T")


class BusyError(SidecarError):
    """Another operation runs.

    Attributes:
        operation: the one that runs.

    """

    def __init__(self, operation: "Operation") -> None:
        super().__init__(
            f"{operation.name} runs since {operation.started:%H:%M:%S} UTC; wait for its end, or cancel it"
        )
        self.operation = operation


@dataclass
class Operation:
    """One piece of long work.

    Attributes:
        id: of it; sorts by time.
        kind: what it does.
        started, ended: wall-clock times; None while it runs.
        outcome: how it stands.
        phase: what it does now, in a word or two.
        done, total: of the phase, in `unit`; total is None where it cannot be known.
        unit: bytes, rows or indexes.
        error: one sentence, where it ended without success.
        report: what came of it, as far as it came.
        cancelling: whether it was told to end early.

    """

    kind: Kind
    id: str = field(default_factory=new_id)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    ended: datetime | None = None
    outcome: Outcome = Outcome.RUNNING
    phase: str = "beginning"
    done: int = 0
    total: int | None = None
    unit: str = ""
    error: str | None = None
    report: dict[str, Any] = field(default_factory=dict)
    cancelling: bool = False
    _phase_began: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> OperationName:
        """Kind and id."""
        return OperationName(f"{self.kind} {self.id}")

    @property
    def fraction(self) -> float | None:
        """How much of the phase is done, from 0 to 1; None where it cannot be known."""
        return min(self.done / self.total, 1.0) if self.total else None

    def enter(self, phase: str, total: int | None = None, unit: str = "") -> None:
        """Begin a phase."""
        self.phase, self.done, self.total, self.unit = phase, 0, total, unit
        self._phase_began = time.monotonic()
        log.get("operations").info("operation", operation=self.name, phase=phase)

    def advance(self, count: int) -> None:
        """Tell that so much more of the phase is done."""
        self.done += count

    def to_json(self) -> dict[str, Any]:
        """Return it as `/v1/operations/{id}` shows it; rate is per second, remaining in seconds."""
        passed = time.monotonic() - self._phase_began
        rate = self.done / passed if passed > 0 and self.done else None
        fraction = self.fraction
        left = (self.total or 0) - self.done
        return {
            "id": self.id,
            "kind": self.kind,
            "outcome": self.outcome,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "percent": None if fraction is None else round(100 * fraction, 1),
            "rate": round(rate, 1) if rate and self.ended is None else None,
            "remaining_seconds": round(max(left, 0) / rate, 1)
            if rate and fraction is not None and self.ended is None
            else None,
            "started": self.started.isoformat(timespec="milliseconds"),
            "ended": self.ended.isoformat(timespec="milliseconds") if self.ended else None,
            "error": self.error,
            "report": self.report,
        }


Work = Callable[[Operation], Awaitable[None]]


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for what must not be left half done. Cancelled, it comes to its end all the same, and then this is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            log.get("operations").warning("what had to come to its end failed", error=str(error).strip())
        raise


class Operations:
    """Runs operations, one at a time, and remembers how they ended.

    Attributes:
        outcomes: how many of each kind ended how.

    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[Kind, Outcome]] = Counter()
        self._known: deque[Operation] = deque(maxlen=_REMEMBERED)
        self._current: Operation | None = None
        self._work: asyncio.Future[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._log = log.get("operations")

    @property
    def current(self) -> Operation | None:
        """The one that runs."""
        return self._current

    def all(self) -> list[Operation]:
        """Return the known ones, the latest first."""
        return list(reversed(self._known))

    def find(self, identifier: str) -> Operation | None:
        """Return a known one by its id."""
        return next((operation for operation in self._known if operation.id == identifier), None)

    def start(self, kind: Kind, work: Work) -> Operation:
        """Begin one.

        Raises:
            BusyError: another one runs.

        """
        if self._current is not None:
            raise BusyError(self._current)
        operation = Operation(kind)
        self._known.append(operation)
        self._current = operation
        self._work = asyncio.ensure_future(work(operation))
        self._ending = asyncio.create_task(self._end_of(operation, self._work), name=operation.name)
        return operation

    async def _end_of(self, operation: Operation, work: "asyncio.Future[None]") -> None:
        """Wait for the work's end, and note how it went. Nobody cancels this: who waits for it may go away."""
        await asyncio.wait({work})
        operation.outcome, operation.error = self._judge(operation, work)
        operation.ended = datetime.now(UTC)
        self.outcomes[operation.kind, operation.outcome] += 1
        self._current = self._work = None
        tell = self._log.info if operation.outcome is Outcome.DONE else self._log.warning
        tell("operation ended", operation=operation.name, outcome=operation.outcome, error=operation.error)

    def _judge(self, operation: Operation, work: "asyncio.Future[None]") -> tuple[Outcome, str | None]:
        if work.cancelled():
            return Outcome.CANCELLED, "it was cancelled; nothing was replaced"
        error = work.exception()
        if error is None:
            return Outcome.DONE, None
        if isinstance(error, RefusedError):
            return Outcome.REFUSED, str(error)
        if isinstance(error, VerificationError):
            return Outcome.UNVERIFIED, str(error)
        if not isinstance(error, SidecarError | OSError):
            self._log.error("an operation failed unexpectedly", operation=operation.name, exc_info=error)
        return Outcome.FAILED, " ".join(f"{error}".split()) or type(error).__name__  # some have several lines

    async def cancel(self, identifier: str) -> Operation:
        """End one early, and return it once it has cleaned up.

        Asking again does not interrupt the clean-up, but for the wait until what was served before is served again.

        Raises:
            RefusedError: it does not run.

        """
        operation, work, ending = self._current, self._work, self._ending
        if operation is None or work is None or ending is None or operation.id != identifier:
            raise RefusedError(f"no operation {identifier[:60]!r} runs; GET /v1/operations lists what does")
        if not operation.cancelling or operation.phase == SERVE:
            operation.cancelling = True
            work.cancel()
        await asyncio.wait({ending})
        return operation

    async def end(self) -> None:
        """End what runs, as the sidecar stops."""
        if self._current is not None:
            await self.cancel(self._current.id)
