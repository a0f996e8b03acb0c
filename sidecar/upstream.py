"""hindsight-api as installed: its version, the schema revisions it knows, the names it reads."""

import functools
import json
import re
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar import log
from sidecar.child import Child
from sidecar.errors import SettingsError, TransientError

_PROBE = Path(__file__).with_name("upstream_probe.py")
_PROBE_TIME = 60.0  # seconds
_EMBED = Path(__file__).with_name("upstream_embed.py")
_EMBED_TIME = 300.0  # seconds; hindsight-api's own limit for loading a model
STORED = "stored-vectors-"  # prefix of a file of memories that are compared; swept at the next start
_TRUE = frozenset({"true"})

# name in /version: variable and default, read in hindsight_api/config.py (0.8.4 and 1.1.0)
_FEATURES = {
    "observations": ("ENABLE_OBSERVATIONS", True),
    "mcp": ("MCP_ENABLED", True),
    "worker": ("WORKER_ENABLED", True),
    "bank_config_api": ("ENABLE_BANK_CONFIG_API", True),
    "bank_llm_health": ("ENABLE_BANK_LLM_HEALTH", False),
    "file_upload_api": ("ENABLE_FILE_UPLOAD_API", True),
    "document_export_api": ("ENABLE_DOCUMENT_EXPORT_API", True),
    "document_import_api": ("ENABLE_DOCUMENT_IMPORT_API", True),
    "audit_log": ("AUDIT_LOG_ENABLED", False),
    "llm_trace": ("LLM_TRACE_ENABLED", True),
    "store_document_text": ("STORE_DOCUMENT_TEXT", True),
}


@dataclass(frozen=True)
class Upstream:
    """The installed hindsight-api.

    Attributes:
        venv: its virtual environment.
        version: of the package.
        package: where its modules are.

    """

    venv: Path
    version: str
    package: Path

    @property
    def python(self) -> Path:
        """The interpreter that has hindsight-api."""
        return self.venv / "bin" / "python"

    @property
    def is_0_8(self) -> bool:
        """Whether it is of the 0.8 line, which reads its tokenizer table from a directory."""
        return self.version.startswith("0.8.")


@dataclass(frozen=True)
class Revisions:
    """Schema revisions of an installed hindsight-api.

    Attributes:
        known: all that it can serve or migrate.
        heads: those that it brings a database to.

    """

    known: frozenset[str]
    heads: frozenset[str]


def find(venv: Path) -> Upstream:
    """Find hindsight-api in a virtual environment, without running it.

    Raises:
        SettingsError: it is not there.

    """
    for info in sorted(venv.glob("lib/python3*/site-packages/hindsight_api_slim-*.dist-info")):
        version = info.name.removeprefix("hindsight_api_slim-").removesuffix(".dist-info")
        return Upstream(venv, version, info.parent / "hindsight_api")
    raise SettingsError(
        f"HINDSIGHT_SIDECAR_API_VENV is {venv}, and hindsight-api-slim is not installed there; name its virtual environment"
    )


@functools.cache
def known_names(upstream: Upstream) -> set[str]:
    """Return every `HINDSIGHT_API_*` name that occurs in the installed sources; reading them all takes its time."""
    names: set[str] = set()
    for path in upstream.package.rglob("*.py"):
        names |= set(re.findall(r"HINDSIGHT_API_[A-Z0-9_]+", path.read_text(encoding="utf-8", errors="replace")))
    return names


def expected_version_body(upstream: Upstream, env: dict[str, str]) -> dict[str, Any]:
    """Return what its `/version` will say with this environment, for the time in which it cannot answer itself."""

    def enabled(name: str, default: bool) -> bool:  # noqa: FBT001 - a private table look-up
        return env.get(f"HINDSIGHT_API_{name}", str(default)).lower() in _TRUE

    features = {feature: enabled(name, default) for feature, (name, default) in _FEATURES.items()}
    if env.get("HINDSIGHT_API_LLM_PROVIDER", "").lower() == "none":
        features["observations"] = False
    return {"api_version": upstream.version, "features": features}


async def revisions(upstream: Upstream, env: dict[str, str], cwd: Path) -> Revisions:
    """Ask the installed package for its schema revisions, with its own interpreter.

    Raises:
        TransientError: it did not answer.

    """
    told = await _ask(upstream, _PROBE, str(upstream.package / "alembic"), env, cwd, _PROBE_TIME)
    return Revisions(frozenset(told["known"]), frozenset(told["heads"]))


async def similarities(
    upstream: Upstream, stored: list[tuple[str, list[float]]], env: dict[str, str], scratch: Path, cwd: Path
) -> list[float]:
    """Embed texts as the installed package does, and return how much each agrees with its stored vector (cosines).

    `env` is `api_environment.for_embedding`. It takes its model's memory for some seconds.

    Raises:
        TransientError: it did not answer.

    """
    # A name of its own: a restore may ask while a check of the served database does.
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=scratch, prefix=STORED) as asked:
        json.dump(stored, asked)
        asked.flush()
        found: list[float] = await _ask(upstream, _EMBED, asked.name, env, cwd, _EMBED_TIME)
    return found


async def _ask(upstream: Upstream, script: Path, argument: str, env: dict[str, str], cwd: Path, patience: float) -> Any:  # noqa: ANN401 - JSON
    """Run one of our scripts with the installed package's interpreter, and return the JSON of its last line."""
    child = Child.start(
        script.stem,
        [str(upstream.python), "-I", str(script), argument],
        env=env,
        cwd=cwd,
        death_signal=signal.SIGKILL,
        hear=log.get(script.stem).debug,
    )
    try:
        # The first to go where memory is short: what it tells is worth less than what runs.
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        code = await child.wait(patience)
    finally:
        if child.returncode is None:
            child.kill_session()
            await child.wait()
    lines = list(child.tail)
    if code != 0 or not lines:
        raise TransientError(f"hindsight-api's {script.stem} did not answer (exit {code}): {' '.join(lines[-3:])}")
    return json.loads(lines[-1])
