"""A container that is short of everything but space: shared memory, descriptors, memory; and one whose clock jumps."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from faults import Alive, needs_root
from harness import RunningSidecar, store_as_they_are, wait_for
from limits import FAKETIME, Clock, build_an_index_in_parallel, in_namespace, limited_memory, take_its_memory

pytestmark = pytest.mark.long  # tests/torture has the same, and one of it in its short form
BANK = "narrow"
CALLERS = 24  # of the 32 connections that an address takes with 256 descriptors; the probes need some too
TEXT = "The glassblower keeps a kiln behind the bakery."


@needs_root
def test_little_shared_memory_few_descriptors_and_then_too_little_memory(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    with limited_memory(f"hindsight-test-{os.getpid()}", 2 * 1024**3) as group:
        join = [f"echo $$ > {group}/cgroup.procs"] if group else []
        sidecar.start(
            in_namespace(*join, "mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm", "ulimit -n 256")
        ).wait_ready()
        check_few_descriptors(sidecar)
        build_an_index_in_parallel(sidecar)
        take_its_memory(sidecar, group)
        assert sidecar.recall(BANK, "Where is the kiln?")[0]["text"] == TEXT
        assert sidecar.stop() == 0


def check_few_descriptors(sidecar: RunningSidecar) -> None:
    store_as_they_are(sidecar, BANK, [TEXT])
    assert sidecar.process is not None
    with Alive(sidecar) as alive, ThreadPoolExecutor(CALLERS) as pool:
        found = list(pool.map(lambda _: sidecar.recall(BANK, "Where is the kiln?"), range(120)))
    assert all(results[0]["text"] == TEXT for results in found)
    assert alive.failed == []


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
def test_a_clock_that_jumps_an_hour_forth_and_back(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    clock = Clock(sidecar)
    sidecar.start(clock.wrapper).wait_ready()
    store_as_they_are(sidecar, BANK, [TEXT])
    before = sidecar.health()["components"]
    for hours in (1, -1, 0):
        clock.jump(hours)
        clock.wait_seen(hours)
        # Longer than any age of a sample, and than any pause between two looks: nothing of ours asks the time of day.
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            health = sidecar.health()
            assert health["status"] == "healthy", health
            assert 0 <= health["sample_age_seconds"] < 3
            assert sidecar.recall(BANK, "Where is the kiln?")[0]["text"] == TEXT
        text = f"It was stored {hours} hours later."
        sidecar.retain(BANK, [text])
        assert text in [one["text"] for one in sidecar.memory(f"/banks/{BANK}/memories/list").json()["items"]]
    assert sidecar.health()["components"] == before
    clock.jump(-1)
    os.kill(before["hindsight-api"]["pid"], signal.SIGKILL)  # a backoff that would be an hour long by the time of day
    wait_for(lambda: sidecar.health()["components"]["hindsight-api"]["restarts"] == 1, 10, "its end seen")
    sidecar.wait_ready(60)
    began = time.monotonic()
    assert sidecar.stop() == 0
    assert time.monotonic() - began < 9
