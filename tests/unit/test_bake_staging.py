from pathlib import Path

import pytest

from bake.errors import BakeError
from bake.staging import empty, publish, restore, staging


def fill(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def test_what_is_published_is_readable_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "models" / "mini"
    with staging(target) as staged:
        fill(staged / "inner", a="1")
        (staged / "inner" / "a").chmod(0o600)
        (staged / "inner").chmod(0o700)
        publish(staged, target)
    assert (target / "inner" / "a").stat().st_mode & 0o777 == 0o644
    assert (target / "inner").stat().st_mode & 0o777 == 0o755
    assert target.stat().st_mode & 0o777 == 0o755
    assert target.parent.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in target.parent.iterdir()] == ["mini"]


def test_publishing_replaces(tmp_path: Path) -> None:
    target = tmp_path / "mini"
    fill(target, old="1")
    with staging(target) as staged:
        fill(staged, new="2")
        publish(staged, target)
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["mini"]


def test_an_empty_directory_may_be_in_the_way(tmp_path: Path) -> None:
    target = tmp_path / "mini"
    target.mkdir()
    with staging(target) as staged:
        fill(staged, new="2")
        publish(staged, target)
    assert (target / "new").is_file()


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    target = tmp_path / "mini"
    fill(tmp_path / ".mini.replaced", old="1")
    restore(target)
    assert (target / "old").is_file()
    # And after them: the new one stays.
    fill(tmp_path / ".mini.replaced", older="0")
    restore(target)
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["mini"]


def test_one_at_a_time(tmp_path: Path) -> None:
    target = tmp_path / "mini"
    with (
        staging(target) as staged,
        pytest.raises(BakeError, match="another hindsight-bake"),
        staging(target),
    ):
        pass
    with staging(target) as again:
        assert again == staged


def test_emptying_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    fill(tmp_path / ".cache" / "deep", x="")
    fill(tmp_path / "onnx", model="", other="")
    (tmp_path / "link").symlink_to("onnx")
    empty(tmp_path, keep=frozenset({"onnx/model"}))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["onnx", "onnx/model"]
