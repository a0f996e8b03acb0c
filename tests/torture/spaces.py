"""Want of space and of all else that is limited: named as the cause, and over without a restart once there is enough."""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
from administrator import ask, finished
from faults import Filler, FullOfFiles, fill_the_log, on_a_disk, resume, stopped, wait_no_space
from harness import RunningSidecar, on_a_small_volume, wait_for
from kills import crash, present
from ledger import BANK
from limits import Clock, build_an_index_in_parallel, in_namespace, limited_memory, take_its_memory
from matrix import Case, MissedError, Round
from rig import Rig
from victims import choose, family

GROUP = "space"
SIZE = 256  # MiB
FRESH = 45  # MiB, less than what a first start takes
TOO_SMALL = 64  # MiB, enough for a start
DIRTY = 100_000  # rows, of which there is room, and which take a moment to be recovered
MEMORY = 2 * 1024**3  # bytes
DESCRIPTORS = 256  # which allow 32 connections to an address
CALLERS = 8  # at a time, beside the writers and the probes
STOP_WITHIN = 9 + 1.0  # seconds
ENDS = {0, 4}  # in order, and where Postgres found no room for its last checkpoint
SHORT = {"shared memory of 1 MB"}


class Disk:
    """The small disk of a sidecar.

    Attributes:
        filler: takes what is free of it.
        files: take all of its inodes.

    """

    def __init__(self, sidecar: RunningSidecar) -> None:
        self.filler = Filler(sidecar)
        self.files = FullOfFiles(sidecar)


Fault = Callable[[Rig, Disk, float], float]  # returns how long it took from enough space to being ready


@contextmanager
def small_disk(rig: Rig) -> Iterator[Disk]:
    """Have a new home, on a small disk of its own; afterwards another one."""
    rig.new_home()
    with on_a_disk(rig.sidecar, SIZE), rig.ending():
        yield Disk(rig.sidecar)
    rig.new_home()


def first_start(rig: Rig, free: Callable[[], object]) -> float:
    """Start where there is not enough, and have enough then; return how long it took from there."""
    rig.start()
    with rig.alive(from_now=False):
        wait_no_space(rig.sidecar, 90)
        return ready_again(rig, free)


def ready_again(rig: Rig, free: Callable[[], object]) -> float:
    """Give space back, and return how long it took until everything was ready; nobody starts anything."""
    began = time.monotonic()
    free()
    rig.sidecar.wait_ready()
    return time.monotonic() - began


# A volume that is full ------------------------------------------------------------------------------------------


def first_initialisation(rig: Rig, place: float) -> Round:
    with small_disk(rig) as disk:
        disk.filler.leave(int(place * FRESH))
        outage = first_start(rig, disk.filler.gone)
        rig.store_some()
        return rig.survived(outage)


def start(rig: Rig, _: float) -> Round:
    with small_disk(rig) as disk:
        rig.begin()
        disk.filler.leave(0)
        outage = first_start(rig, disk.filler.gone)
        rig.store_some()
        return rig.survived(outage)


def during_a_start(rig: Rig, place: float, *, begins: Callable[[Rig], list[int]]) -> Round:
    """Have the volume filled in the middle of a start; `begins` is whom to stop meanwhile. Who stores something is in want."""
    with small_disk(rig) as disk:
        rig.begin()
        rig.start_ready()
        with rig.bulk(DIRTY):
            crash(rig)
        rig.start()
        with rig.alive(from_now=False):
            with held_up(begins(rig)):
                disk.filler.leave(int(place * 4))
            wait_for(lambda: not rig.stores() and in_want(rig), 120, "no space")
            wait_no_space(rig.sidecar)
            outage = ready_again(rig, disk.filler.gone)
        rig.store_some()
        return rig.survived(outage)


def in_want(rig: Rig) -> bool:
    return bool(rig.sidecar.health()["subject"] == "no-space")


def replay(rig: Rig) -> list[int]:
    rig.wait_said("redo starts")
    pids = choose("one backend", rig.pid)
    if "redo done" in rig.new_log():
        raise MissedError
    return pids


def load(rig: Rig) -> list[int]:
    return wait_for(lambda: sorted(present(rig, "hindsight-api")), 60, "hindsight-api", every=0.01)


def no_inodes_at_first(rig: Rig, _: float) -> Round:
    with small_disk(rig) as disk:
        disk.files.fill()
        outage = first_start(rig, disk.files.gone)
        rig.store_some()
        return rig.survived(outage)


def when_ready(rig: Rig, fault: Fault, place: float) -> Round:
    """Have a sidecar with memories on a small disk, ready, and do one of what follows to it."""
    with small_disk(rig) as disk:
        rig.begin()
        rig.start_ready()
        with rig.alive():
            outage = fault(rig, disk, place)
        rig.store_some()
        return rig.survived(outage)


def under_load(rig: Rig, disk: Disk, place: float) -> float:
    with rig.writing() as writer:
        disk.filler.leave(int(place * 4))
        wait_no_space(rig.sidecar, 120)
        outage = ready_again(rig, disk.filler.gone)
        writer.wait_for_more(2)
    return outage


def no_room_for_the_log(rig: Rig, disk: Disk, _: float) -> float:
    """Postgres ends where it cannot write its log, and cannot start before there is room."""
    with rig.writing() as writer:
        disk.filler.leave(0)
        fill_the_log(rig.sidecar)
        wait_no_space(rig.sidecar)
        outage = ready_again(rig, disk.filler.gone)
        writer.wait_for_more(2)
    return outage


def checkpoint(rig: Rig, disk: Disk, place: float) -> float:
    with rig.connected() as connection, rig.writing() as writer:
        connection.execute("CREATE TABLE public.dirty AS SELECT i, repeat('x', 500) FROM generate_series(1, 20000) i")
        disk.filler.leave(int(place * 20))
        with suppress(psycopg.Error):  # what was dirty already is more than what is left of the disk
            connection.execute("INSERT INTO public.dirty SELECT i, repeat('x', 500) FROM generate_series(1, 200000) i")
        with suppress(psycopg.Error):
            connection.execute("CHECKPOINT")
        wait_no_space(rig.sidecar)
        outage = ready_again(rig, disk.filler.gone)
        writer.wait_for_more(2)
    with rig.connected() as connection:
        assert connection.execute("SELECT count(*) FROM public.dirty").fetchone() == (20000,)
    return outage


def letters(rig: Rig) -> None:
    """Have a table whose dump takes more than what is left of the disk."""
    with rig.connected() as connection:
        filling = " || ".join(["md5(random()::text)"] * 8)
        connection.execute(f"CREATE TABLE public.letters AS SELECT i, {filling} FROM generate_series(1, 20000) i")
        connection.execute("ALTER TABLE public.letters OWNER TO hindsight")
        connection.execute("CHECKPOINT")


@contextmanager
def held_up(pids: list[int]) -> Iterator[None]:
    """Have processes stopped meanwhile. Raises MissedError where they have just ended."""
    with ExitStack() as stack:
        try:
            stack.enter_context(stopped(pids))
        except ProcessLookupError as error:
            resume(pids)
            raise MissedError from error
        yield


@contextmanager
def held(rig: Rig, phase: str, program: str) -> Iterator[None]:
    """Hold an operation in one of its phases, by stopping the program of PostgreSQL's that does it."""
    rig.wait_said(f'"phase": "{phase}"')

    def pids() -> list[int]:
        return [process.pid for process in family(rig.pid) if process.words.split(" ", 1)[0].endswith(f"/{program}")]

    with held_up(wait_for(pids, 10, program, every=0.005)):
        yield


def dump(rig: Rig, disk: Disk, place: float) -> float:
    """What is not finished is removed, and what is served is served."""
    letters(rig)
    begun = ask(rig.sidecar, "POST", "/v1/dumps")
    with held(rig, "dump", "pg_dump"):
        disk.filler.leave(int(place * 2))
    check_failed(finished(rig.sidecar, begun))
    check_served(rig)
    assert ask(rig.sidecar, "GET", "/v1/dumps").json()["dumps"] == []
    assert [path.name for path in (rig.sidecar.volume / "dumps").iterdir()] == []
    outage = ready_again(rig, disk.filler.gone)
    assert finished(rig.sidecar, ask(rig.sidecar, "POST", "/v1/dumps"))["outcome"] == "done"
    return outage


def check_served(rig: Rig) -> None:
    """Check that memories come back while there is no room: nothing but the dump had a use for it."""
    assert rig.sidecar.health_status() == 200, rig.sidecar.health()
    text = rig.ledger.texts()[0]
    assert text in [found["text"] for found in rig.sidecar.recall(BANK, text)]


def check_failed(operation: dict[str, Any]) -> None:
    assert operation["outcome"] == "failed", operation
    assert "No space left" in operation["error"], operation


def restore(rig: Rig, disk: Disk, place: float) -> float:
    """What is staged is dropped, and what is served is served."""
    letters(rig)
    dumped = finished(rig.sidecar, ask(rig.sidecar, "POST", "/v1/dumps"))
    assert dumped["outcome"] == "done", dumped
    begun = ask(rig.sidecar, "POST", "/v1/restores", {"dump": dumped["report"]["dump"]["id"]})
    with held(rig, "load", "pg_restore"):
        disk.filler.leave(int(place * 4))
    check_failed(finished(rig.sidecar, begun))
    wait_no_space(rig.sidecar)  # it is Postgres that had no room, so whoever stores something would have none either
    outage = ready_again(rig, disk.filler.gone)
    assert ask(rig.sidecar, "GET", "/v1/databases").json()["kept"] == []
    with rig.connected() as connection:
        staged = "SELECT datname FROM pg_database WHERE datname ~ 'staging'"
        wait_for(lambda: not connection.execute(staged).fetchall(), 20, "that what was staged is dropped")
    return outage


def no_inodes(rig: Rig, disk: Disk, _: float) -> float:
    with rig.writing() as writer:
        with rig.connected() as connection:
            wait_for(lambda: taken(disk, connection), 60, "every inode taken")
        wait_no_space(rig.sidecar, says=" inodes free now")
        outage = ready_again(rig, disk.files.gone)
        writer.wait_for_more(2)
    return outage


def taken(disk: Disk, connection: "psycopg.Connection[Any]") -> bool:
    """Take every inode and tell whether no file can be made, not even of a table that is empty.

    Whoever stores a memory makes tables for a moment, and gives back what they took.
    """
    disk.files.fill()
    try:
        connection.execute("CREATE TABLE public.none_left ()")
    except psycopg.Error as error:
        assert "No space left on device" in str(error)  # noqa: PT017 - what pytest raises instead would end the whole run
        return True
    connection.execute("DROP TABLE public.none_left")
    return False


def stop(rig: Rig, _: float) -> Round:
    """A stop of one that found no space is in time; what it could not write, the next start does."""
    with small_disk(rig) as disk:
        rig.begin()
        rig.start_ready()
        with rig.writing():
            disk.filler.leave(0)
            wait_no_space(rig.sidecar, 120)
            began = time.monotonic()
            code = rig.sidecar.stop()
            assert time.monotonic() - began < STOP_WITHIN
            assert code in ENDS, f"it ended with {code}"
        disk.filler.gone()
        outage = rig.started_again(time.monotonic())
        rig.store_some()
        return rig.survived(outage)


def grows(rig: Rig, _: float) -> Round:
    """Fill a volume that was claimed too small with memories, and make it bigger."""
    rig.new_home()
    with on_a_small_volume(rig.sidecar, TOO_SMALL), rig.ending():
        rig.begin()
        rig.start_ready()
        bigger = ["/bin/mount", "-o", f"remount,size={SIZE}m", str(rig.sidecar.volume)]
        with rig.alive(), rig.writing() as writer:
            wait_no_space(rig.sidecar, 180)
            outage = ready_again(rig, lambda: subprocess.run(bigger, check=True))
            writer.wait_for_more(2)
        rig.store_some()
        seen = rig.survived(outage)
    rig.new_home()
    return seen


# Other limits ---------------------------------------------------------------------------------------------------


@contextmanager
def ready_within(rig: Rig, wrapper: list[str]) -> Iterator[None]:
    """Have a sidecar that is ready and written to within a limit, and that is alive all the time."""
    rig.begin()
    rig.start(wrapper)
    rig.sidecar.wait_ready()
    with rig.writing() as writer, rig.alive():
        yield
        writer.wait_for_more(2)


def little_shared_memory(rig: Rig, _: float) -> Round:
    """Nothing of it is needed, not even to build an index with helpers."""
    with ready_within(rig, in_namespace("mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm")):
        build_an_index_in_parallel(rig.sidecar)
        assert rig.sidecar.health_status() == 200
    rig.store_some()
    return rig.survived(None)


def few_descriptors(rig: Rig, _: float) -> Round:
    """Whoever comes is served, however many keep a connection for nothing."""
    with (
        ready_within(rig, ["/bin/sh", "-euc", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh"]),
        ExitStack() as stack,
        ThreadPoolExecutor(CALLERS) as pool,
    ):
        for port in (rig.sidecar.port, rig.sidecar.control_port):
            for _ in range(DESCRIPTORS):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        text = rig.ledger.texts()[0]
        found = list(pool.map(lambda _: rig.sidecar.recall(BANK, text), range(120)))
        assert all(text in [one["text"] for one in results] for results in found)
        assert rig.sidecar.health_status() == 200
    rig.store_some()
    return rig.survived(None)


def little_memory(rig: Rig, _: float) -> Round:
    """Have hindsight-api killed for want of memory by the kernel itself."""
    # In the end the group has to be empty, and no other round may find one that is not.
    with limited_memory(f"hindsight-torture-{os.getpid()}-{secrets.token_hex(3)}", MEMORY) as group, rig.ending():
        assert group is not None, "no group of processes with a limit can be made here: nothing would have been tested"
        with ready_within(rig, ["/bin/sh", "-euc", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]):
            began = time.monotonic()
            take_its_memory(rig.sidecar, group)
            outage = time.monotonic() - began
        rig.store_some()
        return rig.survived(outage)


def clock(rig: Rig, _: float) -> Round:
    """Nothing asks what time of day it is."""
    sidecar = rig.new_home()
    time_of_day = Clock(sidecar)
    rig.start(time_of_day.wrapper)
    sidecar.wait_ready()
    rig.store_some()
    before = sidecar.health()["components"]
    with rig.writing() as writer, rig.alive():
        for hours in (1, -1, 0):
            time_of_day.jump(hours)
            time_of_day.wait_seen(hours)
            writer.wait_for_more(40)
            health = sidecar.health()
            assert (health["state"], health["components"]) == ("ready", before), health
            assert 0 <= health["sample_age_seconds"] < 3
    rig.store_some()
    seen = rig.survived(None)
    rig.new_home()
    return seen


# A full volume is an ext4 of `SIZE`, on a file.
FAULTS: dict[str, Fault] = {
    "a full volume, ready under load": under_load,
    "a full volume, no room for the log": no_room_for_the_log,
    "a full volume, a checkpoint": checkpoint,
    "a full volume, a dump": dump,
    "a full volume, a restore": restore,
    "no inodes, ready under load": no_inodes,
}
RUNS: dict[str, Callable[[Rig, float], Round]] = {
    "a full volume, first initialisation": first_initialisation,
    "a full volume, a start": start,
    "a full volume, a recovery": partial(during_a_start, begins=replay),
    "a full volume, a model load": partial(during_a_start, begins=load),
    "a full volume, a stop": stop,
    "no inodes, first initialisation": no_inodes_at_first,
    "a volume of 64 MB that grows": grows,
    "shared memory of 1 MB": little_shared_memory,
    "256 descriptors": few_descriptors,
    "too little memory for hindsight-api": little_memory,
    "a clock an hour forth and back": clock,
}


def cases(rig: Rig) -> list[Case]:
    """Return all of them."""
    return [
        *(Case(GROUP, name, partial(run, rig), short=name in SHORT) for name, run in RUNS.items()),
        *(Case(GROUP, name, partial(when_ready, rig, fault)) for name, fault in FAULTS.items()),
    ]
