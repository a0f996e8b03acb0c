"""A PostgreSQL beside the served one, for as long as an operation needs it: on a data directory of its own."""

import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from sidecar import cluster, database, sizing
from sidecar.child import Child
from sidecar.errors import SidecarError
from sidecar.initscripts import InitScripts
from sidecar.operations import to_its_end
from sidecar.programs import Programs

_LOOK = 0.1  # seconds between looks whether it answers
_FAST = 60.0  # seconds for its fast shutdown
_HARD = 10.0  # seconds to reap it after an immediate one
_AT_ONCE = ((signal.SIGQUIT, _HARD), (signal.SIGKILL, _HARD))
_IN_ORDER = ((signal.SIGINT, _FAST), *_AT_ONCE)
_SAID = 5  # of its last lines go into a sentence
_NOT_YET = "the database system is "  # starting up, or not yet accepting connections
# A cluster that others made is run with none of its own configuration: it may load and include what is not here.
_FILES = {"postgresql.conf": "", "pg_hba.conf": "local all all trust\n", "pg_ident.conf": ""}


class SideServerError(SidecarError):
    """It could not be run; its own words are in the sentence."""


@dataclass(frozen=True)
class SideServer:
    """How a server is run on one data directory.

    Attributes:
        pgdata: the data directory.
        socket_dir: where its socket goes, and what is written for it; only we can enter it.
        programs: of its PostgreSQL, with the environment that they get.
        scripts: the init scripts that run it.

    """

    pgdata: Path
    socket_dir: Path
    programs: Programs
    scripts: InitScripts

    @property
    def _environment(self) -> dict[str, str]:
        return {
            **self.programs.environment,
            "PGDATA": str(self.pgdata),
            "PG_BINDIR": str(self.programs.binaries.bindir),
            "PG_SOCKET_DIR": str(self.socket_dir),
        }

    async def make_cluster(self) -> None:
        """Make a cluster of ours in the data directory, or heal its mode where there is one.

        Raises:
            SideServerError: it could not be made.

        """
        child = self.scripts.start("10-initdb", "initdb", self._environment, signal.SIGKILL)
        try:
            code = await child.wait()
        finally:
            await _killed(child)
        if code != 0:
            raise SideServerError(f"10-initdb ended with {code}: {_words(child)}")

    async def run_alone(self, statement: str) -> None:
        """Run one line of SQL as the bootstrap superuser, whatever its name is, with no server (single-user mode).

        A cluster that was not shut down is recovered by that.

        Raises:
            SideServerError: it could not be run.

        """
        asked = self.socket_dir / "statement.sql"
        asked.write_text(f"{statement}\n", encoding="utf-8")
        settings = [f"-c{name}={value}" for name, value in self._foreign_settings().items()]
        with asked.open("rb") as file:
            child = Child.start(
                "postgres-single",
                [self.programs.binaries.program("postgres"), "--single", "-D", str(self.pgdata), "-cexit_on_error=on", *settings,
                 "template1"],
                env=self._environment,
                cwd=self.programs.cwd,
                death_signal=signal.SIGKILL,
                hear=lambda _: None,
                stdin=file.fileno(),
            )  # fmt: skip
        try:
            code = await child.wait()
        finally:
            await _killed(child)  # in the middle of a recovery it would not hear another signal
        if code != 0:
            raise SideServerError(f"PostgreSQL cannot run on the data directory (exit {code}): {_words(child)}")

    @contextlib.asynccontextmanager
    async def running(self, *, foreign: bool = False, settings: Mapping[str, str] | None = None) -> AsyncIterator[None]:
        """Run the server meanwhile, and end it in order, or at once where something went wrong. `foreign`: with none of the cluster's own configuration.

        A crash recovery takes as long as it takes.

        Raises:
            SideServerError: it ended by itself before it answered, or lets nobody in.

        """
        chosen = sizing.postgres_settings(sizing.this_machine()) | dict(settings or {})
        words = {**chosen, **(self._foreign_settings() if foreign else {})}
        cluster.clear_stale_socket_lock(self.socket_dir)
        told = " ".join(f"{name}={value}" for name, value in words.items())
        child = self.scripts.start(
            "20-postgres", "postgres-aside", {**self._environment, "POSTGRES_SETTINGS": told}, signal.SIGQUIT
        )
        try:
            await self._answers(child)
            yield
        except BaseException:
            await to_its_end(_stopped(child, _AT_ONCE))  # nobody needs what is in it any more
            raise
        await to_its_end(_stopped(child, _IN_ORDER))

    async def _answers(self, child: Child) -> None:
        while True:
            if child.returncode is not None:
                raise SideServerError(
                    f"PostgreSQL ended by itself on the data directory ({child.returncode}): {_words(child)}"
                )
            try:
                await (await database.connect(self.socket_dir, database.SUPERUSER, "template1")).close()
            except psycopg.OperationalError as error:
                if "FATAL" in str(error) and _NOT_YET not in str(error):
                    raise SideServerError(
                        f"PostgreSQL lets nobody in on the data directory: {error}".strip()
                    ) from error
                await child.wait(_LOOK)
            else:
                return

    def _foreign_settings(self) -> dict[str, str]:
        for name, text in _FILES.items():
            (self.socket_dir / name).write_text(text, encoding="ascii")
        return {
            "config_file": str(self.socket_dir / "postgresql.conf"),
            "hba_file": str(self.socket_dir / "pg_hba.conf"),
            "ident_file": str(self.socket_dir / "pg_ident.conf"),
            "event_triggers": "off",
            # A subscription would take from its publisher what the cluster itself has to get.
            "max_logical_replication_workers": "0",
            "dynamic_shared_memory_type": "mmap",
            "huge_pages": "off",
        }


def _words(child: Child) -> str:
    return " ".join(list(child.tail)[-_SAID:]) or "it said nothing"


async def _killed(child: Child) -> None:
    """End a short program that did not end by itself, and see it gone: its files are removed next."""
    if child.returncode is None:
        child.kill_session()
        await to_its_end(child.wait())


async def _stopped(child: Child, steps: Sequence[tuple[signal.Signals, float]]) -> None:
    for number, patience in steps:
        child.send(number)
        if await child.wait(patience) is not None:
            return
