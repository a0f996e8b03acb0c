import io
import json
import math
from typing import Any

import pytest

from bake import checks
from bake.checks import Check, agreement_check, embedding_checks, reranker_checks, semantic_check
from bake.identity import Identity
from bake.lock import KnownAnswer
from bake.report import write_json, write_lines
from bake.verify import Report

IDENTITY = Identity(
    id="i",
    revision="r",
    precision="float32",
    dimension=3,
    pooling="cls",
    normalize=True,
    query_prefix="",
    passage_prefix="",
)
KNOWN = KnownAnswer(text="hello world", first=(1.0, 0.0, 0.0), tolerance=0.001)


def answer(**changes: object) -> dict[str, Any]:
    """What a good model says: each triple's anchor and paraphrase are the same, the third is at a right angle."""
    triples = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]] * len(checks.TRIPLES)
    documents = [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], *triples]
    return {
        "hindsight_api": "1.1.0",
        "provider": "OnnxEmbeddings",
        "dimension": 3,
        "pooling": "cls",
        "normalize": True,
        "max_tokens": 512,
        "query_prefix": "",
        "passage_prefix": "",
        "documents": documents,
        "again": documents,
        "queries": [[1.0, 0.0, 0.0]],
        "warnings": [],
        "network": [],
    } | changes


def failed(found: list[Check]) -> list[str]:
    return [check.name for check in found if check.passed is False]


def judged(**changes: object) -> list[str]:
    return failed(embedding_checks(answer(**changes), IDENTITY, 512, KNOWN))


def test_a_good_answer_passes_every_check() -> None:
    found = embedding_checks(answer(), IDENTITY, 512, KNOWN)
    assert all(check.passed for check in found)
    assert [check.name for check in found] == [
        "load", "network", "dimension", "finite", "configuration", "norm", "repeat", "meaning", "known answer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"error": "ValueError: no"}, ["load"]),
        ({"dimension": 4}, ["dimension"]),
        ({"queries": [[1.0, 0.0]]}, ["dimension"]),
        ({"queries": [[math.nan, 0.0, 0.0]]}, ["finite"]),
        ({"pooling": "mean"}, ["configuration"]),
        ({"pooling": None}, ["configuration"]),
        ({"max_tokens": 256}, ["configuration"]),
        ({"query_prefix": "query: "}, ["configuration"]),
        ({"normalize": False}, ["configuration"]),
        ({"queries": [[2.0, 0.0, 0.0]]}, ["norm"]),
        ({"again": [[0.9, 0.0, 0.0]] * 14}, ["repeat"]),
        ({"documents": [[1.0, 0.0, 0.0]] * 14, "again": [[1.0, 0.0, 0.0]] * 14}, ["meaning"]),
        ({"network": ["socket.connect 192.0.2.1"]}, ["network"]),
        # What sentence-transformers up to 5 says; 6 is silent, and the pooling tells.
        ({"warnings": ["st: No model found with name x. Creating a new one with mean pooling."]}, ["warnings"]),
        ({"warnings": ["transformers: something else"]}, []),
        # Torch has no prefixes of ours.
        ({"query_prefix": None, "passage_prefix": None}, []),
    ],
)
def test_each_fault_is_seen_by_its_own_check(changes: dict[str, Any], names: list[str]) -> None:
    assert judged(**changes) == names


def test_known_answer() -> None:
    other = KnownAnswer(text="hello world", first=(0.99, 0.0, 0.0), tolerance=0.001)
    assert failed(embedding_checks(answer(), IDENTITY, 512, other)) == ["known answer"]
    (unpinned,) = (check for check in embedding_checks(answer(), IDENTITY, 512, None) if check.name == "known answer")
    assert (unpinned.passed, unpinned.detail) == (None, "no known answer pinned")
    quantised = IDENTITY.model_copy(update={"precision": "int8"})
    (skipped,) = (check for check in embedding_checks(answer(), quantised, 512, other) if check.name == "known answer")
    assert skipped.passed is None


def test_words_in_common_do_not_make_a_meaning() -> None:
    flat = [[1.0, 0.0], [0.99, math.sqrt(1 - 0.99**2)], [0.99, math.sqrt(1 - 0.99**2)]] * 4
    assert semantic_check(flat).passed is False


def test_every_unrelated_sentence_shares_more_words_with_the_anchor_than_the_paraphrase() -> None:
    for anchor, paraphrase, unrelated in checks.TRIPLES:
        words = [set(text.lower().rstrip(".?").split()) for text in (anchor, paraphrase, unrelated)]
        assert len(words[0] & words[1]) < len(words[0] & words[2])


def test_agreement_allows_for_the_precision() -> None:
    one, other = [[1.0, 0.0]], [[0.9985, math.sqrt(1 - 0.9985**2)]]
    assert agreement_check(one, other, ["float32", "int8"]).passed is True
    assert agreement_check(one, other, ["float32", "float32"]).passed is False
    assert agreement_check(one, [[0.0, 0.0]], ["int8"]).passed is False


def test_rerankers() -> None:
    good = {"hindsight_api": "1.1.0", "provider": "p", "warnings": [], "network": [], "scores": [2.0, -1.0, 3.0, 0.0]}
    good["again"] = good["scores"]
    assert failed(reranker_checks(good)) == []
    # NaN logits become 0 upstream: every text is the same then.
    assert failed(reranker_checks(good | {"scores": [0.0] * 4, "again": [0.0] * 4})) == ["order"]
    assert failed(reranker_checks(good | {"scores": [math.nan] * 4})) == ["finite"]
    assert failed(reranker_checks(good | {"error": "x"})) == ["load"]


def test_a_report_for_people_and_for_programs() -> None:
    report = Report("mini", [Check("a", passed=True, detail="x"), Check("b", passed=None, detail="y")])
    lines, program = io.StringIO(), io.StringIO()
    write_lines(report, lines)
    write_json(report, program)
    assert lines.getvalue() == "ok    a: x\n-     b: y\nmini: verified\n"
    assert json.loads(program.getvalue())["passed"] is True
    report.add("c", ["first", "second"], "")
    write_lines(report, lines)
    assert lines.getvalue().endswith("FAIL  c: first\nFAIL  c: second\nmini: NOT what it has to be\n")
