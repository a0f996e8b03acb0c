"""What hindsight-api's start took away is told, and what it may have taken away rightly is a doubt."""

import pytest

from sidecar.migrated import Found, compare

HEADS = frozenset({"head"})
OLD = Found({"public": 10, "tenant": 5}, {"public": ["old"], "tenant": ["old"]})


NEW = {"public": ["head"], "tenant": ["old"]}


def after(public: int, tenant: int) -> Found:
    return Found({"public": public, "tenant": tenant}, NEW)


def test_more_than_before_and_the_served_schema_at_its_head_is_well() -> None:
    assert compare(OLD, after(10, 5), "public", HEADS) == ([], [])
    assert compare(OLD, after(12, 6), "public", HEADS) == ([], [])
    assert compare(Found(), Found({}, {"public": ["head"]}), "public", HEADS) == ([], [])


def test_fewer_memories_are_a_fault_of_each_schema() -> None:
    faults, doubts = compare(OLD, Found({"public": 9}, {"public": ["head"]}), "public", HEADS)
    assert faults == [
        "schema public had 10 memories before hindsight-api was started, and has 9 now",
        "schema tenant had 5 memories before hindsight-api was started, and has 0 now",
    ]
    assert doubts == []


def test_fewer_where_documents_may_have_been_stored_anew_are_a_doubt() -> None:
    before = Found(OLD.memories, OLD.revisions, frozenset({"public"}))
    told = (
        "schema public had 10 memories before hindsight-api was started, and has 9 now; tasks were waiting in it that may have "
        "replaced some"
    )
    assert compare(before, after(9, 5), "public", HEADS) == ([], [told])
    assert len(compare(before, after(10, 4), "public", HEADS)[0]) == 1


@pytest.mark.parametrize(
    ("served", "revisions", "told"),
    [
        ("public", {"public": ["old"]}, "schema public is at revision old; expected head"),
        ("elsewhere", {}, "schema elsewhere is at revision none; expected head"),
        ("public", {"tenant": ["half"]}, "schema tenant is at revision half; expected head"),
        (None, {"public": ["half"]}, "schema public is at revision half; expected head"),
        (None, {"public": ["old"]}, None),  # whose it is nobody says, and nobody touched it
    ],
)
def test_what_is_migrated_is_at_a_head(served: str | None, revisions: dict[str, list[str]], told: str | None) -> None:
    faults, _ = compare(OLD, Found(OLD.memories, NEW | revisions), served, HEADS)
    assert len(faults) == (told is not None)
    assert told is None or told in faults[0]
