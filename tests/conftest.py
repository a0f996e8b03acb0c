"""Where the tests find what `make setup` made, and a process environment without anybody's settings."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

# Before any test imports what reads them.
for name in list(os.environ):
    if name.startswith(("HINDSIGHT_", "PG")) and not name.startswith("HINDSIGHT_TEST_"):
        del os.environ[name]


@dataclass(frozen=True)
class Made:
    """What `make setup` made below HINDSIGHT_TEST_HOME."""

    home: Path

    def api_venv(self, version: str = "1.1.0", flavor: str = "onnx") -> Path:
        """Return hindsight-api's environment for a version and flavour."""
        return self._existing(self.home / "envs" / f"hindsight-api-{version}-{flavor}")

    def api_python(self, version: str = "1.1.0", flavor: str = "onnx") -> Path:
        """Return the interpreter of such an environment."""
        return self.api_venv(version, flavor) / "bin" / "python"

    @property
    def stand_in(self) -> Path:
        """Return the directory with the packages that carry the stand-in model."""
        return self._existing(self.home / "stand-in")

    @staticmethod
    def _existing(path: Path) -> Path:
        # An error and not a skip: a run without it would have tested nothing.
        if not path.is_dir():
            pytest.fail(f"{path} is not there; run the tests with `make test`, which makes it")
        return path


@pytest.fixture(scope="session")
def made() -> Made:
    """Return what `make setup` made."""
    home = os.environ.get("HINDSIGHT_TEST_HOME")
    if not home:
        pytest.fail("HINDSIGHT_TEST_HOME is not set; run the tests with `make test`")
    return Made(Path(home))
