"""Finds a container engine that works here, by trying, and says why the others do not."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bake.errors import BakeError

NAMES = ("podman", "buildah", "docker")
# For machines on which podman's own settings do not run: no systemd, cgroups of the first version, no right to raise limits.
PLAIN_CONF = Path(__file__).with_name("containers.conf")
_TRY_TIME = 120.0  # seconds; it may include a pull of the base image


class NoEngineError(BakeError):
    """No engine here can build an image: each one's reason."""


@dataclass(frozen=True)
class Engine:
    """An engine that ran a container of the base image.

    Attributes:
        name: podman, buildah or docker.
        program: its path.
        environment: what it needs in addition to the caller's environment.
        passed_over: why each engine that comes before it was not taken.

    """

    name: str
    program: str
    environment: Mapping[str, str] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()

    @property
    def runs_containers(self) -> bool:
        """Whether it starts, stops and enters containers; buildah only builds."""
        return self.name != "buildah"

    def environ(self) -> dict[str, str]:
        """Return the whole environment to call it with."""
        return {**os.environ, **self.environment}

    def call(self, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run one of its commands to the end, and return what it printed and its exit code."""
        return subprocess.run(
            [self.program, *arguments],
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout or _TRY_TIME,
        )

    def has_image(self, image: str) -> bool:
        """Tell whether an image is here already."""
        return self.call("inspect", "--type", "image", image).returncode == 0


def find(base: str | None, wanted: str | None = None) -> Engine:
    """Return the first engine that runs a container of `base`, pulling it where it is not here.

    Without a base, the first that answers at all.

    Raises:
        NoEngineError: none does; the reason of each, a line each.

    """
    reasons: list[str] = []
    for name in (wanted,) if wanted else NAMES:
        program = shutil.which(name)
        engine, why = _try(name, program, base) if program else (None, "not installed")
        if engine:
            return replace(engine, passed_over=tuple(reasons))
        reasons.append(f"{name}: {why}")
    raise NoEngineError("no container engine works here; install podman (or set ENGINE)\n" + "\n".join(reasons))


def _try(name: str, program: str, base: str | None) -> tuple[Engine | None, str]:
    """Try it as it is configured, then with plain settings; return it, or why it does not work."""
    plain = {} if name == "docker" or "CONTAINERS_CONF" in os.environ else {"CONTAINERS_CONF": str(PLAIN_CONF)}
    why = ""
    for environment in ({}, plain) if plain else ({},):
        engine = Engine(name, program, environment)
        try:
            why = _why_not(engine, base)
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if not why:
            return engine, ""
    return None, why


def _why_not(engine: Engine, base: str | None) -> str:
    if (reached := engine.call("info")).returncode:
        return _last_line(reached.stderr)
    if engine.name == "docker" and engine.call("buildx", "version").returncode:
        return "it has no buildx, which builds with more than one context; install docker-buildx"
    if base is None:
        return ""
    if not engine.has_image(base) and engine.call("pull", "--quiet", base).returncode:
        return f"{base} is not here and cannot be pulled; `make image-base` makes it from the Debian archive"
    if engine.name == "buildah":
        made = engine.call("from", "--pull-never", base)
        if made.returncode:
            return _last_line(made.stderr)
        container = made.stdout.strip()
        try:
            ran = engine.call("run", container, "--", "/bin/true")
        finally:
            engine.call("rm", container)
    else:
        name = f"hindsight-engine-trial-{os.getpid()}"
        try:
            ran = engine.call("run", "--rm", f"--name={name}", "--network=none", base, "/bin/true")
        except subprocess.TimeoutExpired:
            engine.call("rm", "--force", name)
            raise
    return "" if ran.returncode == 0 else _last_line(ran.stderr)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
