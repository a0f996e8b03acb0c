"""What hindsight-api asks of whoever calls its own address, so that only the gateway and the sidecar itself are answered."""

import secrets
from collections.abc import Mapping

import httpx2
from pydantic import SecretStr

from sidecar.asgi import Headers
from sidecar.settings import Settings

_EXTENSION = "HINDSIGHT_API_TENANT_EXTENSION"
_KEY = "HINDSIGHT_API_TENANT_API_KEY"
_SCHEMA = "HINDSIGHT_API_DATABASE_SCHEMA"
_PUBLIC = "public"  # hindsight-api's own default for it
_MCP_OPEN = "HINDSIGHT_API_TENANT_MCP_AUTH_DISABLED"
_MCP_TOKEN = "HINDSIGHT_API_MCP_AUTH_TOKEN"  # noqa: S105 - a name
_ASKS_FOR_A_KEY = "hindsight_api.extensions.builtin.tenant:ApiKeyTenantExtension"
_MCP = "/mcp"
_BYTES = 32  # of randomness


class Tenant:
    """The key between the gateway and hindsight-api: another one for each of its starts, and told to nobody.

    An operator who configures a tenant extension has hindsight-api ask for what that wants; then there is none of ours.

    Attributes:
        key: ours, None where the operator's extension asks.

    """

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self.key: SecretStr | None = None if environ.get(_EXTENSION) else _new()
        own = settings.tenant_key.get_secret_value() if settings.tenant_key else None
        self._given = own or environ.get(_KEY)
        # It asks for this token at MCP, and for no other key there: it has to be the client's own.
        self._mcp_asks = bool(environ.get(_MCP_TOKEN))

    def renew(self) -> dict[str, str]:
        """Make a new key, and return the variables that have hindsight-api ask for it; none where there is none of ours."""
        if self.key is None:
            return {}
        self.key = _new()
        # The last: it is for operators of that extension, and would leave MCP open to everyone.
        return {_EXTENSION: _ASKS_FOR_A_KEY, _KEY: self.key.get_secret_value(), _MCP_OPEN: "false"}

    def passed_on(self, headers: Headers, path: str) -> Headers:
        """Return a client's headers as hindsight-api gets them: the key in place of `Authorization`, where there is one."""
        if self.key is None or (self._mcp_asks and (path == _MCP or path.startswith(f"{_MCP}/"))):
            return headers
        kept = [(name, value) for name, value in headers if name.lower() != b"authorization"]
        return [*kept, (b"authorization", f"Bearer {self.key.get_secret_value()}".encode())]

    def sign(self, request: httpx2.Request) -> httpx2.Request:
        """Have a call of our own carry the key, or what the operator gave for such calls."""
        key = self.key.get_secret_value() if self.key is not None else self._given
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request


def served_schema(environ: Mapping[str, str]) -> str | None:
    """Return the schema that calls of our own are answered from; None where an extension of the operator's chooses one."""
    if environ.get(_EXTENSION, "") in {"", _ASKS_FOR_A_KEY}:
        return environ.get(_SCHEMA) or _PUBLIC
    return None


def tenancy(environ: Mapping[str, str]) -> str:
    """Return what decides which schemas hindsight-api serves and migrates, as one text to compare."""
    return f"{environ.get(_SCHEMA) or _PUBLIC} {environ.get(_EXTENSION, '')}".rstrip()


def _new() -> SecretStr:
    return SecretStr(secrets.token_urlsafe(_BYTES))
