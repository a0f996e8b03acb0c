import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar import users
from sidecar.errors import SettingsError
from sidecar.users import Account, become, choose, identity_environment, make_run_dir, make_volume

MISSING_UID = 54321


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have three accounts, whatever this machine has."""
    entries = {
        "root": SimpleNamespace(pw_name="root", pw_uid=0, pw_gid=0),
        "hindsight": SimpleNamespace(pw_name="hindsight", pw_uid=990, pw_gid=991),
        "agent": SimpleNamespace(pw_name="agent", pw_uid=1000, pw_gid=1001),
    }

    def of_uid(uid: int) -> Any:
        for entry in entries.values():
            if entry.pw_uid == uid:
                return entry
        raise KeyError(uid)

    monkeypatch.setattr(users.pwd, "getpwnam", entries.__getitem__)
    monkeypatch.setattr(users.pwd, "getpwuid", of_uid)


def owned_by(monkeypatch: pytest.MonkeyPatch, uid: int, gid: int) -> None:
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_uid=uid, st_gid=gid))


@pytest.mark.parametrize(
    ("text", "account"),
    [
        ("agent", Account(1000, 1001, "agent")),
        ("1000", Account(1000, 1001, "agent")),
        ("1000:5", Account(1000, 5, "agent")),
        ("1000:0", Account(1000, 0, "agent")),
        (f"{MISSING_UID}", Account(MISSING_UID, MISSING_UID, "hindsight")),
        (f"{MISSING_UID}:7", Account(MISSING_UID, 7, "hindsight")),
    ],
)
def test_whom_the_setting_names(text: str, account: Account, tmp_path: Path) -> None:
    assert choose(text, tmp_path) == account


@pytest.mark.parametrize("text", ["root", "0", "0:1000", "0:0"])
def test_root_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="PostgreSQL refuses to run as root"):
        choose(text, tmp_path)


@pytest.mark.parametrize("text", ["nobody-here", "agent:agent", "1000:agent", "-1", ":5", "a b"])
def test_what_names_nobody_is_a_fault(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="HINDSIGHT_SIDECAR_RUN_AS"):
        choose(text, tmp_path)


def test_without_a_setting_the_owner_of_the_data_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned_by(monkeypatch, 1000, 1)
    assert choose(None, tmp_path) == Account(1000, 1001, "agent")
    owned_by(monkeypatch, MISSING_UID, 44)
    assert choose("", tmp_path) == Account(MISSING_UID, 44, "hindsight")


def test_data_of_roots_or_none_means_the_user_hindsight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(None, tmp_path / "none") == Account(990, 991, "hindsight")
    owned_by(monkeypatch, 0, 0)
    assert choose(None, tmp_path) == Account(990, 991, "hindsight")


def test_with_nobody_to_become_the_ways_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(users.pwd, "getpwnam", nobody)
    with pytest.raises(SettingsError, match="HINDSIGHT_SIDECAR_RUN_AS, or make one: useradd"):
        choose(None, tmp_path / "none")


# Directories ---------------------------------------------------------------------------------------------------


def test_the_run_directory_is_made_private_and_made_so_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "a/run"
    make_run_dir(run_dir, None)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    run_dir.chmod(0o777)
    make_run_dir(run_dir, None)
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    owner = (tmp_path / "run").stat().st_uid
    monkeypatch.setattr(users.os, "geteuid", lambda: owner + 1)
    with pytest.raises(SettingsError, match=f"belongs to uid {owner}, and this is {owner + 1}"):
        make_run_dir(tmp_path / "run", None)


def test_root_that_may_not_change_users_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    (tmp_path / "run").mkdir()
    if os.geteuid() != 0:
        monkeypatch.setattr(Path, "lstat", lambda _: os.stat_result((0o40755, 0, 0, 1, 0, 0, 0, 0, 0, 0)))
    with pytest.raises(
        SettingsError, match=r"this is root without the right to become anna .*CHOWN, SETUID and SETGID"
    ):
        make_run_dir(tmp_path / "run", Account(1000, 1000, "anna"))


def test_a_link_as_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError):
        make_run_dir(tmp_path / "run", None)


def test_a_run_directory_that_cannot_be_made_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"mount a tmpfs at .*, or set HINDSIGHT_SIDECAR_RUN_DIR"):
        make_run_dir(tmp_path / "file/run", None)


def test_a_volume_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_volume(tmp_path, Account(MISSING_UID, MISSING_UID, "x"))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert tmp_path.stat().st_uid == os.geteuid()


def test_a_new_volume_is_ours(tmp_path: Path) -> None:
    make_volume(tmp_path / "a/volume", Account(os.geteuid(), os.getegid(), "x"))
    assert (tmp_path / "a/volume").stat().st_mode & 0o777 == 0o700


def test_a_volume_that_cannot_be_made_is_told_by_whoever_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    make_volume(tmp_path / "file/volume", Account(1000, 1000, "x"))

    def gone(_: Path) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(Path, "exists", gone)
    make_volume(tmp_path, Account(1000, 1000, "x"))


# Who the children are ------------------------------------------------------------------------------------------


def test_becoming_someone_leaves_nothing_of_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(users.os, "execv", lambda _, argv: seen.append(argv))
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "-P", "/venv/bin/hindsight-sidecar", "serve"])
    become(Account(1000, 1001, "agent"))
    become(Account(MISSING_UID, 7, "hindsight"))
    assert seen[0][:6] == [
        "/usr/bin/setpriv", "--reuid=1000", "--regid=1001", "--init-groups", "--inh-caps=-all", "--no-new-privs",
    ]  # fmt: skip
    assert seen[0][6:] == ["--", "/venv/bin/python", "-P", "/venv/bin/hindsight-sidecar", "serve"]
    assert seen[1][1:4] == [f"--reuid={MISSING_UID}", "--regid=7", "--clear-groups"]


def test_a_user_with_an_entry_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users.os, "geteuid", lambda: 1000)
    assert identity_environment(tmp_path, tmp_path / "home") == {
        "HOME": str(tmp_path / "home"), "USER": "agent", "LOGNAME": "agent",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_uid_without_an_entry_gets_one_from_nss_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users.os, "geteuid", lambda: MISSING_UID)
    monkeypatch.setattr(users.os, "getegid", lambda: 7)
    monkeypatch.setattr(users, "nss_wrapper", lambda: Path("/usr/lib/libnss_wrapper.so"))
    found = identity_environment(tmp_path, Path("/home/x"))
    assert found["USER"] == "hindsight"
    assert found["LD_PRELOAD"] == "/usr/lib/libnss_wrapper.so"
    fields = Path(found["NSS_WRAPPER_PASSWD"]).read_text().strip().split(":")
    assert fields == ["hindsight", "x", str(MISSING_UID), "7", "hindsight", "/home/x", "/usr/sbin/nologin"]
    assert Path(found["NSS_WRAPPER_GROUP"]).read_text() == "hindsight:x:7:\n"


def test_without_nss_wrapper_such_a_uid_has_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users.os, "geteuid", lambda: MISSING_UID)
    monkeypatch.setattr(users, "nss_wrapper", lambda: None)
    assert set(identity_environment(tmp_path, tmp_path)) == {"HOME", "USER", "LOGNAME"}


def test_a_run_directory_that_is_a_link_is_not_taken_over(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    before = target.stat()
    (tmp_path / "run").symlink_to(target)
    with pytest.raises(SettingsError, match="is a link"):
        users.make_run_dir(tmp_path / "run", None)
    assert target.stat() == before


def test_a_relative_run_directory_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="relative path"):
        users.make_run_dir(Path("run"), None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_roots_that_holds_something_is_not_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run" / "letter").touch()
    given: list[object] = []
    monkeypatch.setattr(users.os, "chown", lambda *words, **_: given.append(words))
    with pytest.raises(SettingsError, match="belongs to uid"):
        users.make_run_dir(tmp_path / "run", users.Account(54321, 54321, "somebody"))
    assert given == []
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755
