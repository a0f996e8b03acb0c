"""hindsight-api's own address answers the gateway and the sidecar alone, and nothing else is different for it."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import urlencode

import made
import psycopg
import pytest
from harness import Answer, RunningSidecar, call, reachable_directory, wait_for

VERSIONS = ("1.1.0", "0.8.4")
EXTENSION = "HINDSIGHT_API_TENANT_EXTENSION"
BUILTIN = "hindsight_api.extensions.builtin.tenant"
BANK = "gardens"
TEXTS = ["Olga prunes the quince trees in March.", "The well behind the barn ran dry.", "Tom sold his tractor to Ivo."]
# What has nothing of a memory, and is answered to everyone.
OPEN = {
    "0.8.4": {"/health", "/version", "/metrics", "/v1/bank-template-schema"},
    "1.1.0": {
        "/health", "/health/ready", "/health/live", "/version", "/metrics", "/v1/bank-template-schema",
    },
}  # fmt: skip
# Where hindsight-api says first that there is no LLM, that something is off, or that what was sent is no archive.
SAID_FIRST = {
    "/health/llm", "/reflect", "/mental-models/{mental_model_id}/refresh", "/mental-models/{mental_model_id}/dry-run-refresh",
    "/import", "/document-transfer", "/transfer/import",
}  # fmt: skip
DESCRIPTIONS = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
BOUNDARY = "a-boundary"
# Of a memory, whatever it is about.
ITS_OWN = {"id", "bank_id", "document_id", "chunk_id", "created_at", "updated_at", "event_date", "mentioned_at"}


@dataclass
class Compared:
    """A sidecar with a key for its hindsight-api, whose memories were stored without one.

    Attributes:
        version: of hindsight-api.
        before: what was answered without a key.
        schemas: where tables were then.

    """

    version: str
    sidecar: RunningSidecar
    before: dict[str, Any]
    schemas: list[str]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def start(home: Path, model_dir: Path, version: str, **settings: str) -> RunningSidecar:
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    return RunningSidecar(home, made.api_venv(version), model_dir, **settings)


@pytest.fixture(scope="module", params=VERSIONS)
def compared(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Compared]:
    """Store memories with the extension that stands for none, and then start as always."""
    version = request.param
    with reachable_directory() as directory:
        plain = start(directory / "0", model_dir, version, **{EXTENSION: f"{BUILTIN}:DefaultTenantExtension"})
        try:
            plain.start_ready()
            plain.retain(BANK, TEXTS)
            later = plain.memory(
                f"/banks/{BANK}/memories", "POST", {"items": [{"content": "Ada mends nets."}], "async": True}
            )
            assert later.status == 200, later.body
            wait_for(lambda: count(plain) == len(TEXTS) + 1, 60, "four memories")
            assert call(plain.api_port, "/v1/default/banks").status == 200, "whoever asks is answered here"
            before, schemas = answers(plain), schemas_of(plain)
            assert plain.stop() == 0
        finally:
            plain.end()
        sidecar = start(directory / "0", model_dir, version)
        try:
            yield Compared(version, sidecar.start_ready(), before, schemas)
        finally:
            sidecar.end()


def count(sidecar: RunningSidecar, bank: str = BANK) -> int | None:
    """Return how many memories a bank has; None while there is no answer to that, on a busy machine."""
    answer = sidecar.memory(f"/banks/{bank}/memories/list")
    return int(answer.json()["total"]) if answer.status == 200 else None


def answers(sidecar: RunningSidecar) -> dict[str, Any]:
    """Return what is answered through the gateway to calls that change nothing, without what passes with time."""
    found: dict[str, Answer] = {
        path: call(sidecar.port, path)
        for path in (
            "/version", "/openapi.json", "/v1/default/banks", f"/v1/default/banks/{BANK}/memories/list",
            f"/v1/default/banks/{BANK}/config", f"/v1/default/banks/{BANK}/stats", "/v1/default/banks/nobodys/config",
            "/v1/nothing", f"/v1/default/banks/{BANK}/entities", "/mcp/",
        )
    }  # fmt: skip
    for question in ("Who cuts fruit trees?", "Is there water?"):
        body = {"query": question, "budget": "low"}
        found[question] = sidecar.memory(f"/banks/{BANK}/memories/recall", "POST", body)
    wrong = sidecar.memory(f"/banks/{BANK}/memories/recall", "POST", {"no": "query"})
    return {
        name: (answer.status, answer.headers["content-type"], json.loads(answer.body, object_hook=without_its_score))
        for name, answer in {**found, "wrong": wrong}.items()
    }


def without_its_score(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out the final score of a memory: it is less the older the memory is."""
    return {name: value for name, value in found.items() if name != "final" or not isinstance(value, float)}


def schemas_of(sidecar: RunningSidecar) -> list[str]:
    """Return where the served database has tables."""
    query = "SELECT DISTINCT schemaname FROM pg_tables WHERE schemaname !~ '^(pg_|information_schema)' ORDER BY 1"
    return [row[0] for row in asked(sidecar, query)]


def stored(sidecar: RunningSidecar, bank: str) -> list[dict[str, Any]]:
    """Return the rows of a bank's memories as they are stored, without what each memory has of its own."""
    rows = asked(sidecar, "SELECT to_jsonb(m) FROM memory_units m WHERE bank_id = %s ORDER BY text", bank)
    return [{name: value for name, value in row.items() if name not in ITS_OWN} for (row,) in rows]


def asked(sidecar: RunningSidecar, query: LiteralString, *values: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(host=str(sidecar.run_dir), user="hindsight", dbname="hindsight") as connection:
        return connection.execute(query, values).fetchall()


# Walking ----------------------------------------------------------------------------------------------------------

PLAIN = {"integer": 1, "number": 1, "boolean": False, "null": None}
ADDRESS = "https://example.invalid/hook"
FORMATS = {"uuid": "00000000-0000-4000-8000-000000000000", "date-time": "2026-01-01T00:00:00Z"}


def example(schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """Return a small value that a schema allows."""
    if "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return example(found, document)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return example(schema[several][0], document)
    if "enum" in schema or "const" in schema:
        return schema.get("const") or schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        wanted = {name: example(schema["properties"][name], document) for name in schema.get("required", [])}
        return wanted | ({"url": ADDRESS} if "url" in wanted else {})
    if kind == "array":
        return [example(schema["items"], document)]
    return PLAIN[kind] if kind in PLAIN else FORMATS.get(schema.get("format", ""), "x" * schema.get("minLength", 1))


def changed(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return a change of one thing, of nothing being refused first; of a webhook not its URL, which is looked at."""
    properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    name = "enabled" if "enabled" in properties else next(iter(properties))
    return {name: example(properties[name], document)}


def form(schema: dict[str, Any], document: dict[str, Any]) -> bytes:
    """Return a form with the fields that a schema wants; one that is a file has an empty one."""
    lines = []
    for name, value in example(schema, document).items():
        is_text = name == "request"  # the JSON beside the files
        file, content = ("", "{}") if is_text else ('; filename="a.zip"', value)
        lines.append(f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n{content}\r\n')
    return ("".join(lines) + f"--{BOUNDARY}--\r\n").encode()


@dataclass(frozen=True)
class Request:
    """A request that hindsight-api's description allows."""

    method: str
    path: str
    target: str
    body: bytes | None
    content_type: dict[str, str]


def requests(document: dict[str, Any]) -> list[Request]:
    """Return one request for each operation of a description."""
    return [
        request(document, method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def request(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> Request:
    wanted = [one for one in operation.get("parameters", []) if one.get("required")]
    values = {one["name"]: str(example(one["schema"], document)) for one in wanted}
    values = {name: FORMATS["uuid"] if name.endswith("_id") else value for name, value in values.items()}
    values |= {"bank_id": BANK, "key": f"banks/{BANK}/exports/x.zip"}
    query = urlencode({one["name"]: values[one["name"]] for one in wanted if one["in"] == "query"})
    target = re.sub(r"\{([^}:]+)[^}]*\}", lambda match: values[match[1]], path) + (f"?{query}" if query else "")
    contents = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in contents:
        body = form(contents["multipart/form-data"]["schema"], document)
        return Request(method, path, target, body, {"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
    if "application/json" in contents:
        schema = contents["application/json"]["schema"]
        value = example(schema, document) or (changed(schema, document) if method == "PATCH" else {})
        body = json.dumps(value).encode()
        return Request(method, path, target, body, {"content-type": "application/json"})
    return Request(method, path, target, None, {})


def test_without_the_key_hindsight_api_answers_nothing_of_memory(compared: Compared) -> None:
    sidecar, port = compared.sidecar, compared.sidecar.api_port
    described = requests(call(port, "/openapi.json").json())
    assert len(described) > 50
    key = sidecar.tenant_key()
    tried: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer guessed"},
        {"authorization": f"Bearer {key}x"},
        {"authorization": ""},
        {"x-api-key": key, "host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"},
    ]
    answered, said = set(), set()
    for one in described:
        for headers in tried:
            answer = call(port, one.target, one.method, one.body, {**one.content_type, **headers})
            if answer.status < 400:
                answered.add((one.method, one.path, answer.status))
            elif answer.status not in (401, 410):  # the latter: there is no such thing any more
                said.add(one.path.removeprefix("/v1/default/banks/{bank_id}"))
                assert not [text for text in TEXTS if text.encode() in answer.body], one
    assert answered == {("GET", path, 200) for path in OPEN[compared.version]}
    assert said <= SAID_FIRST
    for path in DESCRIPTIONS:
        assert call(port, path).status == 200, path
    assert call(port, "/v1/version").status == (200 if compared.version == "1.1.0" else 404)  # not described
    for path in ("/", "/nothing", "/v1/default", "/static/x", "/ext/", "/favicon.ico"):
        assert call(port, path).status == 404, path
    # With it, the same calls are answered.
    for path in ("/v1/default/banks", f"/v1/default/banks/{BANK}/memories/list"):
        assert call(port, path, headers=bearer(key)).status == 200


def test_without_the_key_nothing_is_imported(compared: Compared) -> None:
    sidecar, port = compared.sidecar, compared.sidecar.api_port
    path = f"/v1/default/banks/{BANK}"
    template = sidecar.memory(f"/banks/{BANK}/export").json()
    assert call(port, f"{path}/import", "POST", template).status == 401
    dry = call(port, f"{path}/import?dry_run=true", "POST", template)  # tells what is in what was sent
    assert (dry.status, dry.json()["dry_run"]) == (200, True)
    archive = sidecar.memory(f"/banks/{BANK}/document-transfer")  # 1.1.0 makes archives in the background
    assert archive.status == (200 if compared.version == "0.8.4" else 410)
    content = archive.body if archive.status == 200 else b"PK"
    start = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'.encode()
    body = start + content + f"\r\n--{BOUNDARY}--\r\n".encode()
    form_type = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    assert call(port, f"{path}/document-transfer", "POST", body, form_type).status == 401


def test_without_the_key_mcp_has_nothing(compared: Compared) -> None:
    sidecar, port = compared.sidecar, compared.sidecar.api_port
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}
    accept = {"accept": "application/json, text/event-stream"}
    assert call(sidecar.port, "/mcp/", "POST", hello, accept).status == 200
    for path in ("/mcp", "/mcp/", f"/mcp/{BANK}/", f"/mcp/{BANK}/messages"):
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "GET"):
            for headers in ({}, {"authorization": "Bearer guessed"}):
                sent = {**accept, **headers, "mcp-session-id": "x"}
                assert call(port, path, method, hello if method == "POST" else None, sent).status == 401, (method, path)
        probed = call(port, path)  # without a session: some clients ask whether there is anything
        assert (probed.status, probed.body) == (200, b"{}"), path


def test_memories_of_before_are_found_and_answers_are_the_same(compared: Compared) -> None:
    assert count(compared.sidecar) == len(TEXTS) + 1
    assert compared.sidecar.recall(BANK, "Who cuts fruit trees?")[0]["text"] == TEXTS[0]
    assert answers(compared.sidecar) == compared.before
    assert schemas_of(compared.sidecar) == compared.schemas == ["hindsight_sidecar", "public"]
    compared.sidecar.retain("gardens-again", TEXTS)
    both = [stored(compared.sidecar, bank) for bank in (BANK, "gardens-again")]
    assert [row for row in both[0] if row["text"] in TEXTS] == both[1]
    # What is done in the background has the key's leave too.
    items = {"items": [{"content": "Ruth tunes the organ."}], "async": True}
    assert compared.sidecar.memory("/banks/later/memories", "POST", items).status == 200
    wait_for(lambda: count(compared.sidecar, "later") == 1, 60, "a memory stored later")


def test_the_next_hindsight_api_has_another_key(compared: Compared) -> None:
    sidecar = compared.sidecar
    first, pid = sidecar.tenant_key(), sidecar.pid_of("hindsight-api")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: sidecar.health()["components"]["hindsight-api"]["pid"] not in (None, pid), 60, "another one")
    sidecar.wait_ready()
    assert sidecar.tenant_key() != first
    assert call(sidecar.api_port, "/v1/default/banks", headers=bearer(first)).status == 401
    assert sidecar.memory("/banks").status == 200
    assert first not in sidecar.log_text()


# Operators' own ---------------------------------------------------------------------------------------------------


def test_a_key_of_the_operators_is_the_clients_to_send(make_sidecar: Any) -> None:
    settings = {EXTENSION: f"{BUILTIN}:ApiKeyTenantExtension", "HINDSIGHT_API_TENANT_API_KEY": "the-operators"}
    sidecar = make_sidecar(**settings).start_ready()
    assert sidecar.tenant_key() == "the-operators"
    for port in (sidecar.port, sidecar.api_port):
        assert call(port, "/v1/default/banks").status == 401
        assert call(port, "/v1/default/banks", headers=bearer("wrong")).status == 401
        assert call(port, "/v1/default/banks", headers=bearer("the-operators")).status == 200


def test_a_token_of_mcp_is_the_clients_to_send(make_sidecar: Any) -> None:
    settings = {"HINDSIGHT_API_MCP_AUTH_TOKEN": "of-mcp"}
    sidecar = make_sidecar(**settings).start_ready()
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}
    for port in (sidecar.port, sidecar.api_port):
        assert call(port, "/mcp/", "POST", hello).status == 401
        assert call(port, "/mcp/", "POST", hello, bearer(sidecar.tenant_key())).status == 401
        assert call(port, "/mcp/", "POST", hello, bearer("of-mcp")).status == 200
    assert call(sidecar.port, "/v1/default/banks").status == 200
    assert call(sidecar.api_port, "/v1/default/banks", headers=bearer("of-mcp")).status == 401


def binds(stranger: socket.socket, port: int) -> bool:
    try:
        stranger.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("version", ["1.1.0", pytest.param("0.8.4", marks=pytest.mark.long)])
def test_whoever_took_the_port_is_sent_nothing(version: str, make_sidecar: Any) -> None:
    sidecar = make_sidecar(version).start_ready()
    before = sidecar.health()["components"]["hindsight-api"]["restarts"]
    os.kill(sidecar.pid_of("hindsight-api"), signal.SIGKILL)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_for(lambda: binds(stranger, sidecar.api_port), 20, "the port", every=0.001)
        stranger.listen()
        stranger.settimeout(0)
        says = f"another program listens on port {sidecar.api_port}"
        wait_for(lambda: says in json.dumps(sidecar.health()), 60, "it is told")
        # Killed, and then twice without a port.
        wait_for(lambda: sidecar.health()["components"]["hindsight-api"]["restarts"] >= before + 3, 120, "more starts")
        assert sidecar.memory(f"/banks/{BANK}/memories/list").status == 503
        with pytest.raises(BlockingIOError):
            stranger.accept()
    sidecar.wait_ready()
