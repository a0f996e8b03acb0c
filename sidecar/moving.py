"""Brings memories in: stage, verify, swap, verify again, keep the old. Every source ends here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psycopg
from psycopg import sql

from sidecar import contents, database, migrated, swapping, verification
from sidecar.agreement import SAMPLE, Agreement, own_schemas
from sidecar.api_environment import DATABASE, ROLE
from sidecar.contents import Contents, Moment
from sidecar.database import Facts
from sidecar.errors import RefusedError, SidecarError, TransientError, VerificationError
from sidecar.machine import OperationName
from sidecar.migrated import Found
from sidecar.operations import SERVE, Operation
from sidecar.rehearsal import RehearsalError
from sidecar.staging import Staged

# Traces of hindsight-api's own work: they change by themselves, and nobody was told that they are kept.
_TRACES = frozenset({
    "llm_requests", "audit_log", "alembic_version", "webhook_deliveries", "graph_maintenance_queue", "entity_maintenance_queue",
})  # fmt: skip
_NAMED = 5


class Served(Protocol):
    """What serves the database: the supervisor, as far as operations may ask it."""

    @property
    def schema(self) -> str | None:
        """The schema that our own memory calls are answered from; None where an operator's extension chooses it."""

    @property
    def heads(self) -> frozenset[str]:
        """The revisions that hindsight-api brings a schema to."""

    async def take_api_down(self, operation: OperationName) -> None:
        """Stop hindsight-api and keep it down."""

    async def bring_api_up(self) -> None:
        """Serve what is new and has the name now; VerificationError where it cannot be."""

    async def bring_api_back(self) -> None:
        """Serve what was served before again, for as long as it takes; VerificationError where somebody has to mend it."""

    async def take_postgres_down(self, operation: OperationName) -> None:
        """Stop both components and keep them down."""

    async def bring_postgres_up(self) -> None:
        """Run the data directory that is there now, without hindsight-api; VerificationError where it cannot be."""

    def over(self) -> None:
        """Let memory calls through again."""


@dataclass(frozen=True)
class Baseline:
    """What was served when a move began, as far as changes can be told from it."""

    moment: Moment
    contents: Contents


@dataclass(frozen=True)
class Move:
    """How memories are brought in.

    Attributes:
        socket_dir: of our Postgres.
        served: what serves the database.
        recall: asks a bank for a memory by its own text, and returns the semantic score with which it came back, or None.
        discard_newer: what was stored since staging began may stay in the old database alone.
        force_model: vectors that do not agree with the model at hand are served all the same.

    """

    socket_dir: Path
    served: Served
    recall: Callable[[str, str], Awaitable[float | None]]
    discard_newer: bool = False
    force_model: bool = False

    async def baseline(self) -> Baseline:
        """Count what is served now, before staging begins."""
        async with await database.connect(self.socket_dir) as connection, connection.transaction():
            now = await contents.moment(connection)
            return Baseline(now, await contents.read(connection, since=now))

    async def swap(
        self,
        staged: Staged,
        before: Baseline,
        facts: Facts,
        operation: Operation,
    ) -> None:
        """Serve a staged database instead of the live one, and keep the live one under a name and a date.

        Raises:
            RefusedError: memories were stored since staging began; both databases are as they were.
            VerificationError: the new database could not be served as it is; the old one is served again.

        """
        staged = await finish(self.socket_dir, staged, facts)
        kept = swapping.kept_name()
        operation.enter("swap")
        async with served_again(self.served, operation):
            await self.served.take_api_down(operation.name)
            await self._compare_with(before, operation)
            await swapping.exchange(self.socket_dir, staged.name, kept)
            operation.report["kept"] = kept
            try:
                await self.verify_served(staged, operation)
            except BaseException as error:
                await put_back(self.socket_dir, self.served, kept, staged.name, operation, error)
                del operation.report["kept"]
                raise

    async def _compare_with(self, before: Baseline, operation: Operation) -> None:
        """Compare what is served with what it was when staging began: nothing acknowledged since is lost silently."""
        newer = newer_than(before.contents.unchanged(), await look(self.socket_dir, before.moment))
        operation.report["newer"] = newer
        if newer and not self.discard_newer:
            raise RefusedError(
                f"memories were stored since this began ({'; '.join(newer[:_NAMED])}), and would be in the old database "
                "alone; stop the writers and try again, or allow it with --discard-newer"
            )

    async def verify_served(self, staged: Staged, operation: Operation) -> None:
        """Prove that what is served is the very database that was verified, start hindsight-api on it, recall some memories.

        Raises:
            VerificationError: it is not, or could not be served.

        """
        operation.enter("verify again")
        comparison = verification.compare(staged.contents.unchanged(), await look(self.socket_dir, staged.verified))
        if comparison.faults:
            raise VerificationError("; ".join(comparison.faults[:_NAMED]))
        found, doubts = await start(self.socket_dir, self.served, operation)
        recalled = await self._recall_some(operation)
        doubts += not_recalled(staged.contents.memories, found, self.served.schema, recalled=recalled)
        operation.report["unproved"] = [*operation.report.get("unproved", []), *doubts]

    async def _recall_some(self, operation: Operation) -> bool:
        """Ask for some memories by their own texts: each has to come back, and its vector to agree with the model at hand.

        hindsight-api adds dates and entities to a text before it embeds it, so agreement is not identity; vectors of
        another model have nothing to do with the text at all. Tells whether there were any.
        """
        schema = self.served.schema
        memories = [] if schema is None else await sample(self.socket_dir, schema)
        operation.enter("recall", len(memories), "memories")
        scores: list[float] = []

        async def ask(bank: str, text: str) -> None:
            try:
                scores.append(await self.recall(bank, text) or 0.0)
            except RehearsalError as error:
                raise VerificationError(f"asked for by their own texts: {error}") from error
            operation.done += 1

        try:
            async with asyncio.TaskGroup() as group:  # memory calls wait until all of them came back
                for bank, text in memories:
                    group.create_task(ask(bank, text))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
        if scores:
            agreed = Agreement.of(scores)
            operation.report["recalled"] = agreed.to_json()
            if agreed.fault is not None and not self.force_model:
                raise VerificationError(f"asked for by their own texts: {agreed.fault}")
        return bool(scores)


async def start(socket_dir: Path, served: Served, operation: Operation) -> tuple[Found, list[str]]:
    """Start hindsight-api on what is new and has the name now; return what it found there, and what is not sure of its migration.

    Raises:
        VerificationError: it cannot be served, or not all of it is there any more.

    """
    operation.enter("start hindsight-api")
    found = await migrated.look(socket_dir)
    await served.bring_api_up()
    faults, doubts = migrated.compare(found, await migrated.look(socket_dir), served.schema, served.heads)
    if faults:
        raise VerificationError("; ".join(faults[:_NAMED]))
    return found, doubts


@contextlib.asynccontextmanager
async def served_again(served: Served, operation: Operation) -> AsyncIterator[None]:
    """Whatever happens within, let memory calls through again in the end; what was not proved to be served is, first."""
    try:
        yield
    except BaseException:
        operation.enter(SERVE)
        # What went wrong first matters, and not that nobody waits for this any more; the state tells of it.
        with contextlib.suppress(TransientError, VerificationError, asyncio.CancelledError):
            await served.bring_api_back()
        raise
    finally:
        served.over()


async def put_back(
    socket_dir: Path, served: Served, kept: str, incoming: str, operation: Operation, why: BaseException
) -> None:
    """Serve the old database again, and give the new one back its name; also while the sidecar stops.

    Raises:
        SidecarError: Postgres is gone, so the new one keeps the name; what is kept is named, and `why` it is not wanted.

    """
    operation.enter("roll back")
    with contextlib.suppress(TransientError):  # stopping, or Postgres is down: the exchange itself tells
        await served.take_api_down(operation.name)
    try:
        await swapping.exchange(socket_dir, kept, incoming)
    except (psycopg.Error, TransientError) as error:
        raise SidecarError(
            f"{str(why).strip() or type(why).__name__}; and it could not be put back ({str(error).strip()}): the new database has "
            f"the name, and the one that was served before is kept as {kept}: serve it again with `hindsight-sidecar rollback {kept}`"
        ) from error


async def look(socket_dir: Path, since: Moment) -> Contents:
    """Look at what is served for changes, with its owner's rights."""
    async with await database.connect(socket_dir, ROLE, DATABASE) as connection, connection.transaction():
        return await contents.read(connection, since)


async def _read_again(socket_dir: Path, staged: Staged) -> Staged:
    async with await database.connect(socket_dir, ROLE, staged.name) as connection, connection.transaction():
        now = await contents.moment(connection)
        return replace(staged, contents=await contents.read(connection), verified=now)


def newer_than(before: Contents, now: Contents) -> list[str]:
    """Return what changed in tables that hold what a client was told is kept: a phrase for each table."""
    told = []
    for name in sorted({*before.tables, *now.tables}):
        old, new = before.tables.get(name), now.tables.get(name)
        table = name.rpartition(".")[2]
        if old == new or table in _TRACES or table in contents.DERIVED:
            continue
        difference = (new.rows if new else 0) - (old.rows if old else 0)
        told.append(f"{name}: {difference:+d} rows" if difference else f"{name}: changed rows")
    return told


async def finish(socket_dir: Path, staged: Staged, facts: Facts) -> Staged:
    """Make a verified database one that can be served, and return what it holds then."""
    if await _reset_tasks(socket_dir, staged.name):
        staged = await _read_again(socket_dir, staged)
    # Nor is a copy needed before hindsight-api migrates it, also where this sidecar is killed before it is served: its
    # source has it as it is, and what is served now is kept.
    await database.prepare(socket_dir, staged.name, replace(facts, uncopied=staged.contents.revisions))
    return staged


async def _reset_tasks(socket_dir: Path, name: str) -> int:
    """Let tasks that some worker had begun be taken up again, as that worker is not here; return how many they are."""
    reset = 0
    async with await database.connect(socket_dir, ROLE, name) as connection:
        for schema in await database.memory_schemas(connection):
            if await migrated.has_tasks(connection, schema):
                update = sql.SQL(
                    "UPDATE {} SET status = 'pending', worker_id = NULL, claimed_at = NULL WHERE status = 'processing'"
                ).format(sql.Identifier(schema, "async_operations"))
                reset += (await connection.execute(update)).rowcount
    return reset


def not_recalled(memories: int, found: Found, schema: str | None, *, recalled: bool) -> list[str]:
    """Return what recalls from a schema say nothing of, a sentence each; `recalled` tells whether any memory was."""
    if not memories:
        return []
    if schema is None:
        return [
            "none of its memories was recalled: from which schema hindsight-api answers the sidecar, the tenant extension decides"
        ]
    others = [name for name, there in found.memories.items() if there and name != schema]
    sentences = []
    if not recalled:
        sentences.append(
            f"none of its memories was recalled (one of 20 to 1000 characters is needed in schema {schema}, which hindsight-api "
            "serves, and no observation)"
        )
    if others:
        sentences.append(
            f"no memory was recalled of schema {', '.join(others)}: hindsight-api answers the sidecar from {schema} alone"
        )
    return sentences


async def sample(socket_dir: Path, schema: str) -> list[tuple[str, str]]:
    """Return bank and text of some memories of a schema, of as many banks as can be."""
    async with await database.connect(socket_dir, ROLE) as connection:
        if schema not in await own_schemas(connection):
            return []
        cursor = await connection.execute(
            sql.SQL(
                "SELECT bank_id AS bank, text FROM (SELECT bank_id, text, row_number() OVER (PARTITION BY bank_id ORDER BY md5(id::text)) AS n "
                "FROM {} WHERE embedding IS NOT NULL AND fact_type <> 'observation' AND length(text) BETWEEN 20 AND 1000) AS picked "
                "ORDER BY n, bank_id LIMIT %s"
            ).format(sql.Identifier(schema, "memory_units")),
            (SAMPLE,),
        )
        return [(str(row["bank"]), str(row["text"])) for row in await cursor.fetchall()]
