"""A Postgres URL from outside: what is taken, and what is refused in one sentence."""

import pytest

from sidecar.errors import RefusedError
from sidecar.source_url import parse, shown


def test_a_plain_url() -> None:
    address = parse("postgresql://anna:s3cr%2Ft@db.example:5433/memories?sslmode=require&connect_timeout=5")
    assert address.parameters == {
        "user": "anna",
        "host": "db.example",
        "port": "5433",
        "dbname": "memories",
        "sslmode": "require",
        "connect_timeout": "5",
    }
    assert address.environment == {"PGPASSWORD": "s3cr/t"}
    assert "s3cr" not in address.conninfo
    assert shown(address) == "postgresql://anna@db.example:5433/memories"


def test_without_a_password_libpq_may_find_none() -> None:
    assert parse("postgres://db.example/memories").environment == {}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://db.example/memories", "is no Postgres URL"),
        ("host=db.example dbname=memories", "is no Postgres URL"),
        ("postgresql://db.example/memories?passfile=/etc/shadow", "sets passfile, which would be read on this side"),
        ("postgresql://db.example/memories?sslkey=/k&sslcert=/c", "sets sslcert, sslkey"),
        ("postgresql://db.example/memories?service=x", "sets service"),
        ("postgresql://db.example/memories?options=-cx%3Dy", "sets options"),
        ("postgresql:///memories?host=/run/hindsight", "is a socket of this machine"),
        ("postgresql://%2Frun%2Fhindsight/memories", "is a socket of this machine"),
        ("postgresql://db.example,%2Frun/memories", "is a socket of this machine"),
        ("postgresql://db.example", "names no dbname"),
        ("postgresql:///memories", "names no host"),
        ("postgresql://db.example/memories?nonsense=1", "cannot be read as a Postgres URL"),
        ("postgresql://[::1/memories", "cannot be read as a Postgres URL"),
    ],
)
def test_what_is_refused(url: str, told: str) -> None:
    with pytest.raises(RefusedError) as refused:
        parse(url)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_hostaddr_does_not_get_around_it() -> None:
    with pytest.raises(RefusedError, match="sets hostaddr"):
        parse("postgresql://db.example/memories?hostaddr=127.0.0.1")
