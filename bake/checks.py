"""What vectors and scores have to be like; pure functions of what the probe answered."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bake.identity import Identity
from bake.lock import KnownAnswer

Vector = Sequence[float]

# (anchor, paraphrase in other words, unrelated in similar words): a model of random weights sees only the words,
# and finds the unrelated sentence nearer.
TRIPLES = (
    ("The cat is sleeping on the sofa.", "A kitten takes a nap on a couch.", "The tax is rising on the rich."),
    ("How do I reset my password?", "I forgot my login and need a new one.", "How do I roast my chicken?"),
    ("She moved to Berlin in spring.", "Her new home is the German capital.", "She turned to opera in school."),
    ("The doctor prescribed some pills.", "A physician gave out medicine.", "The farmer harvested some apples."),
)
MARGIN = 0.1  # mean of cosine(anchor, paraphrase) - cosine(anchor, unrelated)
# Longer than any limit in use here, so that both flavours have to cut it at the same token.
LONG_TEXT = "The keeper of the lighthouse writes down every ship that passes by in the night. " * 60
PAIRS = (
    ("how many people live in berlin", "Berlin has a population of about 3.7 million people."),
    ("how many people live in berlin", "Bread is baked from flour, water and yeast."),
    ("what is the capital of france", "Paris is the capital and largest city of France."),
    ("what is the capital of france", "A violin has four strings."),
)
UNIT_TOLERANCE = 1e-3
REPEAT_TOLERANCE = 1e-6
# C1: what sentence-transformers up to 5 says when it makes up a model.
MADE_UP = "Creating a new one"
AGREEMENT = {"float32": 0.999}
AGREEMENT_QUANTISED = 0.998


@dataclass(frozen=True)
class Check:
    """One line of the report. ``passed`` is None for what was not checked."""

    name: str
    passed: bool | None
    detail: str


def documents(known: KnownAnswer | None) -> list[str]:
    """Texts the probe has to encode: the known one (or a blank for it), the long one, the triples."""
    return [known.text if known else "hello world", LONG_TEXT, *(text for triple in TRIPLES for text in triple)]


def embedding_checks(
    answer: dict[str, Any], identity: Identity, max_tokens: int, known: KnownAnswer | None
) -> list[Check]:
    """Judge one flavour's answer."""
    if "error" in answer:
        return [*warning_checks(answer), Check("load", passed=False, detail=answer["error"])]
    vectors = [*answer["documents"], *answer["queries"]]
    shape = {len(vector) for vector in vectors} | {answer["dimension"]}
    checks = [
        Check("load", passed=True, detail=f"{answer['provider']} of hindsight-api {answer['hindsight_api']}"),
        *warning_checks(answer),
        Check(
            "dimension",
            passed=shape == {identity.dimension},
            detail=f"{_listed(shape)}, manifest.json says {identity.dimension}",
        ),
        finite_check(value for vector in vectors for value in vector),
        configuration_check(answer, identity, max_tokens),
    ]
    if not all(check.passed for check in checks):
        return checks
    return [
        *checks,
        norm_check(vectors, normalize=identity.normalize is True),
        repeat_check(answer["documents"], answer["again"]),
        semantic_check(answer["documents"][-3 * len(TRIPLES) :]),
        known_answer_check(answer["documents"][0], known, identity.precision),
    ]


def reranker_checks(answer: dict[str, Any]) -> list[Check]:
    """Judge a reranker's answer: every relevant pair above every irrelevant one of the same query."""
    if "error" in answer:
        return [*warning_checks(answer), Check("load", passed=False, detail=answer["error"])]
    scores = answer["scores"]
    checks = [
        Check("load", passed=True, detail=f"{answer['provider']} of hindsight-api {answer['hindsight_api']}"),
        *warning_checks(answer),
        finite_check(scores),
    ]
    if not all(check.passed for check in checks):
        return checks
    shown = ", ".join(f"{score:.2f}" for score in scores)
    ordered = all(relevant > other for relevant, other in zip(scores[::2], scores[1::2], strict=True))
    return [
        *checks,
        repeat_check([scores], [answer["again"]]),
        Check("order", passed=ordered, detail=f"scores {shown}; each relevant text has to be above its neighbour"),
    ]


def warning_checks(answer: dict[str, Any]) -> list[Check]:
    """No attempt on the network, and no made-up model; everything else that was warned about is not our business."""
    made_up = [warning for warning in answer["warnings"] if MADE_UP in warning]
    attempts = sorted(set(answer["network"]))
    checks = [
        Check("network", passed=not attempts, detail=f"tried {', '.join(attempts)}" if attempts else "no attempt")
    ]
    if made_up:
        checks.append(Check("warnings", passed=False, detail=made_up[0]))
    return checks


def finite_check(values: Iterable[float]) -> Check:
    """Find what is not a number: it is invisible downstream, stored and never found again."""
    strange = sum(not math.isfinite(value) for value in values)
    return Check("finite", passed=not strange, detail=f"{strange} values are not finite" if strange else "all values")


def configuration_check(answer: dict[str, Any], identity: Identity, max_tokens: int) -> Check:
    """Compare the loaded provider with what the model's own files ask for."""
    expected: dict[str, Any] = {"pooling": identity.pooling, "normalize": identity.normalize, "max_tokens": max_tokens}
    for prefix in ("query_prefix", "passage_prefix"):
        if answer[prefix] is not None:
            expected[prefix] = getattr(identity, prefix)
    wrong = [f"{key} is {answer[key]!r}, expected {value!r}" for key, value in expected.items() if answer[key] != value]
    agreed = f"pooling {identity.pooling}, {max_tokens} tokens, as the model's files ask"
    return Check("configuration", passed=not wrong, detail="; ".join(wrong) or agreed)


def norm_check(vectors: Sequence[Vector], *, normalize: bool) -> Check:
    """Length 1 where the model normalises; never 0."""
    norms = [math.hypot(*vector) for vector in vectors]
    if not normalize:
        return Check("norm", passed=min(norms) > 0, detail=f"shortest {min(norms):.4f}; the model does not normalise")
    worst = max(abs(norm - 1) for norm in norms)
    return Check("norm", passed=worst <= UNIT_TOLERANCE, detail=f"at most {worst:.1e} from 1")


def repeat_check(first: Sequence[Vector], second: Sequence[Vector]) -> Check:
    """Compare two runs over the same texts."""
    worst = max(abs(a - b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))
    return Check("repeat", passed=worst <= REPEAT_TOLERANCE, detail=f"at most {worst:.1e} between two runs")


def semantic_check(vectors: Sequence[Vector]) -> Check:
    """Meaning counts for more than words; with the vectors of TRIPLES, in that order."""
    margins = [
        cosine(anchor, paraphrase) - cosine(anchor, unrelated)
        for anchor, paraphrase, unrelated in zip(vectors[::3], vectors[1::3], vectors[2::3], strict=True)
    ]
    mean = sum(margins) / len(margins)
    detail = f"paraphrases are nearer than unrelated sentences by {mean:.3f}, expected {MARGIN} or more"
    return Check("meaning", passed=mean >= MARGIN, detail=detail)


def known_answer_check(vector: Vector, known: KnownAnswer | None, precision: str) -> Check:
    """Compare with the published vector."""
    if known is None:
        return Check("known answer", passed=None, detail="no known answer pinned")
    if precision not in AGREEMENT:
        return Check("known answer", passed=None, detail=f"the pinned one is of full precision, this is {precision}")
    worst = max(abs(a - b) for a, b in zip(vector, known.first, strict=False))
    detail = f"{known.text!r} is at most {worst:.1e} from the published vector, tolerance {known.tolerance}"
    return Check("known answer", passed=worst <= known.tolerance, detail=detail)


def agreement_check(one: Sequence[Vector], other: Sequence[Vector], precisions: Iterable[str]) -> Check:
    """Both flavours give the same vectors, as far as their precision allows."""
    threshold = min(AGREEMENT.get(precision, AGREEMENT_QUANTISED) for precision in precisions)
    worst = min(cosine(a, b) for a, b in zip(one, other, strict=True))
    return Check(
        "agreement", passed=worst >= threshold, detail=f"torch and onnx: cosine {worst:.5f}, expected {threshold}"
    )


def cosine(one: Vector, other: Vector) -> float:
    """Cosine of the angle between two vectors; 0 for a vector of zeros."""
    scale = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / scale if scale else 0.0


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in sorted(values, key=str))
