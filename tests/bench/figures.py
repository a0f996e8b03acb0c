"""All that the benchmark found, and the table of it beside what is required."""

import json
from dataclasses import dataclass, field
from typing import Any

from measuring import MIB, Seconds

DUMP_AT_MOST = 1.15
RESTORE_AT_MOST = 1.3
MEMORY_AT_MOST = 120e6  # bytes
DOWN_AT_MOST = 5.0  # seconds more than hindsight-api's own stop and cold start


@dataclass
class Found:
    """All that was measured."""

    dump: Seconds = field(default_factory=Seconds)
    pg_dump: Seconds = field(default_factory=Seconds)
    whole_restore: Seconds = field(default_factory=Seconds)
    restore: Seconds = field(default_factory=Seconds)
    pg_restore: dict[int, Seconds] = field(default_factory=lambda: {1: Seconds(), 2: Seconds()})
    down: Seconds = field(default_factory=Seconds)
    stop: Seconds = field(default_factory=Seconds)
    cold_start: Seconds = field(default_factory=Seconds)
    memory: dict[int, dict[str, int]] = field(default_factory=dict)
    phases: dict[str, dict[str, Seconds]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def add_phases(self, kind: str, seen: dict[str, float]) -> None:
        """Note how long each phase of an operation took."""
        for phase, seconds in seen.items():
            self.phases.setdefault(kind, {}).setdefault(phase, Seconds()).runs.append(seconds)


def rows(found: Found) -> list[tuple[str, str, str, str, str, str]]:
    """Return a line for each requirement: what, by hand, the sidecar, what is compared, at most, whether it is reached."""
    jobs, best = min(found.pg_restore.items(), key=lambda one: one[1].median)
    ratio = found.dump.median / found.pg_dump.median
    lines = [("dump", f"{found.pg_dump}", f"{found.dump}", f"{ratio:.2f}", f"{DUMP_AT_MOST}", ratio <= DUMP_AT_MOST)]
    ratio = found.restore.median / best.median
    lines.append(
        (f"restore (pg_restore -j{jobs})", f"{best}", f"{found.restore}", f"{ratio:.2f}", f"{RESTORE_AT_MOST}",
         ratio <= RESTORE_AT_MOST)
    )  # fmt: skip
    for units, phases_ in found.memory.items():
        phase, most = max(phases_.items(), key=lambda one: one[1])
        lines.append(
            (f"memory, {units:,} units ({phase})", "", f"{most / 1e6:.0f} MB", f"{most / 1e6:.0f} MB",
             f"{MEMORY_AT_MOST / 1e6:.0f} MB", most < MEMORY_AT_MOST)
        )  # fmt: skip
    own = found.stop.median + found.cold_start.median
    more = found.down.median - own
    lines.append(
        ("memory calls refused", f"{own:.1f} s", f"{found.down}", f"{more:+.1f} s", f"+{DOWN_AT_MOST} s",
         more <= DOWN_AT_MOST)
    )  # fmt: skip
    return [(*line[:5], "yes" if line[5] else "NO") for line in lines]


def table(found: Found) -> str:
    """Return all of it as Markdown."""
    about = found.about
    lines = [
        f"{about['units']:,} memories in {about['banks']} banks, a database of {about['database_bytes'] / MIB:,.0f} MiB.",
        f"An archive of {about['archive_bytes'] / MIB:,.0f} MiB. {about['machine']}.",
        "",
        "| what | by hand | the sidecar | compared | at most | reached |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(line)} |" for line in rows(found)),
        "",
        f"restore from the first byte sent to its end, hindsight-api's stop and start included: {found.whole_restore}",
        *(f"pg_restore -j{jobs}: {seconds}" for jobs, seconds in found.pg_restore.items()),
        f"hindsight-api by itself: stop {found.stop}, cold start {found.cold_start}",
    ]
    for kind, seen in found.phases.items():
        lines.append(f"phases of a {kind}: {', '.join(f'{name} {seconds}' for name, seconds in seen.items())}")
    for units, peaks in found.memory.items():
        lines.append(f"memory, {units:,} units: {', '.join(f'{n} {b / 1e6:.0f} MB' for n, b in peaks.items())}")
    return "\n".join(lines)


def as_json(found: Found) -> str:
    """Return all of it as JSON; seconds and bytes."""
    return json.dumps(vars(found), indent=1, default=lambda seconds: seconds.runs) + "\n"
