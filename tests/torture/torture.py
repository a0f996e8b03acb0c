"""`make torture`: the whole matrix of faults within a budget of time, as one table, and as JSON.

Exits with 1 where anything acknowledged was lost or anything unexpected was seen, where a case had no round, and where the
budget ended before all rounds were done, but for a budget that somebody asked for.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

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
from matrix import Case, Row, Subject, faults, run, unfinished
from rig import Rig
from table import as_json, markdown

import sidecar

BUDGET = "160m"  # a round takes some half a minute on two cores, and there are 285
SHORT_BUDGET = 420.0  # seconds


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


def torture(
    budget: float,
    *,
    short: bool,
    only: str = "",
    rounds: int = 0,
    seed: int = 0,
    keep: Path | None = None,
    say: Callable[[str], None] = print,
    note: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Run the cases whose group and name have the text `only`, and return what came of them; `note` is told of it on the way.

    What failures leave is kept below the directory `keep`, or in a temporary one.
    """
    kills.TIMES.warm = not short
    clearing = Clearing(keep, say)
    rows: list[Row] = []
    try:
        with subjects() as (rig, older, boxes):
            chosen = [case for case in matrix(rig, older, boxes) if only in f"{case.group}: {case.name}"]

            def failed(case: Case, failure: str, error: Exception) -> str:
                subject: Subject = boxes if case.group == containers.GROUP else rig
                return clearing.after(subject, case, failure, error)

            rows = run(chosen, budget, seed, short=short, most=rounds, failed=failed, say=say, note=note)
    except Exception as error:
        if not rows:
            raise
        # It has its table all the same, and is no good run.
        rows[-1].failures.append(f"what it stood on could not be ended: {error!r}")
    note(rows)
    say(f"\n{markdown(rows)}\n")
    return rows


def seconds(text: str) -> float:
    """Read `90`, `90s`, `30m` or `2h`."""
    units = {"s": 1, "m": 60, "h": 3600}
    unit = units.get(text[-1:])
    return float(text[:-1]) * unit if unit else float(text)


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--budget", type=seconds, help=f"what fits into a time such as 90s, 30m or 2h; otherwise all, within {BUDGET}"
    )
    parser.add_argument("--short", action="store_true", help="one round each of the cases that `make test` runs")
    parser.add_argument("--only", default="", help="run the cases that have this text in `group: name`")
    parser.add_argument("--rounds", type=int, default=0, help="at most this many rounds of each case")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="where in its moments each case begins"
    )
    parser.add_argument("--json", type=Path, help="a file for everything that is known of the run")
    options = parser.parse_args()
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

    rows = torture(
        options.budget if what_fits else seconds(BUDGET),
        short=options.short,
        only=options.only,
        rounds=options.rounds,
        seed=options.seed,
        keep=options.json and options.json.with_name(f"{options.json.name}.failures"),
        say=partial(print, flush=True),
        note=note,
    )
    wrong = faults(rows, what_fits=what_fits)
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
