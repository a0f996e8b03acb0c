"""What operations there are, and how they end."""

from enum import StrEnum


class Kind(StrEnum):
    """What an operation does."""

    DUMP = "dump"
    RESTORE = "restore"
    MIGRATE = "migrate"
    ADOPT = "adopt"
    ROLLBACK = "rollback"


class Outcome(StrEnum):
    """How an operation stands."""

    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNVERIFIED = "verification-failed"
    CANCELLED = "cancelled"
