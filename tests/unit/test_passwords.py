"""The password for a Postgres elsewhere: where it is looked for, and in which order."""

from pathlib import Path

import pytest

from sidecar import passwords
from sidecar.errors import SidecarError
from sidecar.source_url import parse

ADDRESS = parse("postgresql://anna@db.example/memories")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write(tmp_path / ".pgpass", "db.example:5432:memories:anna:from-pgpass\n")
    return tmp_path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_the_order(home: Path) -> None:
    file = write(home / "file", "from-file\r\n")
    environ = {"HOME": str(home)}
    assert passwords.find(ADDRESS, None, {}) is None
    assert passwords.find(ADDRESS, None, environ) == "from-pgpass"
    environ["PGPASSFILE"] = str(write(home / "other", "*:*:*:*:from-passfile"))
    assert passwords.find(ADDRESS, None, environ) == "from-passfile"
    environ["PGPASSWORD"] = "from-environment"
    assert passwords.find(ADDRESS, None, environ) == "from-environment"
    assert passwords.find(ADDRESS, str(file), environ) == "from-file"


@pytest.mark.parametrize(
    ("url", "line", "found"),
    [
        ("postgresql://anna@db.example/memories", "*:*:*:anna:p", "p"),
        ("postgresql://anna@db.example:5433/memories", "db.example:5432:memories:anna:p", None),
        ("postgresql://anna@db.example:5433,other:5434/memories", "db.example:5433:*:*:p", "p"),
        ("postgresql://anna@[::1]:5433/memories", r"\:\:1:5433:memories:anna:p", "p"),
        ("postgresql://anna@db.example/memories", r"*:*:*:*:a\:b\\c", "a:b\\c"),
        ("postgresql://anna@db.example/memories", "*:*:*:*:a:b", "a"),
        ("postgresql://anna@db.example/memories", "#*:*:*:*:p", None),
        ("postgresql://anna@db.example/memories", "*:*:*:*", None),
        ("postgresql://anna@db.example/memories", "*:*:*:*:", None),
        ("postgresql://anna@db.example/memories", "*:*:*:bob:q\n\n*:*:*:*:p", "p"),
    ],
)
def test_libpqs_password_file(url: str, line: str, found: str | None, tmp_path: Path) -> None:
    file = write(tmp_path / "file", f"{line}\n")
    assert passwords.find(parse(url), None, {"PGPASSFILE": str(file)}) == found


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match="cannot be read"):
        passwords.find(ADDRESS, str(tmp_path / "absent"), {})
    with pytest.raises(SidecarError, match="has no password in it"):
        passwords.find(ADDRESS, str(write(tmp_path / "empty", "\n")), {})
    with pytest.raises(SidecarError, match="chmod 0600"):
        passwords.find(ADDRESS, None, {"PGPASSFILE": str(write(tmp_path / "open", "*:*:*:*:p", 0o644))})
