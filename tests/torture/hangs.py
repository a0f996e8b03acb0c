"""Hangs under load: told within three seconds while liveness is answered at once, and over without help."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import psycopg
from faults import TOLD_WITHIN, ToldLateError, on_a_volume_that_can_hang, process_of, stopped, wait_told
from harness import wait_for
from matrix import Case, MissedError, Round, SlowError
from postgres_server import UNPRIVILEGED
from rig import Rig

GROUP = "hang"
HUNG_AFTER = 5.0  # seconds, the shortest that can be set
BEYOND = (
    TOLD_WITHIN + HUNG_AFTER + 2
)  # seconds after which a hindsight-api would be replaced, were it the one that hangs
STOP_WITHIN = 9 + 1.0  # seconds
SHORT = {"the checkpointer"}
Hang = Callable[[Rig], AbstractContextManager[float]]  # yields when it began
_WRITING = """
SELECT pid FROM pg_stat_activity
WHERE usename = 'hindsight' AND application_name <> 'hindsight-sidecar' AND backend_xid IS NOT NULL
"""


# What hangs -----------------------------------------------------------------------------------------------------


@contextmanager
def postmaster(rig: Rig) -> Iterator[float]:
    with stopped([rig.sidecar.pid_of("postgres")]) as since:
        yield since


@contextmanager
def all_of_postgres(rig: Rig) -> Iterator[float]:
    first = rig.sidecar.pid_of("postgres")
    with stopped([first]) as since:  # so that it makes no new process meanwhile
        others = [pid for pid in rig.sidecar.postgres_pids() if pid != first]
        assert len(others) > 5
        with stopped(others):
            yield since


@contextmanager
def idle_backend(rig: Rig) -> Iterator[float]:
    """Stop one that has nothing to do and holds nothing; the others wait for it all the same, sooner or later."""
    with rig.connected() as connection, stopped([connection.info.backend_pid]) as since:
        yield since


@contextmanager
def writing_backend(rig: Rig) -> Iterator[float]:
    """Stop one in the middle of a transaction that writes."""
    with rig.connected() as connection, ThreadPoolExecutor(1) as pool:
        for _ in range(50):
            pid = wait_for(partial(some_writer, connection), 20, "a backend that writes", every=0.001)
            with stopped([pid]) as since:
                looking = pool.submit(writers, connection)
                if still_writes(looking.result, pid):
                    yield since
                    return
    raise MissedError("every transaction was over before its backend was stopped")


def writers(connection: "psycopg.Connection[Any]") -> set[int]:
    return {int(pid) for (pid,) in connection.execute(_WRITING)}


def some_writer(connection: "psycopg.Connection[Any]") -> int | None:
    return next(iter(writers(connection)), None)


def still_writes(look: Callable[[float], set[int]], pid: int) -> bool:
    try:
        return pid in look(1.0)
    except TimeoutError:
        return True  # whoever looks waits for what it holds


@contextmanager
def checkpointer(rig: Rig) -> Iterator[float]:
    with stopped([process_of(rig.sidecar, "checkpointer")]) as since:
        yield since


@contextmanager
def hindsight_api(rig: Rig) -> Iterator[float]:
    with stopped([rig.sidecar.pid_of("hindsight-api")]) as since:
        yield since


# Rounds ---------------------------------------------------------------------------------------------------------


def goes_on(rig: Rig, subject: str, hang: Hang, lasts: float, place: float) -> Round:
    """Have something hang for some seconds, be told of, go on, and be kept."""
    with rig.having(HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}"):
        rig.begin()
        rig.start_ready()
        return kept(rig, subject, hang, lasts, place)


def kept(rig: Rig, subject: str, hang: Hang, lasts: float, place: float) -> Round:
    """Do that with a sidecar that is ready."""
    before = rig.sidecar.health()["components"]
    with rig.writing() as writer, rig.alive():
        writer.wait_for_more(1 + int(place * 20))
        with hang(rig) as since:
            check_told(rig, since, subject)
            wait_for(lambda: time.monotonic() > since + lasts, lasts + 1, "some seconds of a hang")
            assert rig.sidecar.health_status() == 503
        over = time.monotonic()
        rig.sidecar.wait_ready(30)
        outage = time.monotonic() - over
        writer.wait_for_more(2)
    assert rig.sidecar.health()["components"] == before, "something was replaced"
    rig.store_some()
    return rig.survived(outage)


def check_told(rig: Rig, since: float, subject: str) -> None:
    try:
        fault = wait_told(rig.sidecar, since, subject)
    except ToldLateError as late:
        raise SlowError(str(late)) from late
    assert fault != "None", f"it is not said what is wrong with {subject}"


def replaced(rig: Rig, place: float) -> Round:
    """Have hindsight-api hang for good: it is ended, and another one serves."""
    with rig.having(HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}"):
        rig.begin()
        rig.start_ready()
        before = rig.sidecar.health()["components"]
        with rig.writing() as writer, rig.alive():
            writer.wait_for_more(1 + int(place * 20))
            with hindsight_api(rig) as since:
                check_told(rig, since, "hindsight-api")
                rig.sidecar.wait_ready()
                outage = time.monotonic() - since
            writer.wait_for_more(2)
        after = rig.sidecar.health()["components"]
        assert outage > HUNG_AFTER, f"it was given {outage:.1f} s"
        assert after["hindsight-api"]["pid"] != before["hindsight-api"]["pid"]
        assert after["hindsight-api"]["restarts"] == before["hindsight-api"]["restarts"] + 1
        assert after["postgres"] == before["postgres"], "Postgres was left alone"
        rig.store_some()
        return rig.survived(outage)


@contextmanager
def home_that_can_hang(rig: Rig) -> Iterator[Hang]:
    """Have a new home, on a file system that can hang; afterwards another one."""
    rig.new_home()
    with on_a_volume_that_can_hang(rig.sidecar) as server, rig.ending():

        @contextmanager
        def hang(_: Rig) -> Iterator[float]:
            with stopped([server]) as since:
                yield since

        yield hang
    rig.new_home()


def volume(rig: Rig, place: float) -> Round:
    """Have the volume hang while memories are stored."""
    with rig.having(HINDSIGHT_SIDECAR_API_HUNG_AFTER=f"{HUNG_AFTER:g}"), home_that_can_hang(rig) as hang:
        rig.begin()
        rig.start_ready()
        return kept(rig, "volume", hang, BEYOND, place)


def volume_at_both_ends(rig: Rig, place: float) -> Round:
    """Stop and start while the volume hangs: the one is not held up, and the other waits."""
    with home_that_can_hang(rig) as hang:
        rig.begin()
        rig.start_ready()
        with rig.writing() as writer:
            writer.wait_for_more(1 + int(place * 20))
            with hang(rig) as since:
                check_told(rig, since, "volume")
                began = time.monotonic()
                assert rig.sidecar.stop() == 4, "Postgres could not be shut down in order"
                assert time.monotonic() - began < STOP_WITHIN
                # Root would look at it for whom to become, before there is anything to answer.
                rig.start(["/usr/bin/setpriv", *UNPRIVILEGED])
                rig.sidecar.wait_state("starting(volume)")
                with rig.alive():
                    detail = wait_for(lambda: rig.sidecar.health()["detail"], 10, "what the start waits for")
                    assert "gave no answer" in detail
            outage = rig.recovered(time.monotonic())
            writer.wait_for_more(2)
        rig.store_some()
        return rig.survived(outage)


def cases(rig: Rig) -> list[Case]:
    """Return all of them."""

    def case(name: str, subject: str, hang: Hang, lasts: float) -> Case:
        return Case(GROUP, name, partial(goes_on, rig, subject, hang, lasts), short=name in SHORT)

    return [
        case("the postmaster", "postgres", postmaster, BEYOND),
        case("all of Postgres", "postgres", all_of_postgres, BEYOND),
        case("one backend that holds nothing", "postgres", idle_backend, BEYOND),
        case("one backend in the middle of a write", "postgres", writing_backend, BEYOND),
        case("the checkpointer", "postgres", checkpointer, TOLD_WITHIN),
        case("hindsight-api, and it goes on", "hindsight-api", hindsight_api, TOLD_WITHIN),
        Case(GROUP, "hindsight-api, beyond its limit", partial(replaced, rig)),
        Case(GROUP, "the volume, ready under load", partial(volume, rig)),
        Case(GROUP, "the volume, a stop and a start", partial(volume_at_both_ends, rig)),
    ]
