"""What the administration commands show, from what the endpoints answer."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from sidecar import progress, reporting
from sidecar.progress import Meter, Progress, amount, duration, size, told

MODEL = {"id": "BAAI/bge-small-en-v1.5", "revision": "5c38ec7c405ec4b44b94", "precision": "float32", "dimension": 384,
         "pooling": "cls"}  # fmt: skip
COMPARISON: dict[str, Any] = {
    "tables": [
        {"name": "public.bank_stats_cache", "there": 1, "here": 0, "equal": None},
        {"name": "public.banks", "there": 3, "here": None, "equal": False},
        {"name": "public.memory_units", "there": 369, "here": 369, "equal": True},
    ],
    "counts": {
        "indexes": {"there": 102, "here": 102, "equal": 102},
        "constraints": {"there": 53, "here": 53, "equal": 53},
        "sequences": {"there": 2, "here": 2, "equal": 1},
    },
    "faults": [],
    "notes": ["extension vector was 0.8.0, and is 0.8.6 here"],
}
FROM = {"postgres": "18.6", "pg_dump": "18.6", "made": "2026-11-29T22:03:00+01:00", "versions": {"hindsight-api": "1.1.0", "postgres": "18.6"}}  # fmt: skip


def operation(**report: Any) -> dict[str, Any]:
    return {"kind": "restore", "outcome": "done", "ended": "2026-11-29T21:03:59.999+00:00", "error": None,
            "report": {"memories": 369, "unproved": [], "newer": [], **report}}  # fmt: skip


# Numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB"), (3 * 2**30, "3.0 GiB"), (2**50, "1024.0 TiB")],
)  # fmt: skip
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_amounts_and_durations() -> None:
    assert (amount(12345, "rows"), amount(2048, "bytes"), amount(3, "")) == ("12,345 rows", "2.0 KiB", "3")
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]


def test_a_moment_is_in_utc() -> None:
    assert reporting.moment("2026-11-29T22:03:00+01:00") == "2026-11-29 21:03 UTC"
    assert reporting.moment(None) == "-"


def test_columns() -> None:
    assert reporting.columns([("name", "rows"), ("a", 5), ("longer", None)], right=(1,)) == [
        "name    rows",
        "a          5",
        "longer     -",
    ]
    assert reporting.columns([]) == []


# Progress ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (Progress("check"), ""),
        (Progress("dump", 2048, None, "bytes", 1024.0), "2.0 KiB, 1.0 KiB/s"),
        (Progress("load", 250, 1000, "rows", 50.0, 15.0), "25 %, 250 rows, 50 rows/s, 0:15 left"),
        (Progress("load", 1200, 1000, "rows", None, 0.0), "100 %, 1,200 rows, 0:00 left"),
        (Progress("index", 0, 0, "indexes"), ""),
    ],
)
def test_what_is_told_beside_the_bar(seen: Progress, text: str) -> None:
    assert told(seen) == text


def test_a_meter_tells_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    seen: list[Progress] = []
    meter = Meter("upload", 1000, seen.append)
    meter.add(200)
    meter.add(300)
    assert seen == [
        Progress("upload", 200, 1000, "bytes", 100.0, 8.0),
        Progress("upload", 500, 1000, "bytes", 125.0, 4.0),
    ]


def test_a_meter_of_a_stream_knows_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", iter([0.0, 1.0]).__next__)
    seen: list[Progress] = []
    Meter("upload", None, seen.append).add(10)
    assert (seen[0].total, seen[0].remaining) == (None, None)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what a terminal of 100 columns is sent."""
    screen = io.StringIO()
    monkeypatch.setattr(
        progress,
        "Console",
        lambda **_: Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"}),
    )
    return screen


def test_the_bar_on_a_terminal(terminal: io.StringIO) -> None:
    with progress.shown(wanted=True) as tell:
        tell(Progress("restore: load [data]", 250, 1000, "rows", 50.0, 15.0))
        tell(Progress("restore: index"))
        tell(Progress("restore: analyze", 7, 0, "x"))
    text = terminal.getvalue()
    assert "restore: analyze" in text
    assert text.endswith("\x1b[2K")  # and gone again


def test_no_bar_elsewhere(terminal: io.StringIO) -> None:
    with progress.shown(wanted=False) as tell:
        tell(Progress("restore: load", 250, 1000, "rows", 50.0, 15.0))
    assert not terminal.getvalue()


# Restores ------------------------------------------------------------------------------------------------------


def test_the_comparison_names_every_table_and_kind() -> None:
    assert reporting.comparison_lines(COMPARISON) == [
        "table                    there  here",
        "public.bank_stats_cache      1     0  derived: made anew, not compared",
        "public.banks                 3     -  NOT EQUAL",
        "public.memory_units        369   369  equal",
        "",
        "indexes                    102   102  equal",
        "constraints                 53    53  equal",
        "sequences                    2     2  NOT EQUAL",
    ]


def test_the_report_of_a_restore() -> None:
    done = operation(
        comparison=COMPARISON,
        kept="hindsight_kept_x",
        recalled={"memories": 20, "median_similarity": 0.93},
        **{"from": FROM},
    )
    lines = reporting.restore_lines(done, "memory.tar", "6078", MODEL)
    assert lines[:2] == [
        "source    memory.tar, sha256 6078",
        "made      2026-11-29 21:03 UTC, by postgres 18.6, pg_dump 18.6, hindsight-api 1.1.0",
    ]
    assert lines[3:11] == reporting.comparison_lines(COMPARISON)
    assert lines[12:] == [
        "noted     extension vector was 0.8.0, and is 0.8.6 here",
        "model     not recorded there, BAAI/bge-small-en-v1.5@5c38ec7c405e float32, 384 dimensions here",
        "recalled  20 memories by their own texts, similarity 0.93 (median)",
        "",
        "2026-11-29 21:03 UTC: 369 memories restored from memory.tar (sha256 6078); 1 tables, 102 indexes, 53 constraints equal; the old database is kept as hindsight_kept_x",
    ]


def test_the_report_of_a_file_that_proves_nothing() -> None:
    origin = {"postgres": "17.2", "pg_dump": "17.2", "made": None, "versions": None}
    done = operation(
        unproved=["the file has no manifest"],
        kept="k",
        newer=["public.banks: +1 rows"],
        **{"from": origin},
    )
    lines = reporting.restore_lines(done, "memory.dump", "6078", None)
    assert lines[1:] == [
        "made      -, by postgres 17.2, pg_dump 17.2",
        "newer     public.banks: +1 rows, since this began",
        "UNPROVED  the file has no manifest",
        "",
        "2026-11-29 21:03 UTC: 369 memories restored from memory.dump (sha256 6078); it has no manifest to compare with; the old database is kept as k",
    ]


def test_the_report_of_a_migration_from_a_postgres() -> None:
    done = operation(
        comparison=COMPARISON,
        kept="k",
        dimensions={"public": 384, "tenant": 384, "other": -1},
        written_there_since=["public.banks: +1 rows"],
        unproved=["the model is not recorded"],
        still_frozen="ALTER ...;",
        **{"from": FROM},
    ) | {"kind": "migrate"}
    lines = reporting.restore_lines(done, "postgresql://anna@db/m", "", MODEL)
    assert lines[0] == "source    postgresql://anna@db/m"
    assert lines[-7:] == [
        "model     not recorded there, BAAI/bge-small-en-v1.5@5c38ec7c405e float32, 384 dimensions here",
        "dimension not fixed, 384 of the memories, 384 of the model here",
        "LATER     public.banks: +1 rows, at the source since it was read: not here",
        "UNPROVED  the model is not recorded",
        "FROZEN    the source still accepts no writes; undo it there, with psql: ALTER ...;",
        "",
        "2026-11-29 21:03 UTC: 369 memories migrated from postgresql://anna@db/m; 1 tables, 102 indexes, 53 constraints equal; the old database is kept as k",
    ]


def test_the_report_of_a_rehearsal_says_that_nothing_was_replaced() -> None:
    done = operation(comparison=COMPARISON, dry_run=True)
    assert reporting.restore_lines(done, "memory.tar", "6078", MODEL)[-1] == (
        "dry run: 369 memories of memory.tar can be restored (1 tables, 102 indexes, 53 constraints equal); nothing was replaced"
    )


def test_of_what_did_not_end_well_only_the_differences_are_shown() -> None:
    assert reporting.restore_lines(operation() | {"outcome": "failed"}, "x", "", MODEL) == []
    equal = operation(comparison=COMPARISON) | {"outcome": "failed"}
    assert reporting.restore_lines(equal, "x", "", MODEL) == []
    differing = COMPARISON | {"faults": ["table public.banks was there (3 rows) and is not here"]}
    unverified = operation(comparison=differing) | {"outcome": "verification-failed"}
    assert reporting.restore_lines(unverified, "x", "", MODEL) == reporting.comparison_lines(COMPARISON)


@pytest.mark.parametrize(
    ("there", "line"),
    [
        (MODEL, "model     BAAI/bge-small-en-v1.5@5c38ec7c405e float32, 384 dimensions, there and here"),
        (
            MODEL | {"precision": "int8"},
            "model     BAAI/bge-small-en-v1.5@5c38ec7c405e int8, 384 dimensions there, BAAI/bge-small-en-v1.5@5c38ec7c405e float32, 384 dimensions here: NOT EQUAL",
        ),
    ],
)
def test_both_models_are_named(there: dict[str, Any], line: str) -> None:
    done = operation(comparison=COMPARISON, dry_run=True, model=there)
    assert line in reporting.restore_lines(done, "x", "", MODEL | {"stand_in": False})


def test_what_a_rollback_leaves_unproved_is_told_before_its_line() -> None:
    done = operation(served="hindsight_kept_a", kept="hindsight_kept_b")
    [line] = reporting.rolled_back_lines(done)
    assert line.endswith(": hindsight_kept_a is served again; the database that was served until then is kept as hindsight_kept_b")  # fmt: skip
    done = operation(served="hindsight_kept_a", kept="hindsight_kept_b", unproved=["one"])
    assert reporting.rolled_back_lines(done) == ["UNPROVED  one", line]


# Lists ---------------------------------------------------------------------------------------------------------


def test_one_operation_with_its_report() -> None:
    one = operation(comparison=COMPARISON, kept="k") | {
        "id": "op-1", "phase": "load", "percent": 12.3, "started": "2026-11-29T21:03:00+00:00", "ended": None, "error": "no",
    }  # fmt: skip
    lines = reporting.operation_detail(one)
    assert lines[:7] == [
        "id        op-1",
        "kind      restore",
        "outcome   done",
        "phase     load 12 %",
        "started   2026-11-29 21:03 UTC",
        "took      -",
        "error     no",
    ]
    assert "kept      k" in lines
    assert "unproved  []" in lines
    assert lines[-8:] == reporting.comparison_lines(COMPARISON)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hindsight_kept_20261129t210305z", "2026-11-29 21:03 UTC"),
        ("pgdata.kept-20261129t210305z", "2026-11-29 21:03 UTC"),
        ("hindsight_kept_20261129t210305z_before_1_1_0", "2026-11-29 21:03 UTC"),
        ("hindsight_kept_20261129t210305z_before_1_1_0_2", "2026-11-29 21:03 UTC"),
        ("hindsight_kept_20261129t210305z_by_hand", None),
        ("hindsight_kept_20261329t210305z", None),
        ("hindsight_kept_by_hand", None),
    ],
)
def test_when_a_kept_database_was_served_last(name: str, text: str | None) -> None:
    assert reporting.served_until(name) == text


@pytest.mark.parametrize("lines", [reporting.dump_lines, reporting.operation_lines, reporting.database_lines])
def test_an_empty_list_has_its_headings(lines: Callable[[list[Any]], list[str]]) -> None:
    assert len(lines([])) == 1


def test_who_made_a_dump_is_told() -> None:
    one = {"id": "a", "made": "2026-11-29T22:03:00+01:00", "memories": 1, "size": 1, "versions": {}, "sha256": "f"}
    lines = reporting.dump_lines(
        [one | {"scheduled": True}, one | {"scheduled": False}, one]
    )  # the last of an older one
    assert [line.split()[4] for line in lines[1:]] == ["schedule", "hand", "hand"]


def test_a_schedule_with_what_became_of_it() -> None:
    told: dict[str, Any] = {
        "schedule": "17 3 * * *",
        "next": "2026-11-29T21:03:00Z",
        "last_success": None,
        "last_failure": None,
    }
    assert reporting.schedule_lines(told) == ["dumps     none yet; next 2026-11-29 21:03 UTC"]
    told["last_success"] = {"time": "2026-11-29T21:03:00Z", "id": "20261129T210305Z-ab12"}
    told["last_failure"] = {"time": "2026-11-29T21:03:00Z", "reason": "no space"}
    assert reporting.schedule_lines(told) == [
        "dumps     latest 2026-11-29 21:03 UTC, 20261129T210305Z-ab12; next 2026-11-29 21:03 UTC",
        "          last failure 2026-11-29 21:03 UTC: no space",
    ]
