"""What an operation asks of the supervisor: to take components down, and to serve again what lies there then."""

import asyncio
from collections.abc import Callable

from sidecar.errors import TransientError, VerificationError
from sidecar.machine import OperationName, Server, World

_CRASHES = 2  # of a component after which new data is given up


class Maintenance:
    """Changes what the supervisor wants, and waits until it is so. Memory calls wait meanwhile."""

    def __init__(self, world: World, changed: Callable[[], object]) -> None:
        self._world = world
        self._changed = changed
        self._looked = asyncio.Condition()

    async def tell_looked(self) -> None:
        """Let whoever waits see what the supervisor has seen."""
        async with self._looked:
            self._looked.notify_all()

    async def take_api_down(self, operation: OperationName) -> None:
        """Stop hindsight-api and keep it down, for an operation that exchanges the database.

        Raises:
            TransientError: Postgres is not up, so nothing can be exchanged.

        """
        self._world.maintenance = operation
        self._world.api_wanted = False
        self._changed()
        while self._world.api is not Server.DOWN:
            await self._next_look()
        if self._world.postgres is not Server.UP:
            raise TransientError("Postgres is not up; try again once the sidecar is ready")

    async def bring_api_up(self) -> None:
        """Serve whatever database has the name now, and return once a memory was recalled from it.

        A schema migration takes its time, so there is no limit but what the components themselves say.

        Raises:
            VerificationError: it cannot be served; the sentence is the state's.
            TransientError: the sidecar is stopping.

        """
        world = self._world
        world.database_exchanged()
        world.api_wanted = world.postgres_wanted = True
        crashes = world.api_restarts.total
        self._changed()
        while not (world.proved and world.api is Server.UP):
            await self._next_look()
            self._check_fault()
            if world.api_restarts.total - crashes >= _CRASHES:
                raise VerificationError("hindsight-api ends again and again with this database; its log lines say why")

    async def take_postgres_down(self, operation: OperationName) -> None:
        """Stop both components and keep them down, for an operation that exchanges the data directory.

        Raises:
            TransientError: the sidecar is stopping.

        """
        world = self._world
        world.maintenance = operation
        world.api_wanted = world.postgres_wanted = False
        self._changed()
        await self._next_look()  # a step that was begun before is over then
        while not (world.api is Server.DOWN and world.postgres is Server.DOWN):
            await self._next_look()

    async def bring_postgres_up(self) -> None:
        """Run whatever data directory is there now, without hindsight-api, and return once Postgres answers.

        Raises:
            VerificationError: it cannot be run; the sentence is the state's.
            TransientError: the sidecar is stopping.

        """
        world = self._world
        world.postgres_ended()
        world.fault = None
        world.postgres_wanted = True
        crashes = world.postgres_restarts.total
        self._changed()
        while world.postgres is not Server.UP:
            await self._next_look()
            self._check_fault()
            if world.postgres_restarts.total - crashes >= _CRASHES:
                raise VerificationError("Postgres ends again and again on this data directory; its log lines say why")

    def over(self) -> None:
        """Let memory calls through again."""
        self._world.maintenance = None
        self._world.api_wanted = self._world.postgres_wanted = True
        self._changed()

    def _check_fault(self) -> None:
        fault = self._world.fault
        if fault is not None and fault.reason is not None:
            raise VerificationError(f"it cannot be served ({fault.reason}): {fault.detail}")

    async def _next_look(self) -> None:
        """Wait until the loop has looked again. Raises TransientError where it does not turn any more."""
        if self._world.stopping:
            raise TransientError("the sidecar is stopping")
        async with self._looked:
            await self._looked.wait()
