"""What a program in the pod, and a page in its browser, get of a sidecar that runs; and where its secrets are not."""

import contextlib
import json
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import made
import pytest
from administrator import archive_of, ask, finished
from harness import Answer, RunningSidecar, call, reachable_directory, wait_for

from sidecar import gateway, probes
from sidecar.settings import secret_names

OPEN_PATHS = {*probes.PROBES, "/version", "/metrics"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
PAGE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
SIMPLE = {"content-type": "text/plain"}  # what a page may send without asking first
DESCRIPTORS = 256
# Every secret that the sidecar takes, and some of those that it passes on.
OURS = {name: f"sesame-{name.removeprefix('HINDSIGHT_SIDECAR_').lower().replace('_', '-')}" for name in secret_names()}
THEIRS = {
    name: f"sesame-{name.lower().replace('_', '-')}"
    for name in (
        "HINDSIGHT_API_LLM_API_KEY",
        "HINDSIGHT_API_RETAIN_LLM_API_KEY",
        "HINDSIGHT_API_WEBHOOK_SECRET",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
    )
}
# What runs as hindsight-api, and the script that becomes it. Its name is in many a path: of its environment, for one.
HINDSIGHT_API = ("hindsight-api", "30-hindsight-api")
EMBEDS = "upstream_embed.py"
NOBODYS = {"SOME_OTHER_PASSWORD": "sesame-of-another-program"}
TOKEN, KEY = OURS["HINDSIGHT_SIDECAR_TOKEN"], OURS["HINDSIGHT_SIDECAR_API_KEY"]


@dataclass
class Watch:
    """Looks at every process that a sidecar starts, all the time.

    Not at those that hindsight-api starts (`uname`, for what its libraries tell of the machine): they have what it has.

    Attributes:
        seen: names of the processes that were looked at.
        found: who had which secret, and where.
        keys: those that hindsight-api was seen to ask for, each with the processes that have it.

    """

    sidecar: RunningSidecar
    seen: set[str] = field(default_factory=set)
    found: set[tuple[str, str, str]] = field(default_factory=set)
    keys: dict[str, set[int]] = field(default_factory=dict)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._end.wait(0.01):
            self._look()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run, name="watch")
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _look(self) -> None:
        assert self.sidecar.process is not None
        own = read(self.sidecar.process.pid, "cmdline")
        for pid in descendants(self.sidecar.process.pid, childless=is_hindsight_api):
            words, environment = read(pid, "cmdline"), read(pid, "environ")
            if not words or words == own:  # a zombie, or what is the sidecar's own image still
                continue
            name = what_runs(words)
            is_api = name in HINDSIGHT_API
            self.seen.add(name)
            if is_api:
                for key in re.findall(rb"(?:^|\0)HINDSIGHT_API_TENANT_API_KEY=([^\0]+)", environment):
                    self.keys.setdefault(key.decode(), set()).add(pid)
            for key, holders in self.keys.items():
                if key.encode() in words or (key.encode() in environment and pid not in holders):
                    self.found.add((name, key, "cmdline or environ"))
            for secret in (OURS | THEIRS | NOBODYS).values():
                if secret.encode() in words:
                    self.found.add((name, secret, "cmdline"))
                if secret.encode() in environment and not (is_api and secret in THEIRS.values()):
                    self.found.add((name, secret, "environ"))


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it ended


def what_runs(words: bytes) -> str:
    """Return the name of what a command line runs: a script where it is one of these, else the program."""
    names = [Path(os.fsdecode(word)).name for word in words.split(b"\0")]
    return next((name for name in names if name in (*HINDSIGHT_API, EMBEDS)), names[0])


def is_hindsight_api(pid: int) -> bool:
    return what_runs(read(pid, "cmdline")) in HINDSIGHT_API


def descendants(pid: int, childless: Callable[[int], bool] = lambda _: False) -> list[int]:
    """Return every process that a process started, and what those started that are not to be taken as `childless`."""
    try:
        children = [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in read_children(task)]
    except OSError:
        return []
    grown = [child for child in children if not childless(child)]
    return [*children, *(one for child in grown for one in descendants(child, childless))]


def read_children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Return the TCP addresses that these processes listen on."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if found := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                        inodes.add(found[1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in read_lines(Path("/proc/net", name))[1:]]
    addresses = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return {(host, int(port, 16)) for host, port in addresses}


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@dataclass
class Guarded:
    """A sidecar with every secret, which says all that it can, and has few descriptors."""

    sidecar: RunningSidecar
    watch: Watch


@pytest.fixture(scope="module")
def guarded(model_dir: Path) -> Iterator[Guarded]:
    with reachable_directory() as directory:
        home = directory / "0"
        home.mkdir()
        home.chmod(0o777)
        sidecar = RunningSidecar(
            home,
            made.api_venv(),
            model_dir,
            HINDSIGHT_SIDECAR_LOG_LEVEL="debug",
            HINDSIGHT_SIDECAR_CHILD_LOG_LEVEL="debug",
            HINDSIGHT_API_LOG_LEVEL="debug",
            HINDSIGHT_API_LLM_PROVIDER="openai",
            HINDSIGHT_API_LLM_BASE_URL="http://127.0.0.1:1/v1",  # nobody is there, and that is told in the log
            **OURS,
            **THEIRS,
            **NOBODYS,
        )
        watch = Watch(sidecar)
        try:
            sidecar.start(["/usr/bin/prlimit", f"--nofile={DESCRIPTORS}"])
            with watch.looking():
                yield Guarded(sidecar.wait_ready(), watch)
        finally:
            sidecar.end()


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return method and path of everything that a description has, each path with a value for each of its parameters."""
    found = [
        (method.upper(), re.sub(r"\{[^}]+\}", "x", path))
        for path, methods in document["paths"].items()
        for method in methods
    ]
    assert found
    return found


def once_ready(sidecar: RunningSidecar, port: int, method: str, path: str, **headers: str) -> Answer:
    """Make a call, and again where the machine was too busy for the sidecar to be sure of itself."""
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    answer = call(port, path, method, body, headers)
    if answer.status == 503:
        sidecar.wait_ready()
        answer = call(port, path, method, body, headers)
    return answer


def bare(port: int, request: bytes) -> int:
    """Send a request as it is, and return the status of its answer."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        client.sendall(request)
        return int(client.recv(4096).split()[1])


# Programs of the pod --------------------------------------------------------------------------------------------


def test_without_a_token_the_control_api_is_health_version_and_metrics(ready_sidecar: RunningSidecar) -> None:
    document = call(ready_sidecar.control_port, "/openapi.json").json()
    described = operations(document)
    assert {path for _, path in described if not path.startswith("/v1/")} == OPEN_PATHS
    assert len([path for _, path in described if path.startswith("/v1/")]) > 15
    for path in {path for _, path in described} | {"/v1/", "/v1/nothing", "/docs", "/redoc", "/", "/nothing"}:
        for method in METHODS:
            answer = once_ready(ready_sidecar, ready_sidecar.control_port, method, path, authorization="Bearer guessed")
            if path.startswith("/v1/"):
                assert answer.status == 403, (method, path)
            elif path in OPEN_PATHS and method in ("GET", "HEAD"):
                assert answer.status == 200, (method, path)
            else:
                assert answer.status in (404, 405), (method, path)
    # By another spelling it is no administration either.
    for path in ("//v1/status", "/V1/status", "/%76%31/status", "/./v1/status", "/health/../v1/status", "/v1//status"):
        assert bare(ready_sidecar.control_port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()) in (
            403,
            404,
        )


def test_with_one_it_is_the_same_for_whoever_has_not_got_it(guarded: Guarded) -> None:
    port = guarded.sidecar.control_port
    for method, path in operations(call(port, "/openapi.json").json()):
        for headers in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Bearer {KEY}"}):
            answer = once_ready(guarded.sidecar, port, method, path, **headers)
            assert answer.status in ((401, 429) if path.startswith("/v1/") else (200,)), (method, path, answer.body)
            assert answer.status != 429 or headers
    assert call(port, "/v1/status", headers={"authorization": f"Bearer {TOKEN}"}).status == 200


def test_the_gateway_has_the_memory_api_and_nothing_of_the_control_api(ready_sidecar: RunningSidecar) -> None:
    memory = {
        path for path in call(ready_sidecar.port, "/openapi.json").json()["paths"] if path not in gateway._OPEN_PATHS
    }
    administration = set(call(ready_sidecar.control_port, "/openapi.json").json()["paths"]) - OPEN_PATHS
    assert memory
    assert not memory & administration
    for method in ("GET", "POST", "PUT", "DELETE"):
        for path in administration:
            answer = once_ready(ready_sidecar, ready_sidecar.port, method, path)
            assert answer.status in (404, 405), (method, path, answer.body)


def test_with_a_key_nothing_but_probes_passes_without_it(guarded: Guarded) -> None:
    port = guarded.sidecar.port
    document = call(port, "/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    others = [("GET", path) for path in ("/", "/docs", "/openapi.json", "/metrics", "/mcp/", "/mcp/x/", "/nowhere")]
    described = operations(document)
    assert len(described) > 50
    passed = set()
    for method, path in [*described, *others, *((method, "/health") for method in METHODS)]:
        answer = once_ready(guarded.sidecar, port, method, path)
        if answer.status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
        else:
            assert answer.status == 200, (method, path, answer.body)
            passed.add((method, path))
    assert {path for _, path in passed} <= gateway._OPEN_PATHS
    assert {method for method, _ in passed} == {"GET", "HEAD"}
    for path in ("//health", "/health/", "/HEALTH", "/health%2f..%2fv1/default/banks", "http://localhost/health"):
        assert bare(port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()) == 401, path
    assert (
        bare(port, f"GET /v1/default/banks HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()) == 421
    )
    assert call(port, "/v1/default/banks", headers={"authorization": f"Bearer {KEY}"}).status == 200


def test_the_key_cannot_be_walked_around(guarded: Guarded) -> None:
    port = guarded.sidecar.api_port
    for headers in ({}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {TOKEN}"}):
        answered = {
            (method, path)
            for method, path in operations(call(port, "/openapi.json").json())
            if call(port, path, method, b"{}" if method in ("POST", "PUT", "PATCH") else None, headers).status < 400
        }
        told = {*gateway._OPEN_PATHS, "/metrics", "/v1/bank-template-schema"} - {"/v1/version"}  # it is not described
        assert answered == {("GET", path) for path in told}
        # With an LLM it is asked for nobody.
        assert call(port, "/v1/default/banks/x/reflect", "POST", {"query": "Who?"}, headers).status == 401


def test_nothing_listens_but_the_three_addresses_on_loopback(guarded: Guarded) -> None:
    sidecar = guarded.sidecar
    assert sidecar.process is not None
    found = listening([sidecar.process.pid, *descendants(sidecar.process.pid)])
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert found == {(loopback, port) for port in (sidecar.port, sidecar.control_port, sidecar.api_port)}


# Pages in a browser ---------------------------------------------------------------------------------------------


def test_a_page_of_another_origin_gets_nothing_of_either_address(ready_sidecar: RunningSidecar) -> None:
    for port in (ready_sidecar.port, ready_sidecar.control_port):
        for method, path in operations(call(port, "/openapi.json").json()):
            body = b"{}" if method in ("POST", "PUT", "PATCH") else None
            for used in (method, "OPTIONS"):
                answer = call(port, path, used, body if used == method else None, PAGE | SIMPLE)
                assert answer.status == 403, (used, path)
                assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
            for name, value in PAGE.items():  # older browsers send one of them, or the request is one that has one
                assert call(port, path, method, body, {name: value}).status == 403, (method, path, name)
            assert call(port, path, method, body, {"host": f"evil.example:{port}"}).status == 421, (method, path)
    assert ready_sidecar.memory("/banks").status == 200


# Secrets --------------------------------------------------------------------------------------------------------


def secrets_in(text: str | bytes, keys: Iterable[str]) -> list[str]:
    """Return the secrets that are in a text, and those of these keys."""
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in (*(OURS | THEIRS | NOBODYS).values(), *keys) if secret.encode() in data]


def _content(path: Path) -> bytes:
    """Return what is in a file; nothing where Postgres has removed it since it was listed."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_secrets_are_nowhere_but_where_they_are_needed(guarded: Guarded) -> None:
    sidecar = guarded.sidecar
    told = partial(secrets_in, keys=guarded.watch.keys)
    authorized = {"authorization": f"Bearer {KEY}"}
    items = {"items": [{"content": "Ben repairs church clocks at night."}], "async": False}
    stored = sidecar.memory("/banks/clocks/memories", "POST", items, headers=authorized, timeout=120)
    assert stored.status >= 500, "no LLM is there"
    as_it_is = {"retain_extraction_mode": "chunks", "enable_observations": False}
    assert sidecar.memory("/banks/chimes", "PUT", as_it_is, headers=authorized).status == 200
    stored = sidecar.memory("/banks/chimes/memories", "POST", items, headers=authorized, timeout=120)
    assert stored.status == 200, stored.body  # and so the restore has something to embed
    archive = archive_of(sidecar)
    restored = finished(sidecar, ask(sidecar, "PUT", "/v1/restores", archive))
    assert restored["outcome"] == "done", restored
    assert restored["report"]["agreement"]["memories"], restored
    source = {"from": "postgresql://anna@127.0.0.1:1/memories", "password": NOBODYS["SOME_OTHER_PASSWORD"]}
    assert finished(sidecar, ask(sidecar, "POST", "/v1/migrations", source))["outcome"] == "failed"
    mistaken = source | {"from": f"postgresql://anna:{source['password']}@[::1:x/memories"}
    refused = ask(sidecar, "POST", "/v1/migrations", mistaken)
    assert refused.status == 422
    assert told(refused.body) == []
    assert told(ask(sidecar, "POST", "/v1/migrations", source | {"password": [source["password"]]}).body) == []

    # answers
    for path in (*OPEN_PATHS, "/openapi.json", "/v1/status", "/v1/dumps", "/v1/databases", "/v1/operations"):
        answer = ask(sidecar, "GET", path)
        assert answer.status == 200
        assert told(answer.body) == [], path
    assert told(archive) == []
    # commands
    for command in (["status"], ["status", "--json"], ["operations"], ["dumps"]):
        done = sidecar.command(*command)
        assert done.returncode == 0, done
        assert told(done.stdout + done.stderr) == []
    # the log, of the least level
    assert len(sidecar.events()) > 50
    assert told(sidecar.log_text()) == []
    # files
    files = [path for top in (sidecar.run_dir, sidecar.volume) for path in top.rglob("*") if path.is_file()]
    assert [(path, secrets) for path in files if (secrets := told(_content(path)))] == []
    # processes, those of Postgres and its programs among them
    names = {name.partition(":")[0] for name in guarded.watch.seen}  # Postgres' own tell what they do there
    assert {"hindsight-api", "postgres", "initdb", "pg_dump", "pg_restore", EMBEDS} <= names
    assert guarded.watch.found == set()
    # hindsight-api's own key: another one since the restore, and each in one process
    assert sidecar.tenant_key() in guarded.watch.keys
    assert len(guarded.watch.keys) > 1
    assert [pids for pids in guarded.watch.keys.values() if len(pids) != 1] == []


def test_what_the_sidecar_writes_is_its_own_alone(guarded: Guarded) -> None:
    sidecar = guarded.sidecar
    archive_of(sidecar)
    dumps = list((sidecar.volume / "dumps").rglob("*"))
    assert {path.name for path in dumps} > {"memory.dump", "manifest.json", "archive.sha256"}
    for path in [sidecar.run_dir, sidecar.pgdata, sidecar.volume / "dumps", *dumps]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert stat.S_IMODE((sidecar.run_dir / "control.sock").stat().st_mode) == 0o600


# Too much of it -------------------------------------------------------------------------------------------------


def test_any_number_of_silent_connections_keeps_nobody_out(guarded: Guarded) -> None:
    sidecar = guarded.sidecar
    with contextlib.ExitStack() as stack:
        for port in (sidecar.port, sidecar.control_port):
            for number in range(DESCRIPTORS * 2):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                with contextlib.suppress(ConnectionError):
                    client.sendall(
                        [b"", b"GET /hea", b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"][
                            number % 3
                        ]
                    )
        for port, path in (
            (sidecar.port, "/health"),
            (sidecar.control_port, "/livez"),
            (sidecar.control_port, "/readyz"),
        ):
            assert call(port, path, timeout=5).status == 200
        assert ask(sidecar, "GET", "/v1/status").status == 200
        assert call(sidecar.port, "/v1/default/banks", headers={"authorization": f"Bearer {KEY}"}).status == 200
    assert not [event for event in sidecar.events() if "Too many open files" in json.dumps(event)]
    wait_for(lambda: sidecar.health_status() == 200, 5, "ready")


# Names from outside ---------------------------------------------------------------------------------------------

HOSTILE = [
    "..", "../../pgdata", "%2e%2e%2fpgdata", "..%2f..%2f..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "%00", "a%00b", "%0a%0dX-Y:%20z",
    "%1b%5b2J", "%c2%9b2J", "%7f", "%ff%fe", "%ed%a0%80", "x" * 10_000, "20260101T000000Z-%2e%2e", "20260101T000000Z-ab%2f..", ".incoming-x", "*", "~",
    "%27%3b%20DROP%20DATABASE%20hindsight%3b--", "hindsight", "postgres", "template1", "pgdata", "pgdata.making",
]  # fmt: skip
NAMED = [
    ("GET", "/v1/dumps/"), ("DELETE", "/v1/dumps/"), ("DELETE", "/v1/restores/"), ("DELETE", "/v1/databases/"),
    ("GET", "/v1/operations/"), ("DELETE", "/v1/operations/"),
]  # fmt: skip
BODIES = [
    ("/v1/restores", {"dump": "%"}), ("/v1/restores", {"upload": "%"}), ("/v1/rollback", {"database": "%"}),
    ("/v1/adoption", {"database": "%"}), ("/v1/migrations", {"from": "%"}), ("/v1/migrations", {"from": "postgresql://a@%/b"}),
    ("/v1/dumps", {"compression": "%"}),
]  # fmt: skip
RULES_TERMINALS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Of what hindsight-api leaves in a question, and not longer than what it logs of one. 1.1.0 takes ESC and BEL out.
FORGED = "lamp\r12:00 sidecar state=ready\x9b2J\x9b?1049h"


def test_no_name_from_outside_leads_anywhere(guarded: Guarded) -> None:
    sidecar = guarded.sidecar
    archive_of(sidecar)
    before = {path for path in sidecar.volume.rglob("*") if sidecar.pgdata not in path.parents}
    for method, path in NAMED:
        for name in HOSTILE:
            answer = ask(sidecar, method, path + name)
            assert answer.status in (404, 405, 422), (method, path, name)
            assert len(answer.body) < 1000
    for path, body in BODIES:
        for name in (unquote(one, errors="surrogateescape") for one in HOSTILE):
            sent = {key: value.replace("%", name) for key, value in body.items()}
            answer = ask(sidecar, "POST", path, sent)
            if answer.status == 202:  # a host of that name is looked for, and not found
                assert finished(sidecar, answer)["outcome"] == "failed", sent
            else:
                assert answer.status in (400, 404, 422), sent
            assert len(answer.body) < 2000
    for value in (
        "bytes=0-" + "9" * 5000,
        "bytes=" + "9" * 5000 + "-",
        "bytes=-" + "9" * 5000,
        "bytes=0-1,2-3",
        "x" * 9000,
    ):
        [*_, last] = ask(sidecar, "GET", "/v1/dumps").json()["dumps"]
        assert ask(sidecar, "GET", f"/v1/dumps/{last['id']}", Range=value).status in (200, 206, 416), value[:30]
    assert {path for path in sidecar.volume.rglob("*") if sidecar.pgdata not in path.parents} == before
    assert all(json.loads(line) for line in sidecar.log_text().splitlines() if line.startswith("{"))
    assert not [event for event in sidecar.events() if "unexpected" in event["event"]]
    # Words of a memory call that hindsight-api logs are passed on as what they are, and do nothing to whoever reads them.
    authorized = {"authorization": f"Bearer {KEY}"}
    assert sidecar.memory("/banks/words", "PUT", {}, headers=authorized).status == 200
    asked = sidecar.memory("/banks/words/memories/recall", "POST", {"query": FORGED}, headers=authorized)
    assert asked.status == 200, asked.body
    wait_for(lambda: [event for event in sidecar.events() if FORGED in event["event"]], 20, "the question in the log")
    assert RULES_TERMINALS.findall(sidecar.log_text()) == []
    assert sidecar.health_status() == 200
