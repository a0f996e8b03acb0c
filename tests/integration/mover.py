"""Moves memories in a process that says where it is and waits there, so that a test can end it just there.

The real Administration works on a real Postgres; only what stops and starts hindsight-api is played. `python mover.py
SOCKET_DIR VOLUME` imports everything once and reads jobs from standard input, one JSON object a line. Each job gets a
process of its own, which writes each moment to standard output and goes on when it reads a line.
"""

import asyncio
import json
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg
from postgres_server import ENV
from psycopg import sql

from sidecar import (
    api_environment,
    archive,
    database,
    log,
    postgres_binaries,
    swapping,
    volume,
)
from sidecar.administration import Administration, Wish
from sidecar.child import Child
from sidecar.errors import VerificationError
from sidecar.model import Identity, Model
from sidecar.operations import Operation
from sidecar.programs import Programs
from sidecar.recognition import Embedder
from sidecar.settings import Settings

REVISIONS = frozenset({"f00df00df00d", "beefbeefbeef"})
IDENTITY = Identity("BAAI/bge-small-en-v1.5", "5c38ec7c", "float32", 384, "cls", normalize=True, query_prefix="", passage_prefix="")  # fmt: skip
MODEL = Model(
    Path("/"), "bge-small-en-v1.5", "model.onnx", 512, stand_in=True, files={}, loaded=frozenset(), identity=IDENTITY
)
_NAMES = [
    (re.compile(r"hindsight_staging_\w+"), "staging"),
    (re.compile(r"hindsight_kept_\w+"), "kept"),
    (re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}"), "ID"),
]
_ALTERS = [
    (re.compile(r'ALTER DATABASE "hindsight" RENAME TO .*'), "RENAME 1"),
    (re.compile(r'ALTER DATABASE .* RENAME TO "hindsight"'), "RENAME 2"),
    (re.compile(r"ALTER DATABASE \S+ (ALLOW_CONNECTIONS \w+)"), r"\1"),
    (re.compile(r'COMMENT ON DATABASE "hindsight" IS .*'), "COMMENT"),
]
_EXCHANGES = ("ALTER DATABASE", "COMMENT ON DATABASE")
_MARKED = (*_EXCHANGES, "CREATE DATABASE", "DROP DATABASE", "CREATE EXTENSION", "ANALYZE", "DROP SCHEMA")
_lock = threading.Lock()
_answers = 1  # where moments are told


def line() -> bytes:
    """Read one line and not a byte more: who is forked shares what is left. Nobody there any more ends us."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(3)
        found += byte
    return found


def tell(**what: Any) -> None:
    os.write(_answers, json.dumps(what).encode() + b"\n")


def at(moment: str) -> None:
    """Say where we are, and wait for leave to go on."""
    for pattern, name in _NAMES:
        moment = pattern.sub(name, moment)
    for pattern, name in _ALTERS:
        moment = pattern.sub(name, moment)
    with _lock:
        tell(at=moment)
        line()


class Parts:
    """What of a supervisor is needed, with a hindsight-api that is up or down at once."""

    model, known_revisions = MODEL, REVISIONS
    schema, heads = "public", REVISIONS
    embedder = Embedder("0" * 64, "onnx", "1.1.0")
    versions = {"hindsight-api": "1.1.0", "postgres": "18"}  # noqa: RUF012 - nobody changes it

    def __init__(self, programs: Programs, *, fails: bool) -> None:
        self.programs = programs
        self._fails = fails

    def check_served(self) -> None:
        pass

    async def take_api_down(self, _: str) -> None:
        at("hindsight-api is down")

    async def bring_api_up(self) -> None:
        if self._fails:
            self._fails = False
            raise VerificationError("hindsight-api ends again and again with this database; its log lines say why")
        at("hindsight-api is up")

    async def bring_api_back(self) -> None:
        at("hindsight-api is up")

    def over(self) -> None:
        at("memory calls are served")

    async def similarities(self, stored: list[Any]) -> list[float]:
        return [0.9] * len(stored)

    async def recall(self, _: str, __: str) -> float:
        return 0.9


# Where it waits ------------------------------------------------------------------------------------------------


def hook() -> None:
    """Let every step that a kill could come between be a moment."""
    around(Operation, "enter", after=lambda _, phase, *__: f"phase {phase}")
    around(volume, "write", lambda path, _: f"write {path.name}", lambda path, _: f"{path.name} is written")
    around(os, "rename", lambda path, *_, **__: f"rename {name(path)}", lambda path, *_, **__: f"renamed {name(path)}")
    around(os, "unlink", after=lambda path, **_: f"unlinked {name(path)}")
    around(os, "rmdir", lambda path, **_: f"rmdir {name(path)}")
    start = Child.start

    def started(name: str, argv: list[str], **options: Any) -> Child:
        child = start(name, argv, **options)
        [kind] = [word for word in argv[1:] if word.startswith(("--section", "--list", "--file"))]
        at(f"{name} {kind.partition('=/')[0]}")
        return child

    Child.start = staticmethod(started)  # type: ignore[assignment, method-assign]
    read_through = archive.read_through

    def read(source: Any, sink: Callable[[bytes], object]) -> Any:
        def sink_and_tell(piece: bytes) -> None:
            sink(piece)
            at("a piece is unpacked")

        return read_through(source, sink_and_tell)

    archive.read_through = read
    execute = psycopg.AsyncConnection.execute

    async def executed(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        text = query.as_string() if isinstance(query, sql.Composable) else str(query)
        if text.startswith(_MARKED):
            at(text)
        found = await execute(self, query, *arguments, **options)
        if text.startswith("CREATE DATABASE"):
            at("the database is made")
        self.alters = text.startswith(_EXCHANGES)
        return found

    psycopg.AsyncConnection.execute = executed  # type: ignore[assignment, method-assign]
    leave = psycopg.AsyncTransaction.__aexit__

    async def left(self: Any, *error: Any) -> Any:
        exchanges = error[0] is None and getattr(self.connection, "alters", False)
        if exchanges:
            at("COMMIT")
        found = await leave(self, *error)
        if exchanges:
            at("exchanged")
        return found

    psycopg.AsyncTransaction.__aexit__ = left  # type: ignore[method-assign]


def around(
    owner: Any, attribute: str, before: Callable[..., str] | None = None, after: Callable[..., str] | None = None
) -> None:
    """Make moments of what comes before and after a function."""
    original = getattr(owner, attribute)

    def hooked(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            at(before(*arguments, **options))
        found = original(*arguments, **options)
        if after is not None:
            at(after(*arguments, **options))
        return found

    setattr(owner, attribute, hooked)


def name(path: Any) -> str:
    return Path(os.fsdecode(path)).name


# Jobs ----------------------------------------------------------------------------------------------------------


def work(job: dict[str, Any], socket_dir: Path) -> None:
    log.configure("json", "info")
    binaries = postgres_binaries.inspect(postgres_binaries.embedded_bindir() or Path())
    empty = api_environment.make_directories(socket_dir)
    swapping._AWAY = job.get("away", swapping._AWAY)
    parts = Parts(Programs(binaries, ENV, empty), fails=job.get("fails", False))
    told = asyncio.run(JOBS[job["job"]](Administration(Settings(), parts, parts), job, socket_dir))
    log.close()
    tell(done=told)


async def ended(begun: Operation, one: Administration) -> dict[str, Any]:
    while one.operations.current is not None:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0.01)
    return begun.to_json()


async def dump(one: Administration, _: dict[str, Any], __: Path) -> dict[str, Any]:
    return await ended(one.dump(), one)


async def restore(one: Administration, job: dict[str, Any], _: Path) -> dict[str, Any]:
    return await ended(await one.restore_dump(job["dump"], Wish()), one)


async def upload(one: Administration, job: dict[str, Any], _: Path) -> dict[str, Any]:
    content = Path(job["file"]).read_bytes()

    async def body() -> AsyncIterator[bytes]:
        yield content[: len(content) // 2]
        at("half of it came")
        yield content[len(content) // 2 :]

    wish = Wish(dry_run=job.get("dry_run", False))
    identifier = await one.receive(body(), len(content))
    at("all of it came")
    return await ended(await one.restore_upload(identifier, wish), one)


async def rollback(one: Administration, _: dict[str, Any], __: Path) -> dict[str, Any]:
    return await ended(await one.rollback(None), one)


async def drop_kept(one: Administration, job: dict[str, Any], _: Path) -> dict[str, Any]:
    await one.drop_kept(job["name"])
    return {}


async def delete_dump(one: Administration, job: dict[str, Any], _: Path) -> dict[str, Any]:
    one.delete_dump(job["dump"])
    return {}


async def start(one: Administration, _: dict[str, Any], socket_dir: Path) -> dict[str, Any]:
    """Do what the supervisor does before anything is served, in its order."""
    one.sweep_files()
    await database.check(socket_dir, MODEL, REVISIONS)
    await one.sweep_databases()
    return {"dumps": [found.manifest.id for found in one.dumps()]}


JOBS = {
    "dump": dump,
    "restore": restore,
    "upload": upload,
    "rollback": rollback,
    "drop_kept": drop_kept,
    "delete_dump": delete_dump,
    "start": start,
}


def become(job: dict[str, Any], socket_dir: Path) -> None:
    """Do a job, with standard output for the log alone."""
    global _answers  # noqa: PLW0603 - of this process
    _answers = os.dup(1)
    tell(pid=os.getpid())
    os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    try:
        work(job, socket_dir)
    except BaseException as error:
        tell(failed=repr(error))
        raise


def main() -> None:
    socket_dir, volume = map(Path, sys.argv[1:])
    os.environ |= {"PGDATA": str(volume / "pgdata"), "HINDSIGHT_SIDECAR_RUN_DIR": str(socket_dir)}
    hook()
    while True:
        job = json.loads(line())
        pid = os.fork()
        if pid == 0:
            try:
                become(job, socket_dir)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        tell(ended=pid)


if __name__ == "__main__":
    main()
