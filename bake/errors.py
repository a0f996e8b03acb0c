"""Why a bake ends without a model directory; each class carries the exit code of the command line."""

from collections.abc import Iterable


class BakeError(Exception):
    """The job failed; the message is one sentence for the operator."""

    exit_code = 1


class UsageError(BakeError):
    """What was asked for cannot be asked for."""

    exit_code = 2


class HubUnreachableError(BakeError):
    """The model hub did not answer, or went away while it was answering."""

    exit_code = 3


class VerificationError(BakeError):
    """Files, or what a model made of them, are not what they have to be.

    Attributes:
        faults: one sentence each, naming the file, what was seen and what was expected.

    """

    exit_code = 5

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))
