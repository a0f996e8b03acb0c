"""kill -9 of a container's first process, and the same container started again: every acknowledged memory is there."""

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from container import PROCESSES, VOLUME, Container, Image, Volume, acknowledged, directory_volume, look_for_engine
from harness import wait_for
from kills import TIMES, pause, timed
from matrix import Case, MissedError, Round, check_each_is_there_once
from rig import REAPED_WITHIN, wait_for_none

from bake.image.engine import NoEngineError

GROUP = "container"
ROUNDS = 2
BANK = "ledger"
KILLED = 128 + signal.SIGKILL
IN_ORDER = 0
SUPERUSER = "--username=postgres"  # the container's own environment names hindsight-api's role
READY = "state=ready"  # in the log
SEEN = 0.8  # of a start, as it takes a moment until one that is ready is seen to be
POINTS = 6  # of the first initialisation
# What there is to be recovered.
BULK = """
CREATE SCHEMA torture AUTHORIZATION hindsight; CREATE TABLE torture.bulk (i integer, filling text); CHECKPOINT;
INSERT INTO torture.bulk SELECT i, repeat('x', 200) FROM generate_series(1, 1000000) AS i
"""
_LINES = 60  # of the log that a failure shows


class ContainerRig:
    """Has a container of the image on a volume of its own. A round begins and ends with one that is stopped and whole.

    Attributes:
        texts: those that were acknowledged in it.

    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: tuple[Container, Volume] | None = None
        self._rounds = 0
        self.texts: list[str] = []

    @property
    def container(self) -> Container:
        """Return it; made, with a few memories, at the first call."""
        if self._made is None:
            self.fresh().wait_ready()
            self.store_some()
            self.stop()
        assert self._made is not None
        return self._made[0]

    def fresh(self) -> Container:
        """Have a new container on an empty volume; it has just been started."""
        self.new_home()
        image = image_under_test()
        volume = self._stack.enter_context(directory_volume(image))
        container = image.start(*image.strict(), volume.option)
        self._stack.callback(container.remove)
        self._made = container, volume
        return container

    def store_some(self) -> None:
        """Have a few memories stored."""
        self._rounds += 1
        for number in range(3):
            text = f"In round {self._rounds} card {number} lies under the lamp."
            self.container.retain(BANK, [text])
            self.texts.append(text)

    def survived(self, outage: float) -> Round:
        """End a round: look at everything in the container, which is ready, stop it, and look at what is on the disk."""
        self.store_some()
        container = self.container
        check_each_is_there_once(self.texts, container.listed(BANK))
        missed = container.missed(BANK, self.texts)
        assert missed == [], (
            f"{len(missed)} memories are there, and do not come back when they are asked for: {missed[:3]}"
        )
        look_at_processes(container)
        psql(container, "CREATE EXTENSION amcheck SCHEMA pg_catalog")
        container.says("pg_amcheck", SUPERUSER, "--heapallindexed", "--database=hindsight")
        psql(container, "DROP EXTENSION amcheck; DROP SCHEMA IF EXISTS torture CASCADE")
        self.stop()
        return Round(len(self.texts), outage)

    def stop(self) -> None:
        """Stop it in order, and look at what is on the disk."""
        assert self._made is not None
        container, volume = self._made
        assert container.stop() == IN_ORDER
        assert volume.cluster_state() == "shut down"
        image = image_under_test()
        image.says("pg_checksums", "--check", "-D", f"{VOLUME}/pgdata", options=[*image.strict(), volume.option])

    def evidence(self) -> str:
        """Return the end of its log."""
        if self._made is None:
            return "there is no container"
        return "\n".join(line[:300] for line in self._made[0].log().splitlines()[-_LINES:])

    def keep(self, directory: Path, *, whole: bool) -> None:
        """Copy the log and what was acknowledged, or the volume too."""
        (directory / "acknowledged").write_text("".join(f"{text}\n" for text in self.texts), encoding="utf-8")
        if self._made is None:
            return
        container, volume = self._made
        (directory / "log").write_text(container.log(), encoding="utf-8")
        if whole:
            container.stop()
            subprocess.run(["/bin/cp", "-a", volume.source, directory / "volume"], check=True)

    def new_home(self) -> None:
        """Remove the container and its volume; the next round makes others."""
        self._made = None
        self.texts = []
        self._stack.close()

    def end(self) -> None:
        """Remove what there is."""
        self._stack.close()


def image_under_test() -> Image:
    name = os.environ.get("HINDSIGHT_TEST_IMAGE")
    # An error: a run without it would have tested nothing.
    assert name, "HINDSIGHT_TEST_IMAGE names no image; run this with `make torture`, which builds one"
    engine = look_for_engine(name)
    if isinstance(engine, NoEngineError):
        raise engine
    return Image(engine, name)


def there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def psql(container: Container, statements: str) -> None:
    container.says(
        "psql",
        SUPERUSER,
        "--no-psqlrc",
        "--quiet",
        "--set=ON_ERROR_STOP=1",
        "--dbname=hindsight",
        "--command",
        statements,
    )


def look_at_processes(container: Container) -> None:
    """Check that nothing in a container is dead or has lost its parent, and that nothing was started again."""

    def amiss() -> list[dict[str, Any]]:
        inside = container.python(PROCESSES)
        of_the_first = [process for process in inside if process["parent"] == 1]
        return [process for process in inside if process["state"] == "Z"] + (
            of_the_first if len(of_the_first) > 1 else []
        )

    found = wait_for_none(amiss, REAPED_WITHIN)
    assert found == [], f"zombies, or orphans beside the sidecar: {found}"
    health = container.health()
    assert health is not None
    assert {component["restarts"] for component in health["components"].values()} == {0}, json.dumps(health)


def kill(container: Container, pid: int, ends: tuple[int, ...] = ()) -> float:
    """Kill the first process of a container, and return when; whatever else runs in there ends with it.

    Raises:
        MissedError: it had ended already, with one of these exit codes.

    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    code = container.wait_end()
    if code in ends:
        raise MissedError("it had ended when it was killed", nearer=False)
    assert code == KILLED, f"it ended with {code} before it was killed"
    return since


def goes_on(pid: int) -> bool:
    assert there(pid), "the container ended by itself"
    return True


def ready_again(rig: ContainerRig, since: float) -> Round:
    rig.container.start().wait_ready()
    return rig.survived(time.monotonic() - since)


def under_load(rig: ContainerRig, place: float) -> Round:
    container = rig.container.start().wait_ready()
    writer = container.writer(BANK, f"On the day {time.time_ns()}")
    wait_for(lambda: len(acknowledged(writer)) >= 8 + int(place * 20), 60, "some stored")
    since = kill(container, container.init())
    writer.wait_end()
    rig.texts += acknowledged(writer)
    return ready_again(rig, since)


def during_a_start(rig: ContainerRig, place: float) -> Round:
    container = rig.container

    def undisturbed() -> float:
        took = timed(lambda: container.start().wait_ready())
        rig.stop()
        return took * SEEN

    TIMES.of("start of a container", undisturbed)
    before = container.log().count(READY)
    container.start()
    return killed_before_ready(rig, "start of a container", before, place)


def first_initialisation(rig: ContainerRig, place: float) -> Round:
    def undisturbed() -> float:
        rig.new_home()
        return timed(lambda: rig.fresh().wait_ready()) * SEEN

    TIMES.of("first start of a container", undisturbed)
    rig.fresh()
    return killed_before_ready(rig, "first start of a container", 0, place)


def killed_before_ready(rig: ContainerRig, what: str, before: int, place: float) -> Round:
    """Kill one that was just started; `before` is how often it was ready already."""
    container = rig.container
    pid = container.init()
    TIMES.reach(what, place, partial(goes_on, pid))
    since = kill(container, pid)
    if container.log().count(READY) > before:
        container.start().wait_ready()
        rig.stop()
        raise MissedError("it was ready already")
    return ready_again(rig, since)


def recovery(rig: ContainerRig, place: float) -> Round:
    container = rig.container.start().wait_ready()
    psql(container, BULK)
    rig.store_some()
    kill(container, container.init())
    before = container.log().count("redo starts"), container.log().count("redo done")
    pid = container.start().init()
    wait_for(lambda: container.log().count("redo starts") > before[0], 60, "a recovery", every=0.02)
    pause(place * 0.5, partial(goes_on, pid))
    since = kill(container, pid)
    if container.log().count("redo done") > before[1]:
        container.start().wait_ready()
        psql(container, "DROP SCHEMA torture CASCADE")
        rig.stop()
        raise MissedError("it had recovered already")
    return ready_again(rig, since)


def during_a_stop(rig: ContainerRig, place: float) -> Round:
    container = rig.container

    def stop() -> int:
        pid = container.init()
        os.kill(pid, signal.SIGTERM)
        return pid

    def undisturbed() -> float:
        container.start().wait_ready()
        began = time.monotonic()
        pid = stop()
        wait_for(lambda: not there(pid), 20, "its end", every=0.01)
        return time.monotonic() - began

    TIMES.of("stop of a container", undisturbed)
    container.start().wait_ready()
    writer = container.writer(BANK, f"On the day {time.time_ns()}")
    wait_for(lambda: len(acknowledged(writer)) >= 4, 60, "some stored")
    pid = stop()
    try:
        with suppress(MissedError):  # how it ended says more
            TIMES.reach("stop of a container", place, partial(there, pid))
        since = kill(container, pid, (IN_ORDER,))
    finally:
        writer.wait_end()
        rig.texts += acknowledged(writer)
    return ready_again(rig, since)


def cases(rig: ContainerRig) -> list[Case]:
    """Return all of them."""
    runs = {
        "ready under load": (under_load, ROUNDS),
        "a start": (during_a_start, ROUNDS),
        "a stop": (during_a_stop, ROUNDS),
        "first initialisation": (first_initialisation, POINTS),
        "a recovery": (recovery, ROUNDS),
    }
    return [
        Case(GROUP, f"kill -9 of its first process, {name}", partial(run, rig), rounds)
        for name, (run, rounds) in runs.items()
    ]
