"""What an agent does, done once in a bank of our own: the only proof that memories come back.

Keyword search finds a text that repeats the question's words also with broken embeddings. So the questions share no
word with the memories, and what counts is the semantic score.
"""

import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from sidecar.errors import SidecarError

CANARY_BANK = "hindsight-sidecar-canary"
SMOKE_BANK_PREFIX = "hindsight-sidecar-smoke-"
# A paraphrase scores about 0.5 with MiniLM and 0.7 with bge; unrelated sentences 0.1 and 0.4, noise around 0.
MARGIN = 0.1


@dataclass(frozen=True)
class Memory:
    """A text to store, and a question about it that shares no word with it."""

    text: str
    question: str


MEMORIES = (
    Memory("Our harbour master repainted his sailing dinghy crimson.", "What colour is the boat now?"),
    Memory(
        "Our physician recommended swallowing two tablets before breakfast.",
        "How should I take my medicine each morning?",
    ),
    Memory("Grandmother's violin was repaired by a luthier in Cremona.", "Who fixed the old musical instrument?"),
)


class RehearsalError(SidecarError):
    """A step of the rehearsal did not do what an agent relies on."""


class UnreachableError(RehearsalError):
    """Nobody listens at the address."""


@dataclass
class Report:
    """What was done and seen.

    Attributes:
        steps: for each step its name, its duration in seconds, and what it showed.
        fault: what went wrong at the step after the last, None where nothing did.
        unreachable: whether that was nobody answering.

    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    fault: str | None = None
    unreachable: bool = False

    def add(self, name: str, began: float, shown: str) -> None:
        """Append a step that began at this monotonic time."""
        self.steps.append({"step": name, "seconds": round(time.monotonic() - began, 3), "shown": shown})

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"passed": self.fault is None, "fault": self.fault, "steps": self.steps}


def words(text: str) -> set[str]:
    """Return the words of a text, as keyword search would see them."""
    return set(re.findall(r"[a-z]+", text.lower()))


class Agent:
    """Speaks the memory API as an agent's plugin does, about one bank."""

    def __init__(self, client: httpx2.AsyncClient, bank: str) -> None:
        self._client = client
        self.bank = bank
        self._path = f"/v1/default/banks/{bank}"

    async def call(self, method: str, path: str = "", body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        """Make one call and return its JSON.

        Raises:
            RehearsalError: it failed, with what was seen.

        """
        what = f"{method} {self._path}{path}"
        try:
            response = await self._client.request(method, self._path + path, json=body)
        except httpx2.ConnectError as error:
            raise UnreachableError(f"{what} found nobody at {self._client.base_url}: {error}") from error
        except httpx2.HTTPError as error:
            raise RehearsalError(f"{what} failed: {type(error).__name__} {error}") from error
        if not response.is_success:
            raise RehearsalError(f"{what} answered {response.status_code}: {response.text[:300]}")
        return response.json()

    async def create(self) -> None:
        """Make the bank: it stores texts as they are, without asking any LLM."""
        await self.call("PUT", body={})
        await self.call(
            "PATCH", "/config", {"updates": {"retain_extraction_mode": "chunks", "enable_observations": False}}
        )

    async def retain(self, texts: list[str]) -> None:
        """Store texts and wait until they are stored."""
        await self.call("POST", "/memories", {"items": [{"content": text} for text in texts], "async": False})

    async def recall(self, question: str, types: list[str] | None = None) -> list[dict[str, Any]]:
        """Return what comes back for a question; `types` as an agent's plugin sends it."""
        body: dict[str, Any] = {"query": question, "budget": "low"}
        if types is not None:
            body["types"] = types
        results: list[dict[str, Any]] = (await self.call("POST", "/memories/recall", body))["results"]
        return results

    async def delete(self) -> None:
        """Delete the bank with all that is in it."""
        await self.call("DELETE")


def semantic_score(results: list[dict[str, Any]], text: str) -> float | None:
    """Return the semantic score with which a text came back, None where it did not."""
    for result in results:
        if result["text"] == text:
            score = (result.get("scores") or {}).get("semantic")
            return None if score is None else float(score)
    return None


def judge(results: list[dict[str, Any]], memory: Memory) -> float:
    """Check that a memory came back for its meaning, ahead of what it has nothing to do with.

    Returns its semantic score.

    Raises:
        RehearsalError: it did not.

    """
    score = semantic_score(results, memory.text)
    if score is None:
        seen = [result["text"][:60] for result in results]
        raise RehearsalError(f"asked {memory.question!r}, {memory.text!r} did not come back by its meaning; got {seen}")
    others = [
        other
        for result in results
        if result["text"] != memory.text
        if (other := (result.get("scores") or {}).get("semantic")) is not None
    ]
    best = max(others, default=-1.0)
    if score < best + MARGIN:
        raise RehearsalError(
            f"asked {memory.question!r}, the memory about it scored {score:.3f} and another {best:.3f}; "
            "the embeddings do not carry meaning: the model at hand is broken, or not the one the memories were made with"
        )
    return score


@asynccontextmanager
async def bank(agent: Agent) -> AsyncIterator[Agent]:
    """Have a bank that is deleted again, whatever happens in between; one left by a killed rehearsal is deleted first."""
    await agent.create()
    try:
        yield agent
    finally:
        await agent.delete()


async def prove(client: httpx2.AsyncClient) -> float:
    """Store two texts and ask for one of them by its meaning; return the semantic score.

    Raises:
        RehearsalError: what was stored did not come back.

    """
    agent = Agent(client, CANARY_BANK)
    await agent.call("DELETE")
    async with bank(agent):
        await agent.retain([memory.text for memory in MEMORIES])
        return judge(await agent.recall(MEMORIES[0].question), MEMORIES[0])


async def smoke(client: httpx2.AsyncClient, name: str, report: Report) -> None:
    """Do all that an agent does, in a bank of this name, and report each step as it is done.

    Raises:
        RehearsalError: at the first step that did not do what it should.

    """
    agent = Agent(client, name)
    began = time.monotonic()
    await agent.create()
    try:
        report.add("create bank", began, agent.bank)
        began = time.monotonic()
        await agent.retain([memory.text for memory in MEMORIES])
        report.add("retain", began, f"{len(MEMORIES)} memories")
        for memory in MEMORIES:
            began = time.monotonic()
            score = judge(await agent.recall(memory.question), memory)
            report.add("recall by meaning", began, f"{memory.question} -> {memory.text} (semantic {score:.3f})")
        began = time.monotonic()
        judge(await agent.recall(MEMORIES[1].question, ["world", "experience", "observation"]), MEMORIES[1])
        report.add("recall, all types", began, "came back")
        began = time.monotonic()
        seen = await agent.recall(MEMORIES[1].question, ["observation"])
        report.add("recall as Hermes asks by default", began, f"{len(seen)} observations (made by an LLM only)")
        began = time.monotonic()
        listed = {item["text"] for item in (await agent.call("GET", "/memories/list"))["items"]}
        missing = [memory.text for memory in MEMORIES if memory.text not in listed]
        if missing:
            raise RehearsalError(f"the list of memories lacks {missing}")
        report.add("list", began, f"{len(listed)} memories")
    finally:
        began = time.monotonic()
        await agent.delete()
    report.add("delete bank", began, "done")
