"""Log lines, ours, the children's and the libraries', on standard output; writing them never holds the event loop up."""

import errno
import logging
import math
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import structlog

from sidecar.control_characters import written_out

_QUEUE = 10_000  # lines; beyond that the reader of our output is stuck, and lines are counted instead of kept
_FLUSH = 2.0  # seconds that the end waits for a reader
# And nobody ever will: the last is a terminal that is gone.
_NOBODY_READS = frozenset({errno.EPIPE, errno.EBADF, errno.EIO})
_TOLD_EVERY = 60.0  # seconds between two messages of one place in a library

Logger = structlog.typing.FilteringBoundLogger


class _Writer:
    """Hands lines to a thread, since a full pipe to the container engine would otherwise stop every probe."""

    def __init__(self, descriptor: int, render: Callable[[dict[str, Any]], str]) -> None:
        """`render` makes a line of an event that says how many are missing in its place; a logger would put it at the end of the queue."""
        self._descriptor = descriptor
        self._render = render
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE)
        self._dropped = 0
        self._lost = 0
        self._torn = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def msg(self, message: str) -> None:
        try:
            if self._dropped:
                event = {
                    "component": "log",
                    "event": "log lines were dropped: their reader did not keep up",
                    "lines": self._dropped,
                }
                self._lines.put_nowait(self._render(event))
                self._dropped = 0
            self._lines.put_nowait(message)
        except queue.Full:
            self._dropped += 1

    log = debug = info = warning = error = critical = exception = fatal = msg

    def _run(self) -> None:
        why = ""
        while (line := self._lines.get()) is not None:
            try:
                if self._lost:
                    event = {
                        "component": "log",
                        "event": "log lines were lost: they could not be written",
                        "lines": self._lost,
                        "error": why,
                    }
                    self._write(self._render(event))
                    self._lost = 0
                self._write(line)
            except OSError as error:
                if error.errno in _NOBODY_READS:
                    return  # there is nowhere left to say so
                # A full disk, say, which may have room again; the next line that can be written tells of it.
                self._lost += 1
                why = str(error.strerror)

    def _write(self, line: str) -> None:
        """Write one line, and wait for its reader as long as that takes. Raises OSError: nothing of it is there, or not all."""
        rest = f"{line}\n".encode("utf-8", "backslashreplace")
        if self._torn:
            rest = b"\n" + rest  # the part of a lost one stands alone
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:  # another process that has our standard output may make it non-blocking
                _wait_for_room(self._descriptor)
                continue
            rest = rest[written:]
            self._torn = bool(rest)

    def close(self) -> None:
        deadline = time.monotonic() + _FLUSH
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._lines.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))


def _wait_for_room(descriptor: int) -> None:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    waiting.poll()


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_writer: _Writer | None = None


def render_line(_: object, __: str, event: structlog.typing.EventDict) -> str:
    """Render an event for people: time, component, the level where it matters, the event, and what belongs to it.

    It is one line; a trace has further ones, which begin as no event does.
    """
    time_of_day = str(event.pop("timestamp"))[11:23]
    component = event.pop("component", "sidecar")
    level = event.pop("level")
    mark = f"{level.upper()}: " if level not in ("info", "debug") else ""
    text = event.pop("event")
    trace = event.pop("exception", None)
    details = "".join(f" {name}={value}" for name, value in event.items())
    line = written_out(f"{time_of_day} {component:<13} {mark}{text}{details}")
    return line + "".join(f"\n  {written_out(below)}" for below in (trace.split("\n") if trace else ()))


_to_json = structlog.processors.JSONRenderer(ensure_ascii=False)


def render_json(logger: object, name: str, event: structlog.typing.EventDict) -> str:
    """Render an event as one JSON object on one line."""
    return written_out(str(_to_json(logger, name, event)))  # what JSON itself leaves as it is: DEL, C1


def configure(log_format: Literal["console", "json"], level: str) -> None:
    """Send every log line to standard output, as text for people or as one JSON object a line."""
    global _writer  # noqa: PLW0603 - one process has one standard output
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        render_json if log_format == "json" else render_line,
    ]

    def render(event: Any) -> str:  # noqa: ANN401 - each processor makes of it what the next one takes
        for processor in processors:
            event = processor(None, "warning", event)
        return str(event)

    _writer = writer = _Writer(sys.stdout.fileno(), render)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[Libraries()], force=True)


class Libraries(logging.Handler):
    """Passes on what libraries have to say.

    Without a handler it would go to standard error, and a full pipe there would stop every probe. From warnings on, whatever our
    own level is: below that some tell the headers of requests, and our keys with them.

    A client causes some of it as often as it likes (what is no HTTP, an answer that it breaks off), which would drive all else
    out of a log. Dropped by name, the next release's others would come through, and a defect in a connection might not.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = get("sidecar")
        self._told: dict[tuple[object, ...], tuple[float, int]] = {}  # when, and how many were left out since

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a message on, unless one of the same place was a moment ago."""
        place, now = _place(record), time.monotonic()
        before, left_out = self._told.get(place, (-math.inf, 0))
        if now - before < _TOLD_EVERY:
            self._told[place] = before, left_out + 1
            return
        self._told[place] = now, 0
        more = {"left_out": left_out} if left_out else {}
        message = record.getMessage().strip()
        tell = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        tell("message of a library", logger=record.name, message=message, **more, exc_info=record.exc_info)


def _place(record: logging.LogRecord) -> tuple[object, ...]:
    """Return where a message was logged and where its exception was raised: no more of these than there are lines of code."""
    kind, _, trace = record.exc_info or (None, None, None)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return record.pathname, record.lineno, kind, raised


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SEVERITY = re.compile(r"\b(WARNING|ERROR|FATAL|PANIC|CRITICAL)\b")


class ChildLines:
    """Passes a child's lines on under its name, each at the level that it seems to have."""

    def __init__(self, component: str, level: str) -> None:
        self._log = get(component)
        self._least = _LEVELS[level]

    def __call__(self, line: str) -> None:
        """Pass one line on."""
        line = _ANSI.sub("", line).rstrip()
        found = _SEVERITY.search(line[:200])
        level = _LEVELS["info"] if found is None else _LEVELS["warning" if found[1] == "WARNING" else "error"]
        if line and level >= self._least:
            self._log.log(level, line)


def get(component: str) -> Logger:
    """Return a logger whose lines carry this component's name."""
    logger: Logger = structlog.get_logger(component=component)
    return logger


def tell(text: str) -> None:
    """Write a text for people, as it is, in its turn between the log lines."""
    if _writer is not None:
        _writer.msg(text)


def close() -> None:
    """Write out what is queued, for at most two seconds."""
    if _writer is not None:
        _writer.close()
