"""What an administrator can have done: dumps, restores, rollbacks; each as an operation that can be asked about."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sidecar import (
    __version__,
    archive,
    dump_file,
    dumping,
    freezing,
    log,
    moving,
    sizing,
    source,
    source_url,
    staging,
    swapping,
    volume,
)
from sidecar.api_environment import DATABASE, ROLE
from sidecar.archive import DUMP, Archive, Manifest
from sidecar.dumping import Compression
from sidecar.errors import RefusedError
from sidecar.model import Identity, Model
from sidecar.moving import Move, Served
from sidecar.operations import BusyError, Kind, Operation, Operations
from sidecar.programs import Programs
from sidecar.settings import Settings
from sidecar.sizing import MIB
from sidecar.staging import Checked, Staged

INCOMING = ".incoming-"  # prefix of an upload; swept at the next start
FILE = "upload"
_MARGIN = 64 * MIB  # bytes that an upload leaves free


class Parts(Served, Protocol):
    """What of the supervisor is needed here."""

    @property
    def programs(self) -> Programs:
        """PostgreSQL's programs; TransientError before there are any."""

    @property
    def model(self) -> Model:
        """The model at hand; TransientError before it was read."""

    @property
    def known_revisions(self) -> frozenset[str]:
        """The schema revisions that hindsight-api knows; TransientError before it was asked."""

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions of hindsight-api and postgres."""

    async def recall(self, bank: str, text: str) -> float | None:
        """Ask a bank for a memory by its own text, and return its semantic score; None where it did not come back."""


@dataclass(frozen=True)
class Wish:
    """How a restore is wanted.

    Attributes:
        dry_run: stage and verify, report, and replace nothing.
        discard_newer: what was stored since it began may stay in the old database alone.
        force_model: serve memories that were embedded with another model.

    """

    dry_run: bool = False
    discard_newer: bool = False
    force_model: bool = False


class Administration:
    """Begins operations on the memories of one running sidecar.

    Attributes:
        operations: all that ran and runs.

    """

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.operations = Operations()
        self._settings = settings
        self._parts = parts
        self._log = log.get("administration")

    @property
    def dumps_directory(self) -> Path:
        """Where dumps are kept on the volume."""
        return self._settings.volume / "dumps"

    def attach_to(self, app: Any) -> None:  # noqa: ANN401 - Starlette's state takes anything
        """Let the control API's endpoints find this one."""
        app.state.administration = self

    # Dumps ------------------------------------------------------------------------------------------------------

    def dump(self, compression: Compression = "gzip") -> Operation:
        """Begin a dump of the served memories. Raises BusyError, TransientError."""
        parts = self._parts
        programs, model, versions = parts.programs, parts.model, {"sidecar": __version__, **parts.versions}

        async def work(operation: Operation) -> None:
            made = await dumping.dump(
                dumping.local(self._settings.run_dir, DATABASE, ROLE),
                programs,
                self.dumps_directory,
                operation,
                versions=versions,
                model=model.identity.to_json(),
                compression=compression,
            )
            operation.report |= {"dump": dict(archive.as_mapping(made))}

        return self.operations.start(Kind.DUMP, work)

    def dumps(self) -> list[Archive]:
        """Return the dumps on the volume, the latest first."""
        return dumping.kept(self.dumps_directory)

    def open_dump(self, identifier: str) -> Archive:
        """Return one dump.

        Raises:
            RefusedError: it cannot be a dump's name, or it is damaged.
            FileNotFoundError: there is none of that name.

        """
        return Archive.open(self.dumps_directory / archive.check_id(identifier))

    def delete_dump(self, identifier: str) -> None:
        """Delete one dump. Raises RefusedError, FileNotFoundError."""
        directory = self.dumps_directory / archive.check_id(identifier)
        if not directory.is_dir():
            raise FileNotFoundError(identifier)
        shutil.rmtree(directory)
        archive.sync(self.dumps_directory)

    # Restores ---------------------------------------------------------------------------------------------------

    async def receive(self, body: AsyncIterator[bytes], length: int | None) -> str:
        """Write an upload to the volume, piece by piece, and return its name; a cut one is discarded.

        Raises:
            RefusedError: there is no space for it, or it is shorter than was said.
            OSError: it cannot be written.

        """
        identifier = archive.new_id()
        self.dumps_directory.mkdir(mode=0o700, exist_ok=True)
        self._check_space(length or 0)
        directory = self.dumps_directory / f"{INCOMING}{identifier}"
        directory.mkdir(mode=0o700)
        try:
            await self._write(body, directory / FILE, length)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return identifier

    async def _write(self, body: AsyncIterator[bytes], path: Path, length: int | None) -> None:
        received = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            async for piece in body:
                received += len(piece)
                await asyncio.to_thread(file.write, piece)
                if received % (64 * MIB) < len(piece):
                    self._check_space(0)
        if length is not None and received != length:
            raise RefusedError(f"{received} of {length} bytes came; the upload was cut, send it again")

    def _check_space(self, wanted: int) -> None:
        free = volume.free_bytes(self.dumps_directory)
        if free < wanted + _MARGIN:
            raise RefusedError(
                f"the upload has {wanted // MIB} MiB, and {self.dumps_directory} has {free // MIB} MiB free, of which "
                f"{_MARGIN // MIB} stay free; delete old dumps or kept databases, or grow the volume"
            )

    def restore_upload(self, identifier: str, wish: Wish) -> Operation:
        """Begin a restore of what was uploaded; the upload is kept after a dry run alone. Raises BusyError, RefusedError."""
        directory = self.dumps_directory / f"{INCOMING}{archive.check_id(identifier)}"
        if not directory.is_dir():
            raise RefusedError(f"no upload {identifier} is kept; send the file again")

        async def work(operation: Operation) -> None:
            done = False
            try:
                operation.report["upload"] = identifier
                operation.enter("unpack")
                file, manifest = await asyncio.to_thread(_unpack, directory)
                await self._restore(file, manifest, wish, operation, f"upload {identifier}")
                done = True
            finally:
                if not (wish.dry_run and done):
                    shutil.rmtree(directory, ignore_errors=True)
                    operation.report.pop("upload", None)

        return self.operations.start(Kind.RESTORE, work)

    def discard_upload(self, identifier: str) -> None:
        """Remove an upload that a dry run kept, or that cannot be restored now.

        Raises:
            BusyError: an operation uses it.
            FileNotFoundError: there is none of that name.

        """
        running = self.operations.current
        if running is not None and running.report.get("upload") == identifier:
            raise BusyError(running)
        directory = self.dumps_directory / f"{INCOMING}{archive.check_id(identifier)}"
        if not directory.is_dir():
            raise FileNotFoundError(identifier)
        shutil.rmtree(directory)

    def restore_dump(self, identifier: str, wish: Wish) -> Operation:
        """Begin a restore of a dump on the volume. Raises BusyError, RefusedError, FileNotFoundError."""
        found = self.open_dump(identifier)

        async def work(operation: Operation) -> None:
            await self._restore(found.directory / DUMP, found.manifest, wish, operation, f"dump {identifier}")

        return self.operations.start(Kind.RESTORE, work)

    def migrate(self, url: str, wish: Wish, *, freeze: bool = False, password: str | None = None) -> Operation:
        """Begin to bring in the memories of a database elsewhere, all of it from one snapshot. Raises BusyError, RefusedError.

        With `freeze` the source accepts no writes meanwhile, but for a dry run. Later writes there are detected and named.
        """
        parts = self._parts
        address, programs, known = source_url.parse(url, password), parts.programs, parts.known_revisions

        async def work(operation: Operation) -> None:
            self.dumps_directory.mkdir(mode=0o700, exist_ok=True)
            directory = self.dumps_directory / f"{INCOMING}{operation.id}"
            directory.mkdir(mode=0o700)
            freezes = freeze and not wish.dry_run
            try:
                await source.check(address, operation, programs.binaries.major, known)
                async with freezing.frozen(address, directory, operation) if freezes else contextlib.nullcontext():
                    fetched = await source.fetch(address, programs, directory, operation)
                    await self._restore(
                        fetched.directory / DUMP, fetched.manifest, wish, operation, source_url.shown(address)
                    )
                    await source.look_again(address, fetched.manifest.contents, operation)
            except asyncio.CancelledError as error:
                source.check_served(operation, error)
            finally:
                shutil.rmtree(directory, ignore_errors=True)

        return self.operations.start(Kind.MIGRATE, work)

    async def _restore(
        self, file: Path, manifest: Manifest | None, wish: Wish, operation: Operation, named: str
    ) -> None:
        parts, socket_dir = self._parts, self._settings.run_dir
        operation.enter("check")
        checked = await staging.preflight(file, manifest, parts.programs, socket_dir, parts.known_revisions)
        self._check_model(manifest, wish)
        await self._check_room(checked)
        operation.report |= _source_report(checked, named)
        move = Move(socket_dir, parts, parts.recall, discard_newer=wish.discard_newer, force_model=wish.force_model)
        if wish.dry_run:
            staged = await self._stage(checked, operation)
            await staging.drop(socket_dir, staged.name)
            operation.report |= {"dry_run": True, "memories": staged.contents.memories}
            return
        origin = {
            "operation": operation.name,
            "source": named,
            "memories": manifest.contents.memories if manifest else None,
        }
        model = parts.model.identity.to_json()
        await moving.restore(checked, move, self._stage, operation, origin, model)

    async def _stage(self, checked: Checked, operation: Operation) -> Staged:
        parts = self._parts
        scratch = self._settings.run_dir / "scratch"
        staged = await staging.stage(
            checked, parts.programs, self._settings.run_dir, scratch, sizing.this_machine(), operation
        )
        dimension = parts.model.identity.dimension
        others = {schema: found for schema, found in staged.contents.dimensions.items() if found not in (dimension, -1)}
        if others:
            await staging.drop(self._settings.run_dir, staged.name)
            told = ", ".join(f"{found} in schema {schema}" for schema, found in others.items())
            raise RefusedError(
                f"the memories have {told} dimensions, and the model at hand {dimension}; use the model they were made with"
            )
        operation.report |= {"memories": staged.contents.memories, "dimensions": staged.contents.dimensions}
        return staged

    def _check_model(self, manifest: Manifest | None, wish: Wish) -> None:
        if manifest is None or manifest.model is None or wish.force_model:
            return
        theirs = {name: manifest.model.get(name) for name in Identity.__dataclass_fields__}
        mine = self._parts.model.identity
        differences = [
            f"{name}: {value!r}, not {theirs[name]!r}"
            for name, value in mine.to_json().items()
            if theirs[name] != value
        ]
        if differences:
            raise RefusedError(
                f"the memories were embedded with another model than the one at hand ({'; '.join(differences)}); recall would "
                "return noise: use the image with that model (or force it, if the two are the same by another name)"
            )

    async def _check_room(self, checked: Checked) -> None:
        """Refuse where it may not fit: some four times the compressed dump, with indexes and their log."""
        wanted = 4 * checked.file.stat().st_size + _MARGIN
        free = volume.free_bytes(self._settings.volume)
        if free < wanted:
            raise RefusedError(
                f"restoring {checked.file.stat().st_size // MIB} MiB may take {wanted // MIB} MiB beside the live database, and "
                f"{self._settings.volume} has {free // MIB} MiB free; delete old dumps or kept databases, or grow the volume"
            )

    # Kept databases ---------------------------------------------------------------------------------------------

    async def kept(self) -> list[swapping.Kept]:
        """Return the databases that were served before, the latest first."""
        return await swapping.kept(self._settings.run_dir)

    async def drop_kept(self, name: str) -> None:
        """Drop a kept database. Raises RefusedError."""
        await swapping.drop_kept(self._settings.run_dir, name)

    async def rollback(self, name: str | None) -> Operation:
        """Begin to serve a kept database again, the latest where none is named; the one served now is kept.

        Raises:
            BusyError, RefusedError.

        """
        kept = await self.kept()
        chosen = next((one.name for one in kept if name in (None, one.name)), None)
        if chosen is None:
            raise RefusedError(
                f"no kept database {'is there' if name is None else name[:80]}; GET /v1/databases lists them"
            )
        parts, socket_dir = self._parts, self._settings.run_dir

        async def work(operation: Operation) -> None:
            outgoing = swapping.kept_name()
            operation.enter("swap")
            async with moving.served_again(parts, operation):
                await parts.take_api_down(operation.name)
                await swapping.exchange(socket_dir, chosen, outgoing)
                operation.report |= {"served": chosen, "kept": outgoing}
                try:
                    operation.enter("start hindsight-api")
                    await parts.bring_api_up()
                except BaseException:
                    await moving.put_back(socket_dir, parts, outgoing, chosen, operation)
                    operation.report.clear()
                    raise

        return self.operations.start(Kind.ROLLBACK, work)

    # Beginning and end ------------------------------------------------------------------------------------------

    def sweep_files(self) -> None:
        """Remove what an earlier sidecar left unfinished on the volume, each named in the log."""
        dumps = self.dumps_directory
        left = (
            [path for path in dumps.iterdir() if path.name.startswith((dumping.PARTIAL, INCOMING))]
            if dumps.is_dir()
            else []
        )
        for path in left:
            freezing.warn_of_frozen(path, self._log.warning)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            self._log.warning("removed what was not finished", path=str(path))

    async def sweep_databases(self) -> None:
        """Drop databases that an earlier sidecar did not finish filling."""
        await staging.sweep(self._settings.run_dir, self._log.warning)

    async def end(self) -> None:
        """End what runs, as the sidecar stops."""
        with contextlib.suppress(RefusedError):
            await self.operations.end()


def _unpack(directory: Path) -> tuple[Path, Manifest | None]:
    """Return the dump of an upload, and its manifest where it is an archive of ours. Raises RefusedError."""
    if (directory / archive.MANIFEST).exists():
        found = Archive.open(directory)
        return directory / DUMP, found.manifest
    file = directory / FILE
    if (directory / DUMP).exists():
        return directory / DUMP, None
    with file.open("rb") as opened:
        begin = opened.read(512)
    if archive.is_tar(begin):
        made = archive.unpack(file, directory)
        file.unlink()
        return directory / DUMP, made.manifest
    dump_file.read_header(file)  # says what it is, where it is no dump
    file.rename(directory / DUMP)
    return directory / DUMP, None


def _source_report(checked: Checked, named: str) -> dict[str, Any]:
    manifest, header = checked.manifest, checked.header
    unproved = []
    if manifest is None:
        unproved.append(
            "the file has no manifest: that it holds every row of its source cannot be proved, only that it is whole and loads without an error"
        )
    if manifest is None or manifest.model is None:
        unproved.append(
            "the model that its memories were embedded with is not recorded in it: after the exchange some are recalled, and their vectors have to agree with the model at hand"
        )
    return {
        "source": named,
        "from": {"postgres": header.server, "pg_dump": header.pg_dump, "made": manifest.made.isoformat() if manifest else None,
                 "versions": manifest.versions if manifest else None},
        "model": manifest.model if manifest else None,
        "unproved": unproved,
    }  # fmt: skip
