"""`make bench-migrate`: how long dumps and restores take beside PostgreSQL's own programs, and what they cost.

What is compared is measured in turn, within one run, against the same server. `--units` memories are in `--banks` banks.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import made
import psycopg
from figures import Found, as_json, table
from generating import PER_DOCUMENT, generate
from harness import RunningSidecar, reachable_directory, wait_for
from measuring import MIB, ByHand, Peak, phases, refused

from sidecar import sizing, staging
from sidecar.administration_client import Client

DUMPS = 4  # of each kind in a round: they take a fraction of what a restore takes, and are compared more closely
REAL = 20  # memories of each bank that hindsight-api stores itself
BY_HAND = "by_hand"  # the database that pg_restore fills
TOKEN = "bench"  # noqa: S105 - of a sidecar on loopback that ends with this program
FIXTURES = Path(__file__).parents[1] / "fixtures"


class Bench:
    """One sidecar, its memories, and what is measured of them."""

    def __init__(self, sidecar: RunningSidecar, directory: Path, banks: int) -> None:
        self.found = Found()
        self._sidecar = sidecar
        self._directory = directory
        self._client = Client(f"http://127.0.0.1:{sidecar.control_port}", TOKEN)
        self._by_hand = ByHand(sidecar)
        self._banks = [f"bank-{number:03}" for number in range(banks)]
        self._each = 0  # memories generated in each bank so far

    # Memories ---------------------------------------------------------------------------------------------------

    def begin_banks(self) -> None:
        """Let hindsight-api make the banks and store the first memories of each."""
        fixture = json.loads((FIXTURES / "memories.json").read_text(encoding="utf-8"))
        texts = [item["content"] for items in fixture["banks"].values() for item in items]
        self._words = sorted({word for text in texts for word in text.split() if word.isascii() and word.isalpha()})
        for number, bank in enumerate(self._banks):
            self._sidecar.retain(bank, [texts[(number * REAL + n) % len(texts)] for n in range(REAL)])

    def grow(self, units: int) -> int:
        """Generate memories until there are about so many, and return how many there are."""
        each = max(units // len(self._banks) - REAL, self._each + PER_DOCUMENT)
        each -= each % PER_DOCUMENT
        with self._connect() as connection:
            generate(connection, self._banks, self._words, self._each, each)
            self._each = each
            row = connection.execute("SELECT count(*), pg_database_size(current_database()) FROM public.memory_units")
            count, size = row.fetchone() or (0, 0)
        self.found.about |= {"units": count, "banks": len(self._banks), "database_bytes": size}
        return int(count)

    def _connect(self) -> "psycopg.Connection[Any]":
        return psycopg.connect(
            host=str(self._sidecar.run_dir), port=5432, user="postgres", dbname="hindsight", autocommit=True
        )

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Begin with no page left to be written by what was before."""
        with self._connect() as connection:
            connection.execute("CHECKPOINT")
        yield

    # What is measured -------------------------------------------------------------------------------------------

    def _watch(self, units: int) -> Peak:
        assert self._sidecar.process is not None
        peak = Peak(self._sidecar.process.pid)
        self.found.memory[units] = peak.bytes
        return peak

    def warm_up(self, units: int) -> None:
        """Dump and restore once, for what it takes of memory."""
        peak = self._watch(units)
        with peak.during("dump"):
            identifier = self._ended(self._client.call("POST", "/v1/dumps", {}))["report"]["dump"]["id"]
        self._fetch(identifier, peak)
        self._restore(peak, measure=False)

    def run(self, units: int, rounds: int) -> None:
        """Make the memories and measure, at a quarter of them and at all of them."""
        self.begin_banks()
        tell(f"{units // 4:,} memories, dumped and restored once")
        self.warm_up(self.grow(units // 4))
        tell(f"{units:,} memories")
        self.measure(self.grow(units), rounds)

    def measure(self, units: int, rounds: int) -> None:
        """Measure everything, in turn, so many times."""
        peak = self._watch(units)
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}: dumps")
            self._measure_dumps(peak)
            tell(f"round {number + 1} of {rounds}: restores")
            for jobs in self.found.pg_restore:
                self._restore_by_hand(jobs)
            self._restore(peak, measure=True)
        for number in range(rounds):
            tell(f"restart {number + 1} of {rounds}")
            self._restart()

    def _measure_dumps(self, peak: Peak) -> None:
        kinds = [self._dump_by_hand, partial(self._dump, peak)]
        for _ in range(DUMPS):
            for dump in kinds:
                dump()
            kinds.reverse()  # what comes first finds the database as the step before left it

    def _dump_by_hand(self) -> None:
        plain = self._directory / "by-hand.dump"
        plain.unlink(missing_ok=True)
        with self._quiet():
            took = self._by_hand.run("pg_dump", "--dbname=hindsight", "-Fc", "-Z", "gzip:1", f"--file={plain}")
        self.found.pg_dump.runs.append(took)

    def _dump(self, peak: Peak) -> None:
        with self._quiet(), peak.during("dump"):
            done = self._ended(self._client.call("POST", "/v1/dumps", {}))
        self.found.dump.runs.append(_between(done["started"], done["ended"]))
        self.found.add_phases("dump", phases(self._sidecar, done))
        self._fetch(done["report"]["dump"]["id"], peak)

    def _fetch(self, identifier: str, peak: Peak) -> None:
        with peak.during("download"), (self._directory / "archive.tar").open("wb") as file:
            self._client.download(identifier, file.write, lambda _: None)
        self.found.about["archive_bytes"] = (self._directory / "archive.tar").stat().st_size
        self._client.call("DELETE", f"/v1/dumps/{identifier}")

    def _restore_by_hand(self, jobs: int) -> None:
        _, memory = staging.builds_of(sizing.this_machine())
        options = {"PGOPTIONS": f"-c maintenance_work_mem={memory // MIB}MB"}
        with self._quiet():
            took = self._by_hand.run("createdb", "--template=template0", BY_HAND)
            plain = str(self._directory / "by-hand.dump")
            took += self._by_hand.run("pg_restore", f"--dbname={BY_HAND}", f"--jobs={jobs}", plain, more=options)
        self.found.pg_restore[jobs].runs.append(took)
        self._by_hand.run("dropdb", "--force", BY_HAND)

    def _restore(self, peak: Peak, *, measure: bool) -> None:
        path = self._directory / "archive.tar"
        length = path.stat().st_size
        with self._quiet(), refused(self._sidecar, f"/v1/default/banks/{self._banks[0]}/config") as down:
            began = time.time()
            with peak.during("upload"), path.open("rb") as file:
                operation, _ = self._client.upload(file, length, {}, lambda _: None)
            with peak.during("restore"):
                done = self._ended(operation)
            wait_for(lambda: down, 10, "memory calls answered again")
        self._client.call("DELETE", f"/v1/databases/{done['report']['kept']}")
        if not measure:
            return
        seen = phases(self._sidecar, done)
        whole = _seconds(done["ended"]) - began
        self.found.whole_restore.runs.append(whole)
        self.found.restore.runs.append(whole - self._stopping(done) - seen["start hindsight-api"])
        self.found.down.runs.append(down[0])
        self.found.add_phases("restore", {"upload": _seconds(done["started"]) - began, **seen})

    def _stopping(self, operation: dict[str, Any]) -> float:
        """Return for how long the exchange waited for hindsight-api to end."""
        events = [event for event in self._sidecar.events() if "timestamp" in event]
        name = f"{operation['kind']} {operation['id']}"
        begin = next(
            e["timestamp"] for e in events if e.get("operation") == name and str(e.get("phase")).startswith("swap")
        )
        end = next(
            e["timestamp"] for e in events if e.get("event") == "hindsight-api ended" and e["timestamp"] >= begin
        )
        return _between(begin, end)

    def _restart(self) -> None:
        """Measure hindsight-api's own stop and cold start, as a restart of the sidecar has them."""
        sidecar = self._sidecar
        pid = sidecar.pid_of("hindsight-api")
        began = time.monotonic()
        assert sidecar.process is not None
        sidecar.process.terminate()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 30, "the end of hindsight-api", every=0.01)
        self.found.stop.runs.append(time.monotonic() - began)
        assert sidecar.wait_end() == 0
        sidecar.start()
        wait_for(lambda: _api_runs(sidecar), 120, "hindsight-api's start", every=0.01)
        began = time.monotonic()
        wait_for(lambda: sidecar.health_status() == 200, 120, "ready", every=0.01)
        self.found.cold_start.runs.append(time.monotonic() - began)

    def _ended(self, operation: dict[str, Any]) -> dict[str, Any]:
        done = self._client.wait(operation, lambda _: None)
        assert done["outcome"] == "done", done
        return done


def _api_runs(sidecar: RunningSidecar) -> bool:
    try:
        return sidecar.health()["components"]["hindsight-api"]["pid"] is not None
    except OSError:
        return False


def _seconds(told: str) -> float:
    return datetime.fromisoformat(told).timestamp()


def _between(begin: str, end: str) -> float:
    return _seconds(end) - _seconds(begin)


def tell(sentence: str) -> None:
    """Say on standard error what is done now."""
    sys.stderr.write(f"==> {sentence}\n")


def machine(sidecar: RunningSidecar) -> str:
    """Return what it ran on."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")), "CPU")
    seen = sizing.this_machine()
    versions = sidecar.health()["versions"]
    return (
        f"{seen.cores} cores of {model}, {seen.memory / 2**30:.0f} GiB; PostgreSQL {versions['postgres']}, hindsight-api "
        f"{versions['hindsight-api']}"
    )


def main() -> None:
    """Make a sidecar, fill it, measure it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--banks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    options = parser.parse_args()
    with reachable_directory() as directory:
        model = made.baked(directory)
        home = directory / "home"
        home.mkdir()
        home.chmod(0o777)
        sidecar = RunningSidecar(home, made.api_venv(), model, HINDSIGHT_SIDECAR_TOKEN=TOKEN)
        try:
            tell("a sidecar, and its banks")
            bench = Bench(sidecar.start_ready(), directory, options.banks)
            bench.found.about["machine"] = machine(sidecar)
            try:
                bench.run(options.units, options.rounds)
            finally:
                if options.json:  # what was measured before something failed is worth having
                    options.json.write_text(as_json(bench.found), encoding="utf-8")
        finally:
            sidecar.end()
    sys.stdout.write(f"{table(bench.found)}\n")


if __name__ == "__main__":
    for unwanted in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[unwanted]
    main()
