"""What the image says of itself, and the commands that it runs instead of the sidecar."""

from typing import Any

import pytest
from container import Image


@pytest.fixture(scope="module")
def config(tested: Image) -> dict[str, Any]:
    found: dict[str, Any] = tested.inspect()["Config"]
    return found


def test_it_starts_the_sidecar_under_an_init_as_an_ordinary_user(config: dict[str, Any]) -> None:
    assert config["Entrypoint"][:2] == ["/usr/bin/tini", "-s"]
    assert config["Cmd"] == ["hindsight-sidecar", "serve"]
    assert config["User"] == "1000:1000"
    assert config["StopSignal"] == "SIGTERM"
    assert config["WorkingDir"] == "/"


def test_it_offers_nothing_to_the_network_and_declares_no_volume(config: dict[str, Any]) -> None:
    # A declared volume would be made anew, and anonymous, for every container without one: memories lost in silence.
    assert not config.get("ExposedPorts")
    assert not config.get("Volumes")


def test_it_has_a_health_check(tested: Image, config: dict[str, Any]) -> None:
    check = config.get("Healthcheck") or tested.inspect().get("Healthcheck")
    assert check, "podman builds it in with --format=docker only"
    assert check["Test"] == ["CMD", "hindsight-sidecar", "health"]


def test_its_labels_say_what_is_in_it(tested: Image, config: dict[str, Any]) -> None:
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "hindsight-sidecar"
    assert labels["org.opencontainers.image.licenses"] == "MIT"
    version = tested.says("hindsight-sidecar", "--version").split()[1]
    assert labels["org.opencontainers.image.version"] == version
    python = "import importlib.metadata as m; print(m.version('hindsight-api-slim'))"
    assert (
        labels["hindsight-sidecar.hindsight-api"] == tested.says("/opt/hindsight-api/bin/python", "-c", python).strip()
    )
    assert labels["hindsight-sidecar.model"] == tested.says("ls", "/opt/models").split()[0]
    assert labels["hindsight-sidecar.stand-in"] in ("true", "false")
    assert labels["hindsight-sidecar.flavor"] in ("onnx", "torch")


def test_its_environment_has_nothing_of_the_machine_that_built_it(config: dict[str, Any]) -> None:
    names = {entry.partition("=")[0] for entry in config["Env"]}
    assert {name for name in names if not name.startswith(("PG", "HINDSIGHT_SIDECAR_"))} == {
        *("PATH", "LANG", "HOME", "USER", "LOGNAME", "PYTHONDONTWRITEBYTECODE")
    }


def test_it_runs_a_command_instead(tested: Image) -> None:
    assert tested.says("/bin/echo", "hi") == "hi\n"
    assert tested.says("/bin/echo", "hi", options=["--network=none"]) == "hi\n"
    assert "serve" in tested.says("hindsight-sidecar", "--help")
    assert "snapshot" in tested.says("hindsight-bake", "--help")
    assert tested.run("sh", "-c", "exit 7").returncode == 7
