"""Log lines, ours and the children's, on standard output; writing them never holds the event loop up."""

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import structlog

_QUEUE = 10_000  # lines; beyond that the reader of our output is stuck, and lines are counted instead of kept
_FLUSH = 2.0  # seconds that the end waits for a reader

Logger = structlog.typing.FilteringBoundLogger


class _Writer:
    """Hands lines to a thread, since a full pipe to the container engine would otherwise stop every probe."""

    def __init__(self, descriptor: int, tell_dropped: Callable[[int], str]) -> None:
        """`tell_dropped` renders the line that says how many are missing in its place."""
        self._descriptor = descriptor
        self._tell_dropped = tell_dropped
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def msg(self, message: str) -> None:
        try:
            if self._dropped:
                self._lines.put_nowait(self._tell_dropped(self._dropped))
                self._dropped = 0
            self._lines.put_nowait(message)
        except queue.Full:
            self._dropped += 1

    log = debug = info = warning = error = critical = exception = fatal = msg

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                rest = f"{line}\n".encode("utf-8", "backslashreplace")
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                return  # nobody reads any more, and there is nowhere left to say so

    def close(self) -> None:
        deadline = time.monotonic() + _FLUSH
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._lines.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_writer: _Writer | None = None


def render_line(_: object, __: str, event: structlog.typing.EventDict) -> str:
    """Render an event for people: time, component, the level where it matters, the event, and what belongs to it."""
    time_of_day = str(event.pop("timestamp"))[11:23]
    component = event.pop("component", "sidecar")
    level = event.pop("level")
    mark = f"{level.upper()}: " if level not in ("info", "debug") else ""
    text = event.pop("event")
    trace = event.pop("exception", None)
    details = "".join(f" {name}={value}" for name, value in event.items())
    return f"{time_of_day} {component:<13} {mark}{text}{details}" + (f"\n{trace}" if trace else "")


def configure(log_format: Literal["console", "json"], level: str) -> None:
    """Send every log line to standard output, as text for people or as one JSON object a line."""
    global _writer  # noqa: PLW0603 - one process has one standard output
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(ensure_ascii=False) if log_format == "json" else render_line
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        renderer,
    ]
    _writer = writer = _Writer(sys.stdout.fileno(), lambda count: _dropped(processors, count))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=True,
    )


def _dropped(processors: Iterable[structlog.typing.Processor], count: int) -> str:
    """Render the event that takes the place of lines; a logger would put it at the end of the queue, or drop it too."""
    event: Any = {"component": "log", "event": "log lines were dropped: their reader did not keep up", "lines": count}
    for processor in processors:
        event = processor(None, "warning", event)
    return str(event)


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
