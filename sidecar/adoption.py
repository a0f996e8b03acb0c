"""Serves the memories of a cluster that others made instead of that cluster: staged into a new one beside it.

The data directory itself is not written to: its memories are read from a copy. It changes its name alone, once the new
cluster is whole and verified, and gets it back where that one cannot be served.
"""

import glob
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sidecar import cluster_exchange, foreign_cluster, log, moving, processes, swapping, volume
from sidecar.archive import DUMP, Archive
from sidecar.errors import TransientError
from sidecar.foreign_cluster import Foreign
from sidecar.operations import Operation, to_its_end
from sidecar.restoring import Place, Restoring, Wish
from sidecar.side_server import SideServer
from sidecar.staging import Staged
from sidecar.swapping import Kept
from sidecar.threads import off_loop

_WORK = ".adopting"  # what begins with the data directory's name and this is swept at the next start
_KEPT = ".kept-"  # likewise, and holds what was adopted from


@dataclass(frozen=True)
class Adoption:
    """Adopts for one sidecar."""

    restoring: Restoring

    async def adopt(self, foreign: Foreign, wanted: str | None, wish: Wish, operation: Operation) -> None:
        """Bring the memories of a foreign cluster over, or stop before anything is exchanged in a dry run.

        Raises:
            RefusedError, VerificationError, SidecarError: as they say; the cluster has its name again.

        """
        pgdata, parts = foreign.pgdata, self.restoring.parts
        await parts.look_at_installed()
        await to_its_end(off_loop(_remove_work, pgdata))  # what an earlier one could not remove
        socket_dir = self.restoring.settings.side_directory
        socket_dir.mkdir(mode=0o700, exist_ok=True)
        copy = await off_loop(parts.side_server, _beside(pgdata, "copy"), socket_dir, foreign.major)
        new = await off_loop(parts.side_server, _beside(pgdata, "new"), socket_dir, None)
        try:
            fetched = await foreign_cluster.fetch(foreign, copy, _beside(pgdata, "dump"), wanted, operation)
            await to_its_end(off_loop(shutil.rmtree, copy.pgdata))
            staged = await self._fill(fetched, new, wish, operation)
            if staged is not None:
                await self._serve(foreign, new.pgdata, staged, wish, operation)
        finally:
            await to_its_end(off_loop(_remove_work_or_tell, pgdata))

    async def _fill(self, fetched: Archive, new: SideServer, wish: Wish, operation: Operation) -> Staged | None:
        """Make a cluster with a verified database of the served name; None in a dry run."""
        restoring, socket_dir = self.restoring, new.socket_dir
        source = f"the cluster at {restoring.settings.pgdata}, database {operation.report['database']}"
        operation.enter("make the cluster")
        await new.make_cluster()
        async with new.running():
            place = Place(socket_dir, new.programs)
            checked = await restoring.check(fetched.directory / DUMP, fetched.manifest, wish, operation, source, place)
            staged = await restoring.stage(checked, wish, operation, place)
            if wish.dry_run:
                operation.report["dry_run"] = True
                return None
            facts = restoring.facts(staged, wish, operation, source, fetched.manifest)
            finished = await moving.finish(socket_dir, staged, facts)
            empty = swapping.kept_name()
            await swapping.exchange(socket_dir, staged.name, empty)
            await swapping.drop_kept(socket_dir, empty)
        return finished

    async def _serve(self, foreign: Foreign, new: Path, staged: Staged, wish: Wish, operation: Operation) -> None:
        pgdata, served = foreign.pgdata, self.restoring.served
        kept = pgdata.with_name(f"{pgdata.name}{_KEPT}{swapping.kept_name().removeprefix(swapping.KEPT)}")
        operation.enter("swap")
        async with moving.served_again(served, operation):
            await served.take_postgres_down(operation.name)
            await off_loop(foreign_cluster.check_unchanged, foreign)
            try:
                await to_its_end(off_loop(cluster_exchange.exchange, pgdata, new, kept))
                operation.report["kept"] = kept.name
                await served.bring_postgres_up()
                await self.restoring.move(wish, self.restoring.settings.run_dir).verify_served(staged, operation)
            except BaseException:
                if await off_loop(kept.exists):
                    await self._put_back(pgdata, kept, operation)
                raise

    async def _put_back(self, pgdata: Path, kept: Path, operation: Operation) -> None:
        """Give the foreign cluster its name again; the sidecar is blocked by it as before."""
        operation.enter("roll back")
        try:
            await self.restoring.served.take_postgres_down(operation.name)
        except TransientError:
            log.get("adoption").warning(
                "the sidecar stops in the middle of an adoption; the new cluster is served at the next start",
                kept=kept.name,
            )
            return
        await to_its_end(off_loop(cluster_exchange.exchange, pgdata, kept, _beside(pgdata, "rejected")))
        operation.report.pop("kept", None)


def _beside(pgdata: Path, name: str) -> Path:
    return pgdata.with_name(f"{pgdata.name}{_WORK}-{name}")


def _remove_work(pgdata: Path) -> list[Path]:
    left = sorted(pgdata.parent.glob(f"{glob.escape(pgdata.name)}{_WORK}-*"))
    for path in left:
        shutil.rmtree(path)
    return left


def _remove_work_or_tell(pgdata: Path) -> None:
    """Remove it; what went wrong before matters more than that this cannot be done now."""
    try:
        _remove_work(pgdata)
    except OSError as error:
        log.get("adoption").warning("what an adoption worked with is removed at the next start", error=str(error))


def sweep(pgdata: Path, tell: Callable[..., object]) -> None:
    """Remove what an adoption left unfinished, each named in the log.

    Raises:
        TransientError: a server still works in some of it; it ends by itself, since its sidecar is gone.
        OSError: it cannot be removed.

    """
    for path in pgdata.parent.glob(f"{glob.escape(pgdata.name)}{_WORK}-*"):
        if path.is_dir() and (alive := processes.postgres_in(path)):
            raise TransientError(f"PostgreSQL process {alive[0]} still works in {path}; it is left to end by itself")
    for path in _remove_work(pgdata):
        tell("removing what was not finished", path=str(path))


def kept(pgdata: Path) -> list[Kept]:
    """Return the data directories that were adopted from, the latest first."""
    return [Kept(path.name, volume.size(path)) for path in _kept(pgdata)]


def drop_kept(directory: Path) -> None:
    """Delete a kept data directory; what a kill in the middle of it leaves has not its name, and goes at the next start."""
    going = directory.with_name(directory.name.replace(_KEPT, f"{_WORK}-dropped-", 1))
    directory.rename(going)
    volume.sync(going.parent)
    shutil.rmtree(going)


def find_kept(pgdata: Path, name: str) -> Path | None:
    """Return the kept data directory of that name; None where there is none."""
    return next((path for path in _kept(pgdata) if path.name == name), None)


def _kept(pgdata: Path) -> list[Path]:
    found = sorted(pgdata.parent.glob(f"{glob.escape(pgdata.name)}{_KEPT}*"), reverse=True)
    return [path for path in found if path.is_dir() and not path.is_symlink()]
