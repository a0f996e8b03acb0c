"""Of which schemas a copy is kept before hindsight-api migrates them, and what the copy is called."""

import pytest

from sidecar.database import not_covered
from sidecar.swapping import copy_name, kept_name

HEADS = {"head"}
SERVED = {"public": ["head"], "tenant": ["old"]}
LEFT = {"tenancy": "public", "schemas": {"tenant": ["old"]}}


@pytest.mark.parametrize(
    ("revisions", "noted", "wanted"),
    [
        ({"public": ["head"]}, None, set()),
        ({"public": ["old"]}, None, {"public"}),
        (SERVED, None, {"tenant"}),
        (SERVED, LEFT, set()),
        ({"public": ["head"], "tenant": ["older"]}, LEFT, {"tenant"}),
        ({**SERVED, "another": ["old"]}, LEFT, {"another"}),
        ({"public": ["old"], "tenant": ["old"]}, LEFT, {"public"}),
        (SERVED, {**LEFT, "tenancy": "tenant"}, {"tenant"}),  # told to serve something else, it may migrate that
        (SERVED, {**LEFT, "tenancy": None}, set()),  # brought in a moment ago
        ({"public": ["old"]}, {"tenancy": None, "schemas": {"public": ["old"]}}, set()),
        (SERVED, "nonsense", {"tenant"}),
    ],
)
def test_of_what_a_copy_is_wanted(revisions: dict[str, list[str]], noted: object, wanted: set[str]) -> None:
    assert set(not_covered(revisions, HEADS, noted, "public")) == wanted


def test_a_newer_hindsight_api_makes_more_of_them_old() -> None:
    assert set(not_covered(SERVED, {"newer"}, LEFT, "public")) == {"public"}


def test_a_copy_of_what_is_brought_back_is_older_than_what_was_served_until_then() -> None:
    back = "hindsight_kept_20250102t030405z"
    name = copy_name("1.1.0", back, {back})
    assert name == f"{back}_before_1_1_0"
    assert max(name, back, later := kept_name()) == later


def test_what_is_brought_back_may_get_its_name_again() -> None:
    back = "hindsight_kept_20250102t030405z_before_1_1_0"
    assert copy_name("1.1.0", back, {back}) == f"{back}_2"
    assert copy_name("1.1.0", back, {back, f"{back}_2"}) == f"{back}_3"


def test_a_name_fits_whatever_the_version_is_called() -> None:
    names: set[str] = set()
    for _ in range(12):
        names.add(copy_name("1.2.0.post1.dev12+g0123abcd", "hindsight_kept_20250102t030405z", names))
    assert len(names) == 12
    assert {len(name) for name in names} == {63}
