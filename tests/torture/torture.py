"""`make torture`: the whole matrix of faults within a budget of time, as one table, and as JSON.

Exits with 1 where anything acknowledged was lost or anything unexpected was seen, where a case had no round, and where the
budget ended before all rounds were done, but for a budget that somebody asked for.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import containers
import hangs
import identity
import kills
import made
import spaces
import stops
from clearing import Clearing
from containers import ContainerRig
from harness import reachable_directory
from lanes import LANES, Note, run_lanes
from matrix import Case, Row, Subject, faults, rows_for, run, unfinished
from rig import Rig
from table import as_json, markdown

import sidecar

BUDGET = "160m"  # a round takes some half a minute on two cores, and there are 285
SHORT_BUDGET = 420.0  # seconds
ALONE = {stops.GROUP, hangs.GROUP, spaces.GROUP}  # nothing runs beside these: they look at how long something takes


def say(text: str) -> None:
    """Show something at once, to whom it may be hours until the end."""
    print(text, flush=True)


@contextmanager
def baked_model() -> Iterator[Path]:
    """Have the stand-in model baked."""
    with reachable_directory() as directory:
        yield made.baked(directory)


def matrix(rig: Rig, older: kills.OlderVolume, boxes: ContainerRig) -> list[Case]:
    """Return all cases."""
    return [
        *kills.cases(rig, older),
        *stops.cases(rig, older),
        *hangs.cases(rig),
        *spaces.cases(rig),
        *identity.cases(rig),
        *containers.cases(boxes),
    ]


@contextmanager
def subjects() -> Iterator[tuple[Rig, kills.OlderVolume, ContainerRig]]:
    """Have what the cases work on."""
    with baked_model() as model_dir, reachable_directory() as directory, ExitStack() as stack:
        directory.chmod(0o777)
        rig = Rig(directory, model_dir)
        stack.callback(rig.end)
        home = directory / "older"
        home.mkdir()
        home.chmod(0o777)
        boxes = ContainerRig()
        stack.callback(boxes.end)
        yield rig, kills.OlderVolume(home, model_dir), boxes


@dataclass(frozen=True)
class Order:
    """What somebody asked for.

    Attributes:
        until: monotonic seconds at which no further round begins.
        short: whether it is the short form: one round each, and no time for measuring twice.
        only: the cases that have this text in their title.
        rounds: at most so many of each case, 0 for all.
        keep: a directory below which failures are kept; a temporary one where it is None.

    """

    until: float
    short: bool = False
    only: str = ""
    rounds: int = 0
    seed: int = 0
    keep: Path | None = None

    def wants(self, case: Case) -> bool:
        """Tell whether a case is asked for."""
        return self.only in case.title and (case.short or not self.short)

    @property
    def most(self) -> int:
        """Return how many rounds a case may have, 0 for all."""
        return 1 if self.short else self.rounds


def wanted(order: Order) -> list[Case]:
    """Return the cases asked for, in the matrix's order, to be looked at: they have nothing to work on."""
    nothing: Any = None
    return [case for case in matrix(nothing, nothing, nothing) if order.wants(case)]


def do(order: Order, chosen: Collection[str], note: Note = lambda _: None) -> list[Row]:
    """Run the cases of these titles in this process, and return what came of them; `note` is told of it on the way."""
    kills.TIMES.warm = not order.short
    clearing = Clearing(order.keep, say)
    rows: list[Row] = []
    try:
        with subjects() as (rig, older, boxes):

            def failed(case: Case, failure: str, error: Exception) -> str:
                subject: Subject = boxes if case.group == containers.GROUP else rig
                return clearing.after(subject, case, failure, error)

            rows = run(
                [case for case in matrix(rig, older, boxes) if case.title in chosen],
                order.until - time.monotonic(),
                order.seed,
                most=order.most,
                failed=failed,
                say=say,
                note=note,
            )
    except Exception as error:
        if not rows:
            raise
        # It has its table all the same, and is no good run.
        rows[-1].failures.append(f"what it stood on could not be ended: {error!r}")
    note(rows)
    return rows


def torture(order: Order, note: Note) -> tuple[list[Row], list[str]]:
    """Run all that is asked for: first, each alone, what takes a time; then the others, side by side.

    Return the rows of all, and what went wrong beside them, as sentences; `note` is told of all rows after each round. Those
    that run alone have one round each, so that each case has its first before any has a second.
    """
    cases = wanted(order)
    alone = [case.title for case in cases if case.group in ALONE]
    others = [case.title for case in cases if case.group not in ALONE]
    rows = {row.title: row for row in rows_for(cases, order.most)}

    def take(found: list[Row]) -> None:
        rows.update((row.title, row) for row in found)
        note(list(rows.values()))

    wrong = []
    take([])  # so that a file that cannot be written is told now, and not after the first round
    for lanes in ([alone], [others[lane::LANES] for lane in range(LANES)]):
        wrong += run_lanes([partial(do, order, chosen) for chosen in lanes if chosen], take)
    return list(rows.values()), wrong


def seconds(text: str) -> float:
    """Read `90`, `90s`, `30m` or `2h`."""
    units = {"s": 1, "m": 60, "h": 3600}
    unit = units.get(text[-1:])
    return float(text[:-1]) * unit if unit else float(text)


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--budget", type=seconds, help=f"what fits into a time such as 90s, 90m or 2h; otherwise all, within {BUDGET}"
    )
    parser.add_argument("--short", action="store_true", help="one round each of the cases that `make test` runs")
    parser.add_argument("--only", default="", help="run the cases that have this text in `group: name`")
    parser.add_argument("--rounds", type=int, default=0, help="at most this many rounds of each case")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="where in its moments each case begins"
    )
    parser.add_argument("--json", type=Path, help="a file for everything that is known of the run")
    options = parser.parse_args()
    # Whoever ends this ends its lanes, and they what they run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began, clock = datetime.now(UTC), time.monotonic()
    what_fits = options.budget is not None

    def note(rows: list[Row]) -> None:
        # After each round, so that a run that is broken off, after hours, leaves what it has seen.
        if options.json:
            run_of = {
                "began": began.isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - clock, 1),
                "seed": options.seed,
            }
            told = as_json(rows, **run_of, faults=faults(rows, what_fits=what_fits))
            part = options.json.with_name(f"{options.json.name}.part")
            part.write_text(f"{json.dumps(told, indent=1)}\n", encoding="utf-8")
            part.replace(options.json)

    order = Order(
        until=clock + (options.budget if what_fits else seconds(BUDGET)),
        short=options.short,
        only=options.only,
        rounds=options.rounds,
        seed=options.seed,
        keep=options.json and options.json.with_name(f"{options.json.name}.failures"),
    )
    rows, wrong = torture(order, note)
    say(f"\n{markdown(rows)}\n")
    wrong += faults(rows, what_fits=what_fits)
    for fault in wrong:
        print(f"WRONG: {fault}\n", file=sys.stderr)
    told = [
        f"seed {options.seed}",
        f"{(time.monotonic() - clock) / 60:.1f} minutes",
        f"hindsight-sidecar {sidecar.__version__}",
        *filter(None, [unfinished(rows)]),
    ]
    print(", ".join(told))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
