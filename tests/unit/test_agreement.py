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
