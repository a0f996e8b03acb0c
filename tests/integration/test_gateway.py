"""Through the gateway: bodies byte for byte as hindsight-api sent them, for all that hindsight's own client uses."""

import gzip
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from harness import RunningSidecar, wait_for
from wire import Call, Exchange, Headers, Message, RecordedGateway, call, recorded_gateway

Endpoint = tuple[str, str]
JSON = [(b"content-type", b"application/json")]
TOURED, COPY, CLONE, DOCUMENTS, KEPT = "toured", "imported", "cloned", "documents", "kept"
ODD_BANKS = ("a b+c", "übung-京", "x;y=1,2", "%41", "..", "q?r#s&t")
# The sidecar answers these by itself, so that a probe is never refused and never waits.
ANSWERED_HERE = {("GET", path) for path in ("/health", "/health/live", "/health/ready", "/version")}
# Nothing of a memory: the import is a dry run, which tells what is in what was sent.
TOLD_TO_EVERYONE = {
    ("GET", "/metrics"), ("GET", "/v1/bank-template-schema"), ("POST", "/v1/default/banks/{bank_id}/import"),
}  # fmt: skip
BOUNDARY = "a-boundary"
CHUNKS = {"updates": {"retain_extraction_mode": "chunks", "enable_observations": False}}  # texts as they are


def endpoints_of_the_client() -> list[Endpoint]:
    """Return method and path of every call that the installed hindsight client can make."""
    spec = importlib.util.find_spec("hindsight_client_api")
    assert spec is not None
    assert spec.origin is not None
    calls = re.compile(r"method='([A-Z]+)',\s+resource_path='([^']+)'")
    sources = sorted(Path(spec.origin).parent.joinpath("api").glob("*_api.py"))
    return sorted({found for source in sources for found in calls.findall(source.read_text(encoding="utf-8"))})


def multipart(name: str, files: dict[str, bytes], **fields: str) -> tuple[bytes, Headers]:
    """Return a form's body and its content type."""
    parts = [f'name="{field}"\r\n\r\n{value}'.encode() for field, value in fields.items()]
    parts += [
        f'name="{name}"; filename="{file}"\r\ncontent-type: application/octet-stream\r\n\r\n'.encode() + content
        for file, content in files.items()
    ]
    lines = [f"--{BOUNDARY}\r\ncontent-disposition: form-data; ".encode() + part + b"\r\n" for part in parts]
    content_type = f"multipart/form-data; boundary={BOUNDARY}".encode()
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode(), [(b"content-type", content_type)]


class Tour:
    """Makes calls through the recorded gateway and keeps every exchange by its endpoint."""

    def __init__(self, gateway: RecordedGateway) -> None:
        self._gateway = gateway
        self.exchanges: dict[Endpoint, list[Exchange]] = {}

    def ask(
        self,
        method: str,
        template: str,
        body: Any = None,
        headers: Headers | None = None,
        *,
        query: str = "",
        status: int = 200,
        **parameters: str,
    ) -> Any:
        """Make one call, whose status is known, and return the answer's JSON, or its bytes where it is none."""
        target = re.sub(r"{(\w+)}", lambda found: quote(parameters[found[1]], safe="/"), template)
        if body is not None and not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), [*(headers or []), *JSON]
        exchange = self._gateway.call(method, target + (f"?{query}" if query else ""), body, headers)
        assert exchange.answer.status == status, (method, target, exchange.answer)
        self.exchanges.setdefault((method, template), []).append(exchange)
        try:
            return json.loads(exchange.answer.body)
        except ValueError:
            return exchange.answer.body

    def bank(
        self, method: str, path: str = "", body: Any = None, *more: Any, bank_id: str = TOURED, **rest: Any
    ) -> Any:
        """Make a call about a bank."""
        return self.ask(method, f"/v1/default/banks/{{bank_id}}{path}", body, *more, bank_id=bank_id, **rest)

    def finished(self, operation_id: str, bank_id: str = TOURED) -> dict[str, Any]:
        """Wait for an operation and return how it ended."""

        def ended() -> dict[str, Any] | None:
            path, query = "/operations/{operation_id}", "include_payload=true"
            found: dict[str, Any] = self.bank("GET", path, operation_id=operation_id, bank_id=bank_id, query=query)
            return found if found["status"] in ("completed", "failed") else None

        seen = wait_for(ended, 60, f"the end of operation {operation_id}")
        assert seen["status"] == "completed", seen
        return seen

    def quiet(self, bank_id: str) -> None:
        """Wait until nothing is done in the background for a bank."""
        for status in ("pending", "processing"):
            wait_for(
                lambda status=status: (
                    self.bank("GET", "/operations", query=f"status={status}", bank_id=bank_id)["total"] == 0
                ),
                60,
                f"no operation of {bank_id} {status}",
            )

    def everything(self) -> None:
        """Use every endpoint, with data that are there where an endpoint has any."""
        for path in ("/metrics", "/v1/bank-template-schema", "/v1/default/banks"):
            self.ask("GET", path)
        self.banks()
        self.memories()
        self.documents()
        self.entities()
        self.mental_models()
        self.directives()
        self.knowledge_base()
        self.webhooks()
        self.transfer()
        self.logs()
        self.ends()

    def banks(self) -> None:
        self.bank("PUT", "", {"name": "Toured"})
        self.bank("PATCH", "", {"mission": "To be compared, ümläuts too."})
        self.bank("PATCH", "/config", CHUNKS)
        self.bank("GET", "/config")
        self.bank("GET", "/profile", status=410)
        traits = {"skepticism": 2, "literalism": 3, "empathy": 4}
        self.bank("PUT", "/profile", {"disposition": traits}, status=410)
        self.bank("POST", "/background", {"content": "I like boats."}, status=410)
        self.bank("POST", "/aliases", {"alias": "toured-alias"}, status=201)
        self.bank("GET", "/aliases")
        self.bank("PATCH", "/aliases/{alias}", {"primary": True}, alias="toured-alias")
        self.bank("DELETE", "/aliases/{alias}", alias="toured-alias")
        self.bank("GET", "/config", bank_id="nobody's", status=404)
        self.bank("POST", "/health/llm", status=404)  # off by default

    def memories(self) -> None:
        anna = [{"text": "Anna", "type": "PERSON"}]
        stored = [
            {"content": "Anna keeps bees in Lisbon.", "document_id": "doc-1", "tags": ["bees"], "entities": anna},
            {"content": "Anna paints blue tiles.", "document_id": "doc-2", "entities": [*anna, {"text": "Azulejo"}]},
        ]
        self.bank("POST", "/memories", {"items": stored, "async": False})
        later = self.bank("POST", "/memories", {"items": [{"content": "Ben mends clocks."}], "async": True})
        self.bank("GET", "/operations")
        self.finished(later["operation_id"])
        listed = self.bank("GET", "/memories/list", query="limit=10&q=bees")
        memory = listed["items"][0]["id"]
        assert listed["items"][0]["text"] == stored[0]["content"]
        self.bank("GET", "/memories/{memory_id}", memory_id=memory)
        self.bank("PATCH", "/memories/{memory_id}", {"context": "a hobby"}, memory_id=memory)
        self.bank("GET", "/memories/{memory_id}/history", memory_id=memory)
        self.bank("DELETE", "/memories/{memory_id}/observations", memory_id=memory)
        found = self.bank("POST", "/memories/recall", {"query": "Where do the bees live?", "budget": "low"})
        assert found["results"][0]["text"] == stored[0]["content"]
        self.bank("POST", "/memories/recall", {"query": "bees", "trace": True, "tags": ["bees"]})
        self.bank("POST", "/memories/recall", {"no": "query"}, status=422)
        self.bank("POST", "/memories", b"{not json", JSON, status=422)
        self.bank("POST", "/reflect", {"query": "What about bees?"}, status=400)
        self.bank("POST", "/memories/dry-run-extract", {"content": "A new fact."})
        self.bank("POST", "/prompts/preview", {"operation": "retain"})
        self.bank("GET", "/graph")
        self.bank("GET", "/stats")
        self.bank("GET", "/stats/memories-timeseries")
        self.bank("GET", "/tags", query="q=b%2A")
        self.bank("GET", "/observations/scopes")
        self.bank("DELETE", "/observations")
        self.bank("POST", "/consolidate")
        self.bank("POST", "/consolidate", {})
        self.bank("POST", "/consolidation/recover")
        self.bank("POST", "/consolidation-strategies/preview", {"strategies": []})
        self.bank("POST", "/operations/{operation_id}/retry", operation_id=later["operation_id"], status=409)
        self.bank("DELETE", "/operations/{operation_id}", operation_id=later["operation_id"], status=409)
        self.bank("DELETE", "/operations/{operation_id}/delete", operation_id=later["operation_id"])

    def documents(self) -> None:
        self.bank("GET", "/documents")
        self.bank("GET", "/documents/{document_id}", document_id="doc-1")
        chunks = self.bank("GET", "/documents/{document_id}/chunks", document_id="doc-1")
        self.ask("GET", "/v1/default/chunks/{chunk_id}", chunk_id=chunks["items"][0]["chunk_id"])
        self.bank("GET", "/documents/{document_id}/history", document_id="doc-1")
        self.bank("PATCH", "/documents/{document_id}", {"tags": ["bees", "lisbon"]}, document_id="doc-1")
        again = self.bank("POST", "/documents/{document_id}/reprocess", document_id="doc-1")
        self.finished(again["operation_id"])
        request = json.dumps({"files_metadata": [{"document_id": "an-upload"}]})
        upload = multipart("files", {"note ü.txt": b"Carla grows figs on the roof.\r\n"}, request=request)
        for operation in self.bank("POST", "/files/retain", *upload)["operation_ids"]:
            self.finished(operation)
        self.quiet(TOURED)  # it is converted first, and stored by another operation
        kept = self.bank("GET", "/documents/{document_id}", document_id="an-upload")
        assert "Carla grows figs" in kept["original_text"]
        self.bank("GET", "/attachments/{attachment_id}", attachment_id="none", status=404)
        self.bank("DELETE", "/documents/{document_id}", document_id="doc-2")

    def entities(self) -> None:
        entity = self.bank("GET", "/entities")["items"][0]["id"]
        self.bank("GET", "/entities/graph")
        self.bank("GET", "/entities/{entity_id}", entity_id=entity)
        self.bank("POST", "/entities/{entity_id}/regenerate", entity_id=entity, status=410)

    def mental_models(self) -> None:
        # Without an LLM it is made and its first refresh fails, which hindsight-api answers with 500.
        made = {"id": "bees", "name": "Bees", "source_query": "What about bees?"}
        self.bank("POST", "/mental-models", made, status=500)
        model = {"mental_model_id": "bees"}
        self.bank("GET", "/mental-models")
        self.bank("GET", "/mental-models/{mental_model_id}", **model)
        self.bank("PATCH", "/mental-models/{mental_model_id}", {"name": "All bees"}, **model)
        self.bank("GET", "/mental-models/{mental_model_id}/history", **model)
        self.bank("POST", "/mental-models/{mental_model_id}/refresh", status=400, **model)
        self.bank("POST", "/mental-models/{mental_model_id}/dry-run-refresh", status=400, **model)
        self.bank("POST", "/mental-models/{mental_model_id}/clear", **model)
        self.bank("DELETE", "/mental-models/{mental_model_id}", **model)

    def directives(self) -> None:
        directive = self.bank("POST", "/directives", {"name": "Short", "content": "Answer shortly."})["id"]
        self.bank("GET", "/directives")
        self.bank("GET", "/directives/{directive_id}", directive_id=directive)
        self.bank("PATCH", "/directives/{directive_id}", {"priority": 3}, directive_id=directive)
        self.bank("DELETE", "/directives/{directive_id}", directive_id=directive)

    def knowledge_base(self) -> None:
        self.bank("POST", "/knowledge-base/folders", {"name": "Notes"}, status=201)
        page = {"name": "Bees page", "source_query": "What about bees?"}
        self.bank("POST", "/knowledge-base/pages", page, status=500)  # made, as a mental model is
        roots = self.bank("GET", "/knowledge-base/tree")["roots"]
        node = next(root["id"] for root in roots if root["kind"] == "page")
        self.bank("GET", "/knowledge-base/pages/{page_id}", page_id=node)
        self.bank("PATCH", "/knowledge-base/nodes/{node_id}", {"name": "Bees again"}, node_id=node)
        self.bank("GET", "/knowledge-base/search", query="q=bees")
        self.bank("GET", "/knowledge-base/export")
        self.bank("DELETE", "/knowledge-base/nodes/{node_id}", node_id=node)

    def webhooks(self) -> None:
        hook = {"url": "http://127.0.0.1:9/hook", "enabled": False}
        self.bank("POST", "/webhooks", hook, status=400)  # none to this machine
        made = self.bank("POST", "/webhooks", {**hook, "url": "https://example.invalid/hook"}, status=201)
        self.bank("GET", "/webhooks")
        self.bank("PATCH", "/webhooks/{webhook_id}", {"secret": "s"}, webhook_id=made["id"])
        self.bank("GET", "/webhooks/{webhook_id}/deliveries", webhook_id=made["id"])
        self.bank("DELETE", "/webhooks/{webhook_id}", webhook_id=made["id"])

    def archive(self, operation: dict[str, Any]) -> bytes:
        """Return the archive that an export made."""
        key = self.finished(operation["operation_id"])["result_metadata"]["storage_key"]
        content: bytes = self.ask("GET", "/v1/default/files/download/{key}", key=key)
        assert content.startswith(b"PK")
        return content

    def transfer(self) -> None:
        template = self.bank("GET", "/export")
        self.bank("POST", "/import", template, query="dry_run=true")
        self.bank("GET", "/document-transfer", status=410)
        archive = self.archive(self.bank("POST", "/document-transfer/export", status=202))
        form = multipart("file", {"documents.zip": archive})
        made = self.bank("POST", "/document-transfer", *form, bank_id=DOCUMENTS, status=202)
        self.finished(made["operation_id"], DOCUMENTS)
        archive = self.archive(self.bank("POST", "/transfer/export", query="include_history=true", status=202))
        form = multipart("file", {"bank.zip": archive})
        made = self.bank("POST", "/transfer/import", *form, query=f"target_bank_id={COPY}", status=202)
        self.finished(made["operation_id"])
        self.bank("POST", "/transfer/import", *multipart("file", {"bank.zip": b"PK no"}), status=400)
        made = self.bank("POST", "/clone", query=f"target_bank_id={CLONE}", status=202)
        self.finished(made["operation_id"])
        for bank in (COPY, CLONE):
            listed = self.bank("GET", "/memories/list", bank_id=bank)["items"]
            assert "Anna keeps bees in Lisbon." in {item["text"] for item in listed}

    def logs(self) -> None:
        self.bank("GET", "/audit-logs")
        self.bank("GET", "/audit-logs/stats")
        self.bank("GET", "/audit-logs/{log_id}", log_id="1", status=404)
        self.bank("GET", "/llm-requests", query="limit=5&group=false")
        self.bank("GET", "/llm-requests/stats")

    def ends(self) -> None:
        self.quiet(TOURED)
        self.bank("DELETE", "/memories", query="type=world")
        self.bank("DELETE", "/config")
        self.bank("DELETE", "")


def keep_some(sidecar: RunningSidecar) -> None:
    """Have a bank whose content does not change any more, for calls that can be compared with each other."""
    assert sidecar.memory(f"/banks/{KEPT}", "PUT", {"name": "Kept ü"}).status == 200
    assert sidecar.memory(f"/banks/{KEPT}/config", "PATCH", CHUNKS).status == 200
    entities = [{"text": "Dora"}, {"text": "Évora"}]
    items = [
        {"content": f"Dora plays the oboe in Évora, {part}.", "document_id": part, "tags": [part], "entities": entities}
        for part in ("part-0", "part-1", "part-2", "part-3")
    ]
    stored = sidecar.memory(f"/banks/{KEPT}/memories", "POST", {"items": items, "async": False}, timeout=120)
    assert stored.status == 200, stored.body
    directive = {"name": "Short", "content": "Answer shortly."}
    assert sidecar.memory(f"/banks/{KEPT}/directives", "POST", directive).status == 200


@pytest.fixture(scope="module")
def clean(ready_sidecar: RunningSidecar) -> Iterator[RunningSidecar]:
    """Return the sidecar; every bank is deleted at the end."""
    yield ready_sidecar
    for bank in ready_sidecar.memory("/banks?limit=500").json()["banks"]:
        assert ready_sidecar.memory(f"/banks/{quote(bank['bank_id'], safe='')}", "DELETE").status == 200
    assert ready_sidecar.memory("/banks").json()["total"] == 0


@pytest.fixture(scope="module")
def gateway(clean: RunningSidecar) -> Iterator[RecordedGateway]:
    """Return a gateway before the running hindsight-api, all of whose calls are recorded behind it."""
    with recorded_gateway(clean.api_port, clean.tenant_key()) as recorded:
        yield recorded


@pytest.fixture(scope="module")
def toured(gateway: RecordedGateway) -> dict[Endpoint, list[Exchange]]:
    """Return every exchange of a tour over all endpoints, by endpoint."""
    tour = Tour(gateway)
    tour.everything()
    return tour.exchanges


@pytest.fixture(scope="module")
def kept(clean: RunningSidecar) -> RunningSidecar:
    """Return the sidecar, with a bank whose content stays as it is."""
    keep_some(clean)
    return clean


def test_the_client_uses_endpoints_and_all_of_them_are_visited(
    clean: RunningSidecar, toured: dict[Endpoint, list[Exchange]]
) -> None:
    served = {
        (method.upper(), path)
        for path, methods in json.loads(call(clean.api_port, "GET", "/openapi.json").body)["paths"].items()
        for method in methods
    }
    used = set(endpoints_of_the_client()) & served
    assert len(used) > 90
    assert used - set(toured) == ANSWERED_HERE


@pytest.mark.parametrize(
    "endpoint", [item for item in endpoints_of_the_client() if item not in ANSWERED_HERE], ids=" ".join
)
def test_bodies_are_byte_for_byte_what_was_sent(endpoint: Endpoint, toured: dict[Endpoint, list[Exchange]]) -> None:
    assert toured[endpoint]
    for exchange in toured[endpoint]:
        exchange.check()


def test_no_call_that_works_is_answered_by_hindsight_api_itself_without_its_key(
    clean: RunningSidecar, toured: dict[Endpoint, list[Exchange]]
) -> None:
    refused = 0
    for endpoint, exchanges in toured.items():
        for exchange in exchanges:
            asked = exchange.request
            headers = [item for item in asked.headers if item[0] not in (b"host", b"content-length")]
            method, target = asked.start  # type: ignore[misc]  # of a request
            body = asked.body if asked.header(b"content-length") is not None else None
            answer = call(clean.api_port, method.decode(), target, body, headers)
            if endpoint in TOLD_TO_EVERYONE:
                assert answer.status == 200, endpoint
            elif answer.status != 401:  # what is wrong in a request may be said first
                assert exchange.answer.status >= 400, (endpoint, answer)
                assert answer.status == exchange.answer.status, (endpoint, answer)
            else:
                refused += 1
    assert refused > 90


def same(sidecar: RunningSidecar, target: str | bytes, method: str = "GET", headers: Headers | None = None) -> Message:
    """Assert that a call has the same answer through the sidecar's own gateway; return it.

    It is made of hindsight-api before and after, which shows that its answer does not change from call to call.
    """
    inner = [*(headers or []), (b"authorization", f"Bearer {sidecar.tenant_key()}".encode())]
    before, through, after = (
        call(port, method, target, None, sent)
        for port, sent in ((sidecar.api_port, inner), (sidecar.port, headers), (sidecar.api_port, inner))
    )
    assert before.undated() == after.undated()
    assert through.undated() == before.undated()
    return through


@pytest.mark.parametrize(
    "path",
    [
        "/openapi.json",
        "/v1/bank-template-schema",
        "/v1/default/banks",
        "/v1/default/banks?q=Kept%20%C3%BC&limit=1",
        f"/v1/default/banks/{KEPT}/aliases",
        f"/v1/default/banks/{KEPT}/audit-logs",
        f"/v1/default/banks/{KEPT}/config",
        f"/v1/default/banks/{KEPT}/directives",
        f"/v1/default/banks/{KEPT}/documents",
        f"/v1/default/banks/{KEPT}/documents/part-1",
        f"/v1/default/banks/{KEPT}/documents/part-1/chunks",
        f"/v1/default/banks/{KEPT}/documents/part-9",
        f"/v1/default/banks/{KEPT}/entities",
        f"/v1/default/banks/{KEPT}/entities/graph",
        f"/v1/default/banks/{KEPT}/export",
        f"/v1/default/banks/{KEPT}/memories/list",
        f"/v1/default/banks/{KEPT}/memories/list?limit=2&offset=1&q=%C3%89vora&tags=part-1&tags=part-2",
        f"/v1/default/banks/{KEPT}/memories/not-an-id",
        f"/v1/default/banks/{KEPT}/mental-models",
        f"/v1/default/banks/{KEPT}/operations",
        f"/v1/default/banks/{KEPT}/tags",
        f"/v1/default/banks/{KEPT}/webhooks",
        f"/v1/default/chunks/{KEPT}_part-1_0",
        f"/v1/default/banks/{KEPT}/memories/list?",
    ],
)
def test_a_call_that_can_be_repeated_has_the_same_answer_directly(kept: RunningSidecar, path: str) -> None:
    same(kept, path)


def test_the_version_is_hindsights_own_body(clean: RunningSidecar) -> None:
    own, through = (call(port, "GET", "/version") for port in (clean.api_port, clean.port))
    assert (through.status, through.body) == (own.status, own.body)
    assert through.header(b"content-type") == own.header(b"content-type")


def test_health_tells_what_hindsights_own_tells_and_more(clean: RunningSidecar) -> None:
    for path in ("/health", "/health/ready"):
        own, through = (json.loads(call(port, "GET", path).body) for port in (clean.api_port, clean.port))
        assert {name: through[name] for name in ("status", "database")} == {
            name: own[name] for name in ("status", "database")
        }
    own, through = (json.loads(call(port, "GET", "/health/live").body) for port in (clean.api_port, clean.port))
    assert through.pop("uptime_seconds") > 0
    assert through == {name: own[name] for name in ("status", "version")}


@pytest.mark.parametrize(
    "target",
    [
        "/v1/default/banks/a%2Fb/config",
        "/v1/default/banks/a%2fb%2Fc",
        "/v1/default/banks//config",
        "/v1/default/banks/%2e%2e/config",
        "/v1/default/banks/../banks",
        "/v1/./default/banks",
        "/v1/default/banks/x%00/config",
        "/v1/default/banks/x%ff/config",
        "/v1/default/banks/100%/config",
        "/v1/default/banks/%zz/config",
        '/v1/default/banks/"<|>^`{}\\/config',
        "/v1/default/banks/~*'()!$&,;=:@+/config",
        "/v1/default/banks?q=a%20b+c&q=&=x&%26=%3D&limit=1",
        "/v1/default/banks?q=%zz&limit=one",
        "/v1/default/banks?q=http://x/?y#z",
        "http://127.0.0.1/v1/default/banks",
        "/nowhere",
    ],
)
def test_a_path_arrives_as_it_was_written(clean: RunningSidecar, gateway: RecordedGateway, target: str) -> None:
    gateway.call("GET", target).check()
    same(clean, target)


def test_banks_with_odd_names(clean: RunningSidecar, gateway: RecordedGateway) -> None:
    tour = Tour(gateway)
    for number, bank in enumerate(ODD_BANKS):
        path = f"/v1/default/banks/{quote(bank, safe='')}"
        text = f"Memory number {number} is about a lighthouse."
        for method, below, body in (
            ("PUT", "", {}),
            ("PATCH", "/config", CHUNKS),
            ("POST", "/memories", {"items": [{"content": text}], "async": False}),
            ("POST", "/memories/recall", {"query": "lighthouse", "budget": "low"}),
        ):
            answer = tour.ask(method, path + below, body)
        assert [result["text"] for result in answer["results"]] == [text]
    for exchange in itertools.chain(*tour.exchanges.values()):
        exchange.check()
    listed = {item["bank_id"] for item in clean.memory("/banks").json()["banks"]}
    assert set(ODD_BANKS) <= listed


def test_a_compressed_answer_stays_compressed(kept: RunningSidecar, gateway: RecordedGateway) -> None:
    target = f"/v1/default/banks/{KEPT}/memories/list"
    compressed = gateway.call("GET", target, headers=[(b"accept-encoding", b"br;q=0, gzip")])
    compressed.check()
    assert compressed.answer.header(b"content-encoding") == b"gzip"
    plain = same(kept, target)
    assert plain.header(b"content-encoding") is None
    assert gzip.decompress(compressed.answer.body) == plain.body


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("HEAD", "/openapi.json", 200),
        ("HEAD", "/v1/default/banks", 405),
        ("OPTIONS", "/v1/default/banks", 405),
        ("OPTIONS", "*", 404),
        ("TRACE", "/v1/default/banks", 405),
        ("QUERY", "/v1/default/banks", 405),
        ("POST", "/openapi.json", 405),
    ],
)
def test_other_methods_are_hindsights_to_answer(
    clean: RunningSidecar, gateway: RecordedGateway, method: str, target: str, status: int
) -> None:
    exchange = gateway.call(method, target)
    exchange.check()
    assert exchange.answer.status == status
    assert not exchange.answer.body or method != "HEAD"
    same(clean, target, method)


@pytest.mark.parametrize("method", ["OPTIONS", "GET"])
def test_a_page_of_our_own_origin_gets_hindsights_own_answer(
    clean: RunningSidecar, gateway: RecordedGateway, method: str
) -> None:
    asked = [
        (b"origin", b"http://127.0.0.1:8888"),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"content-type"),
    ]
    gateway.call(method, "/v1/default/banks", headers=asked).check()
    same(clean, "/v1/default/banks", method, asked)


def test_a_large_text_comes_and_goes_whole(clean: RunningSidecar, gateway: RecordedGateway) -> None:
    tour = Tour(gateway)
    tour.bank("PUT", "", {}, bank_id="large")
    tour.bank("PATCH", "/config", CHUNKS, bank_id="large")
    text = "".join(f"Line {number} of a long ünbroken story.\n" for number in range(140_000))
    assert len(text.encode()) > 5_000_000
    body = json.dumps({"content": text}, ensure_ascii=False).encode()
    exchange = gateway.call("POST", "/v1/default/banks/large/memories/dry-run-extract", body, JSON)
    exchange.check()
    inner = [*JSON, (b"authorization", f"Bearer {clean.tenant_key()}".encode())]
    direct = call(clean.api_port, "POST", "/v1/default/banks/large/memories/dry-run-extract", body, inner)
    assert exchange.answer.undated() == direct.undated()
    assert exchange.answer.status == 200
    assert len(exchange.answer.body) > 5_000_000


class McpSession:
    """A session of the Model Context Protocol over streamable HTTP."""

    def __init__(self, gateway: RecordedGateway, path: str) -> None:
        self._gateway = gateway
        self._path = path
        self._numbers = itertools.count(1)
        self.headers: Headers = [(b"accept", b"application/json, text/event-stream")]
        self.exchanges: list[Exchange] = []
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        self.server = self.request("initialize", client)
        session = self.exchanges[-1].answer.header(b"mcp-session-id")
        assert session is not None
        self.headers += [(b"mcp-session-id", session), (b"mcp-protocol-version", b"2025-06-18")]
        self.post({"method": "notifications/initialized"})

    def post(self, message: dict[str, Any]) -> Exchange:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        exchange = self._gateway.call("POST", self._path, body, [*self.headers, *JSON])
        self.exchanges.append(exchange)
        return exchange

    def request(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return its result, which comes as a stream of one event."""
        number = next(self._numbers)
        answer = self.post({"id": number, "method": method, "params": parameters or {}}).answer
        assert answer.header(b"content-type") == b"text/event-stream"
        data = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: ")]
        message = json.loads(data[-1])
        assert message["id"] == number
        result: dict[str, Any] = message["result"]
        return result

    def tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        return self.request("tools/call", {"name": name, "arguments": arguments})

    def end(self) -> None:
        self.exchanges.append(self._gateway.call("DELETE", self._path, None, self.headers))
        assert self.exchanges[-1].answer.status == 200


@pytest.mark.parametrize(("path", "bank"), [("/mcp/", {"bank_id": "mcp-many"}), ("/mcp/mcp-one/", {})])
def test_mcp_passes_byte_for_byte(gateway: RecordedGateway, path: str, bank: dict[str, str]) -> None:
    session = McpSession(gateway, path)
    assert session.server["serverInfo"]["name"] == "hindsight-mcp-server"
    assert {"retain", "recall"} <= {tool["name"] for tool in session.request("tools/list")["tools"]}
    session.tool("sync_retain", content="Emil collects antique globes.", **bank)
    found = session.tool("recall", query="What does Emil have at home?", **bank)
    assert "Emil collects antique globes." in json.dumps(found)
    assert session.tool("no-such-tool")["isError"]
    session.end()
    refused = gateway.call("POST", path, b'{"jsonrpc":"2.0","id":9,"method":"ping"}', [*session.headers, *JSON])
    assert refused.answer.status == 404
    for exchange in [*session.exchanges, refused, gateway.call("GET", path)]:
        exchange.check()


def test_mcp_events_come_while_their_stream_is_open(gateway: RecordedGateway) -> None:
    session = McpSession(gateway, "/mcp/")
    with Call(gateway.port, "GET", "/mcp/", headers=session.headers) as stream:
        answer = stream.head()
        recording = gateway.tee.recordings[-1]
        assert answer.header(b"content-type") == b"text/event-stream"
        # hindsight-api says that it is alive every fifteen seconds; so a chunk comes before the stream ends.
        answer.body += stream.chunk()
        assert answer.body.startswith(b": ping")
        session.request("ping")
        session.end()
        while chunk := stream.chunk():
            answer.body += chunk
    Exchange(stream.request, answer, recording).check()
