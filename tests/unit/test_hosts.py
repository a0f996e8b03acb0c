import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.asgi import Headers
from sidecar.hosts import FOREIGN_HOST, FOREIGN_ORIGIN, AllowedHosts, Refusal, host_of
from sidecar.settings import Address

LOOPBACK = Address("127.0.0.1", 8888)


@pytest.mark.parametrize(
    ("header", "host"),
    [("127.0.0.1:8888", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("LocalHost:1", "localhost"), ("[::1]:8888", "::1"),
     ("[::1]", "::1"), (" localhost ", "localhost"), ("localhost.:80", "localhost"), ("", ""), (":80", ""), ("[", "")],
)  # fmt: skip
def test_the_host_of_a_header(header: str, host: str) -> None:
    assert host_of(header) == host


def allows(hosts: AllowedHosts, headers: Headers) -> bool:
    return hosts.refusal({"raw_path": b"/", "headers": headers}) is None


@pytest.mark.parametrize("host", [b"127.0.0.1:8888", b"localhost", b"[::1]:8888", b"127.0.0.1:1"])
def test_loopback_names_are_ours(host: bytes) -> None:
    assert allows(AllowedHosts(LOOPBACK, ()), [(b"accept", b"*"), (b"host", host)])


@pytest.mark.parametrize(
    "host", [b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil", b"", b"\xff", b"127.0.0.2", b"0"]
)
def test_others_are_not(host: bytes) -> None:
    assert not allows(AllowedHosts(LOOPBACK, ()), [(b"host", host)])


def test_exactly_one_host_counts() -> None:
    hosts = AllowedHosts(LOOPBACK, ())
    assert not allows(hosts, [])
    assert not allows(hosts, [(b"host", b"localhost"), (b"host", b"localhost")])


def test_the_listen_address_and_the_configured_names_are_ours() -> None:
    hosts = AllowedHosts(Address("127.0.0.9", 1), ("Memory.Local", "[fd00::1]:80", "pod"))
    for host in (b"127.0.0.9:1", b"memory.local:5", b"[fd00::1]", b"POD"):
        assert allows(hosts, [(b"host", host)])
    assert not allows(hosts, [(b"host", b"local")])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7"])  # noqa: S104
def test_a_listener_beyond_loopback_takes_any_host_as_it_demands_a_key(host: str) -> None:
    assert allows(AllowedHosts(Address(host, 1), ()), [(b"host", b"anything.example")])


# Who asks ------------------------------------------------------------------------------------------------------


def asked(*headers: tuple[bytes, bytes], target: bytes = b"/x", origins: tuple[str, ...] = ()) -> Refusal | None:
    hosts = AllowedHosts(LOOPBACK, (), origins)
    named = [] if any(name == b"host" for name, _ in headers) else [(b"host", b"127.0.0.1:8888")]
    return hosts.refusal({"type": "http", "raw_path": target, "headers": [*named, *headers]})


@pytest.mark.parametrize(
    "headers",
    [[], [(b"origin", b"http://127.0.0.1:8888")], [(b"origin", b"HTTP://127.0.0.1:8888"), (b"sec-fetch-site", b"same-origin")],
     [(b"host", b"LocalHost:8888"), (b"origin", b"http://localhost:8888")], [(b"sec-fetch-site", b"none")],
     [(b"sec-fetch-site", b"same-origin")], [(b"sec-fetch-mode", b"cors")]],
)  # fmt: skip
def test_programs_and_our_own_pages_may_ask(headers: Headers) -> None:
    assert asked(*headers) is None


@pytest.mark.parametrize(
    "headers",
    [[(b"origin", b"http://evil.example")], [(b"origin", b"null")], [(b"origin", b"")], [(b"origin", b"http://localhost:8888")],
     [(b"origin", b"http://127.0.0.1:3000")], [(b"origin", b"https://127.0.0.1:8888")], [(b"origin", b"http://127.0.0.1")],
     [(b"origin", b"http://127.0.0.1:8888.evil.example")], [(b"origin", b"http://127.0.0.1:8888")] * 2,
     [(b"origin", b"http://evil.example"), (b"sec-fetch-site", b"same-origin")], [(b"sec-fetch-site", b"cross-site")],
     [(b"sec-fetch-site", b"same-site")], [(b"sec-fetch-site", b"none"), (b"sec-fetch-site", b"cross-site")]],
)  # fmt: skip
def test_pages_of_another_origin_may_not(headers: Headers) -> None:
    assert asked(*headers) is FOREIGN_ORIGIN


def test_an_origin_that_was_allowed_may_ask_though_it_is_another_site() -> None:
    headers = [(b"origin", b"http://Localhost:6274"), (b"sec-fetch-site", b"same-site")]
    assert asked(*headers, origins=("http://localhost:6274",)) is None
    assert asked(*headers, origins=("http://localhost:62740",)) is FOREIGN_ORIGIN


@pytest.mark.parametrize("target", [b"/", b"*", b"http://127.0.0.1/x", b"HTTP://localhost:1/", b"http://[::1]:8888?q"])
def test_targets_that_name_us(target: bytes) -> None:
    assert asked(target=target) is None


@pytest.mark.parametrize(
    "target",
    [b"http://evil.example/x", b"http://127.0.0.1@evil.example/", b"http://127.0.0.1:1@evil.example/", b"http:///x",
     b"evil.example:443", b"127.0.0.1:8888", b"x", b"", b"http:/x", b"\xff"],
)  # fmt: skip
def test_a_target_that_names_another_is_refused_whatever_its_host_header_says(target: bytes) -> None:
    assert asked(target=target) is FOREIGN_HOST


def test_a_name_that_was_made_to_point_here_is_refused_though_its_page_is_of_the_same_origin() -> None:
    rebound = [
        (b"host", b"evil.example:8888"),
        (b"origin", b"http://evil.example:8888"),
        (b"sec-fetch-site", b"same-origin"),
    ]
    assert asked(*rebound) is FOREIGN_HOST


def test_a_listener_beyond_loopback_takes_any_origin_as_it_demands_a_key() -> None:
    scope = {"raw_path": b"/x", "headers": [(b"host", b"memory.example"), (b"origin", b"http://ui.example")]}
    assert AllowedHosts(Address("10.0.0.7", 1), ()).refusal(scope) is None


@given(st.binary(), st.binary(), st.binary())
def test_no_request_of_any_kind_fails(target: bytes, origin: bytes, host: bytes) -> None:
    assert asked((b"origin", origin), target=target) in (None, FOREIGN_HOST, FOREIGN_ORIGIN)
    assert asked((b"host", host), (b"sec-fetch-site", origin)) in (None, FOREIGN_HOST, FOREIGN_ORIGIN)


@given(st.binary())
def test_no_header_of_any_kind_fails(header: bytes) -> None:
    assert allows(AllowedHosts(LOOPBACK, ()), [(b"host", header)]) in (True, False)
