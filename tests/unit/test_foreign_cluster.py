"""What of a cluster that others made is refused before anything is touched."""

import shutil
from pathlib import Path

import pytest

from sidecar import cluster, foreign_cluster, volume
from sidecar.errors import RefusedError


@pytest.fixture
def pgdata(tmp_path: Path) -> Path:
    made = tmp_path / "volume" / "pgdata"
    for name in ("base", "pg_wal", "pg_tblspc"):
        (made / name).mkdir(parents=True)
    (made / "PG_VERSION").write_text("18\n")
    (made / "base/1").write_bytes(b"x" * 1000)
    return made


def test_a_whole_one_can_be_adopted(pgdata: Path) -> None:
    found = foreign_cluster.check(pgdata, crashed=False)
    assert (found.major, found.size) == (18, 1003)


@pytest.mark.parametrize(
    ("name", "told"),
    [("postmaster.pid", "--crashed"), ("standby.signal", "it is a standby"), ("recovery.signal", "promote it first")],
)
def test_a_file_that_tells_of_a_server(name: str, told: str, pgdata: Path) -> None:
    (pgdata / name).touch()
    with pytest.raises(RefusedError, match=told):
        foreign_cluster.check(pgdata, crashed=False)


def test_a_crashed_one_has_to_be_named_so(pgdata: Path) -> None:
    (pgdata / "postmaster.pid").touch()
    assert foreign_cluster.check(pgdata, crashed=True).major == 18


@pytest.mark.parametrize("link", ["pg_wal", "pg_tblspc/16400", "pg_xact", "base/5", "base/1", "global/pg_control"])
def test_a_link_out_of_it(link: str, pgdata: Path, tmp_path: Path) -> None:
    path = pgdata / link
    if path.is_dir():
        path.rmdir()
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path)
    with pytest.raises(RefusedError, match=f"{link} is a link to {tmp_path}, .*pg_dump -Fc"):
        foreign_cluster.check(pgdata, crashed=False)


def test_pgdata_itself_a_link(pgdata: Path) -> None:
    link = pgdata.with_name("linked")
    link.symlink_to(pgdata)
    with pytest.raises(RefusedError, match=f"{link} is a link to {pgdata}, .*set PGDATA to where it leads"):
        foreign_cluster.check(link, crashed=False)


def test_a_link_that_postgres_does_not_write_to(pgdata: Path, tmp_path: Path) -> None:
    for name in ("postgresql.conf", "pg_hba.conf", "log", "pg_log", "server.key"):
        (pgdata / name).symlink_to(tmp_path)
    assert foreign_cluster.check(pgdata, crashed=False).major == 18


def test_a_part_on_another_volume(pgdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = volume.Mount(pgdata / "pg_wal", "ext4")
    monkeypatch.setattr(volume, "mounts", lambda: [volume.Mount(Path("/"), "overlay"), mount])
    with pytest.raises(RefusedError, match=r"pg_wal is a mount of its own, .*pg_dump -Fc"):
        foreign_cluster.check(pgdata, crashed=False)


def test_tablespaces_of_a_backup(pgdata: Path) -> None:
    (pgdata / "tablespace_map").touch()
    with pytest.raises(RefusedError, match=r"tablespace_map names tablespaces in other directories, .*pg_dump -Fc"):
        foreign_cluster.check(pgdata, crashed=False)


def test_our_own_and_nothing(pgdata: Path) -> None:
    (pgdata / cluster.MARKER).touch()
    with pytest.raises(RefusedError, match="holds this sidecar's own cluster; there is nothing to adopt"):
        foreign_cluster.check(pgdata, crashed=False)
    shutil.rmtree(pgdata)
    with pytest.raises(RefusedError, match="holds no cluster"):
        foreign_cluster.check(pgdata, crashed=False)


@pytest.mark.parametrize("name", ["base/1", "postmaster.pid"])
def test_what_is_written_meanwhile(name: str, pgdata: Path) -> None:
    found = foreign_cluster.check(pgdata, crashed=False)
    foreign_cluster.check_unchanged(found)
    (pgdata / name).write_bytes(b"y" * 1000)
    with pytest.raises(
        RefusedError, match=f"1 files of .* were written since this began \\({name}\\): a server works in it"
    ):
        foreign_cluster.check_unchanged(found)


def test_too_little_room(pgdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = foreign_cluster.check(pgdata, crashed=False)
    foreign_cluster.check_room(found)
    monkeypatch.setattr(volume, "free_bytes", lambda _: 100 * 2**20)
    with pytest.raises(RefusedError, match=r"may take 256 MiB, and .* has 100 MiB free; free some or grow the volume"):
        foreign_cluster.check_room(found)


def test_a_size_while_files_go(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("nowhere")
    assert volume.size(tmp_path) == 5 + len("nowhere")
