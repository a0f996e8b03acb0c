"""What an operation asks of the supervisor: to take components down, and to serve again what lies there then."""

import asyncio
import time
from collections.abc import Callable

from sidecar.errors import Reason, TransientError, VerificationError
from sidecar.machine import OperationName, Server, World

_CRASHES = 2  # of a component after which new data is given up
_TRIES = 3  # of a step, in a row, after which new data is given up
_PATIENCE = (
    20.0  # seconds that they have to last: what passes by itself, such as a Postgres that begins again, has passed then
)


class Maintenance:
    """Changes what the supervisor wants, and waits until it is so. Memory calls wait meanwhile.

    Attributes:
        schema: that our own memory calls are answered from; None where an operator's extension chooses it.

    """

    def __init__(
        self, world: World, changed: Callable[[], object], schema: str | None, heads: Callable[[], frozenset[str]]
    ) -> None:
        """`heads` returns the revisions that hindsight-api brings a schema to."""
        self.schema = schema
        self._world = world
        self._changed = changed
        self._heads = heads
        self._looked = asyncio.Condition()

    @property
    def heads(self) -> frozenset[str]:
        """The revisions that hindsight-api brings a schema to. Raises TransientError before it was asked."""
        return self._heads()

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
        # Also where it is down already: a check or a copy that was begun before is of the database of before.
        await self._next_look()
        while self._world.api is not Server.DOWN:
            await self._next_look()
        if self._world.postgres is not Server.UP:
            raise TransientError("Postgres is not up; try again once the sidecar is ready")

    async def bring_api_up(self) -> None:
        """Serve the new database that has the name now, and return once a memory was recalled from it.

        A schema migration takes its time, so there is no limit but what the components themselves say, and how often a
        step failed.

        Raises:
            VerificationError: it cannot be served; the sentence is the state's, or the last step's.
            TransientError: the sidecar is stopping.

        """
        await self._serve(new=True)

    async def bring_api_back(self) -> None:
        """Serve what was served before again, and return once a memory was recalled from it, however many tries that takes.

        Raises:
            VerificationError: it waits for an operator, or for space; the sentence is the state's.
            TransientError: the sidecar is stopping.

        """
        await self._serve(new=False)

    async def _serve(self, *, new: bool) -> None:
        world = self._world
        world.database_exchanged()
        world.api_wanted = world.postgres_wanted = True
        crashes, ends = world.api_restarts.total, world.postgres_restarts.total
        no_space: float | None = None  # monotonic seconds since when
        self._changed()
        while not (world.proved and world.api is Server.UP):
            await self._next_look()
            self._check_fault(new=new)
            no_space = (no_space or time.monotonic()) if world.no_space is not None else None
            if no_space is not None and time.monotonic() - no_space >= _PATIENCE:  # it may be this one that takes it
                raise VerificationError(f"it cannot be served ({Reason.NO_SPACE}): {world.no_space}")
            if world.api_restarts.total - crashes >= _CRASHES:
                raise VerificationError("hindsight-api ends again and again with this database; its log lines say why")
            if world.postgres_restarts.total - ends >= _CRASHES:
                raise VerificationError("Postgres ends again and again with this database; its log lines say why")

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
            self._check_fault(new=True)
            if world.postgres_restarts.total - crashes >= _CRASHES:
                raise VerificationError("Postgres ends again and again on this data directory; its log lines say why")

    def over(self) -> None:
        """Let memory calls through again."""
        self._world.maintenance = None
        self._world.api_wanted = self._world.postgres_wanted = True
        self._changed()

    def _check_fault(self, *, new: bool) -> None:
        """Raise VerificationError where what lies there now cannot be served, and of what is new where it cannot be proved."""
        fault = self._world.fault
        if fault is None:
            return
        detail = " ".join(fault.detail.split())
        if fault.reason is not None:
            raise VerificationError(f"it cannot be served ({fault.reason}): {detail}")
        # hindsight-api may be well, and refuse to store: a schema of its own revision with a column that it does not know.
        if new and fault.tries >= _TRIES and time.monotonic() - fault.since >= _PATIENCE:
            raise VerificationError(f"it cannot be served ({fault.tries} tries): {detail}")

    async def _next_look(self) -> None:
        """Wait until the loop has looked again. Raises TransientError where it does not turn any more."""
        if self._world.stopping:
            raise TransientError("the sidecar is stopping")
        async with self._looked:
            await self._looked.wait()
