"""PostgreSQL's own programs, run for one database: pg_dump, pg_restore, createdb and the like."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sidecar import log
from sidecar.child import Child
from sidecar.errors import SidecarError
from sidecar.postgres_binaries import Binaries

_FIRST_WORDS = 5  # lines of what a program said that go into the sentence
_FAULT = ("error:", "fatal:", "warning:")


class ProgramError(SidecarError):
    """A program of PostgreSQL's reported an error; its own words are in the sentence."""


@dataclass(frozen=True)
class Programs:
    """How PostgreSQL's programs are run here.

    Attributes:
        binaries: one installation, always called by absolute path.
        environment: the whole environment of each; who we are, and nothing from our own.
        cwd: their working directory.

    """

    binaries: Binaries
    environment: Mapping[str, str]
    cwd: Path

    async def run(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        more: Mapping[str, str] | None = None,
        hear: Callable[[str], object] | None = None,
    ) -> None:
        """Run one to its end; cancelled, it is killed and waited for.

        Anything that it reports as an error is one, whatever its exit code: pg_restore goes on after most.

        Raises:
            ProgramError: it reported an error, or ended with another exit code than 0.

        """
        faults: list[str] = []
        tell = log.get(name)

        def take(line: str) -> None:
            if hear is not None:
                hear(line)
            if any(word in line.lower() for word in _FAULT):
                faults.append(line.strip())
                tell.warning(line)
            elif hear is None:
                tell.debug(line)

        child = Child.start(
            name,
            [self.binaries.program(name), *arguments],
            env={**self.environment, **(more or {})},
            cwd=self.cwd,
            # Both tell their own workers, which inherit no death signal, and cancel what the server does for them.
            death_signal=signal.SIGTERM,
            hear=take,
        )
        try:
            status = await child.wait()
        finally:
            if child.returncode is None:
                child.kill_session()
                await child.wait()
        if status or faults:
            said = "; ".join(faults[:_FIRST_WORDS]) or " ".join(list(child.tail)[-_FIRST_WORDS:]) or "it said nothing"
            how = (
                f"ended with exit code {status}"
                if status is not None and status >= 0
                else f"was ended by signal {-(status or 0)}"
            )
            raise ProgramError(f"{name} {how}: {said}")
