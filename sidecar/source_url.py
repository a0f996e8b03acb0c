"""A Postgres URL that came from outside: which of its parameters are taken, and which never."""

import psycopg
from psycopg import conninfo

from sidecar.dumping import Address
from sidecar.errors import RefusedError

# What names a server and a way to it. Everything else libpq knows reads files or settings of the machine that it runs
# on, which is this one and not the one that the URL was written on.
TAKEN = frozenset({"host", "port", "user", "password", "dbname", "sslmode", "connect_timeout", "target_session_attrs"})
SCHEMES = ("postgresql://", "postgres://")
_EXPECTED = "expected postgresql://USER@HOST:PORT/DATABASE"
# libpq would look into a file of whoever runs it, and the passwords there are not meant for whatever a URL names.
_NO_PASSFILE = "/dev/null/no-passfile"


def parse(url: str, password: str | None = None) -> Address:
    """Return the database that a URL names; the password is kept out of everything that is shown or logged.

    `password` is one that came beside the URL; without it, one in the URL is taken.

    Raises:
        RefusedError: it is no such URL, or has parameters that are not taken from outside.

    """
    if not url.startswith(SCHEMES):
        raise RefusedError(f"the source is no Postgres URL; {_EXPECTED}")
    try:
        found = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        why = str(error).partition(': "')[0].strip()  # then what was seen, which may be the password
        raise RefusedError(f"the source cannot be read as a Postgres URL ({why}); {_EXPECTED}") from None
    except UnicodeError:
        raise RefusedError(f"the source's URL has bytes that are no text; {_EXPECTED}") from None
    others = sorted(set(found) - TAKEN)
    if others:
        raise RefusedError(
            f"the source's URL sets {', '.join(others)}, which would be read on this side; leave it out (taken: {', '.join(sorted(TAKEN))})"
        )
    missing = [name for name in ("host", "user", "dbname") if not found.get(name)]
    if missing:
        raise RefusedError(f"the source's URL names no {' and no '.join(missing)}; {_EXPECTED}")
    if any(host.startswith(("/", "@")) for host in found["host"].split(",")):
        raise RefusedError(
            f"the source's host {found['host']!r} is a socket of this machine; expected a host name or an address"
        )
    if not all(map(_can_be_host, found["host"].split(","))):
        raise RefusedError(f"the source's host {found['host'][:60]!r} can be no host name or address; {_EXPECTED}")
    if not all(value.isprintable() for name, value in found.items() if name != "password"):
        raise RefusedError(f"the source's URL has control characters; {_EXPECTED}")
    if not all(port.isdecimal() for port in found.get("port", "").split(",") if port):
        # Nothing of it is shown: it may be what follows a colon in a password.
        raise RefusedError(f"the source's port is no number; {_EXPECTED}, with a password's special characters as %XX")
    inside = found.pop("password", None)
    given = password or inside
    return Address({**found, "passfile": _NO_PASSFILE}, {"PGPASSWORD": given} if given else {})


def _can_be_host(host: str) -> bool:
    """Tell whether a resolver can be asked for it: it raises what is no error of a connection otherwise."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable()


def shown(address: Address) -> str:
    """Return what may be told of an address: everything but the password."""
    parameters = address.parameters
    where = parameters["host"] + (f":{parameters['port']}" if "port" in parameters else "")
    return f"postgresql://{parameters['user']}@{where}/{parameters['dbname']}"
