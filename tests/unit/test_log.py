import asyncio
import contextlib
import itertools
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sidecar import listeners, log
from sidecar.asgi import Receive, Scope, Send
from sidecar.log import ChildLines, Libraries, _Writer, render_json, render_line
from sidecar.settings import Address

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
    assert rendered(event="x", exception="Traceback ...\nKeyError").endswith("x\n  Traceback ...\n  KeyError")


# What whoever calls the memory API can put into a line: a forged one, another screen, a window's title, a bell.
HOSTILE = "\r12:00 sidecar state=ready\n12:00\x1b[?1049h\x1b]0;x\x07\x9b2J\x85\x7f\x00\u2028"
CONTROL = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)} - {"\t"}


@pytest.mark.parametrize("where", ["event", "error", "exception", "component"])
def test_nothing_in_a_line_forges_another_or_rules_a_terminal(where: str) -> None:
    first, *below = rendered(**{"event": "x", where: HOSTILE}).split("\n")
    assert not CONTROL & set(first)
    assert [line for line in below if CONTROL & set(line) or not line.startswith("  ")] == []
    assert bool(below) is (where == "exception")
    assert r"\u000d12:00 sidecar state=ready" in (below or [first])[0]


def test_every_control_character_is_written_out_and_nothing_else() -> None:
    text = "".join(map(chr, (*range(0x250), 0x2028, 0x2029, 0x202F, 0x1F600)))
    line = rendered(event=text)
    assert not CONTROL & set(line)
    written = re.findall(r"\\u([0-9a-f]{4})", line)
    assert {chr(int(code, 16)) for code in written} == CONTROL
    assert re.sub(r"\\u[0-9a-f]{4}", "", line).endswith("".join(one for one in text if one not in CONTROL))


def test_in_json_a_line_is_one_whatever_is_in_it_and_nothing_is_lost() -> None:
    line = render_json(None, "info", {"event": HOSTILE, "error": {HOSTILE: ["caf\u00e9\t"]}})
    assert not (CONTROL | {"\t"}) & set(line)
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"event": HOSTILE, "error": {HOSTILE: ["caf\u00e9\t"]}}
    assert "caf\u00e9" in line


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


def rendered_gap(event: dict[str, Any]) -> str:
    """Render what takes the place of lines: how many, and why where that is told."""
    return " ".join(filter(None, (str(event["lines"]), event["event"].split(":")[0].split()[-1], event.get("error"))))


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
        assert select.select([reader], [], [], 20)[0], seen[-100:]
        seen += os.read(reader, 65536)
    return seen


def test_lines_are_written_in_order_and_before_the_close() -> None:
    with pipe() as (reader, writer):
        made = _Writer(writer, rendered_gap)
        for number in range(100):
            made.msg(f"line {number}")
        made.close()
        assert read_until(reader, b"line 99\n").decode().splitlines() == [f"line {number}" for number in range(100)]
        assert not made._thread.is_alive()


def test_what_is_no_unicode_is_written_all_the_same() -> None:
    with pipe() as (reader, writer):
        made = _Writer(writer, rendered_gap)
        made.msg("a\udcffb")
        made.close()
        assert os.read(reader, 100) == b"a\\udcffb\n"


def test_a_reader_that_stands_still_never_holds_the_caller_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_QUEUE", 50)
    done = threading.Event()
    with pipe() as (reader, writer):
        made = _Writer(writer, rendered_gap)

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


# Writing that fails ---------------------------------------------------------------------------------------------


def test_lines_of_a_full_disk_are_counted_and_the_next_ones_come_once_it_has_room() -> None:
    with pipe() as (reader, writer):
        descriptor = os.open("/dev/full", os.O_WRONLY)
        made = _Writer(descriptor, rendered_gap)
        for _ in range(3):
            made.msg("there is no room for it")
        wait_until(lambda: made._lost == 3)
        assert made._thread.is_alive()
        os.dup2(writer, descriptor)  # somebody made room
        made.msg("first")
        made.msg("second")
        made.close()
        os.close(descriptor)
        assert read_until(reader, b"second\n") == b"3 lost No space left on device\nfirst\nsecond\n"


TORN = """
import resource, sys, time
from sidecar.log import _Writer

def limit(bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

made = _Writer(1, lambda event: f"{event['lines']} lost")
limit(10)
for letter in "abc":
    made.msg(letter * 6)
while made._lost < 2:
    time.sleep(0.001)
limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
made.msg("dddddd")
made.close()
"""


def test_a_line_that_was_torn_stands_alone_and_counts_as_lost(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        argv = [sys.executable, "-c", TORN]
        subprocess.run(argv, env={"PYTHONPATH": str(SOURCE)}, stdout=file, check=True, timeout=20)
    assert (tmp_path / "log").read_bytes() == b"aaaaaa\nbbb\n2 lost\ndddddd\n"


def test_an_output_that_somebody_made_non_blocking_loses_nothing() -> None:
    lines = [f"{number} {'x' * 1000}" for number in range(300)]  # five times what the pipe takes
    with pipe() as (reader, writer):
        os.set_blocking(writer, False)
        made = _Writer(writer, rendered_gap)
        for line in lines:
            made.msg(line)
        made.msg("last")
        assert read_until(reader, b"last\n").decode().splitlines() == [*lines, "last"]
        made.close()


def test_waiting_for_room_uses_no_core() -> None:
    with pipe() as (reader, writer):
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        made = _Writer(writer, rendered_gap)
        before = time.process_time()
        made.msg("x")
        made._thread.join(0.3)
        assert made._thread.is_alive()
        assert time.process_time() - before < 0.2
        read_until(reader, b"x\n")
        made.close()


def nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def nothing_is_open() -> int:
    return 2**20  # more than any limit of descriptors here


def the_terminal_is_gone() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


@pytest.mark.parametrize("gone", [nobody_reads, nothing_is_open, the_terminal_is_gone])
def test_where_nobody_will_ever_read_the_thread_ends(gone: Callable[[], int]) -> None:
    descriptor = gone()
    made = _Writer(descriptor, rendered_gap)
    made.msg("x")
    made._thread.join(20)
    assert not made._thread.is_alive()
    made.close()
    with contextlib.suppress(OSError):
        os.close(descriptor)


STUCK = """
import os, sys
from sidecar import log
log._QUEUE = 5
log.configure(sys.argv[1], "info")
logger = log.get("postgres")
for _ in range(1000):
    logger.info("x" * 1000)
os.close(2)  # its reader may begin; to close sys.stderr leaves it open
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
    made = _Writer(writer, rendered_gap)
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


# Libraries ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hearing() -> Iterator[logging.Logger]:
    """Have what one library says go where all of it goes in a sidecar."""
    library, handler = logging.getLogger("some.library"), Libraries()
    library.addHandler(handler)
    try:
        yield library
    finally:
        library.removeHandler(handler)


def test_what_a_library_says_is_an_event(captured: list[dict[str, Any]], hearing: logging.Logger) -> None:
    hearing.warning("%s is odd\n", "it")
    hearing.error("it is wrong")
    hearing.critical("it is very wrong")
    hearing.info("it is well")
    event = {"component": "sidecar", "event": "message of a library", "logger": "some.library", "exc_info": None}
    assert captured == [
        event | {"log_level": level, "message": message}
        for level, message in (("warning", "it is odd"), ("error", "it is wrong"), ("error", "it is very wrong"))
    ]


def test_one_place_in_a_library_is_told_once_a_minute_and_how_often_it_was_not(
    captured: list[dict[str, Any]], hearing: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0.0, 7.0)  # seconds
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: next(now)))
    for number in range(20):
        hearing.warning("client %d sends no HTTP", number)
    told = [(line["message"].split()[1], line.get("left_out")) for line in captured]
    assert told == [("0", None), ("9", 8), ("18", 8)]


def test_different_defects_at_one_place_are_told_each(captured: list[dict[str, Any]], hearing: logging.Logger) -> None:
    def divide() -> None:
        1 / 0  # noqa: B018

    def look_up() -> None:
        {}["x"]

    for fault in (divide, look_up, divide, look_up):
        try:
            fault()
        except (LookupError, ArithmeticError):
            hearing.exception("a callback failed")
    assert [line["exc_info"][0] for line in captured] == [ZeroDivisionError, KeyError]


NO_HTTP = b"\x16\x03\x01 hello\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


def test_a_client_cannot_fill_the_log(captured: list[dict[str, Any]]) -> None:
    """What is no HTTP, upgrades that are none of ours, and answers that break off, all told by uvicorn."""

    async def breaks_off(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ConnectionError("it ended")

    async def work() -> None:
        listener = listeners.bind_tcp("X", Address("127.0.0.1", 0))
        server = listeners.Server(breaks_off, listener)
        await server.listening()
        for _ in range(5):
            for request in (NO_HTTP, UPGRADE):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(request)
                async with asyncio.timeout(20):
                    await reader.read()
                writer.close()
        await server.end(1.0)

    handler = Libraries()
    logging.getLogger().addHandler(handler)
    try:
        asyncio.run(work())
    finally:
        logging.getLogger().removeHandler(handler)
    messages = [line["message"] for line in captured if line["event"] == "message of a library"]
    assert "Exception in ASGI application" in messages
    assert "Invalid HTTP request received." in messages
    assert len(messages) == len(set(messages))


LIBRARIES = """
import logging, sys
from sidecar import log
log.configure(sys.argv[1], "debug")
library = logging.getLogger("httpx2")
library.setLevel(logging.DEBUG)
library.debug("authorization: Bearer sesame")
library.info("GET /v1/sesame")
for _ in range(3):
    library.warning("\\x1b[2Jodd")
try:
    1 / 0
except ZeroDivisionError:
    library.exception("it failed")
log.close()
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_libraries_write_nothing_to_standard_error_and_tell_no_headers(log_format: str) -> None:
    lines = run(LIBRARIES, log_format)
    assert [line for line in lines if "sesame" in line or "\x1b" in line] == []
    if log_format == "json":
        odd, failed = map(json.loads, lines)
        assert (odd["event"], odd["logger"], odd["message"]) == ("message of a library", "httpx2", "\x1b[2Jodd")
        assert (failed["level"], failed["message"]) == ("error", "it failed")
        assert "ZeroDivisionError" in failed["exception"]
    else:
        assert lines[0].endswith(r"WARNING: message of a library logger=httpx2 message=\u001b[2Jodd")
        assert lines[1].endswith("ERROR: message of a library logger=httpx2 message=it failed")
        assert lines[-1] == "  ZeroDivisionError: division by zero"


# All of it ------------------------------------------------------------------------------------------------------

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


def run(script: str, *arguments: str) -> list[str]:
    """Run a script that says nothing on standard error, and return what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={"PYTHONPATH": str(SOURCE)}, capture_output=True, check=True, timeout=20,
    )  # fmt: skip
    assert done.stderr == b""
    return done.stdout.decode().removesuffix("\n").split("\n")


def configured(log_format: str, level: str) -> list[str]:
    return run(CONFIGURED, log_format, level)


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
    assert lines[-2] == "  ZeroDivisionError: division by zero"
    assert "quiet" in configured("console", "debug")[0]


OF_A_CALLER = """
import sys
from sidecar import log
log.configure(sys.argv[1], "info")
log.ChildLines("hindsight-api", "info")("\\x1b[32mINFO\\x1b[0m: query: " + eval(sys.argv[2]))
log.close()
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_a_caller_has_hindsight_api_log_is_one_line_of_it(log_format: str) -> None:
    sent = HOSTILE.replace("\n", "")  # where a child's lines end
    [line] = run(OF_A_CALLER, log_format, ascii(f"{sent}!"))
    assert not CONTROL & set(line)
    if log_format == "json":
        assert json.loads(line)["event"] == f"INFO: query: {sent}!"
    else:
        assert re.match(
            r"[\d:.]{12} hindsight-api INFO: query: \\u000d12:00 sidecar state=ready12:00\\u001b\[\?1049h", line
        )
