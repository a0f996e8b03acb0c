"""A Postgres URL that came from outside: which of its parameters are taken, and which never."""

import psycopg
from psycopg import conninfo

from sidecar.dumping import Address
from sidecar.errors import RefusedError

# What names a server and a way to it. Everything else libpq knows reads files or settings of the machine that it runs
# on, which is this one and not the one that the URL was written on.
TAKEN = frozenset({"host", "port", "user", "password", "dbname", "sslmode", "connect_timeout", "target_session_attrs"})
_SCHEMES = ("postgresql://", "postgres://")


def parse(url: str) -> Address:
    """Return the database that a URL names; the password is kept out of everything that is shown or logged.

    Raises:
        RefusedError: it is no such URL, or has parameters that are not taken from outside.

    """
    if not url.startswith(_SCHEMES):
        raise RefusedError("the source is no Postgres URL; expected postgresql://USER@HOST:PORT/DATABASE")
    try:
        found = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        raise RefusedError(f"the source cannot be read as a Postgres URL ({str(error).strip()})") from error
    others = sorted(set(found) - TAKEN)
    if others:
        raise RefusedError(
            f"the source's URL sets {', '.join(others)}, which would be read on this side; leave it out (taken: {', '.join(sorted(TAKEN))})"
        )
    missing = [name for name in ("host", "dbname") if not found.get(name)]
    if missing:
        raise RefusedError(
            f"the source's URL names no {' and no '.join(missing)}; expected postgresql://USER@HOST:PORT/DATABASE"
        )
    if any(host.startswith(("/", "@")) for host in found["host"].split(",")):
        raise RefusedError(
            f"the source's host {found['host']!r} is a socket of this machine; expected a host name or an address"
        )
    password = found.pop("password", None)
    return Address(found, {"PGPASSWORD": password} if password else {})


def shown(address: Address) -> str:
    """Return what may be told of an address: everything but the password."""
    parameters = address.parameters
    where = parameters["host"] + (f":{parameters['port']}" if "port" in parameters else "")
    who = f"{parameters['user']}@" if "user" in parameters else ""
    return f"postgresql://{who}{where}/{parameters['dbname']}"
