import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from calls import Answered
from clients import Load
from comparing import Compared
from judging import FULL, SHORT, Dumped, Limits, Measured, as_json, compare, markdown, percentile, rows, windows
from probing import Probed
from samples import Sample

MIB = 2**20


def sample(at: float, *, rss: int = 80 * MIB, threads: int = 5, descriptors: int = 20) -> Sample:
    return Sample(at, rss, rss // 2, threads, descriptors, at / 10)


def good() -> Measured:
    """Return a load of ten minutes in which everything held."""
    return Measured(
        load=Load(
            seconds={"retain": [0.2] * 50, "recall": [0.1] * 50},
            acknowledged={"load-0": [(f"text {number}", 100.0 + number) for number in range(50)]},
        ),
        probed={name: Probed([0.01] * 200) for name in ("/livez", "/health")},
        samples=[sample(100.0 + second) for second in range(600)],
        begin=100.0,
        end=700.0,
        before=sample(90.0),
        after=sample(710.0, threads=9),
        dump=Dumped(400.0, 3.0, fetched=True, verified=True, memories=30, owed=25),
        restarts={"postgres": 0, "hindsight-api": 0},
        compared={1: Compared(direct=[[0.02] * 20] * 3, gateway=[[0.021] * 20] * 3)},
    )


def broken(measured: Measured, limits: Limits = FULL) -> list[str]:
    return [line.what for line in rows(measured, limits) if not line.holds]


def test_what_holds_is_told_with_its_limit() -> None:
    lines = rows(good(), FULL)
    assert broken(good()) == []
    told = markdown(lines)
    assert "| /livez, p99 | 10.0 ms of 200 (p50 10.0 ms, most 10.0 ms) | 100 ms | yes |" in told
    assert (
        "| recall p95, gateway to direct, 1 at once | 1.050 (21.0 ms to 20.0 ms, direct to direct 1.00 to 1.00;" in told
    )


def test_a_run_that_measured_nothing_holds_nothing() -> None:
    assert set(broken(Measured())) >= {
        "retains answered",
        "recalls answered",
        "dump in the middle, fetched and verified",
        "memories in it",
        "memories acknowledged",
        "probes",
        "memory of the sidecar",
        "recall, gateway to direct",
    }


def spoil(change: Callable[[Measured], None]) -> Measured:
    measured = good()
    change(measured)
    return measured


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("other errors", lambda m: m.load.note("retain", Answered(503, 0.0, 0.1, "no word of when"))),
        ("other errors", lambda m: m.load.note("recall", Answered(0, 0.0, 60.0, "TimeoutError"))),
        ("dump in the middle, fetched and verified", lambda m: setattr(m.dump, "verified", False)),
        ("memories in it", lambda m: setattr(m.dump, "memories", 24)),
        ("memories in it", lambda m: setattr(m.dump, "owed", 0)),
        ("of them not there at the end", lambda m: m.lost.append("text 1")),
        ("memories there twice", lambda m: m.twice.append("text 1")),
        ("components that began again", lambda m: m.restarts.update(postgres=1)),
        ("/livez, p99", lambda m: m.probed.update({"/livez": Probed([0.01] * 97 + [0.2] * 3)})),
        ("/health, p99", lambda m: m.probed.update({"/health": Probed()})),
        ("probes that were not 200", lambda m: m.probed["/health"].bad.append("1.0 s: 503")),
        ("RSS of the sidecar, second minute to last",
         lambda m: setattr(m, "samples", [replace(one, rss=one.rss + (one.at > 400) * 13 * MIB) for one in m.samples])),
        ("PSS of the sidecar, second minute to last",
         lambda m: setattr(m, "samples", [replace(one, pss=one.pss + (one.at > 400) * 7 * MIB) for one in m.samples])),
        ("RSS of the sidecar, minute after the dump to last",
         lambda m: setattr(m, "samples", [replace(one, rss=one.rss + int(one.at) * 10_000) for one in m.samples])),
        ("memory of the sidecar", lambda m: m.samples.clear()),
        ("threads before and after", lambda m: setattr(m, "after", sample(710.0, threads=14))),
        ("descriptors before and after", lambda m: setattr(m, "after", sample(710.0, descriptors=25))),
        ("recall p95, gateway to direct, 1 at once", lambda m: m.compared[1].gateway.__setitem__(slice(None), [[0.023] * 20] * 3)),
        ("recall p95, gateway to direct, 1 at once", lambda m: m.compared[1].direct.append([])),
        ("recall, gateway to direct", lambda m: m.compared.clear()),
        ("errors of it, 1 at once", lambda m: m.compared[1].faults.update({"500 fault": 1})),
    ],
)  # fmt: skip
def test_whatever_does_not_hold_is_named(what: str, change: Callable[[Measured], None]) -> None:
    assert broken(spoil(change)) == [what]


def test_being_busy_is_no_error() -> None:
    measured = spoil(lambda m: m.load.note("retain", Answered(503, 0.0, 0.1, "at capacity", 1.0)))
    assert broken(measured) == []
    assert "| 429 or 503 with `Retry-After` | 1 |  |  |" in markdown(rows(measured, FULL))


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 0.95) == 3.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.95)


def test_the_windows_of_ten_minutes_are_the_second_and_the_last() -> None:
    early, dumped, late = windows(good())
    assert (early[0].at, early[-1].at) == (160.0, 219.0)
    assert (dumped[0].at, dumped[-1].at) == (403.0, 462.0)
    assert (late[0].at, late[-1].at) == (640.0, 699.0)


def test_the_windows_of_some_seconds_are_quarters() -> None:
    measured = good()
    measured.end = 112.0
    measured.samples = measured.samples[:12]
    measured.dump = replace(measured.dump, asked=105.0, seconds=1.0)
    assert [[one.at for one in window] for window in windows(measured)] == [
        [103.0, 104.0, 105.0],
        [106.0, 107.0, 108.0],
        [109.0, 110.0, 111.0],
    ]


def test_the_ratio_is_the_median_of_the_pairs_and_the_spread_is_beside_it() -> None:
    found = compare(Compared(direct=[[1.0], [2.0], [1.0]], gateway=[[1.1], [2.0], [3.0]]), 0.95)
    assert found.ratio == pytest.approx(1.1)
    assert found.spread == [2.0, 0.5]


def test_the_json_has_every_row_and_no_memory() -> None:
    measured = good()
    told = json.loads(as_json(measured, rows(measured, FULL)))
    assert {"what", "measured", "limit", "holds"} == set(told["rows"][0])
    assert told["load"]["acknowledged"] == 50
    assert "text 1" not in json.dumps(told)


def test_the_short_form_gives_room_to_times_alone() -> None:
    slow = spoil(lambda m: m.compared[1].gateway.__setitem__(slice(None), [[0.02] * 18 + [0.9] * 2] * 3))
    assert broken(slow, FULL) == ["recall p95, gateway to direct, 1 at once"]
    assert broken(slow, SHORT) == []
    stalled = spoil(lambda m: m.compared[1].gateway.__setitem__(slice(None), [[0.06] * 20] * 3))
    assert broken(stalled, SHORT) == ["recall p50, gateway to direct, 1 at once"]
    assert (SHORT.threads, SHORT.descriptors) == (FULL.threads, FULL.descriptors)


def cells_of(part: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("|") and "---" not in line
    ]


def test_the_page_has_the_table_with_its_limits_and_says_what_each_line_means() -> None:
    page = (Path(__file__).parents[2] / "docs" / "load.md").read_text(encoding="utf-8")
    figures, _, meaning = page.partition("## Figures")[2].partition("## What they mean")
    measured = good()
    measured.probed["/health of the gateway"] = measured.probed["/health"]
    measured.compared[4] = measured.compared[1]
    lines = rows(measured, FULL)
    assert [[cells[0], cells[2]] for cells in cells_of(figures)] == [
        ["what", "at most"],
        *([line.what, line.limit] for line in lines),
    ]
    assert all(cells[3] in ("holds", "yes", "") for cells in cells_of(figures))
    explained = ", ".join(cells[0] for cells in cells_of(meaning)).split(", ")
    clear = ("errors of it", "memories acknowledged")
    short_names = [re.split(r", | of the sidecar| before and after", line.what)[0] for line in lines]
    assert [name for name in short_names if name not in explained and name not in clear] == []


def test_the_page_tells_the_limits_of_the_short_form() -> None:
    page = (Path(__file__).parents[2] / "docs" / "load.md").read_text(encoding="utf-8")
    told = f"{SHORT.probe * 1000:.0f} ms for probes, {SHORT.memory * 100:.0f} % for memory with the dump and {SHORT.creep * 100:.0f} % after it"
    assert f"{told}, {SHORT.recall} for the ratio of the medians" in page


def test_the_page_and_the_makefile_have_the_same_variables() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "load.md").read_text(encoding="utf-8")
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nload:")[2].partition("\n\n")[0]
    named = set(re.findall(r"\b([A-Z]+)=", page.partition("## Figures")[0]))
    assert named == set(re.findall(r"\$\((CLIENTS|MINUTES|TURN)\)", recipe)) | {"SHORT", "JSON"}
