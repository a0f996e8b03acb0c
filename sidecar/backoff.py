"""How long to wait before the next try, and when trying has become a crash loop."""

import signal
from collections import Counter, deque
from enum import StrEnum

_FIRST = 0.5  # seconds
_FACTOR = 2.0
_LONGEST = 20.0
CRASH_WINDOW = 300.0  # seconds
CRASH_CEILING = 5  # restarts in the window that are still tolerated


class End(StrEnum):
    """How a component came to its end that was not asked to."""

    EXITED = "exited"  # by itself, with exit status 0
    FAILED = "failed"  # by itself, with another one
    KILLED = "killed"  # by SIGKILL: mostly the kernel's, for want of memory
    SIGNAL = "signal"  # by another signal: a fault of its own, or somebody's kill
    HUNG = "hung"  # hindsight-api alone: it did not answer for too long, and was replaced
    NO_SPACE = "no-space"  # Postgres alone: it found no space
    # Postgres alone: one of its processes ended badly, and its postmaster, which lived on, began again with all of them.
    REINITIALIZED = "reinitialized"


def how(status: int) -> End:
    """Return what an exit status (negative: the signal) says of an end by itself."""
    if status == 0:
        return End.EXITED
    if status > 0:
        return End.FAILED
    return End.KILLED if -status == signal.SIGKILL else End.SIGNAL


class Restarts:
    """The restarts of one component. Times are seconds of a monotonic clock.

    Attributes:
        total: how often it ended without being asked to.
        ends: how often it ended how.

    """

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._looping = False
        self.total = 0
        self.ends: Counter[End] = Counter()

    def record(self, now: float, end: End) -> None:
        """Note that the component ended without being asked to."""
        self.total += 1
        self.ends[end] += 1
        self._forget(now)
        self._times.append(now)
        self._looping = self._looping or len(self._times) > CRASH_CEILING

    def record_excused(self, end: End) -> None:
        """Note that it ended for a cause that is told by itself, and that trying again waits for already."""
        self.total += 1
        self.ends[end] += 1

    def _forget(self, now: float) -> None:
        while self._times and now - self._times[0] > CRASH_WINDOW:
            self._times.popleft()
        # Tried once a minute, it no longer ends six times in five: the loop is over when it stayed up for a window.
        self._looping = self._looping and bool(self._times)

    def delay(self, now: float) -> float:
        """Return how many seconds after the last end the next start is due. The first restart is nearly at once."""
        self._forget(now)
        return min(_FIRST * _FACTOR ** max(len(self._times) - 1, 0), _LONGEST) if self._times else 0.0

    def due(self, now: float) -> float:
        """Return when the next start is due."""
        delay = self.delay(now)
        return self._times[-1] + delay if self._times else now

    def looping(self, now: float) -> bool:
        """Tell whether it ended so often lately that trying on at this pace helps nobody."""
        self._forget(now)
        return self._looping
