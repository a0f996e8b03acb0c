"""As the image comes, and as root: whoever it is started as, the children are nobody special."""

import re
from collections.abc import Iterator

import pytest
from container import PROCESSES, Container, Image, Start, Volume, named_volume


@pytest.fixture(scope="module")
def as_it_comes(tested: Image) -> Iterator[Container]:
    """Return a ready container with a volume and no other option; Python tells what it loads."""
    with named_volume(tested) as volume:
        telling = ("--env=PYTHONVERBOSE=1", "--env=HINDSIGHT_SIDECAR_PASS_ENV=PYTHONVERBOSE")
        container = tested.start("--network=none", volume.option, *telling)
        try:
            yield container.wait_ready()
        finally:
            container.remove()


def test_it_comes_as_user_1000(as_it_comes: Container) -> None:
    assert {(process["uid"], process["state"] == "Z") for process in as_it_comes.python(PROCESSES)} == {(1000, False)}
    assert as_it_comes.says("id") == "uid=1000(hindsight) gid=1000(hindsight) groups=1000(hindsight)\n"
    assert "smoke passed" in as_it_comes.says("hindsight-sidecar", "smoke")


def test_nothing_is_written_but_where_it_says(as_it_comes: Container) -> None:
    def expected(path: str) -> bool:
        # The engine lays hostname, hosts and resolv.conf over those in /etc.
        return path in ("/", "/etc") or any(path == top or path.startswith(f"{top}/") for top in ("/run", "/tmp"))  # noqa: S108

    assert [path for path in as_it_comes.changed() if not expected(path)] == []


def test_a_start_compiles_nothing(as_it_comes: Container) -> None:
    # What Python says of a module that it had to compile, and of one that it had not.
    log = as_it_comes.log()
    assert len(re.findall(r"# code object from '/opt/hindsight-api/\S+\.pyc'$", log, re.MULTILINE)) > 1000
    assert re.findall(r"# code object from (/\S+)$", log, re.MULTILINE) == []


def test_root_becomes_the_user_hindsight(start: Start, tested: Image, volume: Volume) -> None:
    container = start(options=[*tested.as_root(), volume.option]).wait_ready()
    assert "smoke passed" in container.says("hindsight-sidecar", "smoke")
    found = container.python(PROCESSES)
    assert [process["words"][0] for process in found if process["uid"] == 0] == ["/usr/bin/tini"]
    assert {process["uid"] for process in found} == {0, 1000}
    assert container.says("sh", "-c", "grep -h CapPrm /proc/$(pgrep -o postgres)/status").split() == [
        "CapPrm:",
        "0" * 16,
    ]
    assert {line.split()[3] for line in volume.listing(".lock") + volume.listing("pgdata")} == {"1000:1000"}
    assert container.stop() == 0


def test_root_without_any_right_is_told_what_to_change(start: Start, tested: Image, volume: Volume) -> None:
    container = start(options=[*tested.as_root(), volume.option, "--cap-drop=ALL"])
    assert container.wait_end() == 2
    lines = container.log().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("hindsight-sidecar: ")
    assert "mount a tmpfs" not in lines[0], "there is one, and it is not what is missing"
    assert volume.listing()[1:] == [], "nothing was written"
