"""Whether stored vectors were made by the model at hand: some of their texts are embedded anew and compared."""

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from sidecar.database import Connection

SAMPLE = 10  # memories of each database
# hindsight-api adds dates and entities to a text before it embeds it, so agreement is not identity: the same model gives
# 0.8 to 1 for the bare texts, and another one about 0.
AGREEMENT = 0.6
_COLUMNS = ("id", "bank_id", "text", "fact_type", "embedding")
Embed = Callable[[list[tuple[str, list[float]]]], Awaitable[list[float]]]


@dataclass(frozen=True)
class Agreement:
    """What came of it: how many memories were looked at, and the median of their cosines."""

    memories: int
    median: float

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
    stored = await sample(connection)
    if not stored:
        return None
    cosines = await embed(stored)
    return Agreement(len(cosines), round(statistics.median(cosines), 3))


async def sample(connection: Connection) -> list[tuple[str, list[float]]]:
    """Return text and vector of some memories, of as many banks as can be; observations are summed up by an LLM."""
    found: list[tuple[str, list[float]]] = []
    for schema in await _sampled_schemas(connection):
        cursor = await connection.execute(
            sql.SQL(
                "SELECT text, embedding::text AS vector FROM (SELECT text, embedding, row_number() OVER "
                "(PARTITION BY bank_id ORDER BY md5(id::text)) AS n, bank_id FROM ONLY {} "
                "WHERE embedding IS NOT NULL AND fact_type <> 'observation' AND length(text) BETWEEN 20 AND 1000) AS picked "
                "ORDER BY n, bank_id LIMIT %s"
            ).format(sql.Identifier(schema, "memory_units")),
            (SAMPLE,),
        )
        found += [(str(row["text"]), _components(str(row["vector"]))) for row in await cursor.fetchall()]
    return found[:SAMPLE]


async def _sampled_schemas(connection: Connection) -> list[str]:
    """Return the schemas whose memory_units is hindsight-api's own: another program's may have that name."""
    cursor = await connection.execute(
        "SELECT n.nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped AND a.attname = ANY (%s) "
        "WHERE c.relname = 'memory_units' AND c.relkind = 'r' GROUP BY 1 HAVING count(*) = %s ORDER BY 1",
        (list(_COLUMNS), len(_COLUMNS)),
    )
    return [str(row["schema"]) for row in await cursor.fetchall()]


def _components(text: str) -> list[float]:
    return [float(part) for part in text.strip("[]").split(",")]
