"""Engines made of small shell scripts: which one is taken, and what is said of the others."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from bake.image import engine
from bake.image.engine import PLAIN_CONF, Engine, NoEngineError, find

BASE = "docker.io/library/debian:forky-slim"
TRIAL = f"hindsight-engine-trial-{os.getpid()}"
RUN = f"run --rm --name={TRIAL} --network=none {BASE} /bin/true"
NO_SERVER = "echo 'Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 1"
NO_LIMITS = (
    "echo 'time=\"now\" level=warning' >&2; echo 'Error: OCI runtime error: rlimit: not permitted' >&2; exit 126"
)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that is the whole PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("CONTAINERS_CONF", raising=False)
    return directory


def install(name: str, **commands: str) -> None:
    """Make an engine whose commands do nothing, but for those given; it writes down what it is asked."""
    path = Path(os.environ["PATH"], name)
    cases = "".join(f"{command}) {script} ;;\n" for command, script in commands.items())
    path.write_text(f'#!/bin/sh\necho "$*" >> "$0.calls"\ncase $1 in\n{cases}esac\n')
    path.chmod(0o755)


def calls(name: str) -> list[str]:
    path = Path(os.environ["PATH"], f"{name}.calls")
    return path.read_text().splitlines() if path.exists() else []


def reasons(base: str | None = BASE, wanted: str | None = None) -> list[str]:
    with pytest.raises(NoEngineError) as caught:
        find(base, wanted)
    first, *told = str(caught.value).splitlines()
    assert first == "no container engine works here; install podman (or set ENGINE)"
    return told


def limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(engine, "_TRY_TIME", seconds)


def test_the_first_that_runs_the_base_is_taken(programs: Path) -> None:
    install("podman")
    install("docker")
    assert find(BASE) == Engine("podman", str(programs / "podman"), {})
    assert calls("podman") == [
        "info",
        f"inspect --type image {BASE}",
        RUN,
    ]
    assert calls("docker") == []


def test_without_a_base_it_only_has_to_answer() -> None:
    install("podman")
    assert find(None).name == "podman"
    assert calls("podman") == ["info"]


def test_nothing_is_installed() -> None:
    assert reasons() == ["podman: not installed", "buildah: not installed", "docker: not installed"]


def test_each_has_its_own_reason_of_a_line() -> None:
    install("podman", info="echo 'Error: no space' >&2; echo >&2; exit 125")
    install("buildah", **{"from": NO_LIMITS})
    install("docker", info=NO_SERVER)
    assert reasons() == [
        "podman: Error: no space",
        "buildah: Error: OCI runtime error: rlimit: not permitted",
        "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
    ]


def test_one_that_says_nothing() -> None:
    install("podman", info="exit 1")
    assert reasons()[0] == "podman: no reason given"


def test_a_base_that_is_not_here_is_pulled() -> None:
    install("podman", inspect="exit 125")
    assert find(BASE).name == "podman"
    assert calls("podman")[2:] == [f"pull --quiet {BASE}", RUN]


def test_a_base_that_cannot_be_pulled_can_be_made() -> None:
    install("podman", inspect="exit 125", pull="echo 'Error: pinging registry' >&2; exit 125")
    assert reasons()[0] == (
        f"podman: {BASE} is not here and cannot be pulled; `make image-base` makes it from the Debian archive"
    )
    assert not any(call.startswith("run") for call in calls("podman"))


@pytest.mark.parametrize("command", ["info", "run"])
def test_plain_settings_where_its_own_do_not_run(command: str, programs: Path) -> None:
    install("podman", **{command: f'[ "$CONTAINERS_CONF" = "{PLAIN_CONF}" ] || {{ {NO_LIMITS}; }}'})
    found = find(BASE)
    assert found == Engine("podman", str(programs / "podman"), {"CONTAINERS_CONF": str(PLAIN_CONF)})
    assert found.environ()["CONTAINERS_CONF"] == str(PLAIN_CONF)
    assert found.environ()["PATH"] == str(programs)


def test_the_reason_is_that_of_the_last_try() -> None:
    install("podman", run='echo "Error: with ${CONTAINERS_CONF:-its own}" >&2; exit 126')
    assert reasons()[0] == f"podman: Error: with {PLAIN_CONF}"


def test_settings_of_the_operators_are_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINERS_CONF", "/etc/mine.conf")
    install("podman", run='echo "Error: with $CONTAINERS_CONF" >&2; exit 126')
    assert reasons()[0] == "podman: Error: with /etc/mine.conf"
    assert calls("podman").count("info") == 1


def test_docker_has_no_plain_settings() -> None:
    install("docker", info=NO_SERVER)
    assert reasons()[2].startswith("docker: Cannot connect")
    assert calls("docker") == ["info"]


@pytest.mark.parametrize("base", [BASE, None])
def test_docker_has_to_have_buildx(base: str | None) -> None:
    install("docker", buildx='[ "$2" != version ] || exit 1')
    assert reasons(base, "docker") == [
        "docker: it has no buildx, which builds with more than one context; install docker-buildx"
    ]
    assert calls("docker") == ["info", "buildx version"]


def test_the_plain_settings_are_toml() -> None:
    settings = tomllib.loads(PLAIN_CONF.read_text(encoding="utf-8"))
    assert settings["engine"] == {"runtime": "runc", "cgroup_manager": "cgroupfs"}


def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINERS_CONF", "/etc/mine.conf")
    limit(monkeypatch, 1.0)
    install("podman", run="exec /bin/sleep 60")
    install("docker")
    assert find(BASE).name == "docker"
    assert calls("podman")[-2:] == [RUN, f"rm --force {TRIAL}"]


def test_what_hung_is_named_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 0.2)
    install("docker", info="exec /bin/sleep 60")
    [reason] = reasons(wanted="docker")
    assert reason.startswith("docker: ")
    assert reason.endswith("timed out after 0.2 seconds")


def test_a_call_may_have_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    limit(monkeypatch, 0.2)
    install("podman", info="/bin/sleep 0.5")
    podman = Engine("podman", str(programs / "podman"))
    assert podman.call("info", timeout=30).returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        podman.call("info")


def test_a_program_for_another_machine(programs: Path) -> None:
    (programs / "podman").write_text("\x7fELF for another machine")
    (programs / "podman").chmod(0o755)
    assert reasons()[0] == f"podman: [Errno 8] Exec format error: '{programs}/podman'"


def test_a_program_that_nobody_may_run_is_not_installed(programs: Path) -> None:
    install("podman")
    (programs / "podman").chmod(0o644)
    assert reasons()[0] == "podman: not installed"


def test_only_the_wanted_one_is_tried() -> None:
    install("podman")
    install("docker", info=NO_SERVER)
    assert reasons(wanted="docker") == ["docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock."]
    assert calls("podman") == []
    install("docker")
    assert find(BASE, "docker").name == "docker"


@pytest.mark.parametrize(("ran", "name"), [("", "buildah"), (NO_LIMITS, "docker")])
def test_buildah_leaves_no_container_behind(ran: str, name: str) -> None:
    install("buildah", **{"from": "echo debian-working-container", "run": ran})
    install("docker")
    assert find(BASE).name == name
    assert calls("buildah")[2:5] == [
        f"from --pull-never {BASE}",
        "run debian-working-container -- /bin/true",
        "rm debian-working-container",
    ]


def test_buildah_leaves_none_behind_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINERS_CONF", "/etc/mine.conf")
    limit(monkeypatch, 1.0)
    install("buildah", **{"from": "echo debian-working-container", "run": "exec /bin/sleep 60"})
    assert reasons(wanted="buildah")[0].endswith("timed out after 1.0 seconds")
    assert calls("buildah")[-1] == "rm debian-working-container"


def test_buildah_only_builds() -> None:
    assert [Engine(name, name).runs_containers for name in engine.NAMES] == [True, False, True]


def test_an_image_is_here_or_not() -> None:
    install("podman", inspect='[ "$4" = here:1 ]')
    found = find(None)
    assert found.has_image("here:1")
    assert not found.has_image("there:1")


def test_those_before_the_chosen_one_have_reasons_and_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINERS_CONF", "/etc/mine.conf")
    install("buildah", info="echo 'Error: no space' >&2; exit 125")
    install("docker")
    assert find(BASE).passed_over == ("podman: not installed", "buildah: Error: no space")
    assert calls("buildah") == ["info"]


def test_before_the_first_and_the_wanted_one_there_are_none() -> None:
    install("podman")
    install("docker")
    assert find(BASE).passed_over == ()
    assert find(BASE, "docker").passed_over == ()
