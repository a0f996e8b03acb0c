"""`dump`, `restore`, `rollback` and their lists: what a person at a command line does with the administration endpoints."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import quote

from sidecar import inspection, progress, reporting
from sidecar.administration_client import Client, Json, ProblemError, UnreachableError
from sidecar.destination import STDIO, destination
from sidecar.errors import RefusedError, SidecarError, VerificationError
from sidecar.progress import Tell
from sidecar.terminal import say

_ENDINGS: dict[str, type[SidecarError]] = {"refused": RefusedError, "verification-failed": VerificationError}


class Console:
    """Where things are told: results on standard output, everything else on standard error."""

    def __init__(self, *, as_json: bool = False, output_taken: bool = False) -> None:
        self._as_json = as_json
        self._output_taken = output_taken  # standard output carries an archive

    @property
    def as_json(self) -> bool:
        """Whether results are JSON."""
        return self._as_json

    def result(self, found: object, lines: Callable[[], list[str]]) -> None:
        """Print a result, as JSON or as the lines of it."""
        text = json.dumps(found, indent=2, ensure_ascii=False) if self._as_json else "\n".join(lines())
        if text:
            say(text, err=self._output_taken)

    @staticmethod
    def aside(text: str) -> None:
        """Print what is no result."""
        say(text, err=True)

    @staticmethod
    def is_terminal() -> bool:
        """Tell whether a person can be asked."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    @staticmethod
    def check_agreed(question: str) -> None:
        """Ask on standard error, since a result goes to standard output. Raises RefusedError for anything but yes."""
        say(f"{question} [y/N] ", err=True, newline=False)
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise RefusedError("nothing was replaced")


def follow(client: Client, begin: Callable[[Tell], Json]) -> Json:
    """Begin an operation, show how far it is on a terminal, and return it once it has ended."""
    with progress.shown(wanted=sys.stderr.isatty()) as tell:
        return client.wait(begin(tell), tell)


def check(operation: Json) -> None:
    """Raise what an operation that did not end well ended with."""
    if operation["outcome"] != "done":
        if "unreachable" in operation["report"]:
            raise UnreachableError(f"{operation['kind']} {operation['outcome']}: {operation['error']}")
        raise _ENDINGS.get(str(operation["outcome"]), SidecarError)(
            f"{operation['kind']} {operation['outcome']}: {operation['error']}"
        )


# Dumps ----------------------------------------------------------------------------------------------------------


def dump(client: Client, compression: str, console: Console, output: str | None, *, force: bool) -> None:
    """Have a dump made. With `output` it is fetched, and then deleted from the volume."""

    def make() -> Json:
        operation = follow(client, lambda _: client.call("POST", "/v1/dumps", {"compression": compression}))
        check(operation)
        made: Json = operation["report"]["dump"]
        return made

    if output is not None:
        delete_dump(client, str(fetch(client, make, console, output, force=force)["id"]))
        return
    made = make()
    console.result(made, lambda: [str(made["id"])])
    console.aside(
        f"{_account(made)}; it is kept on the volume: `hindsight-sidecar dump --id {made['id']} -o FILE` fetches it, "
        f"`hindsight-sidecar dumps --delete {made['id']}` deletes it"
    )


def fetch(client: Client, obtain: Callable[[], Json], console: Console, output: str, *, force: bool) -> Json:
    """Download the dump that is obtained once there is a place for it, into a file or to standard output."""
    with destination(output, force=force) as write:
        found = obtain()
        try:
            with progress.shown(wanted=sys.stderr.isatty()) as tell:
                client.download(str(found["id"]), write, tell)
        except (SidecarError, OSError, KeyboardInterrupt) as error:
            raise _kept(error, str(found["id"])) from error
    name = None if output == STDIO else output
    console.result(found | {"file": name}, lambda: [f"{name or 'standard output'}: {_account(found)}"])
    return found


def _kept(error: BaseException, identifier: str) -> SidecarError:
    """Return a failure with the word that the dump is still there."""
    if isinstance(error, ProblemError | RefusedError):
        return error  # it is not
    kind = type(error) if isinstance(error, SidecarError) else SidecarError
    told = "left" if isinstance(error, KeyboardInterrupt) else said(error)
    return kind(
        f"{told}; the dump is kept on the volume: `hindsight-sidecar dump --id {identifier} -o FILE` fetches it again"
    )


def said(error: BaseException) -> str:
    """Return an error as one line: the system's with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__  # the server's own come with several lines


def _account(made: Json) -> str:
    return f"{made['memories']} memories in {progress.size(made['size'])}, sha256 {made['sha256']}"


def dump_of(client: Client, identifier: str) -> Json:
    """Return what the list says of one."""
    found: list[Json] = [one for one in client.get("/v1/dumps")["dumps"] if one["id"] == identifier]
    if not found:
        raise SidecarError(f"there is no dump {identifier[:60]!r} on the volume; `hindsight-sidecar dumps` lists them")
    return found[0]


def list_dumps(client: Client, console: Console) -> None:
    """Show the dumps on the volume."""
    found = client.get("/v1/dumps")
    console.result(found, lambda: reporting.dump_lines(found["dumps"]))


def delete_dump(client: Client, identifier: str) -> None:
    """Delete one."""
    client.call("DELETE", f"/v1/dumps/{quote(identifier, safe='')}")


# Restores -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """How a restore is wanted.

    Attributes:
        yes: replace what is served without asking.
        dry_run: report alone.
        discard_newer, force_model: as the endpoint has them.

    """

    yes: bool = False
    dry_run: bool = False
    discard_newer: bool = False
    force_model: bool = False

    def options(self, *, dry_run: bool) -> dict[str, bool]:
        """Return what the endpoint takes."""
        return {"dry_run": dry_run, "discard_newer": self.discard_newer, "force_model": self.force_model}


class Source(Protocol):
    """What memories come from.

    Attributes:
        name: of it, for a person.
        sha256: of the archive; empty where there is none, and before it was sent.

    """

    name: str
    sha256: str

    def begin(self, options: dict[str, bool], tell: Tell) -> Json:
        """Begin to bring them in, or a rehearsal of that."""

    def keep(self, operation: Json) -> None:
        """Remember what a rehearsal kept."""

    def look_again(self, operation: Json) -> None:
        """Add to the report of what was brought in what the source has that did not come along, if that is known here."""

    def discard(self) -> None:
        """Remove what a rehearsal kept, if it still is."""


class Upload:
    """An upload that a rehearsal kept, so that it is not sent again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: str | None = None

    def begin(self, options: dict[str, bool]) -> Json | None:
        """Begin its restore; None where nothing is kept."""
        if self._kept is None:
            return None
        operation = self._client.call("POST", "/v1/restores", {"upload": self._kept, **options})
        self._kept = None  # the operation's now
        return operation

    def keep(self, operation: Json) -> None:
        """Remember what a rehearsal kept."""
        self._kept = operation["report"].get("upload")

    def discard(self) -> None:
        """Remove what a rehearsal kept, if it still is."""
        if self._kept is not None:
            with contextlib.suppress(SidecarError):  # the next start of the sidecar removes it
                self._client.call("DELETE", f"/v1/restores/{self._kept}")


class FileSource:
    """A file, standard input, or a dump on the volume."""

    def __init__(self, client: Client, file: str | None, dump: str | None) -> None:
        self._client = client
        self._file = file
        self._dump = dump
        self._upload = Upload(client)
        self.name = {STDIO: "standard input"}.get(file, Path(file).name) if file is not None else f"dump {dump}"
        self.sha256 = "" if dump is None else str(dump_of(client, dump)["sha256"])

    def begin(self, options: dict[str, bool], tell: Tell) -> Json:
        """Begin its restore; what was kept of a rehearsal is not sent again."""
        if self._file is None:
            return self._client.call("POST", "/v1/restores", {"dump": self._dump, **options})
        if (operation := self._upload.begin(options)) is not None:
            return operation
        with _opened(self._file) as (file, length):
            operation, self.sha256 = self._client.upload(file, length, options, tell)
            return operation

    def keep(self, operation: Json) -> None:
        """Remember what a rehearsal kept."""
        self._upload.keep(operation)

    def look_again(self, operation: Json) -> None:
        """Do nothing: what was written at its source since cannot be seen from a file."""

    def discard(self) -> None:
        """Remove what a rehearsal kept, if it still is."""
        self._upload.discard()


class ForeignCluster:
    """What is adopted: the cluster at PGDATA that others made.

    Attributes:
        name: of it, for a person.
        sha256: of nothing.

    """

    def __init__(self, client: Client, database: str | None, *, crashed: bool) -> None:
        self._client = client
        self._options = {"database": database, "crashed": crashed}
        self.name = f"the cluster at {client.get('/v1/status')['health']['pgdata']}"
        self.sha256 = ""

    def begin(self, options: dict[str, bool], _tell: Tell) -> Json:
        """Begin its adoption."""
        chosen = {name: options[name] for name in ("dry_run", "force_model")}
        return self._client.call("POST", "/v1/adoption", {**self._options, **chosen})

    def keep(self, operation: Json) -> None:
        """Remember nothing: a rehearsal keeps nothing."""

    def look_again(self, operation: Json) -> None:
        """Do nothing: nothing runs on it."""

    def discard(self) -> None:
        """Remove nothing."""


@contextlib.contextmanager
def _opened(name: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """Open a file with its length, or standard input, of which the first bytes are waited for: it may be a dump's."""
    if name == STDIO:
        if sys.stdin.isatty():
            raise SidecarError("an archive is not typed; redirect the input, or name a FILE")
        with open(sys.stdin.fileno(), "rb", closefd=False) as stream:
            if not stream.peek(1):
                raise RefusedError("nothing came on standard input; nothing was replaced")
            yield stream, None
        return
    with Path(name).open("rb") as file:
        status = os.fstat(file.fileno())
        yield file, status.st_size or None  # a pipe or a device has none


def restore(client: Client, source: Source, wanted: Wanted, console: Console) -> None:
    """Restore, after a rehearsal and a question; or at once with `yes`, or not at all with `dry_run`.

    Raises:
        RefusedError: it would lose data, cannot be meant, or nobody agreed to it; nothing was replaced.
        VerificationError: what arrived is not what was there; nothing was replaced, or it was put back.
        SidecarError: it failed.

    """
    model: Json | None = client.get("/v1/status")["health"]["model"]
    try:
        if not wanted.yes or wanted.dry_run:
            rehearsed = follow(client, lambda tell: source.begin(wanted.options(dry_run=True), tell))
            source.keep(rehearsed)
            alone = wanted.dry_run or not console.is_terminal()
            _show(rehearsed, source, model, console, result=alone)
            check(rehearsed)
            if wanted.dry_run:
                return
            _ask(client, rehearsed, source, console)
        restored = follow(client, lambda tell: source.begin(wanted.options(dry_run=False), tell))
    finally:
        source.discard()
    if restored["outcome"] == "done":
        source.look_again(restored)
    _show(restored, source, model, console, result=True)
    check(restored)


def _show(operation: Json, source: Source, model: Json | None, console: Console, *, result: bool) -> None:
    """Show a report; on standard error where another one is the result."""

    def lines() -> list[str]:
        return reporting.restore_lines(operation, source.name, source.sha256, model)

    if not result and console.as_json:
        console.aside("\n".join(lines()))
    else:
        console.result(operation | {"source_sha256": source.sha256}, lines)


def _ask(client: Client, rehearsed: Json, source: Source, console: Console) -> None:
    """Ask whether to replace what is served. Raises RefusedError where not."""
    if not console.is_terminal():
        raise RefusedError("nothing was replaced, since nobody can be asked here; add --yes to replace what is served")
    memories = f"{rehearsed['report']['memories']} memories of {source.name}"
    if rehearsed["kind"] == "adopt":
        told = f"Nothing is served now; {memories} come into a new cluster. The old one is kept as it is"
    else:
        served = client.get("/v1/status")["health"]["memory_count"]
        count = "an unknown number of" if served is None else served
        told = f"{count} memories are served now; {memories} come instead. The database that is served now is kept"
    console.aside(f"\n{told}, and its name is told afterwards.")
    console.check_agreed("Replace them?")


# Kept databases and operations ----------------------------------------------------------------------------------


def rollback(client: Client, name: str | None, console: Console, *, yes: bool) -> None:
    """Serve a kept database again. Raises RefusedError where nobody agreed to it."""
    kept = [str(one["name"]) for one in client.get("/v1/databases")["kept"]]
    if not kept or name not in {None, *kept}:
        raise RefusedError(
            f"no kept database {'is there' if name is None else name[:80]}; `hindsight-sidecar databases` lists them"
        )
    chosen = name or kept[0]
    if not yes:
        if not console.is_terminal():
            raise RefusedError(
                f"nothing was replaced, since nobody can be asked here; add --yes to serve {chosen} again"
            )
        until = reporting.served_until(chosen)
        was = "" if until is None else f", served until {until},"
        console.aside(f"{chosen}{was} is served again. What is served now is kept, and its name is told afterwards.")
        console.check_agreed("Replace it?")
    operation = follow(client, lambda _: client.call("POST", "/v1/rollback", {"database": chosen}))
    console.result(operation, lambda: reporting.rolled_back_lines(operation) if operation["outcome"] == "done" else [])
    check(operation)


def list_databases(client: Client, console: Console) -> None:
    """Show the kept databases and clusters."""
    found = client.get("/v1/databases")
    console.result(found, lambda: reporting.database_lines([*found["kept"], *found["clusters"]]))


def drop_database(client: Client, name: str) -> None:
    """Drop one."""
    client.call("DELETE", f"/v1/databases/{quote(name, safe='')}")


def list_operations(client: Client, console: Console) -> None:
    """Show what runs and what ran since the sidecar's start."""
    found = client.get("/v1/operations")
    console.result(found, lambda: reporting.operation_lines(found["operations"]))


def show_operation(client: Client, identifier: str, console: Console) -> None:
    """Show one, with its report."""
    found = client.get(f"/v1/operations/{quote(identifier, safe='')}")
    console.result(found, lambda: reporting.operation_detail(found))


def cancel_operation(client: Client, identifier: str, console: Console) -> None:
    """Cancel one, and show how it ended."""
    found = client.cancel(identifier)
    console.result(found, lambda: reporting.operation_lines([found]))


# Files ----------------------------------------------------------------------------------------------------------


def verify(path: str, console: Console) -> None:
    """Look at a file. Raises VerificationError, OSError."""
    found = inspection.inspect(Path(path))
    console.result(found.to_json(), lambda: reporting.inspection_lines(found))
