"""Which `Host` headers a loopback listener believes: a web page must not reach it by a name it controls."""

from sidecar.settings import Address

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def host_of(header: str) -> str:
    """Return the host of a `Host` header, without port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


class AllowedHosts:
    """The hosts that requests may be addressed to."""

    def __init__(self, listen: Address, extra: tuple[str, ...]) -> None:
        # A listener that others than this pod can reach demands a key, which a foreign page does not have.
        self._everything = not listen.is_loopback
        self._names = _LOOPBACK | {listen.host} | {host_of(name) for name in extra}

    def allows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Tell whether a request's raw headers name one of us, exactly once."""
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        return self._everything or (len(hosts) == 1 and host_of(hosts[0]) in self._names)
