import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from sidecar import log
from sidecar.log import ChildLines, _Writer, render_line

SOURCE = Path(sys.modules["sidecar"].__path__[0]).parent


@pytest.fixture
def captured() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


# Lines for people ----------------------------------------------------------------------------------------------


def rendered(**event: Any) -> str:
    return render_line(None, "info", {"timestamp": "2026-11-29T17:08:40.123456Z", "level": "info", **event})


def test_a_line_has_time_component_event_and_details() -> None:
    assert rendered(component="postgres", event="started", pid=7) == "17:08:40.123 postgres      started pid=7"


def test_only_what_matters_has_its_level() -> None:
    assert rendered(event="x", level="debug") == "17:08:40.123 sidecar       x"
    assert "WARNING: x" in rendered(event="x", level="warning")
    assert "ERROR: x" in rendered(event="x", level="error")


def test_a_trace_comes_below() -> None:
    assert rendered(event="x", exception="Traceback ...\nKeyError").endswith("x\nTraceback ...\nKeyError")


# Lines of children ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-11-29 17:08:40 UTC [7] LOG:  database system is ready", "info"),
        ("2026-11-29 17:08:40 UTC [7] WARNING:  out of shared memory", "warning"),
        ("FATAL:  role x does not exist", "error"),
        ("PANIC:  could not write", "error"),
        ("CRITICAL: gone", "error"),
        ("INFO: no ERRORS here", "info"),
        ("a warning in small letters", "info"),
        ("x" * 200 + " ERROR", "info"),
        ("100% done, 5%s of %d", "info"),
    ],
)
def test_a_childs_line_has_the_level_that_it_seems_to_have(
    line: str, level: str, captured: list[dict[str, Any]]
) -> None:
    ChildLines("postgres", "debug")(line)
    assert captured == [{"component": "postgres", "event": line, "log_level": level}]


def test_colours_are_taken_out_and_empty_lines_left_out(captured: list[dict[str, Any]]) -> None:
    hear = ChildLines("hindsight-api", "info")
    hear("\x1b[32mINFO\x1b[0m: ready\x1b[1;31m!\x1b[K  ")
    hear("")
    hear("\x1b[0m  ")
    assert [line["event"] for line in captured] == ["INFO: ready!"]


@pytest.mark.parametrize(("least", "heard"), [("debug", 3), ("info", 3), ("warning", 2), ("error", 1)])
def test_a_child_is_heard_from_its_level_on(least: str, heard: int, captured: list[dict[str, Any]]) -> None:
    hear = ChildLines("postgres", least)
    for line in ("LOG: a", "WARNING: b", "ERROR: c"):
        hear(line)
    assert len(captured) == heard


# The writer ----------------------------------------------------------------------------------------------------


def told_dropped(count: int) -> str:
    return f"{count} dropped"


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def read_until(reader: int, end: bytes) -> bytes:
    seen = b""
    while not seen.endswith(end):
        seen += os.read(reader, 65536)
    return seen


def test_lines_are_written_in_order_and_before_the_close() -> None:
    with pipe() as (reader, writer):
        made = _Writer(writer, told_dropped)
        for number in range(100):
            made.msg(f"line {number}")
        made.close()
        assert read_until(reader, b"line 99\n").decode().splitlines() == [f"line {number}" for number in range(100)]
        assert not made._thread.is_alive()


def test_what_is_no_unicode_is_written_all_the_same() -> None:
    with pipe() as (reader, writer):
        made = _Writer(writer, told_dropped)
        made.msg("a\udcffb")
        made.close()
        assert os.read(reader, 100) == b"a\\udcffb\n"


def test_a_reader_that_stands_still_never_holds_the_caller_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_QUEUE", 50)
    done = threading.Event()
    with pipe() as (reader, writer):
        made = _Writer(writer, told_dropped)

        def call() -> None:
            for _ in range(2000):
                made.msg("x" * 1000)  # two megabytes, where the pipe takes 64 KiB
            done.set()

        threading.Thread(target=call, daemon=True).start()
        assert done.wait(20)
        seen = b""
        while b"dropped\nlast\n" not in seen:
            seen += os.read(reader, 65536)
            made.msg("last")  # the first line after the gap tells of it
        # Whatever is missing is told where it is missing.
        until, _, _ = seen.partition(b"dropped\nlast\n")
        dropped = [int(count) for count in re.findall(rb"(\d+) dropped\n", until + b"dropped\n")]
        assert sum(dropped) + until.count(b"x" * 1000) >= 2000
        assert sum(dropped) > 1000
        assert made._thread.is_alive()
        made.close()


STUCK = """
import os, sys
from sidecar import log
log._QUEUE = 5
log.configure(sys.argv[1], "info")
logger = log.get("postgres")
for _ in range(1000):
    logger.info("x" * 1000)
sys.stderr.close()  # its reader may begin
while log._writer._dropped:
    if log._writer._lines.empty():  # faster than the reader it would never end
        logger.info("last")
log.close()
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_lines_that_are_missing_are_told_of_as_every_event_is(log_format: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, log_format],
        env={"PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.read() == ""
        lines = process.stdout.read().splitlines()
    told = [line for line in lines if "dropped" in line]
    assert told
    if log_format == "json":
        events = [json.loads(line) for line in lines]
        missing = [event for event in events if event["component"] == "log"]
        assert {event["event"] for event in missing} == {"log lines were dropped: their reader did not keep up"}
        assert {event["level"] for event in missing} == {"warning"}
        assert sum(event["lines"] for event in missing) > 500
    else:
        assert re.search(r"log  +WARNING: log lines were dropped: their reader did not keep up lines=\d+$", told[0])


def test_the_end_does_not_wait_for_a_reader_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_FLUSH", 0.3)
    done = threading.Event()
    reader, writer = os.pipe()
    made = _Writer(writer, told_dropped)
    for _ in range(200):
        made.msg("x" * 1000)

    def close() -> None:
        made.close()
        done.set()

    threading.Thread(target=close, daemon=True).start()
    assert done.wait(20)
    os.close(reader)  # which ends the thread that writes
    made._thread.join(20)
    assert not made._thread.is_alive()
    os.close(writer)


CONFIGURED = """
import sys
from sidecar import log
log.configure(sys.argv[1], sys.argv[2])
logger = log.get("postgres")
logger.debug("quiet")
logger.warning("caf\\u00e9", pid=7)
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("fault")
log.tell("for people")
log.close()
"""


def configured(log_format: str, level: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED, log_format, level],
        env={"PYTHONPATH": str(SOURCE)}, capture_output=True, check=True, timeout=20,
    )  # fmt: skip
    assert done.stderr == b""
    return done.stdout.decode().splitlines()


def test_json_is_one_object_a_line() -> None:
    lines = configured("json", "info")
    assert lines[-1] == "for people"
    first, second = (json.loads(line) for line in lines[:-1])
    assert (first["event"], first["level"], first["component"], first["pid"]) == ("caf\u00e9", "warning", "postgres", 7)
    assert "ZeroDivisionError" in second["exception"]
    assert "\u00e9" in lines[0]


def test_text_has_the_trace_below_and_debug_only_where_wanted() -> None:
    lines = configured("console", "info")
    assert "WARNING: caf\u00e9 pid=7" in lines[0]
    assert lines[-2] == "ZeroDivisionError: division by zero"
    assert "quiet" in configured("console", "debug")[0]
