"""What the control API answers to probes, with nothing but the status asked."""

from typing import Any

from sidecar.status import RETRY_AFTER, Status

LIVE = "/livez"
# Each with what it tells, and whether its answer can be 503.
PROBES = {
    "/health": ("Whether memory calls are served", True),
    "/readyz": ("The same, by Kubernetes' name", True),
    "/startupz": ("Whether this start was ready once", True),
    LIVE: ("Whether the supervisor's loop turns", False),
}


def answer(path: str, status: Status) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the HTTP status, body and further headers of one of `PROBES`."""
    if path == LIVE:
        # The answer itself is the proof: it comes from the same loop. The database is not asked.
        return 200, {"status": "alive", "state": str(status.state)}, {}
    good = status.picture.ever_ready if path == "/startupz" else status.ready
    return (200, status.body(), {}) if good else (503, status.body(), {"Retry-After": str(RETRY_AFTER)})
