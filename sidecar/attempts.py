"""How often wrong tokens are answered in full: one small number an address, whoever sends them."""

import math
import time
from collections.abc import Callable

from sidecar import log

BURST = 10  # wrong ones in a row
RATE = 1.0  # further ones a second
_TOLD_EVERY = 60.0  # seconds between two log lines


class Attempts:
    """A token bucket for the wrong credentials of one address.

    Everyone on loopback looks alike, so a right credential is never refused for somebody's wrong ones: what this keeps
    small is the work and the noise of guessing. It is the length of a secret that makes guessing hopeless.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._left = float(BURST)
        self._at = clock()
        self._told = -math.inf
        self._log = log.get("sidecar")

    def retry_after(self) -> int | None:
        """Note a wrong credential. Return the seconds for `Retry-After` where there were too many, else None."""
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._at) * RATE)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return None
        if now - self._told > _TOLD_EVERY:
            self._told = now
            self._log.warning("too many wrong tokens or keys", address=self._address)
        return math.ceil((1 - self._left) / RATE)
