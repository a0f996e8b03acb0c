"""What `make setup` made for the tests, below HINDSIGHT_TEST_HOME."""

import os
import subprocess
import sys
from pathlib import Path

MODEL = "all-MiniLM-L6-v2"


def _existing(*parts: str) -> Path:
    home = os.environ.get("HINDSIGHT_TEST_HOME")
    path = Path(home or "unset", *parts)
    # An error and not a skip: a run without it would have tested nothing.
    if not home or not path.is_dir():
        raise AssertionError(f"{path} is not there (HINDSIGHT_TEST_HOME={home}); run the tests with `make test`")
    return path


def api_venv(version: str = "1.1.0", flavor: str = "onnx") -> Path:
    """Return hindsight-api's environment for a version and flavour."""
    return _existing("envs", f"hindsight-api-{version}-{flavor}")


def api_python(version: str = "1.1.0", flavor: str = "onnx") -> Path:
    """Return the interpreter of such an environment."""
    return api_venv(version, flavor) / "bin" / "python"


def stand_in() -> Path:
    """Return the directory with the packages that carry the stand-in model."""
    return _existing("stand-in")


def servers() -> Path:
    """Return the directory with the PostgreSQL servers that memories are migrated from."""
    return _existing("servers")


def baked(directory: Path, flavor: str = "onnx") -> Path:
    """Bake the stand-in into a directory, as `make run` does where no hub is reachable; return where the model is."""
    bake = Path(sys.prefix) / "bin" / "hindsight-bake"
    argv = [bake, "snapshot", MODEL, "--into", directory, "--flavor", flavor, "--from-dir", stand_in()]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    return directory / MODEL
