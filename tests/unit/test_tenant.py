"""The key between the gateway and hindsight-api: when there is one, who has it, and where it is not."""

from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from sidecar.asgi import Headers
from sidecar.settings import Settings
from sidecar.tenant import Tenant, served_schema, tenancy

A = "HINDSIGHT_API_TENANT_"
CLIENTS: Headers = [(b"authorization", b"Bearer theirs"), (b"accept", b"*/*")]
OURS = {f"{A}EXTENSION": "hindsight_api.extensions.builtin.tenant:ApiKeyTenantExtension"}


def tenant(**environ: str) -> Tenant:
    return Tenant(Settings(), environ)


def signed(one: Tenant) -> str | None:
    found: str | None = one.sign(httpx2.Request("GET", "http://x/")).headers.get("authorization")
    return found


@pytest.mark.parametrize(
    "environ", [{}, {f"{A}EXTENSION": ""}, {f"{A}API_KEY": "of no use"}, {f"{A}MCP_AUTH_DISABLED": "true"}]
)
def test_every_start_of_hindsight_api_asks_for_another_key(environ: dict[str, str]) -> None:
    one = tenant(**environ)
    keys = {str(one.renew()[f"{A}API_KEY"]) for _ in range(3)}
    assert len(keys) == 3
    assert all(len(key) >= 43 for key in keys)
    variables = one.renew()
    key = variables.pop(f"{A}API_KEY")
    assert variables == {**OURS, f"{A}MCP_AUTH_DISABLED": "false"}
    assert signed(one) == f"Bearer {key}"
    assert one.passed_on(CLIENTS, "/x") == [(b"accept", b"*/*"), (b"authorization", f"Bearer {key}".encode())]
    assert one.passed_on([], "/mcp/") == [(b"authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize(
    ("changes", "environ", "sent"),
    [
        ({}, {}, None),
        ({}, {f"{A}API_KEY": "asked"}, "Bearer asked"),
        ({"tenant_key": SecretStr("given")}, {f"{A}API_KEY": "asked"}, "Bearer given"),
    ],
)
def test_where_an_extension_of_the_operators_asks_nothing_is_added(
    changes: dict[str, Any], environ: dict[str, str], sent: str | None
) -> None:
    one = Tenant(Settings(**changes), {f"{A}EXTENSION": "theirs:Extension", **environ})
    assert one.renew() == {}
    assert one.key is None
    assert one.passed_on(CLIENTS, "/x") == CLIENTS
    assert signed(one) == sent


@pytest.mark.parametrize(("path", "own"), [("/mcp", True), ("/mcp/bank/", True), ("/mcpx", False), ("/v1/mcp", False)])
def test_where_mcp_asks_for_a_token_of_its_own_the_client_sends_it(path: str, *, own: bool) -> None:
    asking = {"HINDSIGHT_API_MCP_AUTH_TOKEN": "token"}
    one = tenant(**asking)
    assert (one.passed_on(CLIENTS, path) == CLIENTS) is own
    assert one.renew()[f"{A}EXTENSION"] == OURS[f"{A}EXTENSION"]


def test_the_key_does_not_show() -> None:
    one = tenant()
    assert one.key is not None
    assert one.key.get_secret_value() not in f"{vars(one)} {one.key!r} {one.key}"


SCHEMA = "HINDSIGHT_API_DATABASE_SCHEMA"


@pytest.mark.parametrize(
    ("environ", "schema"),
    [
        ({}, "public"),
        ({SCHEMA: ""}, "public"),
        ({SCHEMA: "ours"}, "ours"),
        ({**OURS, SCHEMA: "ours"}, "ours"),
        ({f"{A}EXTENSION": "theirs:Extension"}, None),
        ({f"{A}EXTENSION": "theirs:Extension", SCHEMA: "ours"}, None),
    ],
)
def test_which_schema_answers_us(environ: dict[str, str], schema: str | None) -> None:
    assert served_schema(environ) == schema


def test_another_schema_or_another_extension_may_serve_something_else() -> None:
    found = [tenancy(environ) for environ in ({}, {SCHEMA: "ours"}, OURS, {f"{A}EXTENSION": "theirs:Extension"})]
    assert len(set(found)) == 4
    assert tenancy({}) == tenancy({SCHEMA: "public", f"{A}EXTENSION": "", f"{A}API_KEY": "secret"}) == "public"
