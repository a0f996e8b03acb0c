"""All that a load showed, beside what is promised: one table, and JSON."""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clients import Load
from comparing import Compared
from probing import Probed
from samples import Sample

HEAD = ("what", "measured", "at most", "holds")
_MIB = 2**20
_WINDOW = 60.0  # seconds; of a load shorter than four of them it is a quarter


@dataclass(frozen=True)
class Limits:
    """What is promised.

    Attributes:
        probe: seconds for a probe at its 99th percentile.
        memory: by which part of itself it may grow from the second window to the last, with the dump between them. A
            first dump takes its buffers and keeps them for the next.
        creep: by which part from the window after the dump to the last: what leaks with each call.
        threads: further threads after the load, those kept for work that waits for the disk.
        descriptors: further open files after it.
        recall: how much longer than directly a recall through the gateway may take.
        part: at which percentile.

    """

    probe: float
    memory: float
    creep: float
    threads: int
    descriptors: int
    recall: float
    part: float


FULL = Limits(probe=0.1, memory=0.15, creep=0.02, threads=8, descriptors=4, recall=1.1, part=0.95)
# Some seconds beside whatever else the machine does: what is counted holds as it does in full, what takes its time has
# room. One probe of a hundred decides their p99, memory still warms up, and of some ten recalls only the middle tells
# something: that it took half as long again is seen there too.
SHORT = Limits(probe=0.5, memory=0.25, creep=0.1, threads=8, descriptors=4, recall=1.5, part=0.5)


@dataclass
class Dumped:
    """The dump in the middle.

    Attributes:
        asked: monotonic seconds.
        seconds: from asking for it to having it fetched.
        fetched, verified: whether the two commands said so.
        said: what they said where they did not.
        memories: how many it has, None where that is not known.
        owed: how many were acknowledged before it was asked for.

    """

    asked: float = 0.0
    seconds: float = 0.0
    fetched: bool = False
    verified: bool = False
    said: str = ""
    memories: int | None = None
    owed: int = 0


@dataclass
class Measured:
    """Everything that was seen.

    Attributes:
        begin, end: of the load, in monotonic seconds.
        before, after: the sidecar's process without any client.
        lost: acknowledged memories that were not there at the end.
        twice: memories that were there more than once.
        restarts: of each component.
        compared: by how many asked at once.
        about: what it ran on, and how.

    """

    load: Load = field(default_factory=Load)
    probed: dict[str, Probed] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    before: Sample | None = None
    after: Sample | None = None
    dump: Dumped = field(default_factory=Dumped)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    compared: dict[int, Compared] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of the table; without a limit it only tells."""

    what: str
    measured: str
    limit: str = ""
    holds: bool = True


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that so large a part of them does not exceed. Raises ValueError where there is none."""
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[max(0, -int(-part * len(values) // 1) - 1)]


def rows(measured: Measured, limits: Limits) -> list[Row]:
    """Return all lines."""
    return [
        *_calls(measured),
        *_memories(measured),
        *_probes(measured, limits),
        *_process(measured, limits),
        *(line for callers, compared in measured.compared.items() for line in _recalls(callers, compared, limits)),
        *([] if measured.compared else [Row("recall, gateway to direct", "not measured", f"{limits.recall}", holds=False)]),
    ]  # fmt: skip


def _none(what: str, seen: int, example: str = "") -> Row:
    return Row(what, f"{seen}{f' ({example})' if seen and example else ''}", "0", seen == 0)


def _calls(measured: Measured) -> list[Row]:
    load = measured.load
    lines = [
        Row(
            f"{kind}s answered",
            f"{len(seconds)}, p50 {_ms(percentile(seconds, 0.5))}, p95 {_ms(percentile(seconds, 0.95))}, p99 {_ms(percentile(seconds, 0.99))}"
            if seconds
            else "none",
            "some",
            bool(seconds),
        )
        for kind, seconds in load.seconds.items()
    ]  # fmt: skip
    refused = sum(load.busy.values())
    lines.append(Row("429 or 503 with `Retry-After`", f"{refused}"))
    lines.append(_none("other errors", sum(load.faulty.values()), "; ".join(load.faults[:3])))
    return lines


def _memories(measured: Measured) -> list[Row]:
    dump, acknowledged = measured.dump, sum(map(len, measured.load.acknowledged.values()))
    enough = dump.memories is not None and dump.owed > 0 and dump.memories >= dump.owed
    return [
        Row("dump in the middle, fetched and verified",
            f"{dump.seconds:.1f} s" if dump.fetched and dump.verified else f"no: {dump.said}", "yes", dump.fetched and dump.verified),
        Row("memories in it", f"{dump.memories}, {dump.owed} were acknowledged before", "all", enough),
        Row("memories acknowledged", f"{acknowledged}", "some", acknowledged > 0),
        _none("of them not there at the end", len(measured.lost), "; ".join(measured.lost[:3])),
        Row("of them not recalled right after they were stored", f"{len(measured.load.missed)}"),
        _none("memories there twice", len(measured.twice), "; ".join(measured.twice[:3])),
        _none("components that began again", sum(measured.restarts.values()), json.dumps(measured.restarts)),
    ]  # fmt: skip


def _probes(measured: Measured, limits: Limits) -> list[Row]:
    if not measured.probed:
        return [Row("probes", "none", "some", holds=False)]
    lines = []
    for name, probed in measured.probed.items():
        if not probed.seconds:
            lines.append(Row(f"{name}, p99", "none was answered", _ms(limits.probe), holds=False))
            continue
        p99 = percentile(probed.seconds, 0.99)
        told = f"{_ms(p99)} of {len(probed.seconds)} (p50 {_ms(percentile(probed.seconds, 0.5))}, most {_ms(max(probed.seconds))})"
        lines.append(Row(f"{name}, p99", told, _ms(limits.probe), p99 <= limits.probe))
    bad = [told for probed in measured.probed.values() for told in probed.bad]
    lines.append(_none("probes that were not 200", len(bad), "; ".join(bad[:2])))
    return lines


def windows(measured: Measured) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Return the samples of the load's second minute, of the one after the dump, and of the last one."""
    window = min(_WINDOW, (measured.end - measured.begin) / 4)
    dumped = measured.dump.asked + measured.dump.seconds

    def of(begin: float) -> list[Sample]:
        return [one for one in measured.samples if begin <= one.at < begin + window]

    return of(measured.begin + window), of(dumped), of(measured.end - window)


def _process(measured: Measured, limits: Limits) -> list[Row]:
    early, dumped, late = windows(measured)
    if not early or not dumped or not late or measured.before is None or measured.after is None:
        return [Row("memory of the sidecar", "not measured", f"+{limits.memory:.0%}", holds=False)]

    def median(samples: list[Sample], of: Callable[[Sample], int]) -> float:
        return statistics.median(map(of, samples))

    def grown(name: str, of: Callable[[Sample], int], since: list[Sample], limit: float) -> Row:
        first, last, most = median(since, of), median(late, of), max(map(of, measured.samples))
        growth = last / first - 1
        told = f"{growth:+.1%} ({first / _MIB:.1f} to {last / _MIB:.1f} MiB, most {most / _MIB:.1f})"
        return Row(f"{name} to last", told, f"+{limit:.0%}", growth <= limit)

    def left(name: str, of: Callable[[Sample], int], more: int) -> Row:
        before, after = of(measured.before), of(measured.after)  # type: ignore[arg-type]
        told = f"{after - before:+d} ({before} to {after}; under load {median(early, of):g}, then {median(late, of):g})"
        return Row(f"{name} before and after", told, f"+{more}", after - before <= more)

    return [
        grown("RSS of the sidecar, second minute", lambda one: one.rss, early, limits.memory),
        grown("PSS of the sidecar, second minute", lambda one: one.pss, early, limits.memory),
        grown("RSS of the sidecar, minute after the dump", lambda one: one.rss, dumped, limits.creep),
        left("threads", lambda one: one.threads, limits.threads),
        left("descriptors", lambda one: one.descriptors, limits.descriptors),
    ]


@dataclass(frozen=True)
class Ratio:
    """One percentile of the recalls, gateway to direct.

    Attributes:
        direct, gateway: medians over the turns, in seconds.
        ratio: the median of what each pair of turns gives.
        spread: the ratios of each direct turn to the direct turn before it: what is noise.

    """

    direct: float
    gateway: float
    ratio: float
    spread: list[float]


def compare(compared: Compared, part: float) -> Ratio:
    """Compare one percentile. Raises ValueError where a turn has no answer."""
    direct = [percentile(turn, part) for turn in compared.direct]
    through = [percentile(turn, part) for turn in compared.gateway]
    ratio = statistics.median(b / a for a, b in zip(direct, through, strict=True))
    spread = [after / before for before, after in itertools.pairwise(direct)]
    return Ratio(statistics.median(direct), statistics.median(through), ratio, spread)


def _recalls(callers: int, compared: Compared, limits: Limits) -> list[Row]:
    name = f"recall p{limits.part * 100:.0f}, gateway to direct, {callers} at once"
    other = round(1.45 - limits.part, 2)  # the 50th percentile where the 95th decides, and the other way round
    try:
        decides, told_too = compare(compared, limits.part), compare(compared, other)
    except (ValueError, statistics.StatisticsError):
        why = "; ".join(f"{count} times {fault[:100]}" for fault, count in compared.faults.most_common(3))
        return [Row(name, f"not measured ({why or 'a turn has no answer'})", f"{limits.recall}", holds=False)]
    noise = f", direct to direct {min(decides.spread):.2f} to {max(decides.spread):.2f}" if decides.spread else ""
    told = (
        f"{decides.ratio:.3f} ({_ms(decides.gateway)} to {_ms(decides.direct)}{noise}; "
        f"p{other * 100:.0f} {told_too.ratio:.3f}, {_ms(told_too.gateway)} to {_ms(told_too.direct)})"
    )
    return [
        Row(name, told, f"{limits.recall}", decides.ratio <= limits.recall),
        _none(f"errors of it, {callers} at once", sum(compared.faults.values()), "; ".join(list(compared.faults)[:3])),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def markdown(lines: list[Row]) -> str:
    """Return the table in Markdown."""
    cells = [HEAD, *((line.what, line.measured, line.limit, _verdict(line)) for line in lines)]
    body = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([body[0], "|" + "---|" * len(HEAD), *body[1:]])


def _verdict(line: Row) -> str:
    if not line.limit:
        return ""
    return "yes" if line.holds else "NO"


def as_json(measured: Measured, lines: list[Row]) -> str:
    """Return all of it as JSON; seconds and bytes. The texts of the memories are left out."""
    told = {name: value for name, value in vars(measured).items() if name != "load"}
    load = {name: value for name, value in vars(measured.load).items() if name not in ("acknowledged", "unsaid")}
    load["acknowledged"] = sum(map(len, measured.load.acknowledged.values()))
    load["unsaid"] = sum(map(len, measured.load.unsaid.values()))
    return json.dumps({"rows": [asdict(line) for line in lines], "load": load, **told}, indent=1, default=asdict) + "\n"
