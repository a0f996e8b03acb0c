import sys
from pathlib import Path

import pytest

from bake import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["hindsight-bake", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    code = left.value.code
    return code if isinstance(code, int) else 0


def table_lock(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.write_text(
        """format = 1
[models.table]
kind = "tokenizer-table"
id = "example/table"
revision = "1"
license = "MIT"
hub = false
how = "see there"
files = [{ path = "t", size = 3, source = "inner/t" }]
"""
    )
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "t").write_text("abc")
    return path


def test_from_a_directory_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--lock", table_lock(tmp_path))
    make = (*common, "snapshot", "table", "--into", tmp_path / "models")
    assert run(monkeypatch, *make) == 2
    assert "see there" in capsys.readouterr().err
    assert run(monkeypatch, *make, "--from-dir", tmp_path / "source") == 0
    told = capsys.readouterr()
    assert "made (1 files, 3 bytes)" in told.out
    assert "no sha256 is pinned for" in told.err
    assert run(monkeypatch, *make) == 0
    assert "is there already" in capsys.readouterr().out
    assert run(monkeypatch, *common, "verify", tmp_path / "models" / "table") == 0
    assert capsys.readouterr().out.endswith("table: verified\n")
    assert run(monkeypatch, *common, "manifest", tmp_path / "models" / "table") == 0
    assert '"tokenizer-table"' in capsys.readouterr().out

    (tmp_path / "models" / "table" / "t").write_text("abd")
    assert run(monkeypatch, *common, "verify", tmp_path / "models" / "table", "--json") == 5
    assert '"passed": false' in capsys.readouterr().out
    assert run(monkeypatch, *common, "manifest", tmp_path / "models" / "table") == 5
    assert "FAIL  files: t: sha256" in capsys.readouterr().err


def test_a_source_that_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = table_lock(tmp_path)
    make = ("--lock", lock, "snapshot", "table", "--into", tmp_path / "models", "--from-dir", tmp_path / "source")
    (tmp_path / "source" / "inner" / "t").write_text("abcd")
    assert run(monkeypatch, *make) == 5
    assert "t: 4 bytes, the lock says 3" in capsys.readouterr().err
    (tmp_path / "source" / "inner" / "t").unlink()
    assert run(monkeypatch, *make) == 5
    assert "t: not in" in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []


def test_a_directory_of_someone_elses_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = table_lock(tmp_path)
    make = ("--lock", lock, "snapshot", "table", "--into", tmp_path / "models", "--from-dir", tmp_path / "source")
    (tmp_path / "models" / "table").mkdir(parents=True)
    (tmp_path / "models" / "table" / "precious").write_text("x")
    assert run(monkeypatch, *make) == 1
    assert "move it away" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["table"]
    assert (tmp_path / "models" / "table" / "precious").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ("snapshot", "no-such-model", "--into", "x"),
        ("snapshot", "bge-small-en-v1.5"),
        ("snapshot", "bge-small-en-v1.5", "--into", "x", "--flavor", "gguf"),
        ("verify", "/no/such/directory"),
        ("--lock", "/no/such/lock", "snapshot", "bge-small-en-v1.5", "--into", "x"),
        (),
    ],
)
def test_usage(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    assert list(tmp_path.iterdir()) == []


def test_whatever_the_system_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = table_lock(tmp_path)
    (tmp_path / "file").write_text("")
    code = run(monkeypatch, "--lock", lock, "snapshot", "table", "--into", tmp_path / "file" / "models")
    assert code == 1
    assert "Not a directory" in capsys.readouterr().err
