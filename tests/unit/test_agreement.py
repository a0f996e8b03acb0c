"""Whether stored vectors agree with fresh ones."""

import pytest

from sidecar import upstream_embed
from sidecar.agreement import Agreement


def test_agreement_has_a_limit() -> None:
    assert Agreement(10, 0.6).fault is None
    fault = Agreement(10, 0.59).fault
    assert fault is not None
    assert "agree with the model at hand by 0.59 (expected 0.6 or more)" in fault


@pytest.mark.parametrize(
    ("cosines", "agrees"),
    [
        ([0.97] * 10, True),
        ([0.05] * 10, False),
        ([0.97], True),
        ([0.05], False),
        ([0.97, 0.05], True),  # one of two was edited where it is stored
        ([0.97, 0.97, 0.97, 0.05, 0.05, 0.05], True),
        ([0.97, 0.05, 0.05, 0.05], False),  # those few were stored with the model at hand, and the others were not
    ],
)
def test_half_of_the_memories_decide(cosines: list[float], *, agrees: bool) -> None:
    assert (Agreement.of(cosines).fault is None) is agrees
    assert Agreement.of(cosines).memories == len(cosines)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 0.0], [2.0, 0.0], 1.0),
        ([1.0, 0.0], [0.0, 1.0], 0.0),
        ([1.0, 0.0], [-1.0, 0.0], -1.0),
        ([1.0, 0.0], [1.0, 0.0, 0.0], 0.0),
        ([0.0, 0.0], [1.0, 0.0], 0.0),
    ],
)
def test_the_cosine_of_two_vectors(one: list[float], other: list[float], expected: float) -> None:
    assert upstream_embed.cosine(one, other) == pytest.approx(expected)
