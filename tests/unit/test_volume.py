import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import volume
from sidecar.errors import BlockedError, Reason
from sidecar.volume import LOCK, Mount, VolumeLock, check_access, check_layout, free_bytes, mount_of, mounts

MOUNTINFO = r"""
22 27 0:20 / / rw,relatime - overlay overlay rw,lowerdir=/a
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 0:22 / /tmp rw shared:1 master:2 - tmpfs tmpfs rw
25 22 8:1 /data /opt/hindsight rw,relatime shared:5 - ext4 /dev/sda1 rw
26 22 8:2 / /mnt/two\040words rw - xfs /dev/sdb rw
27 22 8:3 / /mnt/back\134slash rw - xfs /dev/sdb rw
28 22 8:4 / /mnt/tab\011and\012line rw - xfs /dev/sdb rw
29 22 8:5 / /mnt/caf<e9> rw - xfs /dev/sdb rw
""".lstrip().replace("<e9>", "\u00e9")


@pytest.fixture
def table(tmp_path: Path) -> list[Mount]:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO, encoding="utf-8")
    return mounts(path)


def layout(pgdata: str, table: list[Mount], *, ephemeral: bool = False) -> BlockedError | None:
    try:
        check_layout(Path(pgdata), ephemeral=ephemeral, table=table)
    except BlockedError as error:
        return error if error.reason is Reason.VOLUME_LAYOUT else None
    return None


# Mounts --------------------------------------------------------------------------------------------------------


def test_mountinfo_is_read_with_its_escapes_and_optional_fields(table: list[Mount]) -> None:
    assert table == [
        Mount(Path("/"), "overlay"),
        Mount(Path("/proc"), "proc"),
        Mount(Path("/tmp"), "tmpfs"),  # noqa: S108
        Mount(Path("/opt/hindsight"), "ext4"),
        Mount(Path("/mnt/two words"), "xfs"),
        Mount(Path("/mnt/back\\slash"), "xfs"),
        Mount(Path("/mnt/tab\tand\nline"), "xfs"),
        Mount(Path("/mnt/caf\u00e9"), "xfs"),
    ]


def test_a_mount_point_that_is_no_utf8_is_a_path_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(b"1 2 8:1 / /mnt/\xff\\040x rw - ext4 /dev/sda rw\n")
    assert os.fsencode(mounts(tmp_path / "mountinfo")[0].point) == b"/mnt/\xff x"


@given(
    st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1).filter(
        lambda n: n not in ".."
    )
)
def test_any_name_survives_the_kernels_escapes(name: str) -> None:
    escaped = "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in name)
    assert volume._unescape(escaped) == name


def test_the_deepest_mount_holds_a_path_and_of_two_on_one_point_the_last() -> None:
    table = [
        Mount(Path("/"), "overlay"),
        Mount(Path("/opt"), "xfs"),
        Mount(Path("/opt/a"), "ext4"),
        Mount(Path("/opt"), "nfs"),
    ]
    assert mount_of(Path("/opt/a/b"), table).filesystem == "ext4"
    assert mount_of(Path("/opt/a"), table).filesystem == "ext4"
    assert mount_of(Path("/opt/ab"), table).filesystem == "nfs"
    assert mount_of(Path("/etc"), table).filesystem == "overlay"


def test_the_real_table_holds_every_path() -> None:
    assert mount_of(Path("/proc/self"), mounts()).filesystem == "proc"


# Layout --------------------------------------------------------------------------------------------------------


def test_a_subdirectory_of_a_real_volume_is_fine(table: list[Mount]) -> None:
    assert layout("/opt/hindsight/pgdata", table) is None
    assert layout("/mnt/two words/deep/pgdata", table) is None


@pytest.mark.parametrize("ephemeral", [False, True])
def test_pgdata_as_a_mount_point_is_refused_with_the_line_to_change(table: list[Mount], ephemeral: bool) -> None:  # noqa: FBT001
    error = layout("/opt/hindsight", table, ephemeral=ephemeral)
    assert error is not None
    assert "mountPath: /opt" in error.detail


def test_a_link_to_a_mount_point_is_one(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "pgdata").symlink_to(tmp_path / "volume")
    assert layout(str(tmp_path / "pgdata"), [Mount(Path("/"), "ext4"), Mount(tmp_path / "volume", "ext4")]) is not None


@pytest.mark.parametrize(("pgdata", "filesystem"), [("/srv/pgdata", "overlay"), ("/tmp/x/pgdata", "tmpfs")])  # noqa: S108
def test_what_is_gone_with_the_container_is_refused_unless_wanted(
    pgdata: str, filesystem: str, table: list[Mount]
) -> None:
    error = layout(pgdata, table)
    assert error is not None
    assert f"lies on {filesystem}" in error.detail
    assert "HINDSIGHT_SIDECAR_EPHEMERAL=true" in error.detail
    assert layout(pgdata, table, ephemeral=True) is None


# Access --------------------------------------------------------------------------------------------------------


def test_a_volume_that_is_not_there_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    check_access(tmp_path / "new/volume")
    assert list((tmp_path / "new/volume").iterdir()) == []
    assert (tmp_path / "new/volume").stat().st_mode & 0o777 == 0o700


def test_a_volume_that_is_no_directory_is_a_matter_of_layout(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("")
    with pytest.raises(BlockedError) as caught:
        check_access(tmp_path / "volume")
    assert caught.value.reason is Reason.VOLUME_LAYOUT


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, Reason.NO_SPACE), (errno.EDQUOT, Reason.NO_SPACE), (errno.EACCES, Reason.PERMISSIONS),
     (errno.EROFS, Reason.PERMISSIONS)],
)  # fmt: skip
def test_a_directory_that_cannot_be_made_is_named_with_what_is_missing(
    number: int, reason: Reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BlockedError) as caught:
        check_access(tmp_path)
    assert caught.value.reason is reason
    assert str(tmp_path) in caught.value.detail
    if reason is Reason.PERMISSIONS:
        assert f"securityContext.fsGroup: {os.getegid()}" in caught.value.detail


def test_free_bytes_are_what_df_says(tmp_path: Path) -> None:
    assert 0 < free_bytes(tmp_path) < os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


# The lock ------------------------------------------------------------------------------------------------------

HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_holder_is_kept_out_until_the_first_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock = VolumeLock(tmp_path)
        with pytest.raises(BlockedError) as caught:
            lock.acquire()
        assert caught.value.reason is Reason.VOLUME_LOCKED
        assert "strategy: Recreate" in caught.value.detail
        assert not lock.held
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        assert lock.acquire().held
        lock.release()


def test_two_locks_of_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    first, second = VolumeLock(tmp_path), VolumeLock(tmp_path)
    first.acquire()
    assert first.acquire() is first
    with pytest.raises(BlockedError):
        second.acquire()
    first.release()
    first.release()
    assert second.acquire().held
    second.release()


def test_the_lock_file_is_private_and_its_descriptor_is_not_inherited(tmp_path: Path) -> None:
    lock = VolumeLock(tmp_path).acquire()
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
    assert lock._descriptor is not None
    assert not os.get_inheritable(lock._descriptor)
    lock.release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlockedError) as caught:
        VolumeLock(tmp_path).acquire()
    assert caught.value.reason is Reason.VOLUME_LAYOUT
    assert not (tmp_path / "elsewhere").exists()


def test_a_filesystem_without_flock_is_a_matter_of_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BlockedError) as caught:
        VolumeLock(tmp_path).acquire()
    assert caught.value.reason is Reason.VOLUME_LAYOUT
    assert "must support flock" in caught.value.detail


def test_space_is_what_the_file_system_says(tmp_path: Path) -> None:
    found = volume.space(tmp_path)
    status = os.statvfs(tmp_path)
    assert found.size == status.f_blocks * status.f_frsize
    assert 0 < found.free <= found.size
    assert found.enough


# Files ---------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("deed", ["fsync", "rename", "close"])
def test_a_file_is_replaced_whole_or_not_at_all(deed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note"
    volume.replace(path, b"the old one")
    assert path.stat().st_mode & 0o777 == 0o600

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        if deed == "close":  # once the directory is on the disk too
            patch.setattr(volume, "sync", killed)
        else:
            patch.setattr(os, deed, killed)
        with pytest.raises(KilledError):
            volume.replace(path, b"the new one, which is longer")
    assert path.read_bytes() == (b"the new one, which is longer" if deed == "close" else b"the old one")
    volume.replace(path, b"short")  # what was left does not stand in the way
    assert path.read_bytes() == b"short"
    assert [one.name for one in tmp_path.iterdir()] == ["note"]


def test_what_is_on_the_volume_is_written_by_this_module_alone() -> None:
    """Another way leaves half a file at a power cut; files of the run directory and of /proc are gone then anyway."""
    elsewhere = {
        "hindsight_api.py",
        "serve.py",
        "side_server.py",
        "staging.py",
        "upstream.py",
        "upstream_embed.py",
        "users.py",
    }
    writes = re.compile(r"\.write_text\(|\.write_bytes\(|open\(\"[wax]")
    sources = sorted(Path(volume.__file__).parent.glob("*.py"))
    assert len(sources) > 50
    assert {path.name for path in sources if writes.search(path.read_text(encoding="utf-8"))} <= elsewhere
