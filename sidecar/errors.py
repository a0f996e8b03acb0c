"""What callers may catch. Every sentence names what was seen, what was expected and what to do."""

from enum import StrEnum


class SidecarError(Exception):
    """Something the operator has to know; its text is the whole message."""


class SettingsError(SidecarError):
    """The settings cannot be used. Every fault found is in `faults`, one sentence each."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class Reason(StrEnum):
    """Why the sidecar is blocked. Each has a paragraph in docs/troubleshooting.md."""

    VOLUME_LOCKED = "volume-locked"
    PERMISSIONS = "permissions"
    NO_SPACE = "no-space"
    WRONG_MAJOR = "wrong-major"
    VOLUME_LAYOUT = "volume-layout"
    DAMAGED_CLUSTER = "damaged-cluster"
    FOREIGN_CLUSTER = "foreign-cluster"
    SCHEMA_NEWER = "schema-newer"
    MODEL_MISSING = "model-missing"
    MODEL_CHANGED = "model-changed"
    MODEL_MISMATCH = "model-mismatch"
    CRASH_LOOP = "crash-loop"


class BlockedError(SidecarError):
    """The sidecar may not go on until its cause is gone; it looks again by itself.

    Attributes:
        reason: which kind of cause.
        retry_after: seconds until the next look.

    """

    def __init__(self, reason: Reason, detail: str, *, retry_after: float = 2.0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.retry_after = retry_after


class TransientError(SidecarError):
    """A step failed in a way that a later try may mend, and nothing was lost."""


class RefusedError(SidecarError):
    """It was not done, since it would lose or damage data, or cannot be meant; nothing was touched."""


class VerificationError(SidecarError):
    """What was moved is not what was there; nothing was replaced, or it was put back."""
