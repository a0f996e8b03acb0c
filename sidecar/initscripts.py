"""Runs the init scripts: they say what runs, and everything else they get as environment."""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sidecar import log
from sidecar.child import Child


def installed() -> Path:
    """Return where this installation keeps its init scripts."""
    return Path(sys.prefix) / "share" / "hindsight-sidecar" / "initscripts"


class InitScripts:
    """The init scripts of one directory, run in one working directory.

    Attributes:
        cwd: the working directory.

    """

    def __init__(self, directory: Path, cwd: Path, child_log_level: str) -> None:
        self._directory = directory
        self.cwd = cwd
        self._level = child_log_level

    def start(
        self,
        script: str,
        component: str,
        env: Mapping[str, str],
        death_signal: signal.Signals,
        hear: Callable[[str], None] | None = None,
        keeps: Sequence[int] = (),
    ) -> Child:
        """Start a script; its lines are logged as this component's, and `hear` gets them too. It inherits what it `keeps`.

        Raises:
            OSError: it could not be started.

        """
        log_line = log.ChildLines(component, self._level)

        def pass_on(line: str) -> None:
            log_line(line)
            if hear is not None:
                hear(line)

        argv = [str(self._directory / script)]
        return Child.start(component, argv, env=env, cwd=self.cwd, death_signal=death_signal, hear=pass_on, keeps=keeps)
