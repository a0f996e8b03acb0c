"""Whom a loopback listener takes for a program of this pod: a web page in a browser here must get nothing from it."""

import re
from dataclasses import dataclass

from sidecar.asgi import Headers, Scope
from sidecar.settings import Address

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_ABSOLUTE = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
_ASKED_BY_US = frozenset({b"same-origin", b"none"})  # by a page of this address, or a person


def host_of(header: str) -> str:
    """Return the host of a `Host` header, without port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused.

    Attributes:
        reason: its name in the metrics.
        status: of the answer.
        title, detail: of the problem.

    """

    reason: str
    status: int
    title: str
    detail: str


FOREIGN_HOST = Refusal(
    "foreign-host", 421, "Foreign Host",
    "the Host header or the target names none of this listener's addresses; address it as 127.0.0.1, or add the name to "
    "HINDSIGHT_SIDECAR_ALLOWED_HOSTS",
)  # fmt: skip
FOREIGN_ORIGIN = Refusal(
    "foreign-origin", 403, "Foreign Origin",
    "a web page of another origin asks, and those are refused; send no Origin header, or, for the memory API, add the origin to "
    "HINDSIGHT_SIDECAR_ALLOWED_ORIGINS",
)  # fmt: skip


class AllowedHosts:
    """The hosts that requests may be addressed to, and the origins of pages that may ask."""

    def __init__(self, listen: Address, extra: tuple[str, ...], origins: tuple[str, ...] = ()) -> None:
        # A gateway that others than this pod can reach demands a key, which a foreign page does not have; and metrics there
        # are for whoever reaches them, by whatever name.
        self._everything = not listen.is_loopback
        self._names = _LOOPBACK | {listen.host} | {host_of(name) for name in extra}
        self._origins = {origin.lower().encode() for origin in origins}

    def refusal(self, scope: Scope) -> Refusal | None:
        """Return why a request is refused, None where it is not."""
        if self._everything:
            return None
        headers: Headers = scope["headers"]
        host = self._host(headers)
        if host is None or not self._is_ours(scope["raw_path"]):
            return FOREIGN_HOST
        return None if self._asked_from_here(headers, host) else FOREIGN_ORIGIN

    def _host(self, headers: Headers) -> bytes | None:
        hosts = [value for name, value in headers if name == b"host"]
        return hosts[0] if len(hosts) == 1 and host_of(hosts[0].decode("latin-1")) in self._names else None

    def _is_ours(self, target: bytes) -> bool:
        """Tell whether a target names nobody else: one in absolute form goes before the `Host` header (RFC 9112, 3.2.2)."""
        if target.startswith(b"/") or target == b"*":
            return True
        found = _ABSOLUTE.match(target)
        return found is not None and b"@" not in found[1] and host_of(found[1].decode("latin-1")) in self._names

    def _asked_from_here(self, headers: Headers, host: bytes) -> bool:
        """Tell whether no page of another origin asks.

        A browser sends `Origin` with all that could change something (Fetch, section 3.2), and `Sec-Fetch-Site` with
        everything to loopback. A name that was made to point here (DNS rebinding) is no allowed host.
        """
        origins = [value.lower() for name, value in headers if name == b"origin"]
        if origins:
            return len(origins) == 1 and origins[0] in self._origins | {b"http://" + host.lower()}
        return all(value in _ASKED_BY_US for name, value in headers if name == b"sec-fetch-site")
