"""kill -9 of a container's first process, and the same container started again: every acknowledged memory is there."""

import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from container import Container, Image, Volume, acknowledged, directory_volume, look_for_engine
from harness import wait_for
from kills import TIMES, pause
from matrix import Case, MissedError, Round

from bake.image.engine import NoEngineError

GROUP = "container"
ROUNDS = 2
BANK = "ledger"
KILLED = 128 + signal.SIGKILL
READY = "state=ready"  # in the log
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
            image = image_under_test()
            volume = self._stack.enter_context(directory_volume(image))
            container = image.start(*image.strict(), volume.option)
            self._stack.callback(container.remove)
            self._made = container, volume
            container.wait_ready()
            self.store_some()
            self.stop()
        return self._made[0]

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
        self.container.check_each_is_there_once(BANK, self.texts)
        self.stop()
        return Round(len(self.texts), outage)

    def stop(self) -> None:
        """Stop it in order."""
        assert self._made is not None
        container, volume = self._made
        assert container.stop() == 0
        assert volume.cluster_state() == "shut down"

    def evidence(self) -> str:
        """Return the end of its log."""
        if self._made is None:
            return "there is no container"
        return "\n".join(line[:300] for line in self._made[0].log().splitlines()[-_LINES:])

    def new_home(self) -> None:
        """Remove the container and its volume; the next round makes others."""
        self._stack.close()
        self._made = None
        self.texts = []

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


def kill(container: Container, pid: int) -> float:
    """Kill the first process of a container, and return when; whatever else runs in there ends with it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise MissedError from None
    since = time.monotonic()
    if container.wait_end() != KILLED:
        raise MissedError
    return since


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

    def start() -> None:
        container.start().wait_ready()

    takes = TIMES.of("start of a container", start)
    if container.running():
        rig.stop()
    before = container.log().count(READY)
    pid = container.start().init()
    pause(place * takes * 0.8, partial(there, pid))  # it is seen to be ready some time after it is
    since = kill(container, pid)
    if container.log().count(READY) > before:
        rig.container.start().wait_ready()
        rig.stop()
        raise MissedError
    return ready_again(rig, since)


def during_a_stop(rig: ContainerRig, place: float) -> Round:
    container = rig.container.start().wait_ready()

    def stop() -> None:
        pid = container.init()
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not there(pid), 20, "its end", every=0.01)

    takes = TIMES.of("stop of a container", stop)
    if not container.running():
        container.start().wait_ready()
    writer = container.writer(BANK, f"On the day {time.time_ns()}")
    wait_for(lambda: len(acknowledged(writer)) >= 4, 60, "some stored")
    pid = container.init()
    os.kill(pid, signal.SIGTERM)
    try:
        pause(place * takes, partial(there, pid))
        since = kill(container, pid)
    finally:
        writer.wait_end()
        rig.texts += acknowledged(writer)
    return ready_again(rig, since)


def cases(rig: ContainerRig) -> list[Case]:
    """Return all of them."""
    return [
        Case(GROUP, "kill -9 of its first process, ready under load", partial(under_load, rig), ROUNDS),
        Case(GROUP, "kill -9 of its first process, a start", partial(during_a_start, rig), ROUNDS),
        Case(GROUP, "kill -9 of its first process, a stop", partial(during_a_stop, rig), ROUNDS),
    ]
