"""The base image from the archive, with apt, mmdebstrap and engines made of small shell scripts."""

import os
from pathlib import Path

import pytest

from bake.errors import BakeError
from bake.image import __main__ as command_line
from bake.image import base
from bake.image.base import choose_mirror, make, mirror
from bake.image.engine import Engine

IMAGE = "docker.io/library/debian:forky-slim"
MIRROR = "https://mirror.example/debian"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that is the whole PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(base, "_DEFAULT_KEYRING", tmp_path / "no-keyring")
    return directory


def program(name: str, script: str = "") -> Engine:
    path = Path(os.environ["PATH"], name)
    path.write_text(f'#!/bin/sh\necho "$*" >> "$0.calls"\n{script}\n')
    path.chmod(0o755)
    return Engine(name, str(path))


def calls(name: str) -> list[str]:
    path = Path(os.environ["PATH"], f"{name}.calls")
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (f"{MIRROR}/ Debian\n", MIRROR),
        ("https://security.example/ Debian-Security\nhttps://apt.example/ PGDG\nhttps://m.example/ Debian\n", "https://m.example"),
        # Lists that were never fetched have no label.
        ("https://apt.example/pgdg/ \nhttps://m.example/debian/ \n", "https://m.example/debian"),
        ("https://m.example/debian\n", "https://m.example/debian"),
        # A label is better than an address.
        ("https://unfetched.example/debian \nhttps://m.example/archive Debian\n", "https://m.example/archive"),
        ("https://m.example/debian PGDG\nhttps://m.example/debian-security \n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_mirror_of_the_archive_is_chosen(targets: str, expected: str) -> None:
    assert choose_mirror(targets) == expected


def test_apt_is_asked_for_its_sources() -> None:
    program("apt-get", f"echo '{MIRROR}/ Debian'")
    assert mirror() == MIRROR
    assert calls("apt-get") == ["indextargets --format $(REPO_URI) $(LABEL) Created-By: Packages"]


def test_without_apt_it_is_no_debian() -> None:
    with pytest.raises(BakeError, match=r"apt's sources cannot be read \(.*apt-get.*\); run this on a Debian machine"):
        mirror()


def test_apt_that_fails_is_a_sentence() -> None:
    program("apt-get", "exit 100")
    with pytest.raises(BakeError, match=r"apt's sources cannot be read \(.*status 100"):
        mirror()


def test_sources_without_a_mirror_of_the_archive() -> None:
    program("apt-get", "echo 'https://apt.example/ PGDG'")
    with pytest.raises(BakeError, match="run `apt-get update` first, or add one"):
        mirror()


def test_without_mmdebstrap_nothing_is_done() -> None:
    with pytest.raises(BakeError, match="mmdebstrap is not installed; apt-get install mmdebstrap"):
        make(program("podman"), "forky", IMAGE)
    assert calls("podman") == []


def test_what_mmdebstrap_says_is_told() -> None:
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap", "echo 'E: unable to pick chroot mode automatically' >&2; exit 1")
    with pytest.raises(BakeError) as caught:
        make(program("podman"), "forky", IMAGE)
    assert str(caught.value) == (
        f"mmdebstrap could not make forky from {MIRROR}:\nE: unable to pick chroot mode automatically"
    )
    assert calls("podman") == []


@pytest.mark.parametrize("name", ["podman", "docker"])
def test_the_system_is_imported_with_a_label(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap", 'for word; do case $word in *.tar) echo tar > "$word" ;; esac; done')
    make(program(name, '[ -s "$4" ] || exit 1'), "trixie", IMAGE)
    [made] = calls("mmdebstrap")
    assert made.startswith("--variant=minbase --include=ca-certificates ")
    assert made.endswith(f"base.tar {MIRROR}")
    [imported] = calls(name)
    assert imported.startswith(
        'import --change=LABEL hindsight-sidecar.base=debian-archive --change=CMD ["/bin/bash"] /'
    )
    assert imported.endswith(f"/base.tar {IMAGE}")
    assert capsys.readouterr().out == f"==> {IMAGE} from {MIRROR}, suite trixie\n"


def test_buildah_makes_it_in_steps_and_leaves_no_container() -> None:
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap")
    make(program("buildah", '[ "$1" != from ] || echo working-container'), "forky", IMAGE)
    asked = [call.split() for call in calls("buildah")]
    assert [words[0] for words in asked] == ["from", "add", "config", "commit", "rm"]
    assert asked[2] == [
        "config",
        "--label=hindsight-sidecar.base=debian-archive",
        "--cmd=/bin/bash",
        "working-container",
    ]
    assert asked[3] == ["commit", "working-container", IMAGE]
    assert asked[4] == ["rm", "working-container"]


def test_buildah_leaves_none_either_when_a_step_fails() -> None:
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap")
    buildah = program("buildah", 'case $1 in from) echo c ;; add) echo "no space" >&2; exit 125 ;; esac')
    with pytest.raises(BakeError, match=r"^buildah add failed: no space$"):
        make(buildah, "forky", IMAGE)
    assert calls("buildah")[-1] == "rm c"


def test_the_archives_keyring_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "debian.gpg").write_text("")
    monkeypatch.setattr(base, "_DEFAULT_KEYRING", tmp_path / "debian.gpg")
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap")
    make(program("podman"), "forky", IMAGE)
    assert f" --keyring={tmp_path}/debian.gpg forky " in calls("mmdebstrap")[0]


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap", 'for word; do case $word in *.tar) echo tar > "$word" ;; esac; done')
    make(program("podman"), "forky", IMAGE)
    assert f"{tmp_path}/scratch/hindsight-base-" in calls("podman")[0]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_make_image_base_needs_no_base_image_to_choose_an_engine() -> None:
    program("apt-get", f"echo '{MIRROR} Debian'")
    program("mmdebstrap")
    program("podman")
    command_line.main(["base", "--suite=trixie"])
    info, imported = calls("podman")
    assert info == "info"
    assert imported.endswith(" docker.io/library/debian:trixie-slim")
