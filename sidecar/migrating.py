"""`hindsight-sidecar migrate`: what its source may be, and how memories come from there."""

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping

from sidecar import archive, moving, passwords, progress, source_url
from sidecar.administering import Console, FileSource, Source, Upload, check
from sidecar.administration_client import CHUNK, SOURCE_TOKEN, Client, Json, checked_url, token_from
from sidecar.archive import Manifest
from sidecar.contents import Contents
from sidecar.dumping import Address
from sidecar.errors import SidecarError
from sidecar.progress import Tell

_HTTP = ("http://", "https://")


def source(
    client: Client, origin: str, environ: Mapping[str, str], *, freeze: bool, password_file: str | None
) -> Source:
    """Return what `--from` names; `client` is of the sidecar that the memories go to.

    Raises:
        ValueError: it cannot be used so; a password in the URL is one such use, as others see a command's arguments.
        SidecarError: it is no source, or its password cannot be read.

    """
    is_postgres = origin.startswith(source_url.SCHEMES)
    if freeze and not is_postgres:
        raise ValueError("--freeze is for a Postgres URL; stop what writes to the source instead")
    if password_file is not None and not is_postgres:
        raise ValueError(f"--password-file is for a Postgres URL; a sidecar's token is taken from {SOURCE_TOKEN}")
    if is_postgres:
        address = source_url.parse(origin)
        if address.environment:
            raise ValueError(
                "the URL has a password in it, which everyone on this machine can read while the command runs; leave it "
                "out, and give it with --password-file FILE (- for standard input), PGPASSWORD or ~/.pgpass"
            )
        return PostgresSource(client, origin, address, passwords.find(address, password_file, environ), freeze=freeze)
    if origin.startswith(_HTTP):
        return SidecarSource(client, Client(checked_url(origin), token_from(environ, SOURCE_TOKEN)))
    if "://" in origin:
        raise ValueError(
            f"{origin.partition('://')[0]}:// is no source; expected postgresql://USER@HOST:PORT/DATABASE, "
            "http://HOST:PORT of another sidecar's control address, or a FILE"
        )
    return FileSource(client, origin, None)


class PostgresSource:
    """A Postgres that the sidecar itself reads."""

    sha256 = ""

    def __init__(self, client: Client, url: str, address: Address, password: str | None, *, freeze: bool) -> None:
        self._client = client
        self._body: Json = {"from": url, "freeze": freeze} | ({} if password is None else {"password": password})
        self.name = source_url.shown(address)

    def begin(self, options: dict[str, bool], tell: Tell) -> Json:  # noqa: ARG002 - nothing is sent from here
        """Have it read and staged."""
        return self._client.call("POST", "/v1/migrations", self._body | options)

    def keep(self, operation: Json) -> None:
        """Keep nothing: after the question it is read again, as it is then."""

    def look_again(self, operation: Json) -> None:
        """Do nothing: the sidecar has looked itself."""

    def discard(self) -> None:
        """Discard nothing."""


class SidecarSource:
    """Another sidecar: a dump is made there, goes from there to here, and is deleted there."""

    def __init__(self, client: Client, there: Client) -> None:
        self._client = client
        self._there = there
        self._upload = Upload(client)
        self._before: Contents | None = None
        self.name = str(there.url)
        self.sha256 = ""

    def begin(self, options: dict[str, bool], tell: Tell) -> Json:
        """Bring a dump here and begin its restore; what was kept of a rehearsal is not brought again.

        Nothing is kept on this machine's disk, and the last piece is sent once the whole download is proved.
        """
        if (operation := self._upload.begin(options)) is not None:
            return operation
        with self._dumped(tell) as identifier:
            self._before = self._manifest(identifier).contents
            with self._there.opened(identifier) as download:
                operation, self.sha256 = self._client.upload(download, download.length, options, tell)
        return operation

    def keep(self, operation: Json) -> None:
        """Remember what a rehearsal kept."""
        self._upload.keep(operation)

    def look_again(self, operation: Json) -> None:
        """Name what was written there since its dump: by the manifest of another one, which is not fetched."""
        report = operation["report"]
        try:
            with progress.shown(wanted=sys.stderr.isatty()) as tell, self._dumped(tell) as identifier:
                now = self._manifest(identifier).contents
        except (SidecarError, OSError, KeyboardInterrupt) as error:
            why = " ".join(str(error).split()) or "it was interrupted"
            sentence = f"whether anything was written at the source since its dump is not known ({why})"
            report["unproved"] = [*report.get("unproved", []), sentence]
        else:
            report["written_there_since"] = moving.newer_than(self._before or now, now)

    def discard(self) -> None:
        """Remove what a rehearsal kept, if it still is."""
        self._upload.discard()

    @contextlib.contextmanager
    def _dumped(self, tell: Tell) -> Iterator[str]:
        """Have a dump there, which is deleted afterwards."""
        operation = self._there.wait(self._there.call("POST", "/v1/dumps", {"compression": "gzip"}), tell)
        check(operation)
        identifier = str(operation["report"]["dump"]["id"])
        try:
            yield identifier
        finally:
            try:
                self._there.call("DELETE", f"/v1/dumps/{identifier}")
            except SidecarError as error:
                Console.aside(
                    f"the dump {identifier} is still on the volume of {self.name} ({error}); delete it there: "
                    f"`hindsight-sidecar dumps --delete {identifier}`"
                )

    def _manifest(self, identifier: str) -> Manifest:
        """Return a dump's manifest, which is the beginning of its archive."""
        begin = self._part(identifier, 0, archive.BLOCK)
        return Manifest.from_bytes(self._part(identifier, archive.BLOCK, archive.BLOCK + archive.manifest_size(begin)))

    def _part(self, identifier: str, start: int, end: int) -> bytes:
        found = io.BytesIO()
        with self._there.opened(identifier, (start, end)) as download:
            while piece := download.read(CHUNK):
                found.write(piece)
        return found.getvalue()
