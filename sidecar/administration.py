"""What an administrator can have done: dumps, restores, rollbacks; each as an operation that can be asked about."""

import asyncio
import contextlib
import math
import os
import shutil
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from sidecar import (
    __version__,
    adoption,
    archive,
    cluster,
    dump_file,
    dumping,
    foreign_cluster,
    freezing,
    log,
    moving,
    schedule,
    source,
    source_url,
    staging,
    swapping,
    upstream,
    volume,
)
from sidecar.adoption import Adoption
from sidecar.api_environment import DATABASE, ROLE
from sidecar.archive import DUMP, Archive, Manifest
from sidecar.dumping import Compression
from sidecar.errors import RefusedError, TransientError
from sidecar.kinds import Kind
from sidecar.moving import Served
from sidecar.operations import BusyError, Operation, Operations
from sidecar.restoring import Parts, Restoring, Wish
from sidecar.schedule import Made, Retention
from sidecar.settings import Settings
from sidecar.sizing import MIB
from sidecar.threads import off_loop

INCOMING = ".incoming-"  # prefix of an upload; swept at the next start
FILE = "upload"
_MARGIN = 64 * MIB  # bytes that an upload leaves free
_STALLED = 60.0  # seconds without a piece of an upload
_KEPT_FOR = 3600.0  # seconds after a dry run, for its upload


class Administration:
    """Begins operations on the memories of one running sidecar.

    Attributes:
        operations: all that ran and runs.
        last_dump: when the latest good dump was made; of an earlier start too, where it is on the volume. None: there is none.

    """

    def __init__(self, settings: Settings, parts: Parts, served: Served) -> None:
        self.operations = Operations()
        self.last_dump: datetime | None = None
        self._settings = settings
        self._parts = parts
        self._served = served
        self._restoring = Restoring(settings, parts, served)
        self._adoption = Adoption(self._restoring)
        self._last_piece = -math.inf  # monotonic seconds, of an upload that comes now
        self._expiring: dict[str, asyncio.TimerHandle] = {}  # by the name of an upload that a dry run kept
        self._removing: set[asyncio.Task[None]] = set()
        self._log = log.get("administration")

    @property
    def dumps_directory(self) -> Path:
        """Where dumps are kept on the volume."""
        return self._settings.volume / "dumps"

    @property
    def busy(self) -> bool:
        """Whether an operation runs, or an upload comes that will be one; an upload that has stalled holds nobody up."""
        return self.operations.current is not None or time.monotonic() - self._last_piece < _STALLED

    def attach_to(self, app: Any) -> None:  # noqa: ANN401 - Starlette's state takes anything
        """Let the control API's endpoints find this one."""
        app.state.administration = self

    # Dumps ------------------------------------------------------------------------------------------------------

    def dump(self, compression: Compression = "gzip", *, retention: Retention | None = None) -> Operation:
        """Begin a dump of the served memories. Raises BusyError, TransientError.

        One with a `retention` is scheduled: it is verified, and then those that a schedule keeps no longer are deleted.
        """
        parts = self._parts
        parts.check_served()  # the dump's manifest says of it that it is of the model at hand
        programs, model, versions = parts.programs, parts.model, {"sidecar": __version__, **parts.versions}

        async def work(operation: Operation) -> None:
            if retention is not None:
                operation.report["scheduled"] = True
            made = await dumping.dump(
                dumping.local(self._settings.run_dir, DATABASE, ROLE),
                programs,
                self.dumps_directory,
                operation,
                versions=versions,
                model=model.identity.to_json(),
                compression=compression,
                scheduled=retention is not None,
            )
            self.last_dump = made.manifest.made
            operation.report |= {"dump": dict(await off_loop(archive.as_mapping, made))}
            if retention is not None:
                operation.enter("delete old dumps")
                await off_loop(self._retain, retention, made, operation)

        return self.operations.start(Kind.DUMP, work)

    def _retain(self, retention: Retention, newest: Archive, operation: Operation) -> None:
        """Delete what a schedule made and keeps no longer, the oldest first. Raises TransientError where that cannot be."""
        deleted: list[str] = []
        operation.report["deleted"] = deleted
        for old in reversed(
            schedule.superfluous(self.scheduled_dumps(), newest.manifest.id, datetime.now(UTC), retention)
        ):
            try:
                dumping.delete(self.dumps_directory, old.id)
            except OSError as error:
                raise TransientError(
                    f"the new dump {newest.manifest.id} is good, and the old one {old.id} cannot be deleted ({error}); "
                    f"give {self.dumps_directory} and what is in it to the sidecar's user"
                ) from error
            deleted.append(old.id)

    def dumps(self) -> list[Archive]:
        """Return the dumps on the volume, the latest first."""
        return dumping.kept(self.dumps_directory)

    def scheduled_dumps(self) -> list[Made]:
        """Return the good dumps on the volume that a schedule made. Raises OSError."""
        return [Made(one.manifest.id, one.manifest.made) for one in self.dumps() if one.manifest.scheduled]

    def open_dump(self, identifier: str) -> Archive:
        """Return one dump.

        Raises:
            RefusedError: it cannot be a dump's name, or it is damaged.
            FileNotFoundError: there is none of that name.

        """
        return Archive.open(self.dumps_directory / archive.check_id(identifier))

    def delete_dump(self, identifier: str) -> None:
        """Delete one dump. Raises RefusedError, FileNotFoundError."""
        if not (self.dumps_directory / archive.check_id(identifier)).is_dir():
            raise FileNotFoundError(identifier)
        dumping.delete(self.dumps_directory, identifier)

    # Restores ---------------------------------------------------------------------------------------------------

    async def check_possible(self) -> None:
        """Look whether memories can be brought in now, before anything is sent or read for it.

        Raises:
            BusyError, TransientError, RefusedError, psycopg.OperationalError: they cannot.

        """
        if (running := self.operations.current) is not None:
            raise BusyError(running)
        await self._restoring.check_possible()

    async def receive(self, body: AsyncIterator[bytes], length: int | None) -> str:
        """Write an upload to the volume, piece by piece, and return its name; a cut one is discarded.

        Raises:
            RefusedError: there is no space for it and what is unpacked of it, or it is shorter than was said.
            OSError: it cannot be written.

        """
        identifier = archive.new_id()
        directory = self.dumps_directory / f"{INCOMING}{identifier}"
        await off_loop(self._make_incoming, directory, length or 0)
        try:
            await self._write(body, directory / FILE, length)
        except BaseException:
            await off_loop(shutil.rmtree, directory, ignore_errors=True)
            raise
        finally:
            self._last_piece = -math.inf
        return identifier

    def _make_incoming(self, directory: Path, length: int | None = None) -> None:
        self.dumps_directory.mkdir(mode=0o700, exist_ok=True)
        if length is not None:
            _check_room(
                self.dumps_directory, 2 * length, f"the upload and what is unpacked of it take {2 * length // MIB} MiB"
            )
        directory.mkdir(mode=0o700)

    async def _write(self, body: AsyncIterator[bytes], path: Path, length: int | None) -> None:
        received = 0
        file = await off_loop(_new_file, path)
        try:
            async for piece in body:
                self._last_piece = time.monotonic()
                received += len(piece)
                await off_loop(file.write, piece)
                if received % (64 * MIB) < len(piece):
                    await off_loop(
                        _check_room, path.parent, 0, f"{received // MIB} MiB of the upload came, and more comes"
                    )
        finally:
            await off_loop(file.close)
        if length is not None and received != length:
            raise RefusedError(f"{received} of {length} bytes came; the upload was cut, send it again")

    async def restore_upload(self, identifier: str, wish: Wish) -> Operation:
        """Begin a restore of what was uploaded; the upload is kept after a dry run alone. Raises BusyError, RefusedError."""
        directory = self.dumps_directory / f"{INCOMING}{archive.check_id(identifier)}"
        if not await off_loop(directory.is_dir):
            raise RefusedError(f"no upload {identifier} is kept; send the file again")

        async def work(operation: Operation) -> None:
            done = False
            try:
                operation.report["upload"] = identifier
                operation.enter("unpack")
                file, manifest = await off_loop(_unpack, directory, operation)
                await self._restoring.restore(file, manifest, wish, operation, f"upload {identifier}")
                done = True
            finally:
                if wish.dry_run and done:
                    later = asyncio.get_running_loop().call_later
                    self._expiring[identifier] = later(_KEPT_FOR, self._expire, identifier, directory)
                else:
                    await off_loop(shutil.rmtree, directory, ignore_errors=True)
                    operation.report.pop("upload", None)

        begun = self.operations.start(Kind.RESTORE, work)
        self._keep_no_longer(identifier)
        return begun

    def _keep_no_longer(self, identifier: str) -> None:
        """Forget that an upload is kept: an operation has it now, or it goes."""
        if (timer := self._expiring.pop(identifier, None)) is not None:
            timer.cancel()

    def _expire(self, identifier: str, directory: Path) -> None:
        """Remove an upload whose dry run nobody came back to: a command that was killed at its question, mostly."""
        del self._expiring[identifier]
        self._log.info("removing an upload that was kept for an hour and not restored", path=str(directory))
        task = asyncio.create_task(off_loop(shutil.rmtree, directory, ignore_errors=True))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def discard_upload(self, identifier: str) -> None:
        """Remove an upload that a dry run kept, or that cannot be restored now.

        Raises:
            BusyError: an operation uses it.
            FileNotFoundError: there is none of that name.

        """
        running = self.operations.current
        if running is not None and running.report.get("upload") == identifier:
            raise BusyError(running)
        await off_loop(shutil.rmtree, self.dumps_directory / f"{INCOMING}{archive.check_id(identifier)}")
        self._keep_no_longer(identifier)

    async def restore_dump(self, identifier: str, wish: Wish) -> Operation:
        """Begin a restore of a dump on the volume. Raises BusyError, RefusedError, FileNotFoundError."""
        found = await off_loop(self.open_dump, identifier)

        async def work(operation: Operation) -> None:
            operation.enter("hash", found.manifest.size, "bytes")
            try:
                await off_loop(found.check, operation.advance)
            except RefusedError as error:
                raise RefusedError(
                    f"dump {identifier} was damaged on the disk ({error}); delete it, and use another one"
                ) from error
            await self._restoring.restore(found.directory / DUMP, found.manifest, wish, operation, f"dump {identifier}")

        return self.operations.start(Kind.RESTORE, work)

    def migrate(self, url: str, wish: Wish, *, freeze: bool = False, password: str | None = None) -> Operation:
        """Begin to bring in the memories of a database elsewhere, all of it from one snapshot. Raises BusyError, RefusedError.

        With `freeze` the source accepts no writes meanwhile, but for a dry run. Later writes there are detected and named.
        """
        parts = self._parts
        address, programs, known = source_url.parse(url, password), parts.programs, parts.known_revisions
        dimension = parts.model.identity.dimension

        async def work(operation: Operation) -> None:
            directory = self.dumps_directory / f"{INCOMING}{operation.id}"
            await off_loop(self._make_incoming, directory)
            freezes = freeze and not wish.dry_run
            try:
                await source.check(address, operation, programs.binaries.major, known, dimension)
                async with freezing.frozen(address, directory, operation) if freezes else contextlib.nullcontext():
                    fetched = await source.fetch(address, programs, directory, operation)
                    named = source_url.shown(address)
                    await self._restoring.restore(fetched.directory / DUMP, fetched.manifest, wish, operation, named)
                    await source.look_again(address, fetched.manifest.contents, operation)
            except asyncio.CancelledError as error:
                source.check_served(operation, error)
            finally:
                await off_loop(shutil.rmtree, directory, ignore_errors=True)

        return self.operations.start(Kind.MIGRATE, work)

    async def adopt(self, name: str | None, wish: Wish, *, crashed: bool = False) -> Operation:
        """Begin to bring in the memories of the cluster at PGDATA that others made; it is kept as it is, under another name.

        `name` is its database; None where only one has memories. `crashed`: its server was killed, and is not running.

        Raises:
            BusyError, RefusedError.
            BlockedError: the data directory cannot be looked at.
            TransientError: the volume is not ours.

        """
        self._parts.check_volume_held()
        foreign = await off_loop(foreign_cluster.check, self._settings.pgdata, crashed=crashed)
        await off_loop(foreign_cluster.check_room, foreign)

        async def work(operation: Operation) -> None:
            await self._adoption.adopt(foreign, name, wish, operation)

        return self.operations.start(Kind.ADOPT, work)

    # Kept databases ---------------------------------------------------------------------------------------------

    async def kept(self) -> list[swapping.Kept]:
        """Return the databases that were served before, the latest first.

        Raises:
            BlockedError: the data directory cannot be looked at.
            psycopg.OperationalError: Postgres does not run.

        """
        if (await off_loop(cluster.look, self._settings.pgdata)).found is not cluster.Found.CLUSTER:
            return []  # they are kept in a cluster of ours
        return await swapping.kept(self._settings.run_dir)

    async def kept_clusters(self) -> list[swapping.Kept]:
        """Return the data directories that were adopted from, the latest first."""
        return await off_loop(adoption.kept, self._settings.pgdata)

    async def drop_kept(self, name: str) -> None:
        """Drop a kept database or data directory.

        Raises:
            BusyError: an operation may have to serve it again.
            RefusedError, OSError.

        """
        running = self.operations.current
        if running is not None and running.report.get("kept") == name:
            raise BusyError(running)
        directory = await off_loop(adoption.find_kept, self._settings.pgdata, name)
        if directory is not None:
            await off_loop(adoption.drop_kept, directory)
            self._log.warning("dropped a data directory that was kept", path=str(directory))
            return
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
                f"no kept database {'is there' if name is None else name[:80]}; `hindsight-sidecar databases` lists them"
            )
        served, socket_dir = self._served, self._settings.run_dir

        async def work(operation: Operation) -> None:
            outgoing = swapping.kept_name()
            operation.enter("swap")
            async with moving.served_again(served, operation):
                await served.take_api_down(operation.name)
                await swapping.exchange(socket_dir, chosen, outgoing)
                operation.report |= {"served": chosen, "kept": outgoing}
                try:
                    _, doubts = await moving.start(socket_dir, served, operation)
                    operation.report |= {"unproved": doubts} if doubts else {}
                except BaseException as error:
                    await moving.put_back(socket_dir, served, outgoing, chosen, operation, error)
                    operation.report.clear()
                    raise

        return self.operations.start(Kind.ROLLBACK, work)

    # Beginning and end ------------------------------------------------------------------------------------------

    def sweep_files(self) -> None:
        """Remove what an earlier sidecar left unfinished on the volume, each named in the log.

        What cannot be removed is named too, and stays: memories are served all the same.

        Raises:
            TransientError: a server of an earlier sidecar still works in some of it.

        """
        dumps, scratch = self.dumps_directory, self._settings.run_dir / "scratch"
        try:
            adoption.sweep(self._settings.pgdata, self._log.warning)
            found = sorted(dumps.iterdir()) if dumps.is_dir() else []
            left = [path for path in found if path.name.startswith((dumping.PARTIAL, INCOMING))]
            for path in [*left, *scratch.glob(f"{staging.STAGING}*"), *scratch.glob(f"{upstream.STORED}*")]:
                freezing.warn_of_frozen(path, self._log.warning)
                self._log.warning("removing what was not finished", path=str(path))
                _remove(path)
        except OSError as error:
            self._log.warning("what was not finished could not be removed", error=str(error))
            return
        made = [self._made(path) for path in found if not path.name.startswith(".")]
        self.last_dump = max((time for time in made if time is not None), default=self.last_dump)

    def _made(self, path: Path) -> datetime | None:
        """Return when a dump was made; None where it is damaged, which is told."""
        try:
            found = Archive.open(path)
            found.checksum  # noqa: B018 - it has one, or is refused
        except (RefusedError, OSError) as error:
            self._log.warning("a dump is not whole, and not listed; delete it", path=str(path), error=str(error))
            return None
        return found.manifest.made

    async def sweep_databases(self) -> None:
        """Drop databases that an earlier sidecar did not finish filling or dropping, and name what is left of others."""
        await staging.sweep(self._settings.run_dir, self._log.warning)

    async def end(self) -> None:
        """End what runs, as the sidecar stops."""
        with contextlib.suppress(RefusedError):
            await self.operations.end()


def _check_room(directory: Path, wanted: int, what: str) -> None:
    free = volume.free_bytes(directory)
    if free < wanted + _MARGIN:
        raise RefusedError(
            f"{what}, and {directory} has {free // MIB} MiB free, of which {_MARGIN // MIB} stay free; "
            "delete old dumps or kept databases, or grow the volume"
        )


def _new_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _unpack(directory: Path, operation: Operation) -> tuple[Path, Manifest | None]:
    """Return the dump of an upload, and its manifest where it is an archive of ours. Raises RefusedError."""
    if (directory / archive.MANIFEST).exists():
        found = Archive.open(directory)  # unpacked by a dry run, an hour ago perhaps
        operation.total, operation.unit = found.manifest.size, "bytes"
        try:
            found.check(operation.advance)
        except RefusedError as error:
            raise RefusedError(f"the upload was damaged on the disk ({error}); send it again") from error
        return directory / DUMP, found.manifest
    file = directory / FILE
    if (directory / DUMP).exists():
        return directory / DUMP, None
    with file.open("rb") as opened:
        begin = opened.read(512)
    if archive.is_tar(begin):
        size = file.stat().st_size  # nobody told before, of an upload without a length
        _check_room(directory, size, f"unpacking the upload takes {size // MIB} MiB")
        operation.total, operation.unit = size, "bytes"
        made = archive.unpack(file, directory, operation.advance)
        file.unlink()
        return directory / DUMP, made.manifest
    dump_file.read_header(file)  # says what it is, where it is no dump
    file.rename(directory / DUMP)
    return directory / DUMP, None
