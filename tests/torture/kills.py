"""The kill matrix: SIGKILL of each victim at each moment; what was acknowledged is there, and ready comes by itself."""

import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import made
import psycopg
from harness import RunningSidecar, wait_for
from ledger import store
from matrix import Case, MissedError, Round
from rig import GONE_WITHIN, Rig
from victims import VICTIMS, alive, choose, family, replays_the_log, send

GROUP = "kill"
POINTS = 24  # of the first initialisation, at the least
_EVERY = 0.03  # seconds between two looks at whether a moment is still on
ROUNDS = 3  # of each other case
STOP_WITHIN = 40.0  # seconds; its own limit is below that
KILLED = -signal.SIGKILL
ENDS = {0, 4}  # of a stop: in order, and hard
THERE_WITHIN = 60.0  # seconds for a victim to appear, at a moment that goes on
OLDER = "0.8.4"
MIGRATED = "Database migrations completed"  # says hindsight-api of the last one


SHORT = {
    ("all at once", "first initialisation"),
    ("postmaster", "recovery"),
    ("sidecar", "ready under load"),
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
    """How long an undisturbed first start, start, migration and stop take here, in seconds; each measured once.

    Attributes:
        warm: whether each is done twice to measure it, as the first time something is read that is in memory later.

    """

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self.warm = True

    def of(self, what: str, measure: Callable[[], float]) -> float:
        """Return it, and measure it where that was not done yet."""
        if what not in self._known:
            if self.warm:
                measure()
            self._known[what] = measure()
        return self._known[what]

    def reach(self, what: str, place: float, still: Callable[[], bool]) -> None:
        """Let a part of what was measured pass; where it is over before that, as long as it took is how long it takes.

        Raises:
            MissedError: it is over; the same place is somewhere else from now on.

        """
        began = time.monotonic()
        try:
            pause(place * self._known[what], still)
        except MissedError:
            took = time.monotonic() - began
            self._known[what] = min(self._known[what], took)
            raise MissedError(f"the {what} was over after {took:.2f} s", nearer=False) from None


TIMES = Times()


def runs(rig: Rig) -> bool:
    """Check that the sidecar has not ended by itself, at a moment that would never be over otherwise."""
    assert rig.runs, "the sidecar ended by itself"
    return True


def unready(rig: Rig) -> bool:
    return runs(rig) and rig.sidecar.health_status() != 200


def pause(seconds: float, still: Callable[[], bool]) -> None:
    """Let a part of a moment pass, where the moment itself is what is waited through."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        threading.Event().wait(min(max(left, 0.0), _EVERY))
        if not still():
            raise MissedError
        if left <= _EVERY:
            return


# Moments --------------------------------------------------------------------------------------------------------


def first_initialisation(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    def undisturbed() -> float:
        rig.new_home()
        return timed(rig.start_ready)

    TIMES.of("first start", undisturbed)
    rig.new_home()
    rig.start()
    TIMES.reach("first start", place, partial(unready, rig))
    yield partial(unready, rig)


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def start(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()

    def undisturbed() -> float:
        took = timed(rig.start_ready)
        rig.stop()
        return took

    TIMES.of("start", undisturbed)
    rig.start()
    TIMES.reach("start", place, partial(unready, rig))
    yield partial(unready, rig)


def recovery(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    with rig.bulk(1_000_000):
        rig.store_some(2)
        crash(rig)
    rig.start()
    rig.wait_said("redo starts")

    def still() -> bool:
        return runs(rig) and "redo done" not in rig.new_log()

    pause(place * 0.5, still)
    yield still


def crash(rig: Rig) -> None:
    """Kill the sidecar with all that it runs."""
    members = family(rig.pid)
    send([process.pid for process in members], signal.SIGKILL)
    assert rig.sidecar.wait_end() == KILLED, "it ended by itself"
    wait_for(lambda: not alive(members), GONE_WITHIN, "all of it gone")


def schema_migration(rig: Rig, place: float, older: "OlderVolume") -> Iterator[Callable[[], bool]]:
    def begun() -> None:
        rig.new_home(older.volume)
        for text in older.texts:
            rig.ledger.add(text)
        rig.start()
        rig.wait_said("Running upgrade")  # the first of some thirty; before that the old database is copied

    def undisturbed() -> float:
        begun()
        took = timed(lambda: rig.wait_said(MIGRATED))
        rig.sidecar.wait_ready()
        return took

    def still() -> bool:
        # Not until the schema's revision is another: one of the migrations commits what was done before it.
        return runs(rig) and MIGRATED not in rig.new_log()

    TIMES.of("schema migration", undisturbed)
    begun()
    TIMES.reach("schema migration", place, still)
    yield still


class OlderVolume:
    """A volume with memories of an older version, whose schema the next start migrates."""

    def __init__(self, directory: Path, model_dir: Path) -> None:
        self._directory = directory
        self._model_dir = model_dir
        self._made: Path | None = None
        self.texts = [f"In the time of {OLDER}, letter {number} was written by hand." for number in range(5)]

    @property
    def volume(self) -> Path:
        """Return it; made at the first call, and in a place of its own each time that this fails."""
        if self._made is None:
            home = Path(tempfile.mkdtemp(dir=self._directory))
            home.chmod(0o777)
            sidecar = RunningSidecar(home, made.api_venv(OLDER), self._model_dir)
            try:
                sidecar.start_ready()
                assert [store(sidecar, text) for text in self.texts] == [200] * len(self.texts)
                assert sidecar.stop() == 0
            finally:
                sidecar.end()
            self._made = sidecar.volume
        return self._made


def model_load(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()

    def begun() -> None:
        rig.start()
        wait_for(partial(present, rig, "hindsight-api"), 60, "hindsight-api", every=0.01)

    def undisturbed() -> float:
        begun()
        took = timed(rig.sidecar.wait_ready)
        rig.stop()
        return took

    TIMES.of("model load", undisturbed)
    begun()
    TIMES.reach("model load", place, partial(unready, rig))
    yield partial(unready, rig)


def under_load(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    with rig.writing() as writer:
        writer.wait_for_more(1 + int(place * 20))
        yield partial(runs, rig)
        writer.wait_for_more(2)


def checkpoint(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()
    rig.start_ready()
    with rig.writing(), rig.bulk(300_000) as connection:
        done = threading.Event()

        def work() -> None:
            try:
                connection.execute("CHECKPOINT")
            except psycopg.Error:
                return  # it was the victim, or waited for it
            done.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            pause(0.005 + place * 0.1, lambda: not done.is_set())
            yield lambda: runs(rig) and not done.is_set()
        finally:
            thread.join(STOP_WITHIN)
            assert not thread.is_alive(), "a checkpoint goes on for ever"


def stop(rig: Rig, place: float) -> Iterator[Callable[[], bool]]:
    rig.begin()

    def undisturbed() -> float:
        rig.start_ready()
        with rig.writing():
            took = timed(rig.sidecar.stop)
        rig.look_at_the_end()
        return took

    TIMES.of("stop", undisturbed)
    rig.start_ready()
    with rig.writing():
        rig.sidecar.signal(signal.SIGTERM)
        TIMES.reach("stop", place, lambda: rig.runs)
        yield lambda: rig.runs


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
        sidecar = rig.pid
        once_there(victim, sidecar, still)
        successor = SUCCESSORS.get(victim, victim)
        counted, before = rig.restarts(), present(rig, successor)
        pids, replays = hit(victim, sidecar, still)
        began = time.monotonic()
        if sidecar in pids:
            code = rig.sidecar.wait_end()
            if code in ENDS and moment.name == STOPPING:
                raise MissedError("it had ended when it was killed", nearer=False)
            assert code == KILLED, f"it ended with {code} before it was killed"
        elif moment.name == STOPPING:
            assert rig.sidecar.wait_end(STOP_WITHIN) in ENDS
            rig.look_at_the_end(None)
        if sidecar in pids or moment.name == STOPPING:
            if moment.name == STOPPING:
                stack.close()  # its writer ends before a new sidecar would answer it
            outage = rig.started_again(began)
            assert set(rig.restarts().values()) == {0}, f"a new sidecar counts {rig.restarts()}"
        else:
            wait_for(lambda: present(rig, successor) - before, GONE_WITHIN * 2, f"a new {successor}", every=0.02)
            outage = rig.recovered(began)
            # Postgres gives up where the one that replays its log is killed.
            check_counters(rig, victim, counted, 1 if victim == "postmaster" or replays else 0)
    rig.store_some()
    return rig.survived(outage)


def once_there(victim: str, sidecar: int, still: Callable[[], bool]) -> list[int]:
    """Return whom to hit; one that is not there yet is waited for, as long as the moment is on."""
    deadline = time.monotonic() + THERE_WITHIN
    while True:
        try:
            return choose(victim, sidecar)
        except MissedError:
            pause(0.005, still)
        assert time.monotonic() < deadline, f"no {victim} came within {THERE_WITHIN:g} s"


def hit(victim: str, sidecar: int, still: Callable[[], bool]) -> tuple[list[int], bool]:
    """Kill it at once; one that has ended by itself since it was found is looked for again, as long as the moment is on.

    Return whom, and whether one of them replayed Postgres' log.
    """
    deadline = time.monotonic() + THERE_WITHIN
    while time.monotonic() < deadline:
        if not still():
            raise MissedError
        with suppress(MissedError):
            pids = choose(victim, sidecar)
            replays = any(replays_the_log(pid) for pid in pids)
            if send(pids, signal.SIGKILL):
                return pids, replays
    raise MissedError(f"each {victim} ended before it was hit")


STOPPING = "stop"
# Whose replacement shows that an end was seen: Postgres ends all its processes where one of them is killed.
SUCCESSORS = {"one backend": "checkpointer", "postmaster": "checkpointer"}


def present(rig: Rig, victim: str) -> set[int]:
    try:
        return set(choose(victim, rig.pid))
    except MissedError:
        return set()


def check_counters(rig: Rig, victim: str, before: dict[str, int], postgres: int) -> None:
    """Look at what `/health` counts: all ends that nobody asked for, and of a backend none.

    Where one is killed, Postgres starts anew within itself, and hindsight-api may end for it, or not.
    """
    wait_for(lambda: Counter(rig.restarts()) == rig.ends_told(), 5, "as many restarts in /health as in the log")
    found = rig.restarts()
    more = {name: count - before.get(name, 0) for name, count in found.items()}
    assert more["postgres"] == postgres, f"{more} were started again for a {victim}"
    assert more["hindsight-api"] in ({1} if victim == "hindsight-api" else {0, 1}), more


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
