"""The kill matrix: SIGKILL of each victim at each moment; what was acknowledged is there, and ready comes by itself."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import made
import psycopg
from harness import RunningSidecar, wait_for
from ledger import store
from matrix import Case, MissedError, Round
from rig import GONE_WITHIN, Rig
from victims import VICTIMS, choose, send

GROUP = "kill"
POINTS = 24  # of the first initialisation, at the least
ROUNDS = 3  # of each other case
BULK = "INSERT INTO torture.bulk SELECT i, repeat('x', 200) FROM generate_series(1, {}) AS i"
STOP_WITHIN = 40.0  # seconds; its own limit is below that
ENDS = {0, 4, -signal.SIGKILL}  # a stop in order, a hard one, and one of a sidecar that was the victim
OLDER = "0.8.4"


SHORT = {
    ("all at once", "first initialisation"),
    ("postmaster", "recovery"),
    ("sidecar", "schema migration"),
    ("postmaster", "ready under load"),
    ("hindsight-api", "ready under load"),
    ("sidecar", "ready under load"),
    ("checkpointer", "stop"),
}


@dataclass(frozen=True)
class Moment:
    """Brings a rig to a moment, holds it there while the victim is hit, and says whether it was over by then.

    Attributes:
        hold: takes the rig and where in the moment; what it yields tells whether the moment is still on.
        victims: those that there are at such a moment.

    """

    name: str
    hold: Callable[[Rig, float], Iterator[Callable[[], bool]]]
    victims: tuple[str, ...] = VICTIMS


class Times:
    """How long an undisturbed first start, start, migration and stop take here, in seconds; each measured once."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def of(self, what: str, measure: Callable[[], object]) -> float:
        """Return it, and measure it where that was not done yet."""
        if what not in self._known:
            began = time.monotonic()
            measure()
            self._known[what] = time.monotonic() - began
        return self._known[what]


TIMES = Times()


def unready(rig: Rig) -> bool:
    return rig.sidecar.health_status() != 200


def pause(seconds: float, still: Callable[[], bool]) -> None:
    """Let a part of a moment pass, where the moment itself is what is waited through."""
    threading.Event().wait(seconds)
    if not still():
        raise MissedError


# Moments --------------------------------------------------------------------------------------------------------


def first_initialisation(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    def undisturbed() -> None:
        rig.new_home()
        rig.start_ready()

    takes = TIMES.of("first start", undisturbed)
    rig.new_home()
    rig.start()
    pause(place * takes, partial(unready, rig))
    yield partial(unready, rig)


def start(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    takes = TIMES.of("start", rig.start_ready)
    if rig.runs:
        rig.stop()
    rig.start()
    pause(place * takes, partial(unready, rig))
    yield partial(unready, rig)


def recovery(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    with rig.connected() as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS torture")
        connection.execute("CREATE TABLE IF NOT EXISTS torture.bulk (i integer, filling text)")
        connection.execute("TRUNCATE torture.bulk")
        connection.execute("CHECKPOINT")
        connection.execute(BULK.format(1_000_000))
        rig.store_some(2)
        crash(rig)
    rig.start()
    rig.wait_said("redo starts")

    def still() -> bool:
        return "redo done" not in rig.new_log()

    pause(place * 0.5, still)
    yield still


def crash(rig: Rig) -> None:
    send(choose("all at once", rig.pid), signal.SIGKILL)
    assert rig.sidecar.process is not None
    rig.sidecar.process.wait()
    wait_for(lambda: not rig.sidecar.postgres_pids(), GONE_WITHIN, "all of it gone")


def schema_migration(rig: Rig, place: float, older: "OlderVolume") -> Iterator[Callable[[], bool]]:
    def migrated() -> None:
        rig.new_home(older.volume)
        rig.start()
        wait_for(lambda: revision(rig) not in (None, older.revision), 60, "a schema that is migrated", every=0.02)

    takes = TIMES.of("migration", migrated)
    rig.new_home(older.volume)
    for text in older.texts:
        rig.ledger.add(text)
    rig.start()

    def still() -> bool:
        return revision(rig) in (None, older.revision)

    pause(place * takes, still)
    yield still


def revision(rig: Rig) -> str | None:
    """Return the schema's revision, None where nobody says."""
    try:
        with rig.connected() as connection:
            row = connection.execute("SELECT version_num FROM public.alembic_version").fetchone()
    except psycopg.Error:
        return None
    return str(row[0]) if row else None


class OlderVolume:
    """A volume with memories of an older version, whose schema the next start migrates."""

    def __init__(self, directory: Path, model_dir: Path) -> None:
        self._sidecar = RunningSidecar(directory, made.api_venv(OLDER), model_dir)
        self.texts = [f"In the time of {OLDER}, letter {number} was written by hand." for number in range(5)]
        self.revision = ""

    @property
    def volume(self) -> Path:
        """Return it; made at the first call."""
        if not self.revision:
            sidecar = self._sidecar.start_ready()
            try:
                assert [store(sidecar, text) for text in self.texts] == [200] * len(self.texts)
                with psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight") as connection:
                    [(self.revision,)] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
                assert sidecar.stop() == 0
            finally:
                sidecar.end()
        return self._sidecar.volume


def model_load(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()

    def loaded() -> None:
        rig.start()
        wait_for(partial(present, rig, "hindsight-api"), 60, "hindsight-api", every=0.01)
        rig.sidecar.wait_ready()

    takes = TIMES.of("start of hindsight-api", loaded)
    if rig.runs:
        rig.stop()
    rig.start()
    wait_for(partial(present, rig, "hindsight-api"), 60, "hindsight-api", every=0.01)
    # It has begun some time after the sidecar, which the measured time has in it.
    pause(place * takes * 0.7, partial(unready, rig))
    yield partial(unready, rig)


def under_load(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    with rig.writing() as writer:
        writer.wait_for_more(1 + int(place * 20))
        yield lambda: True
        writer.wait_for_more(2)


def checkpoint(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    with rig.connected() as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS torture")
        connection.execute("CREATE TABLE IF NOT EXISTS torture.bulk (i integer, filling text)")
    with rig.writing(), rig.connected() as connection:
        connection.execute("TRUNCATE torture.bulk")
        connection.execute(BULK.format(300_000))
        done = threading.Event()

        def work() -> None:
            try:
                connection.execute("CHECKPOINT")
            except psycopg.Error:
                return  # it was the victim, or waited for it
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            pause(0.005 + place * 0.1, lambda: not done.is_set())
            yield lambda: not done.is_set()
        finally:
            thread.join()


def stop(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    takes = TIMES.of("stop", rig.stop)
    if not rig.runs:
        rig.start_ready()
    with rig.writing():
        assert rig.sidecar.process is not None
        rig.sidecar.signal(signal.SIGTERM)
        pause(place * takes, lambda: rig.runs)
        yield lambda: rig.runs
        assert rig.sidecar.process.wait(STOP_WITHIN) in ENDS


def backoff(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()

    def waits() -> bool:
        component = rig.sidecar.health()["components"]["hindsight-api"]
        return component["pid"] is None

    for _ in range(3):  # the third pause is long enough to be met
        wait_for(partial(present, rig, "hindsight-api"), 60, "hindsight-api", every=0.01)
        send(choose("hindsight-api", rig.pid), signal.SIGKILL)
        wait_for(waits, 10, "its end seen", every=0.01)
    pause(place * 0.3, waits)
    yield waits


# Rounds ---------------------------------------------------------------------------------------------------------


def kill(rig: Rig, victim: str, moment: Moment, place: float) -> Round:
    """Do one round."""
    with ExitStack() as stack:
        still = stack.enter_context(contextmanager(moment.hold)(rig, place))
        pids, sidecar = once_there(victim, rig.pid, still), rig.pid
        successor = SUCCESSORS.get(victim, victim)
        before = present(rig, successor)
        if not still():
            raise MissedError
        send(pids, signal.SIGKILL)
        began = time.monotonic()
        if sidecar in pids:
            assert rig.sidecar.process is not None
            rig.sidecar.process.wait()
        if moment.name == STOPPING:
            stack.close()  # it ends by itself
        elif sidecar not in pids:
            # It may still call itself ready, not having seen it yet.
            wait_for(lambda: present(rig, successor) - before, GONE_WITHIN * 2, f"a new {successor}", every=0.02)
        outage = rig.recover(began)
        if moment.name in COUNTED and sidecar not in pids:
            check_counters(rig, victim)
    rig.store_some()
    return rig.survived(outage)


def once_there(victim: str, sidecar: int, still: Callable[[], bool]) -> list[int]:
    """Return whom to hit; one that is not there yet is waited for, as long as the moment is on."""
    while True:
        try:
            return choose(victim, sidecar)
        except MissedError:
            pause(0.005, still)


STOPPING = "stop"
# Whose replacement shows that an end was seen: Postgres ends all its processes where one of them is killed.
SUCCESSORS = {"one backend": "checkpointer", "postmaster": "checkpointer"}


def present(rig: Rig, victim: str) -> set[int]:
    try:
        return set(choose(victim, rig.pid))
    except MissedError:
        return set()


COUNTED = {"ready under load", "checkpoint"}


def check_counters(rig: Rig, victim: str) -> None:
    """Look at what `/health` counts: a backend's end makes Postgres start anew within itself, and is nobody's restart."""
    found = rig.restarts()
    assert found["postgres"] == (1 if victim == "postmaster" else 0), found
    assert found["hindsight-api"] <= 1, found
    assert found["hindsight-api"] == 1 or victim != "hindsight-api", found


def moments(older: OlderVolume) -> list[Moment]:
    """Return all moments but the stop itself; in some there are not all of the victims."""
    postgres = ("postmaster", "one backend", "checkpointer")
    return [
        Moment("first initialisation", first_initialisation),
        Moment("start", start),
        Moment("recovery", recovery, (*postgres, "sidecar", "all at once")),
        Moment("schema migration", partial(schema_migration, older=older)),
        Moment("model load", model_load),
        Moment("ready under load", under_load),
        Moment("checkpoint", checkpoint),
        Moment("backoff", backoff, (*postgres, "sidecar", "all at once")),
    ]


def cases(rig: Rig, older: OlderVolume) -> list[Case]:
    """Return the whole matrix."""

    def rounds(moment: Moment, victim: str) -> int:
        thorough = moment.hold is first_initialisation and victim in ("sidecar", "all at once")
        return POINTS if thorough else ROUNDS

    return [
        Case(
            GROUP,
            f"{victim}, {moment.name}",
            partial(kill, rig, victim, moment),
            rounds(moment, victim),
            short=(victim, moment.name) in SHORT,
        )
        for moment in [*moments(older), Moment(STOPPING, stop)]
        for victim in moment.victims
    ]
