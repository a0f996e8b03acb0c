"""Containers of the image under test: run as strictly as a cluster may run them, entered, asked, and removed again."""

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness import wait_for

from bake.image.engine import Engine, NoEngineError, find

UID, GID = 12345, 54321  # nobody's: neither has an entry in the image
VOLUME = "/opt/hindsight"
GATEWAY, CONTROL = "http://127.0.0.1:8888", "http://127.0.0.1:8890"
PYTHON = "/opt/sidecar/bin/python"
READY_WITHIN = 120.0  # seconds; some 13 on an idle machine with two cores
BANK = "kept"
KEPT = (  # what a volume `with_memories` has
    "The lighthouse keeper wound the clock before the storm.",
    "Our beekeeper moved her hives beside the orchard.",
    "The glassblower keeps a kiln behind the bakery.",
)

# A JSON list of every process but the one that makes it.
PROCESSES = """
import json, os, pathlib
found = []
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) != os.getpid():
        try:
            stat = (entry / "stat").read_text()
            state, parent = stat[stat.rindex(")") + 2:].split()[:2]
            words = (entry / "cmdline").read_bytes().decode().rstrip("\\0").split("\\0")
            uid = entry.stat().st_uid
        except OSError:
            continue
        found.append({"pid": int(entry.name), "parent": int(parent), "state": state, "uid": uid, "words": words})
print(json.dumps(found))
"""

# A JSON list of those texts that do not come back when they are asked for.
MISSED = """
import http.client, json, sys
missed = []
for text in json.loads(sys.argv[2]):
    connection = http.client.HTTPConnection("127.0.0.1", 8888, timeout=60)
    body = json.dumps({"query": text, "budget": "low"})
    connection.request("POST", sys.argv[1], body, {"content-type": "application/json"})
    if text not in [found["text"] for found in json.loads(connection.getresponse().read())["results"]]:
        missed.append(text)
    connection.close()
print(json.dumps(missed))
"""
_AT_A_TIME = 200  # texts, as an argument's length has a limit

# Four lanes store one text after another, and print each once it is acknowledged.
_WRITTEN = "went out with the night train."
WRITER = """
import http.client, json, os, sys, threading
def lane(name):
    number = 0
    while True:
        number += 1
        text = f"{sys.argv[1]}, lane {name}: letter {number} went out with the night train."
        connection = http.client.HTTPConnection("127.0.0.1", 8888, timeout=60)
        body = json.dumps({"items": [{"content": text}], "async": False})
        connection.request("POST", sys.argv[2], body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status == 200:
            os.write(1, (text + "\\n").encode())
for name in "abcd":
    threading.Thread(target=lane, args=(name,)).start()
"""


@functools.cache
def look_for_engine(image: str) -> Engine | NoEngineError:
    """Return what runs containers of the image, or why nothing does."""
    wanted = os.environ.get("ENGINE") or None
    try:
        found = find(image, wanted)
        if not found.runs_containers and wanted is None:
            found = find(image, "docker")  # what comes after buildah
    except NoEngineError as error:
        return error
    return (
        found if found.runs_containers else NoEngineError(f"{found.name} only builds images; install podman or docker")
    )


@dataclass(frozen=True)
class Reply:
    """What a call from inside the container was answered."""

    status: int
    body: str

    def json(self) -> Any:
        return json.loads(self.body)


class Session:
    """A command that goes on inside a container; what it says is kept in a file of the host's."""

    def __init__(self, argv: list[str], environ: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT
        )

    def tell(self, text: str) -> None:
        """Write to its standard input, which stays open."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def lines(self) -> list[str]:
        """Return the whole lines it wrote so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").split("\n")[:-1]

    def wait_line(self, line: str, within: float = 30.0) -> None:
        wait_for(lambda: line in self.lines(), within, f"the line {line!r} among {self.lines()[-5:]}")

    def wait_end(self, within: float = 30.0) -> int:
        return self._process.wait(within)

    def end(self) -> None:
        """End the engine's client; the command itself ends with its container at the latest."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._output.close()


def acknowledged(writer: Session) -> list[str]:
    """Return what a writer stored so far; it says other things where nobody answers it any more."""
    return [line for line in writer.lines() if line.endswith(_WRITTEN)]


class Image:
    """The image under test, and the engine that runs it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name

    def strict(self) -> list[str]:
        """Return the options of the standard run: no network, no writable root, no rights, a user without an entry."""
        # Podman would make /var/tmp writable, and write an entry for the user: Kubernetes does neither.
        podman = ["--read-only-tmpfs=false", "--passwd=false"] if self.engine.name == "podman" else []
        return ["--network=none", "--read-only", *podman, *_no_rights(), f"--user={UID}:{GID}", *_scratch()]

    def as_root(self) -> list[str]:
        """Return the options of the standard run, but as root with the engine's usual rights."""
        podman = ["--read-only-tmpfs=false"] if self.engine.name == "podman" else []
        return ["--network=none", "--read-only", *podman, "--user=0:0", *_scratch()]

    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.checked("inspect", "--type=image", self.name))[0]
        return found

    def checked(self, *arguments: str) -> str:
        """Run one of the engine's commands, and return what it printed."""
        done = self.engine.call(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-3000:]}"
        return done.stdout

    def run(self, *command: str, options: list[str] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container of its own, which is removed."""
        return self.engine.call("run", "--rm", *(self.strict() if options is None else options), self.name, *command)

    def says(self, *command: str, options: list[str] | None = None) -> str:
        """Run a command likewise, and return what it printed."""
        done = self.run(*command, options=options)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def python(self, script: str, options: list[str] | None = None) -> Any:
        """Run a script in a container of its own, and return the JSON it prints."""
        return json.loads(self.says(PYTHON, "-I", "-c", script, options=options))

    def file(self, path: str) -> str | None:
        """Return the text of a file of the image's own, None where there is none; an engine may lay its own over it."""
        container = self.checked("create", self.name).strip()
        try:
            with tempfile.TemporaryDirectory() as directory:
                copy = Path(directory, "copy")
                found = self.engine.call("cp", f"{container}:{path}", str(copy)).returncode == 0
                return copy.read_text(encoding="utf-8").strip() if found else None
        finally:
            self.checked("rm", container)

    def start(self, *options: str) -> "Container":
        """Start the sidecar in a container, and return at once. Whoever asks has to remove it."""
        return Container(self, self.checked("run", "--detach", *options, self.name).strip())


def _no_rights() -> list[str]:
    return ["--cap-drop=ALL", "--security-opt=no-new-privileges"]


def _scratch() -> list[str]:
    return ["--tmpfs=/run", "--tmpfs=/tmp"]


class Volume:
    """What containers have at /opt/hindsight: a directory of this machine, or a volume of the engine's."""

    def __init__(self, image: Image, source: str) -> None:
        self._image = image
        self.source = source

    @property
    def option(self) -> str:
        """The option that mounts it where it belongs."""
        return f"--volume={self.source}:{VOLUME}"

    def root(self, script: str, *options: str) -> str:
        """Do something to it as the node's root would, with a shell in the volume."""
        mount = f"--volume={self.source}:/volume"
        options = ("--network=none", "--user=0:0", "--workdir=/volume", mount, *options)
        return self._image.says("sh", "-euc", script, options=list(options))

    def listing(self, path: str = ".") -> list[str]:
        """Return name, type, mode, owner, size, and both times of everything at and below a path."""
        return sorted(self.root(f"find {path} -printf '%p %y %m %U:%G %s %T@ %C@\\n'").splitlines())

    def cluster_state(self) -> str:
        """Return what the cluster says of its end, as the sidecar's user reads it."""
        options = [*self._image.strict(), self.option]
        told = self._image.says("pg_controldata", f"{VOLUME}/pgdata", options=options)
        return next(
            line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("Database cluster st")
        )

    def fill_from(self, other: "Volume") -> None:
        """Copy another volume's whole content."""
        self.root("cp -a /other/. .", f"--volume={other.source}:/other")


@contextlib.contextmanager
def directory_volume(image: Image) -> Iterator[Volume]:
    """Have a directory that any user may write to, as a volume."""
    path = Path(tempfile.mkdtemp(prefix="hs-", dir="/var/tmp"))
    path.chmod(0o777)
    volume = Volume(image, str(path))
    try:
        yield volume
    finally:
        volume.root("find . -mindepth 1 -delete")  # without root's rights here, others' files could not be removed
        shutil.rmtree(path)


@contextlib.contextmanager
def named_volume(image: Image) -> Iterator[Volume]:
    """Have a fresh volume of the engine's."""
    name = f"hindsight-test-{secrets.token_hex(4)}"
    image.checked("volume", "create", name)
    try:
        yield Volume(image, name)
    finally:
        image.checked("volume", "rm", name)


class Container:
    """A running container of the image."""

    def __init__(self, image: Image, identity: str) -> None:
        self.id = identity
        self._image = image
        self._engine = image.engine
        self._sessions: list[Session] = []

    def exec(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        """Run a command inside, as a probe or an operator does."""
        return self._engine.call("exec", self.id, *argv)

    def says(self, *argv: str) -> str:
        """Run a command inside, and return what it printed."""
        done = self.exec(*argv)
        assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def session(self, *argv: str) -> Session:
        """Start a command inside that goes on."""
        session = Session([self._engine.program, "exec", "-i", self.id, *argv], self._engine.environ())
        self._sessions.append(session)
        return session

    def writer(self, bank: str, name: str) -> Session:
        """Store one text after another meanwhile, each of which begins with a name; see `acknowledged`."""
        return self.session(PYTHON, "-c", WRITER, name, f"/v1/default/banks/{bank}/memories")

    def check_each_is_there_once(self, bank: str, texts: list[str]) -> None:
        """Check that texts that were acknowledged are all that they have to be, and that the last one comes back."""
        there = Counter(self.listed(bank))
        assert [text for text in texts if there[text] != 1] == []
        assert [text for text, count in there.items() if count > 1] == [], "a memory is there twice"
        assert texts[-1] in self.recall(bank, texts[-1])

    def missed(self, bank: str, texts: list[str]) -> list[str]:
        """Return those of some texts that do not come back when they are asked for."""
        path = f"/v1/default/banks/{bank}/memories/recall"
        return [
            text
            for batch in (texts[at : at + _AT_A_TIME] for at in range(0, len(texts), _AT_A_TIME))
            for text in self.python(MISSED, path, json.dumps(batch))
        ]

    def python(self, script: str, *arguments: str) -> Any:
        """Run a script inside, and return the JSON it prints."""
        return json.loads(self.says(PYTHON, "-I", "-c", script, *arguments))

    def curl(self, url: str, method: str = "GET", body: Any = None) -> Reply | None:
        """Make a call from inside; None where nobody answers."""
        sent = ["-H", "content-type: application/json", "-d", json.dumps(body)] if body is not None else []
        done = self.exec("curl", "-s", "-m", "100", "-X", method, *sent, "-w", "\n%{http_code}", url)
        if done.returncode != 0:
            return None
        text, _, status = done.stdout.rpartition("\n")
        return Reply(int(status), text)

    def memory(self, path: str, method: str = "GET", body: Any = None) -> Reply:
        """Call the memory API through the gateway, below /v1/default."""
        reply = self.curl(f"{GATEWAY}/v1/default{path}", method, body)
        assert reply is not None, f"nobody answers; the log ends: {self.log()[-1500:]}"
        return reply

    def retain(self, bank: str, texts: list[str]) -> None:
        """Store texts; each becomes one memory."""
        items = {"items": [{"content": text} for text in texts], "async": False}
        reply = self.memory(f"/banks/{bank}/memories", "POST", items)
        assert reply.status == 200, reply.body

    def recall(self, bank: str, query: str) -> list[str]:
        """Return the texts that come back for a query, best first."""
        reply = self.memory(f"/banks/{bank}/memories/recall", "POST", {"query": query, "budget": "low"})
        assert reply.status == 200, reply.body
        return [result["text"] for result in reply.json()["results"]]

    def listed(self, bank: str) -> list[str]:
        """Return every text of a bank."""
        return [item["text"] for item in self.memory(f"/banks/{bank}/memories/list?limit=10000").json()["items"]]

    def health(self) -> dict[str, Any] | None:
        """Return the control API's health body, whatever its status; None where nobody answers yet."""
        reply = self.curl(f"{CONTROL}/health")
        return reply.json() if reply else None

    def pid_of(self, component: str) -> int:
        """Return the pid, inside, of `postgres` or `hindsight-api`."""
        health = self.health()
        assert health is not None
        return int(health["components"][component]["pid"])

    def wait_state(self, state: str, within: float = 60.0) -> dict[str, Any]:
        """Wait for a state such as `blocked(permissions)` or `ready`; return the health body."""
        last: dict[str, Any] = {}

        def seen() -> dict[str, Any] | None:
            body = self.health()
            if body is None:
                assert self.running(), f"it ended with {self.exit_code()}"
                return None
            last.update(body)
            told = f"{body['state']}({body['subject']})" if body["subject"] else body["state"]
            return body if told == state else None

        try:
            return wait_for(seen, within, state, every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {last}; the log ends: {self.log()[-3000:]}") from None

    def wait_ready(self) -> Self:
        self.wait_state("ready", READY_WITHIN)
        return self

    def start(self) -> Self:
        """Start it again, after its end."""
        self._image.checked("start", self.id)
        return self

    def init(self) -> int:
        """Return the pid that its first process has on this machine."""
        pid = int(self._inspect("{{.State.Pid}}"))
        assert Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == "tini\n"
        return pid

    def running(self) -> bool:
        return self._inspect("{{.State.Running}}") == "true"

    def exit_code(self) -> int:
        return int(self._inspect("{{.State.ExitCode}}"))

    def _inspect(self, template: str) -> str:
        return self._image.checked("inspect", "--type=container", f"--format={template}", self.id).strip()

    def wait_end(self) -> int:
        """Wait for its end, and return its exit code."""
        self._image.checked("wait", self.id)
        return self.exit_code()

    def stop(self) -> int:
        """Stop it as the engine does by default, SIGKILL after 10 s; return its exit code."""
        self._image.checked("stop", self.id)
        return self.exit_code()

    def kill(self) -> None:
        """Kill everything in it at once."""
        self._image.checked("kill", "--signal=KILL", self.id)
        assert self.wait_end() == 137

    def changed(self) -> list[str]:
        """Return every path that differs from the image."""
        return [line.split(maxsplit=1)[1] for line in self._image.checked("diff", self.id).splitlines()]

    def healthcheck(self) -> int:
        """Return what the image's HEALTHCHECK gives; docker looks by itself, so its next look is waited for."""
        if self._engine.name == "podman":
            return self._engine.call("healthcheck", "run", self.id).returncode
        wait_for(lambda: self._inspect("{{.State.Health.Status}}") == "healthy", 60, "healthy", every=1)
        return 0

    def log(self) -> str:
        done = self._engine.call("logs", self.id)
        return done.stdout + done.stderr

    def remove(self) -> None:
        """Remove it with all that still runs in it."""
        for session in self._sessions:
            session.end()
        self._sessions.clear()
        now = ["--time=0"] if self._engine.name == "podman" else []
        self._image.checked("rm", "--force", *now, self.id)


Start = Callable[..., Container]
