import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sidecar import __version__, control, control_listener, probes
from sidecar.hosts import AllowedHosts
from sidecar.machine import Phase, State
from sidecar.metrics import Metrics
from sidecar.settings import Address, Settings
from sidecar.status import Status

READY = State(Phase.READY)
BEARER = "the-token"
KEY = "the-key"
OPEN = ["/health", "/readyz", "/startupz", "/livez", "/version", "/metrics"]


@pytest.fixture
def status() -> Status:
    status = Status(clock=lambda: 100.0)
    status.update(state=READY, sampled=100.0, ever_ready=True, postgres={"state": "up"}, versions={"postgres": "18.6"})
    return status


Client = Callable[..., TestClient]


@pytest.fixture
def client(status: Status) -> Client:
    def make(listener: str = control_listener.TCP, **settings: Any) -> TestClient:
        made = Settings(**settings)
        hosts = AllowedHosts(made.control_listen, made.allowed_hosts) if listener == control_listener.TCP else None
        app = control.build(made, status, Metrics(status))
        return TestClient(control_listener.Marked(app, listener, hosts), base_url="http://127.0.0.1:8890")

    return make


def problem(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    return body


# Probes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [READY, State(Phase.STARTING, "postgres")])
@pytest.mark.parametrize("path", probes.PROBES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_are_answered_the_same_before_there_is_an_application(
    method: str, path: str, state: State, client: Client, status: Status
) -> None:
    status.update(state=state, ever_ready=state is READY)

    async def early() -> control_listener.Later:
        return control_listener.Later(status)

    marked = control_listener.Marked(asyncio.run(early()), control_listener.TCP, None)
    before = TestClient(marked, base_url="http://127.0.0.1:8890").request(method, path)
    after = client().request(method, path)
    assert (before.status_code, before.content) == (after.status_code, after.content)
    assert dict(before.headers) == dict(after.headers)
    assert before.status_code == (200 if state is READY or path == probes.LIVE else 503)


def test_what_is_no_probe_waits_for_the_application(status: Status) -> None:
    async def work() -> list[int]:
        later = control_listener.Later(status)
        sent: list[int] = []

        async def send(message: Any) -> None:
            sent.append(message["status"])

        async def app(_: Any, __: Any, send: Any) -> None:
            await send({"status": 204})

        scope = {"type": "http", "method": "GET", "path": "/v1/dumps"}
        calls = [asyncio.create_task(later(scope, None, send)) for _ in range(2)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        calls[0].cancel()  # a client that does not wait takes nothing from the others
        assert sent == []
        later.set(app)
        await asyncio.gather(*calls, return_exceptions=True)
        return sent

    assert asyncio.run(work()) == [204]


@pytest.mark.parametrize("path", ["/health", "/readyz"])
def test_readiness(path: str, client: Client, status: Status) -> None:
    answer = client().get(path)
    assert answer.status_code == 200
    assert answer.json() == status.body()
    assert answer.headers["cache-control"] == "no-store"
    assert "retry-after" not in answer.headers
    status.update(state=State(Phase.DEGRADED, "postgres"))
    answer = client().get(path)
    assert answer.status_code == 503
    assert answer.json()["subject"] == "postgres"
    assert answer.headers["retry-after"] == "2"


def test_startup_is_over_for_good_once_it_was_ready(client: Client, status: Status) -> None:
    status.update(ever_ready=False, state=State(Phase.STARTING, "recovery"))
    assert client().get("/startupz").status_code == 503
    status.update(ever_ready=True, state=State(Phase.DEGRADED, "postgres"))
    assert client().get("/startupz").status_code == 200


@pytest.mark.parametrize("state", [State(Phase.BLOCKED, "no-space"), State(Phase.STARTING, "recovery"), READY])
def test_liveness_holds_in_any_state(state: State, client: Client, status: Status) -> None:
    status.update(state=state, sampled=0.0)
    answer = client().get("/livez")
    assert answer.status_code == 200
    assert answer.json() == {"status": "alive", "state": str(state) if state != READY else "degraded(sampling)"}


def test_version(client: Client) -> None:
    assert client().get("/version").json() == {"sidecar": __version__, "postgres": "18.6"}


def test_metrics(client: Client) -> None:
    answer = client().get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "hindsight_sidecar_ready 1.0" in answer.text


def described(client: Client) -> list[tuple[str, str]]:
    paths = client().get("/openapi.json").json()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def test_what_is_open_is_the_probes_and_nothing_else(client: Client) -> None:
    assert {path for _, path in described(client) if not path.startswith("/v1/")} == set(OPEN)


def test_no_administration_without_the_token(client: Client) -> None:
    administration = [(method, path) for method, path in described(client) if path.startswith("/v1/")]
    assert len(administration) > 10
    for method, path in administration:
        problem(client().request(method, path, json={}), 403)
        problem(client(token=BEARER).request(method, path, json={}), 401)
        wrong = {"Authorization": "Bearer another"}
        problem(client(token=BEARER).request(method, path, json={}, headers=wrong), 401)


# Who may -------------------------------------------------------------------------------------------------------


def test_without_a_token_administration_is_off_over_tcp(client: Client) -> None:
    body = problem(client().get("/v1/status"), 403)
    assert "HINDSIGHT_SIDECAR_TOKEN" in body["detail"]
    problem(client().get("/v1/status", headers={"authorization": f"Bearer {BEARER}"}), 403)


@pytest.mark.parametrize(
    "headers",
    [[], [("authorization", "Bearer wrong")], [("authorization", BEARER)], [("authorization", "Bearer ")],
     [("authorization", f"bearer{BEARER}")], [("authorization", f"Bearer {BEARER}")] * 2, [("x-token", BEARER)],
     [("authorization", "Bearer caf\u00e9".encode("latin-1"))]],
)  # fmt: skip
def test_a_missing_or_wrong_token_is_refused(headers: Any, client: Client) -> None:
    answer = client(token=BEARER).get("/v1/status", headers=headers)
    assert BEARER not in problem(answer, 401)["detail"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_right_token_may(client: Client) -> None:
    answer = client(token=BEARER).get("/v1/status", headers={"authorization": f"Bearer {BEARER}"})
    assert answer.status_code == 200
    assert set(answer.json()) == {"health", "settings"}


@pytest.mark.parametrize("settings", [{}, {"token": BEARER}])
def test_whoever_opens_the_socket_may(settings: dict[str, str], client: Client) -> None:
    assert client(control_listener.SOCKET, **settings).get("/v1/status").status_code == 200


def test_probes_need_no_token(client: Client) -> None:
    for path in OPEN:
        assert client(token=BEARER).get(path).status_code == 200


def test_no_header_imitates_the_socket(client: Client) -> None:
    headers = {"sidecar.listener": "socket", "x-forwarded-for": "127.0.0.1", "x-listener": "socket"}
    problem(client(token=BEARER).get("/v1/status", headers=headers), 401)


@pytest.mark.parametrize("path", ["/health", "/v1/status", "/livez"])
def test_a_foreign_host_is_refused_over_tcp(path: str, client: Client) -> None:
    problem(client(token=BEARER).get(path, headers={"host": "evil.example"}), 421)
    assert client(allowed_hosts=("pod.local",)).get("/health", headers={"host": "pod.local:1"}).status_code == 200
    assert client(control_listener.SOCKET).get(path, headers={"host": "anything"}).status_code == 200


# Answers -------------------------------------------------------------------------------------------------------


def test_the_settings_are_shown_by_variable_and_without_secrets(client: Client, tmp_path: Path) -> None:
    text = client(
        control_listener.SOCKET, token=BEARER, api_key=KEY, PGDATA=tmp_path / "pg", allowed_hosts=("a", "b")
    ).get("/v1/status")
    assert BEARER not in text.text
    assert KEY not in text.text
    shown = text.json()["settings"]
    assert shown["HINDSIGHT_SIDECAR_TOKEN"] == shown["HINDSIGHT_SIDECAR_API_KEY"]
    assert shown["HINDSIGHT_SIDECAR_API_KEY"] == "**********"
    assert shown["HINDSIGHT_SIDECAR_LISTEN"] == "127.0.0.1:8888"
    assert shown["HINDSIGHT_SIDECAR_METRICS_LISTEN"] is None
    assert shown["HINDSIGHT_SIDECAR_ALLOWED_HOSTS"] == ["a", "b"]
    assert shown["PGDATA"] == str(tmp_path / "pg")


def test_an_unset_secret_is_shown_as_unset(client: Client) -> None:
    shown = client(control_listener.SOCKET).get("/v1/status").json()["settings"]
    assert shown["HINDSIGHT_SIDECAR_TOKEN"] is None


def test_what_is_not_there_is_a_problem(client: Client) -> None:
    problem(client().get("/nothing"), 404)
    problem(client().get("/docs"), 404)
    answer = client().post("/health")
    problem(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD"


def test_every_method_of_a_path_is_told_to_whoever_tries_another(client: Client) -> None:
    for path, expected in (
        ("/v1/dumps", "GET, HEAD, POST"),
        ("/v1/restores", "POST, PUT"),
        ("/v1/dumps/x", "DELETE, GET, HEAD"),
    ):
        answer = client(control_listener.SOCKET).patch(path)
        problem(answer, 405)
        assert answer.headers["allow"] == expected


def test_the_listener_for_metrics_serves_them_and_nothing_else(status: Status) -> None:
    client = scraper(status, "0.0.0.0:9187", "http://10.0.0.7:9187")
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert "hindsight_sidecar_ready 1.0" in answer.text
    head = client.head("/metrics")
    assert head.status_code == 200
    assert head.text == ""
    for path in ("/health", "/v1/status", "/"):
        problem(client.get(path), 404)
        assert client.head(path).text == ""


def scraper(status: Status, listen: str, url: str) -> TestClient:
    host, port = listen.split(":")
    hosts = AllowedHosts(Address(host, int(port)), ("metrics.internal",))
    app = control_listener.Marked(control_listener.metrics_app(Metrics(status)), control_listener.SCRAPER, hosts)
    return TestClient(app, base_url=url)


def test_on_loopback_the_listener_for_metrics_is_closed_to_web_pages(status: Status) -> None:
    client = scraper(status, "127.0.0.1:9187", "http://127.0.0.1:9187")
    for path in ("/metrics", "/nothing"):
        problem(client.get(path, headers={"host": "evil.example:9187"}), 421)
        problem(client.get(path, headers={"origin": "http://evil.example"}), 403)
        problem(client.get(path, headers={"sec-fetch-site": "cross-site"}), 403)
    assert client.head("/metrics", headers={"host": "evil.example"}).status_code == 421
    for host in ("localhost:9187", "metrics.internal:9187"):
        assert client.get("/metrics", headers={"host": host}).status_code == 200
    # Elsewhere a scraper names it as it likes.
    beyond = scraper(status, "0.0.0.0:9187", "http://10.0.0.7:9187")
    assert beyond.get("/metrics", headers={"host": "any.example"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"database":"\\udcff"}',
        b'{"\\ud800":1}',
        b'{"' + b"x" * 10_000 + b'":1}',
        b'"\\udcff"',
        b'{"database":"' + b"x" * 10_000 + b'\\udcff"}',
        b"[" * 20_000,
    ],
)
def test_a_body_that_no_answer_could_repeat_is_refused_all_the_same(body: bytes, client: Client) -> None:
    json = {"content-type": "application/json"}
    for path in ("/v1/rollback", "/v1/adoption", "/v1/restores", "/v1/migrations", "/v1/dumps"):
        answer = client(control_listener.SOCKET).post(path, content=body, headers=json)
        assert len(problem(answer, 400)["detail"]) < 1000
