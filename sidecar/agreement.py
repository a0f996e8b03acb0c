"""Whether stored vectors were made by the model at hand: some of their texts are embedded anew and compared."""

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Self

from psycopg import sql

from sidecar.database import OURS, Connection

SAMPLE = 10  # memories of each database
# hindsight-api adds dates and entities to a text before it embeds it, so agreement is not identity: the same model gives
# 0.8 to 1 for the bare texts, and another one about 0.
AGREEMENT = 0.6
_COLUMNS = {"id": "uuid", "bank_id": "text", "text": "text", "fact_type": "text", "embedding": "vector"}
Stored = list[tuple[str, list[float]]]  # a text and its vector
Embed = Callable[[Stored], Awaitable[list[float]]]


@dataclass(frozen=True)
class Agreement:
    """What came of it: how many memories were looked at, and the median of their cosines."""

    memories: int
    median: float

    @classmethod
    def of(cls, cosines: Sequence[float]) -> Self:
        """Judge by half of them: the upper median, so of two the better one.

        A text that was edited where it is stored, or is short and has many entities, says nothing of the model, and may be all
        of the others. A single one that agrees may not: with two models in one database, most of its memories are noise.
        """
        return cls(len(cosines), round(statistics.median_high(cosines), 3))

    @property
    def fault(self) -> str | None:
        """Say what is wrong; None where they agree."""
        if self.median >= AGREEMENT:
            return None
        return (
            f"{self.memories} of its memories were embedded anew, and their stored vectors agree with the model at hand by "
            f"{self.median} (expected {AGREEMENT} or more): they were embedded with another model, and recall would return noise"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a report has it."""
        return {"memories": self.memories, "median_similarity": self.median}


async def measure(connection: Connection, embed: Embed) -> Agreement | None:
    """Compare a sample of what a database holds, of all its tenants; None where it holds nothing to compare.

    Raises:
        psycopg.Error: it cannot be read.
        Whatever `embed` raises.

    """
    return await compare(await sample(connection), embed)


async def compare(stored: Stored, embed: Embed) -> Agreement | None:
    """Compare what was sampled; None where that is nothing. Raises whatever `embed` raises."""
    return Agreement.of(await embed(stored)) if stored else None


async def sample(connection: Connection) -> Stored:
    """Return text and vector of some memories, of as many tenants and banks as can be, no text twice.

    Observations are left out: an LLM sums them up, and what was embedded may be another text.
    """
    found: list[Stored] = []
    for schema in await own_schemas(connection):
        cursor = await connection.execute(
            sql.SQL(
                # The vectors are fetched last: sorting them would write most of the table to the disk.
                "SELECT text, embedding::text AS vector FROM (SELECT id, bank_id, row_number() OVER "
                "(PARTITION BY bank_id ORDER BY md5(id::text)) AS n FROM (SELECT DISTINCT ON (md5(text)) id, bank_id FROM ONLY {0} "
                "WHERE embedding IS NOT NULL AND fact_type <> 'observation' AND length(text) BETWEEN 20 AND 1000 "
                "ORDER BY md5(text), id) AS different ORDER BY n, bank_id LIMIT %s) AS picked "
                "JOIN ONLY {0} AS whole USING (id) ORDER BY n, picked.bank_id"
            ).format(sql.Identifier(schema, "memory_units")),
            (SAMPLE,),
        )
        found.append([(str(row["text"]), _components(str(row["vector"]))) for row in await cursor.fetchall()])
    different: dict[str, list[float]] = {}
    for text, vector in filter(None, chain.from_iterable(zip_longest(*found))):
        different.setdefault(text, vector)
    return list(different.items())[:SAMPLE]


async def own_schemas(connection: Connection) -> list[str]:
    """Return the schemas whose memory_units is hindsight-api's own: another program's may have that name."""
    cursor = await connection.execute(
        "SELECT n.nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "  # noqa: S608 - a constant
        "JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped JOIN pg_type t ON t.oid = a.atttypid "
        "JOIN unnest(%s::text[], %s::text[]) AS wanted (column_name, type_name) ON a.attname = column_name AND t.typname = type_name "
        f"WHERE c.relname = 'memory_units' AND c.relkind = 'r' AND {OURS} GROUP BY 1 HAVING count(*) = %s ORDER BY 1",
        (list(_COLUMNS), list(_COLUMNS.values()), len(_COLUMNS)),
    )
    return [str(row["schema"]) for row in await cursor.fetchall()]


def _components(text: str) -> list[float]:
    return [float(part) for part in text.strip("[]").split(",")]
