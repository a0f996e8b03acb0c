"""Whether the memories that are stored were embedded with what is about to embed more of them.

A model's identity is what its manifest says. Other weights under the same name give vectors of another space: everything
is healthy then, and recall is noise. So a database has a note of the embedder that its vectors were seen to be of, and
where another one is at hand, some of its texts are embedded anew before hindsight-api is started and could store any.
A start with the same embedder as before looks at the note alone, which takes no time.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sidecar import agreement, database, log
from sidecar.agreement import Agreement, Embed, Stored
from sidecar.errors import BlockedError, Reason, TransientError
from sidecar.model import Model

FORCED: dict[str, Any] = {
    "forced": True
}  # noted where an operator had vectors served that no embedder here agrees with
_RETRY = 10.0  # seconds


@dataclass(frozen=True)
class Embedder:
    """What a vector depends on, beyond the identity of the model.

    Attributes:
        content: one hash over the model's files.
        flavor: what computes with them.
        hindsight_api: version of what asks for it.

    """

    content: str
    flavor: str
    hindsight_api: str

    def to_json(self) -> dict[str, Any]:
        """Return it as a database notes it."""
        return asdict(self)


def is_known(noted: object, embedder: Embedder) -> bool:
    """Tell whether nothing has to be compared, by what a database has noted (None: nothing)."""
    return noted in (embedder.to_json(), FORCED)


def has_other_weights(noted: object, embedder: Embedder) -> bool:
    """Tell whether a database has noted other content than that of the model at hand."""
    return isinstance(noted, dict) and noted.get("content") not in (None, embedder.content)


def may_be_noted(found: Agreement | None, memories: int) -> bool:
    """Tell whether a database's vectors are of the embedder at hand: they agree, or all that come will be.

    Memories that say nothing, such as observations alone, may yet be another's; so they are looked at again next time.
    """
    return memories == 0 if found is None else found.fault is None


def note_of(found: Agreement | None, embedder: Embedder, *, forced: bool) -> dict[str, Any] | None:
    """Return what is noted in a database that is brought in; None lets the next look at it compare."""
    if found is not None and found.fault is None:
        return embedder.to_json()
    return FORCED if forced else None


def fault_of(found: Agreement | None, model: Model) -> BlockedError | None:
    """Return why nothing may be served; None where vectors agree, or there are none to compare."""
    if found is None or found.fault is None:
        return None
    return BlockedError(
        Reason.MODEL_MISMATCH,
        f"{found.fault}; the model in {model.directory} has the same name and revision, and other weights: set "
        "HINDSIGHT_SIDECAR_MODEL_DIR to the model they were made with, or put its files back",
        retry_after=_RETRY,
    )


class Recognition:
    """Compares, and remembers what it refused: the next look is soon, and takes a model's load again otherwise."""

    def __init__(self, socket_dir: Path) -> None:
        self._socket_dir = socket_dir
        self._log = log.get("sidecar")
        self._refused: tuple[Embedder, Stored, BlockedError] | None = None

    async def check(self, model: Model, embedder: Embedder, embed: Embed) -> None:
        """Compare what is stored in the served database with the embedder at hand, unless it is noted there.

        Writes nothing but that note.

        Raises:
            BlockedError: `model-mismatch`.
            psycopg.Error: Postgres went away meanwhile.

        """
        async with await database.connect(self._socket_dir, lock_timeout=database.LOCK_TIMEOUT) as owner:
            noted = await database.noted_embedder(owner)
            if is_known(noted, embedder):
                return
            stored = await agreement.sample(owner)
            if self._refused is not None and self._refused[:2] == (embedder, stored):
                raise self._refused[2]
            if stored:
                self._log.info("comparing stored vectors with the model", model=str(model.directory))
            try:
                found = await agreement.compare(stored, embed)
            except TransientError as error:
                if stored and has_other_weights(noted, embedder):
                    # Nothing may be embedded with them before they were compared.
                    raise BlockedError(
                        Reason.MODEL_MISMATCH,
                        f"the model's files in {model.directory} are not those that the memories were last seen to be of, and "
                        f"whether they agree could not be found out ({error}); it is tried again, or put the files back",
                        retry_after=_RETRY,
                    ) from error
                # hindsight-api will not load it either, and its own end says more; or memory was short for a moment.
                self._log.warning("stored vectors were not compared with the model", error=str(error))
                return
            if (fault := fault_of(found, model)) is not None:
                self._refused = (embedder, stored, fault)
                raise fault
            if not may_be_noted(found, await database.count_memories(owner, await database.memory_schemas(owner))):
                return
        await database.note_embedder(self._socket_dir, embedder.to_json())
