import json
from collections.abc import Callable
from dataclasses import replace

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
        dump=Dumped(3.0, fetched=True, verified=True, memories=30, owed=25),
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
        "recall p95, gateway to direct",
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
         lambda m: setattr(m, "samples", [replace(one, rss=one.rss + int(one.at) * MIB // 50) for one in m.samples])),
        ("PSS of the sidecar, second minute to last",
         lambda m: setattr(m, "samples", [replace(one, pss=one.pss + int(one.at) * MIB // 50) for one in m.samples])),
        ("memory of the sidecar", lambda m: m.samples.clear()),
        ("threads before and after", lambda m: setattr(m, "after", sample(710.0, threads=14))),
        ("descriptors before and after", lambda m: setattr(m, "after", sample(710.0, descriptors=25))),
        ("recall p95, gateway to direct, 1 at once", lambda m: m.compared[1].gateway.__setitem__(slice(None), [[0.023] * 20] * 3)),
        ("recall p95, gateway to direct, 1 at once", lambda m: m.compared[1].direct.append([])),
        ("recall p95, gateway to direct", lambda m: m.compared.clear()),
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
    early, late = windows(good())
    assert (early[0].at, early[-1].at) == (160.0, 219.0)
    assert (late[0].at, late[-1].at) == (641.0, 699.0)


def test_the_windows_of_some_seconds_are_quarters() -> None:
    measured = good()
    measured.end = 112.0
    measured.samples = measured.samples[:12]
    early, late = windows(measured)
    assert ([one.at for one in early], [one.at for one in late]) == ([103.0, 104.0, 105.0], [110.0, 111.0])


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
    assert (SHORT.threads, SHORT.descriptors) == (FULL.threads, FULL.descriptors)
