import asyncio
import json
from itertools import product
from typing import Any

import httpx2
import pytest

from sidecar.rehearsal import (
    CANARY_BANK,
    MARGIN,
    MEMORIES,
    Memory,
    RehearsalError,
    Report,
    judge,
    prove,
    semantic_score,
    smoke,
    words,
)

MEMORY = MEMORIES[0]


def result(text: str, semantic: float | None) -> dict[str, Any]:
    return {"text": text, "scores": {"semantic": semantic}}


# Words ---------------------------------------------------------------------------------------------------------


def test_words_are_what_keyword_search_sees() -> None:
    assert words("Who's THE boat-man? 2 boats.") == {"who", "s", "the", "boat", "man", "boats"}


@pytest.mark.parametrize(("asked", "stored"), list(product(MEMORIES, MEMORIES)))
def test_no_question_shares_a_word_with_any_memory(asked: Memory, stored: Memory) -> None:
    assert not words(asked.question) & words(stored.text)


def test_the_memories_are_different_ones() -> None:
    assert len({memory.text for memory in MEMORIES}) == len({memory.question for memory in MEMORIES}) == 3


# Judging -------------------------------------------------------------------------------------------------------


def test_a_memory_that_comes_back_by_its_meaning_is_good() -> None:
    assert judge([result(MEMORY.text, 0.55), result("other", 0.1)], MEMORY) == 0.55
    assert judge([result(MEMORY.text, 0.2)], MEMORY) == 0.2
    assert judge([result("other", None), {"text": "third"}, result(MEMORY.text, 0.3)], MEMORY) == 0.3


@pytest.mark.parametrize(
    "results",
    [
        [],
        [result("other", 0.9)],
        [result(MEMORY.text, None)],
        [{"text": MEMORY.text}],
        [{"text": MEMORY.text, "scores": None}],
        [result(MEMORY.text.upper(), 0.9)],
    ],
)
def test_one_that_did_not_come_back_by_its_meaning_is_a_fault(results: list[dict[str, Any]]) -> None:
    with pytest.raises(RehearsalError, match="did not come back by its meaning"):
        judge(results, MEMORY)


@pytest.mark.parametrize("lead", [-0.3, 0.0, MARGIN - 0.02])
def test_one_that_does_not_lead_is_a_fault_of_the_embeddings(lead: float) -> None:
    with pytest.raises(RehearsalError, match="the embeddings do not carry meaning"):
        judge([result("other", 0.4), result(MEMORY.text, 0.4 + lead)], MEMORY)


def test_the_first_of_equal_texts_counts() -> None:
    assert semantic_score([result("a", 0.5), result("a", 0.1)], "a") == 0.5
    assert semantic_score([], "a") is None


# The whole of it -----------------------------------------------------------------------------------------------


class Bank:
    """hindsight-api as far as the rehearsal speaks with it."""

    def __init__(self, *, meaning: bool = True, fails: str = "") -> None:
        self.texts: list[str] = []
        self.calls: list[str] = []
        self._meaning = meaning
        self._fails = fails

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/v1/default/banks/")
        name, _, rest = path.partition("/")
        call = f"{request.method} {rest}".strip()
        self.calls.append(f"{call} {name}" if not rest else call)
        if call == self._fails:
            return httpx2.Response(500, text="broken")
        if call == "DELETE":
            self.texts = []
        elif call == "POST memories":
            self.texts += [item["content"] for item in json.loads(request.content)["items"]]
        elif call == "POST memories/recall":
            return httpx2.Response(200, json={"results": self._recall(json.loads(request.content))})
        elif call == "GET memories/list":
            return httpx2.Response(200, json={"items": [{"text": text} for text in self.texts]})
        return httpx2.Response(200, json={})

    def _recall(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if body.get("types") == ["observation"]:
            return []
        wanted = next(memory.text for memory in MEMORIES if memory.question == body["query"])
        return [result(text, 0.6 if text == wanted and self._meaning else 0.1) for text in self.texts]


def with_bank(bank: Bank, work: Any) -> Any:
    async def run() -> Any:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(bank), base_url="http://h") as client:
            return await work(client)

    return asyncio.run(run())


def test_a_proof_clears_what_a_killed_one_left_and_leaves_nothing() -> None:
    bank = Bank()
    assert with_bank(bank, prove) == 0.6
    assert bank.calls[0] == bank.calls[-1] == f"DELETE {CANARY_BANK}"
    assert bank.texts == []


@pytest.mark.parametrize("fails", ["POST memories", "POST memories/recall", "PATCH config"])
def test_a_proof_that_fails_says_where_and_deletes_its_bank_where_it_was_made(fails: str) -> None:
    bank = Bank(fails=fails)
    with pytest.raises(RehearsalError, match="answered 500: broken"):
        with_bank(bank, prove)
    if fails != "PATCH config":
        assert bank.calls[-1] == f"DELETE {CANARY_BANK}"


def test_broken_embeddings_are_no_proof() -> None:
    with pytest.raises(RehearsalError, match="do not carry meaning"):
        with_bank(Bank(meaning=False), prove)


def test_a_smoke_run_reports_every_step() -> None:
    bank, report = Bank(), Report()
    with_bank(bank, lambda client: smoke(client, "smoke-1", report))
    assert [step["step"] for step in report.steps] == [
        "create bank", "retain", *["recall by meaning"] * 3, "recall, all types", "recall as Hermes asks by default",
        "list", "delete bank",
    ]  # fmt: skip
    assert report.to_json()["passed"]
    assert bank.calls[-1] == "DELETE smoke-1"


def test_a_smoke_run_that_fails_reports_what_was_done_and_deletes_its_bank() -> None:
    bank, report = Bank(fails="GET memories/list"), Report()
    with pytest.raises(RehearsalError, match="GET /v1/default/banks/smoke-1/memories/list answered 500"):
        with_bank(bank, lambda client: smoke(client, "smoke-1", report))
    assert report.steps[-1]["step"] == "recall as Hermes asks by default"
    assert bank.calls[-1] == "DELETE smoke-1"


def test_a_gateway_that_is_not_there_is_a_fault_with_its_name() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    async def run() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(refuse), base_url="http://h") as client:
            await prove(client)

    with pytest.raises(RehearsalError, match="found nobody at"):
        asyncio.run(run())
