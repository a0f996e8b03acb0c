"""Stages a dump, verifies it, and serves it: what every way of bringing memories in has in common."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psycopg

from sidecar import agreement, contents, database, recognition, sizing, staging, volume
from sidecar.agreement import Agreement
from sidecar.api_environment import ROLE
from sidecar.archive import Manifest
from sidecar.contents import Contents
from sidecar.database import Facts
from sidecar.errors import RefusedError, TransientError, VerificationError
from sidecar.model import Identity, Model
from sidecar.moving import Move, Served
from sidecar.operations import Operation
from sidecar.programs import Programs
from sidecar.recognition import Embedder
from sidecar.settings import Settings
from sidecar.side_server import SideServer
from sidecar.sizing import MIB
from sidecar.staging import Checked, Staged
from sidecar.threads import off_loop

_MARGIN = 64 * MIB  # bytes of the volume that stay free
_LOG = 512 * MIB  # bytes that Postgres' log grows to (max_wal_size)


class Parts(Protocol):
    """What is at hand for an operation."""

    @property
    def programs(self) -> Programs:
        """PostgreSQL's programs; TransientError before there are any."""

    @property
    def model(self) -> Model:
        """The model at hand; TransientError before it was read."""

    @property
    def embedder(self) -> Embedder:
        """What embeds with that model here; TransientError before it was read."""

    @property
    def known_revisions(self) -> frozenset[str]:
        """The schema revisions that hindsight-api knows; TransientError before it was asked."""

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions of hindsight-api and postgres."""

    def side_server(self, pgdata: Path, socket_dir: Path, major: int | None) -> SideServer:
        """Return a server beside the served one; RefusedError where no installed PostgreSQL is of that major."""

    def check_served(self) -> None:
        """Raise TransientError where what is served was not found to be what it has to be."""

    def check_volume_held(self) -> None:
        """Raise TransientError where the volume is not ours, or not yet."""

    async def look_at_installed(self) -> None:
        """Read the model and hindsight-api's revisions, also where nothing is served yet."""

    async def similarities(self, stored: list[tuple[str, list[float]]]) -> list[float]:
        """Embed texts anew, and return how much each agrees with its stored vector; TransientError where that failed."""

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


@dataclass(frozen=True)
class Place:
    """A server whose databases are filled: the served one, or one beside it.

    Attributes:
        socket_dir: of its socket.
        programs: of its PostgreSQL.

    """

    socket_dir: Path
    programs: Programs


@dataclass(frozen=True)
class Restoring:
    """Restores dumps into what one sidecar serves."""

    settings: Settings
    parts: Parts
    served: Served

    async def check_possible(self) -> None:
        """Look whether memories can be brought in now, before gigabytes are sent for it.

        Raises:
            TransientError: not now.
            RefusedError: never into this cluster.
            psycopg.OperationalError: Postgres does not answer.

        """
        self.parts.programs, self.parts.model, self.parts.known_revisions  # noqa: B018 - each is there, or says why not
        try:
            async with await database.connect(self.settings.run_dir):
                pass
        except psycopg.OperationalError as error:
            if "does not exist" not in str(error):
                raise
            raise RefusedError(
                f"the cluster has lost what is to be replaced ({' '.join(str(error).split())}); put a copy of the volume back, or move "
                f"{self.settings.pgdata} away and restore into the new cluster that is made then"
            ) from error

    async def restore(
        self, file: Path, manifest: Manifest | None, wish: Wish, operation: Operation, source: str
    ) -> None:
        """Stage a dump beside what is served, verify it, and serve it instead; or stop before that in a dry run.

        Raises:
            RefusedError, VerificationError, ProgramError: as they say; what was served is served.

        """
        socket_dir = self.settings.run_dir
        place = Place(socket_dir, self.parts.programs)
        checked = await self.check(file, manifest, wish, operation, source, place)
        if wish.dry_run:
            staged = await self.stage(checked, wish, operation, place)
            await staging.drop_whatever_happens(socket_dir, staged.name)
            operation.report["dry_run"] = True
            return
        move = self.move(wish, socket_dir)
        operation.enter("baseline")
        before = await move.baseline()
        staged = await self.stage(checked, wish, operation, place)
        try:
            await move.swap(staged, before, self.facts(staged, wish, operation, source, manifest), operation)
        except BaseException:
            await staging.drop_whatever_happens(socket_dir, staged.name)
            raise

    def move(self, wish: Wish, socket_dir: Path) -> Move:
        """Return how what is staged comes to be served."""
        return Move(
            socket_dir,
            self.served,
            self.parts.recall,
            discard_newer=wish.discard_newer,
            force_model=wish.force_model,
        )

    def facts(self, staged: Staged, wish: Wish, operation: Operation, source: str, manifest: Manifest | None) -> Facts:
        """Return what is noted in a staged database about where it came from, and what its vectors are of."""
        memories = manifest.contents.memories if manifest else None
        return Facts(
            {"operation": operation.name, "source": source, "memories": memories},
            self.parts.model.identity.to_json(),
            recognition.note_of(staged.agreement, self.parts.embedder, forced=wish.force_model),
        )

    async def check(
        self, file: Path, manifest: Manifest | None, wish: Wish, operation: Operation, source: str, place: Place
    ) -> Checked:
        """Look at a dump without touching anything. Raises RefusedError."""
        operation.enter("check")
        checked = await staging.preflight(file, manifest, place.programs, place.socket_dir, self.parts.known_revisions)
        self._check_model(manifest, wish)
        if manifest is not None:
            self._check_known(manifest.contents)
        await off_loop(self._check_room, checked)
        operation.report |= _source_report(checked, source)
        return checked

    async def stage(self, checked: Checked, wish: Wish, operation: Operation, place: Place) -> Staged:
        """Fill a new database and verify it; it is dropped again where it is not what it has to be.

        Raises:
            RefusedError: its vectors have another dimension than the model at hand, or its schema is a newer one.
            VerificationError: its vectors are not of that model, or it is not what its source held.
            ProgramError, psycopg.Error: as `staging.stage`.

        """
        scratch = self.settings.run_dir / "scratch"
        staged = await staging.stage(
            checked, place.programs, place.socket_dir, scratch, sizing.this_machine(), operation
        )
        operation.report |= {"memories": staged.contents.memories, "dimensions": staged.contents.dimensions}
        try:
            self._check_known(staged.contents)
            found = await self._check_agreement(staged, wish, operation, place)
        except BaseException:
            await staging.drop_whatever_happens(place.socket_dir, staged.name)
            raise
        return replace(staged, agreement=found)

    def _check_known(self, held: Contents) -> None:
        """Refuse what could not be served: a file without a manifest tells only once it is loaded."""
        staging.check_dimensions(held.dimensions, self.parts.model.identity.dimension)
        if newer := contents.unknown(held.revisions, self.parts.known_revisions):
            raise RefusedError(
                f"the schema is at revision {', '.join(newer)}, which the hindsight-api here does not know; use an image with the "
                "version that made it, or a newer one"
            )

    async def _check_agreement(
        self, staged: Staged, wish: Wish, operation: Operation, place: Place
    ) -> Agreement | None:
        operation.enter("embed a sample")
        async with await database.connect(place.socket_dir, ROLE, staged.name) as connection:
            try:
                found = await agreement.measure(connection, self.parts.similarities)
            except TransientError as error:  # such as too little memory for a second model beside hindsight-api's
                operation.report["unproved"].append(
                    f"no sample of its vectors could be embedded anew before the swap ({error}); after it, some memories are "
                    "recalled by their own texts"
                )
                return None
        if found is None:
            if staged.contents.memories:
                operation.report["unproved"].append(
                    "none of its memories could be embedded anew (a text of 20 to 1000 characters is needed, and no observation): that "
                    "its vectors are of the model at hand"
                )
            return None
        operation.report["agreement"] = found.to_json()
        if found.fault is not None and not wish.force_model:
            raise VerificationError(f"{found.fault}; use the image with that model (or force it)")
        return found

    def _check_model(self, manifest: Manifest | None, wish: Wish) -> None:
        if manifest is None or manifest.model is None or wish.force_model:
            return
        theirs = {name: manifest.model.get(name) for name in Identity.__dataclass_fields__}
        mine = self.parts.model.identity
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

    def _check_room(self, checked: Checked) -> None:
        """Refuse where it may not fit: what it took at its source and the log of loading it.

        Where that is not known: some four times the compressed dump, with indexes and their log.
        """
        size = checked.file.stat().st_size
        there = checked.manifest.database_size if checked.manifest else None
        wanted = (4 * size if there is None else there + min(there, _LOG)) + _MARGIN
        free = volume.free_bytes(self.settings.volume)
        if free < wanted:
            raise RefusedError(
                f"restoring {size // MIB} MiB may take {wanted // MIB} MiB beside the live database, and "
                f"{self.settings.volume} has {free // MIB} MiB free; delete old dumps or kept databases, or grow the volume"
                + ("" if there is None else " (or dump anew after VACUUM FULL there, where much was deleted)")
            )


def _source_report(checked: Checked, source: str) -> dict[str, Any]:
    manifest, header = checked.manifest, checked.header
    unproved = []
    if manifest is None:
        unproved.append(
            "the file has no manifest: that it holds every row of its source cannot be proved, only that it is not cut short and "
            "loads without an error"
        )
        unproved.append(
            "its rows have gzip's checksums, its names and definitions have none: a bit that changed there may not show"
            if header.compression == "gzip"
            else f"it has no checksums (compression {header.compression}): a bit that changed in it may not show"
        )
    if manifest is None or manifest.model is None:
        unproved.append(
            "the model that its memories were embedded with is not recorded in it; a sample of them is embedded anew instead"
        )
    return {
        "source": source,
        "from": {"postgres": header.server, "pg_dump": header.pg_dump, "made": manifest.made.isoformat() if manifest else None,
                 "versions": manifest.versions if manifest else None},
        "model": manifest.model if manifest else None,
        "unproved": unproved,
    }  # fmt: skip
