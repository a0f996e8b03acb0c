"""When PostgreSQL's programs are at hand: also where what is served has to be replaced, and nowhere else."""

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.at_hand import AtHand
from sidecar.errors import Reason, TransientError
from sidecar.machine import Fault, Server, World

PROGRAMS = object()
REPLACEABLE = [Reason.SCHEMA_NEWER, Reason.MODEL_MISMATCH, Reason.DAMAGED_CLUSTER]


def at_hand(world: World, *, binaries: object = True) -> AtHand:
    postgres: Any = SimpleNamespace(binaries=binaries, programs=lambda _: PROGRAMS)
    nobody: Any = None
    return AtHand(nobody, world, nobody, postgres, nobody, {}, nobody)


def blocked(reason: Reason | None, **more: Any) -> World:
    return World(**{"postgres": Server.UP, "fault": Fault(reason, "why", 0.0)} | more)


def test_they_are_where_the_database_was_checked() -> None:
    one = at_hand(World(postgres=Server.UP, database_checked=True))
    assert one.programs is PROGRAMS
    one.check_served()


@pytest.mark.parametrize("reason", REPLACEABLE)
def test_they_are_where_it_is_the_database_that_is_wrong(reason: Reason) -> None:
    one = at_hand(blocked(reason))
    assert one.programs is PROGRAMS
    with pytest.raises(TransientError, match=f"^{reason}: why$"):  # what is there is not dumped as if it were good
        one.check_served()


@pytest.mark.parametrize("reason", [None, *(one for one in Reason if one not in REPLACEABLE)])
def test_they_are_not_where_something_else_is(reason: Reason | None) -> None:
    told = "^Postgres is not ready" if reason is None else f"^{reason}: why$"
    with pytest.raises(TransientError, match=told):
        at_hand(blocked(reason)).programs  # noqa: B018 - it is refused


@pytest.mark.parametrize(
    ("world", "binaries"),
    [
        (World(), True),
        (World(postgres=Server.UP), True),
        (World(postgres=Server.UP, database_checked=True), None),
        (World(postgres=Server.DOWN, database_checked=True), True),
        (blocked(Reason.DAMAGED_CLUSTER, postgres=Server.DOWN), True),
        (blocked(Reason.SCHEMA_NEWER, postgres=Server.RECOVERING), True),
    ],
)
def test_they_are_not_without_postgres(world: World, binaries: object) -> None:
    with pytest.raises(TransientError):
        at_hand(world, binaries=binaries).programs  # noqa: B018 - it is refused
