import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.hosts import AllowedHosts, host_of
from sidecar.settings import Address

LOOPBACK = Address("127.0.0.1", 8888)


@pytest.mark.parametrize(
    ("header", "host"),
    [("127.0.0.1:8888", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("LocalHost:1", "localhost"), ("[::1]:8888", "::1"),
     ("[::1]", "::1"), (" localhost ", "localhost"), ("localhost.:80", "localhost"), ("", ""), (":80", ""), ("[", "")],
)  # fmt: skip
def test_the_host_of_a_header(header: str, host: str) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize("host", [b"127.0.0.1:8888", b"localhost", b"[::1]:8888", b"127.0.0.1:1"])
def test_loopback_names_are_ours(host: bytes) -> None:
    assert AllowedHosts(LOOPBACK, ()).allows([(b"accept", b"*"), (b"host", host)])


@pytest.mark.parametrize(
    "host", [b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil", b"", b"\xff", b"127.0.0.2", b"0"]
)
def test_others_are_not(host: bytes) -> None:
    assert not AllowedHosts(LOOPBACK, ()).allows([(b"host", host)])


def test_exactly_one_host_counts() -> None:
    hosts = AllowedHosts(LOOPBACK, ())
    assert not hosts.allows([])
    assert not hosts.allows([(b"host", b"localhost"), (b"host", b"localhost")])


def test_the_listen_address_and_the_configured_names_are_ours() -> None:
    hosts = AllowedHosts(Address("127.0.0.9", 1), ("Memory.Local", "[fd00::1]:80", "pod"))
    for host in (b"127.0.0.9:1", b"memory.local:5", b"[fd00::1]", b"POD"):
        assert hosts.allows([(b"host", host)])
    assert not hosts.allows([(b"host", b"local")])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7"])  # noqa: S104
def test_a_listener_beyond_loopback_takes_any_host_as_it_demands_a_key(host: str) -> None:
    assert AllowedHosts(Address(host, 1), ()).allows([(b"host", b"anything.example")])


@given(st.binary())
def test_no_header_of_any_kind_fails(header: bytes) -> None:
    assert AllowedHosts(LOOPBACK, ()).allows([(b"host", header)]) in (True, False)
