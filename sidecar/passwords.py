"""The password for a Postgres elsewhere: from a file, from PGPASSWORD, or from libpq's password file; never from argv."""

import sys
from collections.abc import Mapping
from pathlib import Path

from sidecar.dumping import Address
from sidecar.errors import SidecarError

_PORT = "5432"
_FIELDS = 5  # hostname:port:database:username:password
_OTHERS = 0o077  # libpq takes no password file that others may read


def find(address: Address, file: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the password for an address; None where none is found.

    `file` is a file that holds it, `-` for standard input. Without one PGPASSWORD counts, and then libpq's password
    file (PGPASSFILE, or ~/.pgpass), as psql on this machine would find it.

    Raises:
        SidecarError: the file cannot be read, or is empty.

    """
    if file is not None:
        return _from_file(file)
    if environ.get("PGPASSWORD"):
        return environ["PGPASSWORD"]
    home = environ.get("HOME")
    name = environ.get("PGPASSFILE") or (f"{home}/.pgpass" if home else "")
    return _from_passfile(Path(name), address.parameters) if name else None


def _from_file(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SidecarError(f"the password file {name} cannot be read ({error})") from error
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        where = "standard input" if name == "-" else f"the password file {name}"
        raise SidecarError(f"{where} has no password in it; expected one line")
    return password


def _from_passfile(path: Path, wanted: Mapping[str, str]) -> str | None:
    """Look into a file as libpq does (passwordFromFile in fe-connect.c), for the first of several hosts."""
    if not path.is_file():
        return None
    if path.stat().st_mode & _OTHERS:
        raise SidecarError(f"the password file {path} may be read by others than its owner; chmod 0600 {path}")
    key = (
        wanted["host"].partition(",")[0],
        wanted.get("port", _PORT).partition(",")[0] or _PORT,
        wanted["dbname"],
        wanted["user"],
    )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SidecarError(f"the password file {path} cannot be read ({error})") from error
    for line in lines:
        fields = _split(line)
        if line.startswith("#") or len(fields) < _FIELDS:
            continue
        if all(field in ("*", value) for field, value in zip(fields, key, strict=False)):
            return fields[_FIELDS - 1] or None
    return None


def _split(line: str) -> list[str]:
    """Split at colons; a backslash takes the meaning from what follows it."""
    fields, escaped = [""], False
    for sign in line:
        if not escaped and sign == "\\":
            escaped = True
            continue
        if not escaped and sign == ":":
            fields.append("")
        else:
            fields[-1] += sign
        escaped = False
    return fields
