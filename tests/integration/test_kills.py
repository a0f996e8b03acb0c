"""kill -9 of every part: each acknowledged memory is there in the next ready state, and nothing is left behind."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from harness import call, wait_for

from sidecar import processes

BANK = "kills"


class Writer:
    """Stores memories without a pause, and keeps those that were acknowledged."""

    def __init__(self, sidecar: Any) -> None:
        self.acknowledged: list[str] = []
        self._sidecar = sidecar
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._end.is_set():
            number += 1
            text = f"Memory number {number} was stored while things were being killed."
            body = {"items": [{"content": text}], "async": False}
            try:
                answer = call(self._sidecar.port, f"/v1/default/banks/{BANK}/memories", "POST", body, timeout=60)
            except OSError:
                self._end.wait(0.05)
                continue
            if answer.status == 200:
                self.acknowledged.append(text)
            else:
                self._end.wait(0.05)

    @contextmanager
    def writing(self) -> Iterator["Writer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._end.set()
            self._thread.join()

    def wait_for_more(self, count: int) -> None:
        target = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= target, 120, f"{count} more acknowledged memories")


def stored(sidecar: Any) -> list[str]:
    items = sidecar.memory(f"/banks/{BANK}/memories/list?limit=10000").json()["items"]
    return [item["text"] for item in items]


def assert_nothing_lost(sidecar: Any, writer: Writer) -> None:
    there = stored(sidecar)
    assert [text for text in writer.acknowledged if text not in there] == []
    assert len(there) == len(set(there)), "a memory is there twice"
    last = writer.acknowledged[-1]
    assert last in [result["text"] for result in sidecar.recall(BANK, last)]


def zombies_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
            if state == "Z" and int(parent) == pid:
                found.append(int(entry.name))
    return found


def assert_one_of_each(sidecar: Any) -> None:
    postgres = sidecar.pid_of("postgres")
    pids = sidecar.postgres_pids()
    assert postgres in pids
    assert int((sidecar.pgdata / "postmaster.pid").read_text().split()[0]) == postgres
    parents = {
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids if pid != postgres
    }
    assert parents <= {postgres}, "a PostgreSQL process of another postmaster"
    assert zombies_of(sidecar.process.pid) == []


@pytest.mark.parametrize("victim", ["postgres", "hindsight-api"])
def test_kill_of_a_child(make_sidecar: Any, victim: str) -> None:
    sidecar = make_sidecar().start_ready()
    with Writer(sidecar).writing() as writer:
        writer.wait_for_more(10)
        for _ in range(2):
            pid = sidecar.pid_of(victim)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: sidecar.health()["components"][victim]["pid"] not in (None, pid), 60, "a new one")
            sidecar.wait_ready()
            writer.wait_for_more(5)
    assert_nothing_lost(sidecar, writer)
    assert_one_of_each(sidecar)
    assert sidecar.health()["components"][victim]["restarts"] == 2
    assert sidecar.stop() == 0
    assert not sidecar.postgres_pids()


def test_kill_of_the_sidecar(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    with Writer(sidecar).writing() as writer:
        for _ in range(2):
            writer.wait_for_more(10)
            children = [sidecar.pid_of("postgres"), sidecar.pid_of("hindsight-api")]
            sidecar.process.kill()
            sidecar.process.wait()
            # At once: its children are still ending, and neither may survive nor keep the next one out.
            sidecar.start()
            wait_for(
                lambda gone=children: not any(Path(f"/proc/{pid}").exists() for pid in gone),
                20,
                "the old children gone",
            )
            sidecar.wait_ready()
    assert_nothing_lost(sidecar, writer)
    assert_one_of_each(sidecar)
    assert sidecar.stop() == 0


def test_kill_during_the_first_initialisation(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    making = sidecar.volume / "pgdata.making"
    for moment in ("PG_VERSION", "global/pg_control", "hindsight-sidecar.marker"):
        sidecar.start()
        wait_for(
            lambda moment=moment: (making / moment).exists(), 30, f"{moment} in the half-made cluster", every=0.002
        )
        sidecar.process.kill()
        sidecar.process.wait()
        wait_for(lambda: not processes_named("initdb", sidecar), 20, "initdb gone")
        assert not sidecar.pgdata.exists() or (sidecar.pgdata / "hindsight-sidecar.marker").exists()
    sidecar.start_ready()
    assert not making.exists()
    assert sidecar.stop() == 0


def processes_named(name: str, sidecar: Any) -> list[int]:
    found = []
    for process in processes.all_processes():
        if process.name == name:
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_text()
            except OSError:
                continue
            if str(sidecar.volume) in words:
                found.append(process.pid)
    return found


def test_kill_of_everything_at_once_leaves_a_stale_pid_file(make_sidecar: Any) -> None:
    sidecar = make_sidecar().start_ready()
    sidecar.retain(BANK, ["The lighthouse keeper wound the clock before the storm."])
    doomed = [sidecar.process.pid, sidecar.pid_of("hindsight-api"), *sidecar.postgres_pids()]
    for pid in doomed:
        with suppress(ProcessLookupError):  # one that ended with its parent
            os.kill(pid, signal.SIGKILL)
    sidecar.process.wait()
    wait_for(lambda: not sidecar.postgres_pids(), 20, "all gone")
    path = sidecar.pgdata / "postmaster.pid"
    lines = path.read_text().splitlines()
    # The number belongs to somebody else by now: here to the test's own process, a live one of another program.
    path.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    sidecar.start_ready()
    assert any(event["event"] == "removed a stale postmaster.pid" for event in sidecar.events())
    assert "starting(recovery)" in [event.get("state") for event in sidecar.events()], "a recovery is told as one"
    assert len(stored(sidecar)) == 1
    assert sidecar.stop() == 0
