"""A Postgres URL from outside: what is taken, and what is refused in one sentence."""

from pathlib import Path

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
        "passfile": "/dev/null/no-passfile",
    }
    assert address.environment == {"PGPASSWORD": "s3cr/t"}
    assert "s3cr" not in address.conninfo
    assert shown(address) == "postgresql://anna@db.example:5433/memories"


def test_without_a_password_none_is_sent() -> None:
    address = parse("postgres://anna@db.example/memories")
    assert address.environment == {}
    assert not Path(address.parameters["passfile"]).exists()


def test_a_password_beside_the_url_comes_first() -> None:
    assert parse("postgres://anna:inside@db.example/m", "beside").environment == {"PGPASSWORD": "beside"}


@pytest.mark.parametrize(
    "url", ["postgresql://anna:p@ss:s3cret@h/d", "postgresql://anna:100%zzs3cret@h/d", "postgresql://anna:s3/cret@h/d"]
)
def test_a_password_that_breaks_the_url_is_not_shown(url: str) -> None:
    with pytest.raises(RefusedError) as refused:
        parse(url)
    assert "s3" not in str(refused.value)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://db.example/memories", "is no Postgres URL"),
        ("host=db.example dbname=memories", "is no Postgres URL"),
        (
            "postgresql://anna@db.example/memories?passfile=/etc/shadow",
            "sets passfile, which would be read on this side",
        ),
        ("postgresql://anna@db.example/memories?sslkey=/k&sslcert=/c", "sets sslcert, sslkey"),
        ("postgresql://anna@db.example/memories?service=x", "sets service"),
        ("postgresql://anna@db.example/memories?options=-cx%3Dy", "sets options"),
        ("postgresql://anna@/memories?host=/run/hindsight", "is a socket of this machine"),
        ("postgresql://anna@%2Frun%2Fhindsight/memories", "is a socket of this machine"),
        ("postgresql://anna@db.example,%2Frun/memories", "is a socket of this machine"),
        ("postgresql://db.example", "names no user and no dbname"),
        ("postgresql://anna@/memories", "names no host"),
        ("postgresql://anna@db.example/memories?nonsense=1", "cannot be read as a Postgres URL"),
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
        parse("postgresql://anna@db.example/memories?hostaddr=127.0.0.1")


@pytest.mark.parametrize("host", ["..", "a..b", "x" * 64, "x" * 10_000, "a%0ab", "a%1bb", "%ff", "good,a..b"])
def test_a_host_that_no_resolver_can_be_asked_for_is_refused(host: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(f"postgresql://anna@{host}/memories")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_control_characters_in_names_are_refused() -> None:
    with pytest.raises(RefusedError, match="control characters"):
        parse("postgresql://an%0ana@db/memories")
