"""`make load`: many clients at once for some minutes with a dump in the middle, and then what the gateway costs a recall.

Exits with 1 where a limit does not hold, where an error of another kind than "busy" was seen, and where nothing was measured.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calls
import clients
import comparing
import made
import probing
import samples
from harness import PROGRAM, RunningSidecar, reachable_directory, running_sidecar, wait_for
from judging import FULL, SHORT, Dumped, Limits, Measured, as_json, markdown, rows

from sidecar import __version__, sizing

PROBES_A_SECOND = 10.0  # of each address
_START = 2.0  # seconds for the processes of clients and probes to be there
_DUMP_PATIENCE = 600.0  # seconds
_QUIET = 60.0  # seconds for connections to be closed after the load
_PAGE = 5000  # memories of a page
_ASKED = 40  # memories of each bank that the comparison asks for


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        clients: at once.
        seconds: of the load.
        turns: of each address in a comparison, for so many `turn` seconds.
        callers: how many ask at once in the comparisons.
        limits: that have to hold.

    """

    clients: int
    seconds: float
    turns: int
    turn: float
    callers: tuple[int, ...]
    limits: Limits


def full(count: int, minutes: float, turn: float) -> Size:
    """Return what `make load` does."""
    return Size(count, minutes * 60, 6, turn, (1, 4), FULL)


def short() -> Size:
    """Return what `make test` has of it."""
    return Size(20, 12.0, 3, 1.5, (1,), SHORT)


class Run:
    """One sidecar under load, and what was seen of it."""

    def __init__(self, sidecar: RunningSidecar, workers: Executor, directory: Path, size: Size) -> None:
        assert sidecar.process is not None
        self._sidecar = sidecar
        self._pid = sidecar.process.pid
        self._workers = workers
        self._archive = directory / "middle.tar"
        self._size = size
        self.measured = Measured(about=_about(sidecar, size))

    def all(self, say: Callable[[str], None]) -> Measured:
        """Do everything."""
        size = self._size
        say(f"{size.clients} clients for {size.seconds:g} s, a dump in the middle")
        self._load()
        say("every acknowledged memory, and the dump")
        self._look_for_memories()
        self._verify_dump()
        for callers in size.callers:
            say(f"recalls, direct and through the gateway in turns, {callers} at once")
            self.measured.compared[callers] = self._compare(callers)
        return self.measured

    def _load(self) -> None:
        found = self.measured
        plan = clients.Plan(calls.gateway(self._sidecar), self._size.clients, 0.0, 0.0)
        with calls.Caller(plan.address) as caller:
            for bank in plan.banks:
                answered = caller.prepare(bank)
                assert answered.status == 200, answered
        found.before = wait_for(self._quiet, _QUIET, "no connection of a client")
        found.begin = time.monotonic() + _START
        found.end = found.begin + self._size.seconds
        plan = clients.Plan(plan.address, plan.clients, found.begin, found.end)
        control = self._sidecar.control_port
        probes = [
            probing.Probe("/livez", control, "/livez"),
            probing.Probe("/health", control, "/health"),
            probing.Probe("/health of the gateway", self._sidecar.port, "/health"),
        ]
        used = self._used()
        with samples.sampling(self._pid) as found.samples:
            load = self._workers.submit(clients.run, plan)
            probed = self._workers.submit(probing.run, probes, PROBES_A_SECOND, found.begin, found.end)
            time.sleep(max(0.0, found.begin + self._size.seconds / 2 - time.monotonic()))
            found.dump = self._dump()
            found.load, found.probed = load.result(), probed.result()
        found.about["cpu_seconds"] = {name: seconds - used[name] for name, seconds in self._used().items()}
        acknowledged = [at for each in found.load.acknowledged.values() for _, at in each]
        found.dump.owed = sum(at < found.dump.asked for at in acknowledged)
        found.after = wait_for(self._quiet, _QUIET, "no connection of a client")
        found.restarts = {name: int(one["restarts"]) for name, one in self._sidecar.health()["components"].items()}

    def _used(self) -> dict[str, float]:
        return {
            "sidecar": samples.cpu_seconds(self._pid),
            "hindsight-api": samples.cpu_seconds(self._sidecar.pid_of("hindsight-api")),
        }

    def _quiet(self) -> samples.Sample | None:
        """Look at the process while no client has a connection to it."""
        listening = {f"{port:04X}" for port in (self._sidecar.port, self._sidecar.api_port, self._sidecar.control_port)}
        established = "01"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
        ours = [line for line in lines if line[1].partition(":")[2] in listening and line[3] == established]
        return None if ours else samples.look(self._pid)

    def _dump(self) -> Dumped:
        asked = time.monotonic()
        done = self._command("dump", "--output", str(self._archive))
        said = "" if done.returncode == 0 else done.stderr[-300:].strip()
        return Dumped(asked, time.monotonic() - asked, fetched=done.returncode == 0, said=said)

    def _verify_dump(self) -> None:
        done, dump = self._command("verify", "--json", str(self._archive)), self.measured.dump
        dump.verified = done.returncode == 0
        if dump.verified:
            dump.memories = json.loads(done.stdout)["archive"]["memories"]
        else:
            dump.said = dump.said or done.stderr[-300:].strip()

    def _command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(PROGRAM), *arguments],
            env=self._sidecar.environment,
            capture_output=True,
            text=True,
            timeout=_DUMP_PATIENCE,
            check=False,
        )

    def _look_for_memories(self) -> None:
        found = self.measured
        with calls.Caller(calls.gateway(self._sidecar)) as caller:
            for bank, acknowledged in found.load.acknowledged.items():
                there = Counter(_list(caller, bank))
                found.lost += [text for text, _ in acknowledged if text not in there]
                found.twice += [text for text, count in there.items() if count > 1]

    def _compare(self, callers: int) -> comparing.Compared:
        questions = [
            (bank, text) for bank, texts in self.measured.load.acknowledged.items() for text, _ in texts[:_ASKED]
        ]
        if not questions:
            return comparing.Compared()
        course = comparing.Course(
            calls.direct(self._sidecar),
            calls.gateway(self._sidecar),
            questions,
            callers,
            self._size.turns,
            self._size.turn,
        )
        return self._workers.submit(comparing.run, course).result()


def _list(caller: calls.Caller, bank: str) -> Iterator[str]:
    offset = 0
    while True:
        answered = caller.list(bank, _PAGE, offset)
        assert answered.status == 200, answered
        items = answered.body["items"]
        yield from (item["text"] for item in items)
        offset += len(items)
        if len(items) < _PAGE:
            return


def _about(sidecar: RunningSidecar, size: Size) -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in cpu if line.startswith("model name")), "CPU")
    machine, versions = sizing.this_machine(), sidecar.health()["versions"]
    return {
        "machine": f"{machine.cores} cores of {model}, {machine.memory / 2**30:.0f} GiB",
        "versions": {**versions, "sidecar": __version__},
        "clients": size.clients,
        "seconds": size.seconds,
        "turns": size.turns,
        "turn_seconds": size.turn,
    }


@contextmanager
def _run(size: Size) -> Iterator[Run]:
    spawning = multiprocessing.get_context("spawn")
    with (
        reachable_directory() as directory,
        running_sidecar(made.baked(directory)) as sidecar,
        ProcessPoolExecutor(2, mp_context=spawning) as workers,
    ):
        yield Run(sidecar, workers, directory, size)


def measure(size: Size, say: Callable[[str], None]) -> Measured:
    """Start a sidecar and load it."""
    with _run(size) as run:
        return run.all(say)


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--turn", type=float, default=20.0, help="seconds of each turn of the comparison")
    parser.add_argument("--short", action="store_true", help="what `make test` has of it")
    parser.add_argument("--json", type=Path, help="a file for everything that was measured")
    options = parser.parse_args()
    size = short() if options.short else full(options.clients, options.minutes, options.turn)
    measured = measure(size, lambda sentence: print(f"==> {sentence}", file=sys.stderr, flush=True))
    lines = rows(measured, size.limits)
    about = measured.about
    print(f"{about['machine']}; {', '.join(f'{name} {version}' for name, version in about['versions'].items())}\n")
    print(markdown(lines))
    if options.json:
        options.json.write_text(as_json(measured, lines), encoding="utf-8")
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    for unwanted in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[unwanted]
    sys.exit(main())
