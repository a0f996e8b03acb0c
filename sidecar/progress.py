"""How far something long is: as numbers, and as a bar on a terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


@dataclass(frozen=True)
class Progress:
    """How far something is. Rate is per second, and remaining in seconds; None is what cannot be known."""

    phase: str
    done: int = 0
    total: int | None = None
    unit: str = ""
    rate: float | None = None
    remaining: float | None = None


Tell = Callable[[Progress], object]


class Meter:
    """How fast bytes go by."""

    def __init__(self, phase: str, total: int | None, tell: Tell) -> None:
        self._phase, self._total, self._tell = phase, total, tell
        self._began = time.monotonic()
        self._done = 0

    def add(self, count: int) -> None:
        """Tell that so many bytes more went by."""
        self._done += count
        passed = time.monotonic() - self._began
        rate = self._done / passed if passed > 0 else None
        left = (self._total - self._done) / rate if self._total is not None and rate else None
        self._tell(Progress(self._phase, self._done, self._total, "bytes", rate, left))


@contextlib.contextmanager
def shown(*, wanted: bool) -> Iterator[Tell]:
    """Have a bar on a terminal's standard error, which is gone afterwards; nothing where it is not wanted."""
    if not wanted:
        yield lambda _: None
        return
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("beginning", total=None, told="")

        def show(seen: Progress) -> None:
            total = seen.total or None
            done = min(seen.done, total) if total else seen.done
            bar.update(task, description=seen.phase, completed=done, total=total, told=told(seen))

        yield show


def told(seen: Progress) -> str:
    """Return percentage, amount, rate and remaining time, as far as they are known."""
    parts = []
    if seen.total:
        parts.append(f"{100 * min(seen.done / seen.total, 1):.0f} %")
    if seen.done and seen.unit:
        parts.append(amount(seen.done, seen.unit))
    if seen.rate:
        parts.append(f"{amount(seen.rate, seen.unit)}/s")
    if seen.remaining is not None and seen.total:
        parts.append(f"{duration(seen.remaining)} left")
    return ", ".join(parts)


def size(count: float) -> str:
    """Return a number of bytes as a person reads it."""
    for unit in _UNITS[:-1]:
        if count < _STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return f"{count:.1f} {_UNITS[-1]}"


def amount(count: float, unit: str) -> str:
    """Return a number with its unit."""
    return size(count) if unit == "bytes" else f"{count:,.0f} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Return seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
