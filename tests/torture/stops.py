"""Stops within their budget: whatever goes on, the sidecar ends in time, in order, and with everything on the disk."""

import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from http import HTTPStatus

import loopback_llm
import psycopg
from administrator import archive_of, ask
from kills import Moment, OlderVolume, moments
from matrix import Case, Round, SlowError
from rig import SHUT_DOWN, Rig

GROUP = "stop"
BUDGETS = (1, 5, 10, 30)  # seconds
DEFAULT = 9  # seconds, of a sidecar that is told nothing
SPARE = 0.7  # seconds beside the budget, of a process to be started, scheduled and waited for
IN_ORDER, HARD = 0, 4  # exit codes
SHORTEST = 1  # seconds; too little to write out what may be dirty, so its end may be a hard one
# A Postgres that is told to stop before it has opened ends in order as well, and its next start goes on with what this one
# did not come to.
IN_RECOVERY = SHUT_DOWN | {"shut down in recovery", "in crash recovery"}
STATES = {
    "first initialisation": SHUT_DOWN | {"shut down in recovery"},
    "start": SHUT_DOWN | {"shut down in recovery"},
    "schema migration": SHUT_DOWN | {"shut down in recovery"},
    "recovery": IN_RECOVERY,
}
SHORT = {(10, "a running restore")}
While = Callable[[Rig], AbstractContextManager[None]]  # starts the sidecar, which has its budget already


def start(rig: Rig) -> None:
    rig.start_ready()
    rig.store_some()


@contextmanager
def open_transaction(rig: Rig) -> Iterator[None]:
    start(rig)
    connection = psycopg.connect(host=str(rig.sidecar.run_dir), user="postgres", dbname="hindsight")
    try:
        connection.execute("CREATE TABLE never_committed (i integer)")
        yield
    finally:
        connection.close()


@contextmanager
def idle_client(rig: Rig) -> Iterator[None]:
    start(rig)
    with ExitStack() as stack:
        for port in (rig.sidecar.port, rig.sidecar.control_port):
            stack.enter_context(kept_open(port))
        yield


@contextmanager
def kept_open(port: int) -> Iterator[None]:
    """Keep a connection after an answer, as clients with a pool do."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/version")
        connection.getresponse().read()
        yield
    finally:
        connection.close()


def grow(rig: Rig) -> None:
    """Have a database whose dump and restore take longer than it takes to stop, and nothing of that left to be written."""
    with rig.connected() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS public.torture_letters (i integer, filling text)")
        if connection.execute("SELECT count(*) FROM public.torture_letters").fetchone() == (0,):
            rows = "SELECT i, repeat('x', 200) FROM generate_series(1, 400000) AS i"
            connection.execute(f"INSERT INTO public.torture_letters {rows}")
            connection.execute("ALTER TABLE public.torture_letters OWNER TO hindsight")
        connection.execute("CHECKPOINT")


def until_phase(rig: Rig, phase: str) -> None:
    rig.wait_said(f'"phase": "{phase}"')


@contextmanager
def streaming_dump(rig: Rig) -> Iterator[None]:
    start(rig)
    grow(rig)
    archive_of(rig.sidecar)
    dump = ask(rig.sidecar, "GET", "/v1/dumps").json()["dumps"][0]
    taken, ended = threading.Event(), threading.Event()

    def slowly() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(rig.sidecar.run_dir / "control.sock"))
            connection.sendall(f"GET /v1/dumps/{dump['id']} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            connection.recv(4096)
            taken.set()
            ended.wait(60)

    thread = threading.Thread(target=slowly, daemon=True)
    thread.start()
    try:
        assert taken.wait(30), "the dump does not begin to come"
        yield
    finally:
        ended.set()
        thread.join(60)


@contextmanager
def running_restore(rig: Rig) -> Iterator[None]:
    start(rig)
    grow(rig)
    content = archive_of(rig.sidecar)
    assert ask(rig.sidecar, "PUT", "/v1/restores", content).status == 202
    until_phase(rig, "load")
    yield


@contextmanager
def outstanding_call(rig: Rig) -> Iterator[None]:
    """Have hindsight-api wait for an LLM that never answers."""
    body = {"items": [{"content": "Ada sold the boat to Carla in May."}], "async": True}
    with loopback_llm.serving() as llm:
        llm.silent.set()
        with rig.having(**loopback_llm.variables(llm)):
            start(rig)
            assert rig.sidecar.memory("/banks/asking/memories", "POST", body).status == HTTPStatus.OK
            assert llm.asked.wait(30), "the LLM is not asked"
            yield


WHILE: dict[str, While] = {
    "an open transaction": open_transaction,
    "an idle client": idle_client,
    "a streaming dump": streaming_dump,
    "a running restore": running_restore,
    "an LLM call outstanding": outstanding_call,
}


def stop(rig: Rig, budget: int, condition: While, _: float) -> Round:
    """Stop it with SIGTERM while something goes on."""
    rig.begin()
    with rig.having(HINDSIGHT_SIDECAR_STOP_GRACE=str(budget)), condition(rig):
        end_in_time(rig, budget, lambda: rig.sidecar.signal(signal.SIGTERM))
    return whole_again(rig)


def stop_at(rig: Rig, moment: Moment, place: float) -> Round:
    """Stop it with SIGTERM at one of the moments at which others are killed."""
    with contextmanager(moment.hold)(rig, place):
        end_in_time(rig, DEFAULT, lambda: rig.sidecar.signal(signal.SIGTERM), STATES.get(moment.name, SHUT_DOWN))
        rig.started_again(time.monotonic())  # within the moment: a writer of it waits for that
    rig.store_some()
    return rig.survived(None)


def stop_twice(rig: Rig, place: float) -> Round:
    """Ask twice, as whoever is impatient does."""
    rig.begin()
    rig.start_ready()
    rig.store_some()

    def ask_twice() -> None:
        rig.sidecar.signal(signal.SIGTERM)
        threading.Event().wait(place * 0.5)
        if rig.runs:
            rig.sidecar.signal(signal.SIGTERM)

    end_in_time(rig, DEFAULT, ask_twice)
    return whole_again(rig)


def stop_from_a_terminal(rig: Rig, _: float) -> Round:
    """End it with Ctrl-C, which every process of the terminal's foreground gets."""
    rig.begin()
    rig.start(["/usr/bin/setsid"])
    rig.sidecar.wait_ready()
    rig.store_some()
    end_in_time(rig, DEFAULT, lambda: os.killpg(rig.pid, signal.SIGINT))
    return whole_again(rig)


def end_in_time(rig: Rig, budget: float, ask_it: Callable[[], None], states: frozenset[str] = SHUT_DOWN) -> None:
    """Have it end within its budget, in order, with nothing left of it."""
    began = time.monotonic()
    ask_it()
    code = rig.sidecar.wait_end(budget + 30)
    took = time.monotonic() - began
    if took > budget + SPARE:
        raise SlowError(f"it took {took:.1f} s of {budget} s")
    allowed = {IN_ORDER, HARD} if budget == SHORTEST else {IN_ORDER}
    assert code in allowed, f"it ended with {code} after {took:.1f} s of {budget} s"
    rig.look_at_the_end(states if code == IN_ORDER else None)


def whole_again(rig: Rig) -> Round:
    rig.start_ready()
    rig.store_some()
    return rig.survived(None)


def cases(rig: Rig, older: OlderVolume) -> list[Case]:
    """Return all of them."""
    return [
        *(
            Case(
                GROUP,
                f"within {budget} s, with {name}",
                partial(stop, rig, budget, condition),
                short=(budget, name) in SHORT,
            )
            for budget in BUDGETS
            for name, condition in WHILE.items()
        ),
        *(Case(GROUP, f"SIGTERM, {moment.name}", partial(stop_at, rig, moment)) for moment in moments(older)),
        Case(GROUP, "SIGTERM twice", partial(stop_twice, rig)),
        Case(GROUP, "SIGINT from a terminal", partial(stop_from_a_terminal, rig)),
    ]
