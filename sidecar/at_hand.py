"""What operations need and the supervisor has: PostgreSQL's programs, the model, the revisions that hindsight-api knows."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from sidecar import model, postgres_binaries, upstream
from sidecar.errors import BlockedError, Reason, RefusedError, TransientError
from sidecar.hindsight_api import HindsightApi
from sidecar.machine import Server, World
from sidecar.model import Model
from sidecar.postgres import Postgres
from sidecar.programs import Programs
from sidecar.recognition import Embedder
from sidecar.settings import Settings
from sidecar.side_server import SideServer
from sidecar.status import Status
from sidecar.threads import off_loop

# It is the database that is wrong then, and another one may come in its place.
_REPLACEABLE = frozenset({Reason.SCHEMA_NEWER, Reason.MODEL_MISMATCH, Reason.DAMAGED_CLUSTER})


class AtHand:
    """Looks at what is installed, and remembers it."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        status: Status,
        postgres: Postgres,
        api: HindsightApi,
        identity: Mapping[str, str],
        cwd: Path,
    ) -> None:
        self._settings = settings
        self._world = world
        self._status = status
        self._postgres = postgres
        self._api = api
        self._identity = identity
        self._cwd = cwd
        self._model: Model | None = None
        self._revisions: upstream.Revisions | None = None
        self._hashes = model.Hashes()

    async def look_at_installed(self) -> None:
        """Read the model and hindsight-api's revisions, also where nothing is served yet.

        Raises:
            BlockedError: `model-missing` or `model-changed`.
            TransientError: hindsight-api did not answer.

        """
        found = await off_loop(self._read_models)
        # At the same time, so that reading the model costs a start next to nothing.
        await asyncio.gather(off_loop(model.check_content, found, self._hashes), self._ask_for_revisions())
        self._model = found
        self._status.update(model=found.to_json())

    def _read_models(self) -> Model:
        found = model.read(self._settings.model_dir, self._settings.flavor)
        model.check_files(found)
        if self._settings.reranker_dir is not None:
            model.check_files(model.read_reranker(self._settings.reranker_dir, self._settings.flavor))
        return found

    async def _ask_for_revisions(self) -> None:
        if self._revisions is None:
            env = {**self._identity, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
            self._revisions = await upstream.revisions(self._api.installed, env, self._cwd)

    @property
    def model(self) -> Model:
        """The model at hand. Raises TransientError before it was read."""
        if self._model is None:
            raise TransientError("the model was not looked at yet; try again once the sidecar is ready")
        return self._model

    @property
    def embedder(self) -> Embedder:
        """What embeds with that model here. Raises TransientError before it was read."""
        return Embedder(self.model.content, self._settings.flavor, self._api.installed.version)

    @property
    def revisions(self) -> upstream.Revisions:
        """The schema revisions of the installed hindsight-api. Raises TransientError before it was asked."""
        if self._revisions is None:
            raise TransientError("hindsight-api was not looked at yet; try again once the sidecar is ready")
        return self._revisions

    @property
    def known_revisions(self) -> frozenset[str]:
        """The schema revisions that hindsight-api knows. Raises TransientError before it was asked."""
        return self.revisions.known

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions of hindsight-api and postgres."""
        return self._status.picture.versions

    @property
    def programs(self) -> Programs:
        """PostgreSQL's programs, with the environment that they get here; also where what is served has to be replaced.

        Raises:
            TransientError: Postgres is not up, or was not looked at yet; it says why.

        """
        binaries, world = self._postgres.binaries, self._world
        replaceable = world.fault is not None and world.fault.reason in _REPLACEABLE
        if binaries is None or world.postgres is not Server.UP or not (world.database_checked or replaceable):
            raise self._not_ready()
        return self._postgres.programs(binaries)

    def check_served(self) -> None:
        """Raise TransientError where what is served was not found to be what it has to be."""
        if self._world.postgres is not Server.UP or not self._world.database_checked:
            raise self._not_ready()

    def _not_ready(self) -> TransientError:
        fault = self._world.fault
        if fault is not None and fault.reason is not None:
            return TransientError(f"{fault.reason}: {fault.detail}")
        return TransientError("Postgres is not ready; try again once the sidecar is")

    def side_server(self, pgdata: Path, socket_dir: Path, major: int | None) -> SideServer:
        """Return how a server of this major is run beside the served one; any usable one where `major` is None.

        Raises:
            RefusedError: none is installed.

        """
        try:
            binaries = postgres_binaries.choose(self._settings.pg_bindir, major)
        except BlockedError as error:
            raise RefusedError(error.detail) from error
        return self._postgres.side_server(pgdata, socket_dir, binaries)

    def check_volume_held(self) -> None:
        """Raise TransientError where the volume is not ours, or not yet."""
        if not self._world.volume_held:
            raise TransientError("this sidecar does not hold the volume; its state says why")

    async def similarities(self, stored: list[tuple[str, list[float]]]) -> list[float]:
        """Embed texts anew, and return how much each agrees with its stored vector. Raises TransientError."""
        return await self._api.similarities(self.model, stored)

    async def recall(self, bank: str, text: str) -> float | None:
        """Ask a bank for a memory by its own text, and return its semantic score; None where it did not come back."""
        return await self._api.recall(bank, text)
