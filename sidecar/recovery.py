"""How far Postgres is with the replay of its log after a crash, from its own lines and from the log's pages."""

import re
import struct
from pathlib import Path
from typing import Any

from sidecar.sizing import MIB

_LSN = r"([0-9A-F]+)/([0-9A-F]+)"
# "LOG:  syncing data directory (fsync), elapsed time: 10.00 s, current path: ./base/5", where the disk is slow.
_SYNCING = re.compile(r"LOG: +syncing data directory \(\w+\), elapsed time: ([\d.]+) s")
_BEGINS = re.compile(rf"LOG: +redo starts at {_LSN}")
_GOES_ON = re.compile(rf"LOG: +redo in progress, elapsed time: ([\d.]+) s, current LSN: {_LSN}")
_DONE = re.compile(rf"LOG: +redo done at {_LSN}")
_CRASHED = re.compile(r"LOG: +database system was not properly shut down; automatic recovery in progress")
_SEGMENT = re.compile(r"[0-9A-F]{24}")
# XLogLongPageHeaderData in access/xlog_internal.h: magic, info, timeline, address, remaining length, padding, system
# identifier, size of a segment, size of a page. Only the first page of a segment has the last three.
_HEADER = struct.Struct("=HHIQI4xQII")
_ADDRESS = struct.Struct("=Q")
_ADDRESS_OFFSET = 8


def _position(high: str, low: str) -> int:
    return (int(high, 16) << 32) + int(low, 16)


def _shown(position: int | None) -> str | None:
    return None if position is None else f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


class Recovery:
    """One recovery, as far as it has been told.

    Attributes:
        begins, now, ends: positions in the log, in bytes; None where not known yet.
        seconds: how long the replay has taken, by Postgres' own clock.

    """

    def __init__(self) -> None:
        self.begins: int | None = None
        self.now: int | None = None
        self.ends: int | None = None
        self.seconds: float | None = None
        self._phase = "is about to replay its log"

    @classmethod
    def begun(cls, line: str) -> "Recovery | None":
        """Return a new one where Postgres says, in a line as `postgres_log.said` returns it, that one is under way.

        The files are brought to the disk before it says that it recovers, and on a slow one that takes longest.
        """
        return cls() if any(told.match(line) for told in (_SYNCING, _CRASHED, _BEGINS)) else None

    def hear(self, line: str) -> bool:
        """Take such a line, and tell whether it was about this."""
        if _CRASHED.match(line):
            self._phase = "is about to replay its log"
        elif found := _SYNCING.match(line):
            self._phase = f"brings its files to the disk before it replays its log ({float(found[1]):.0f} s)"
        elif found := _BEGINS.match(line):
            self.begins = self.now = _position(found[1], found[2])
            self._phase = "replays its log"
        elif found := _GOES_ON.match(line):
            self.seconds = float(found[1])
            self.now = _position(found[2], found[3])
            self._phase = "replays its log"
        elif found := _DONE.match(line):
            self.now = self.ends = _position(found[1], found[2])
            self._phase = "has replayed its log and writes its buffers out"
        else:
            return False
        return True

    @property
    def sentence(self) -> str:
        """Where it is, for people."""
        told = self.to_json()
        if told["replayed_bytes"] is None:
            return f"Postgres {self._phase}"
        of = "" if told["total_bytes"] is None else f" of {told['total_bytes'] // MIB}"
        percent = "" if told["percent"] is None else f", {told['percent']:.0f} %"
        took = "" if self.seconds is None else f", in {self.seconds:.0f} s"
        return f"Postgres {self._phase} ({told['replayed_bytes'] // MIB}{of} MiB{percent}{took})"

    def to_json(self) -> dict[str, Any]:
        """Return it as `/health` shows it. What is not known is null; the end is never more than a page too far."""
        done = total = None
        if self.begins is not None and self.now is not None:
            done = max(self.now - self.begins, 0)
            total = None if self.ends is None else max(self.ends - self.begins, done)
        return {
            "lsn": _shown(self.now),
            "end_lsn": _shown(self.ends),
            "replayed_bytes": done,
            "total_bytes": total,
            "percent": None if done is None or total is None else round(100 * done / total, 1) if total else 100.0,
            "seconds": self.seconds,
        }


def end_of_log(pgdata: Path) -> int | None:
    """Return where the log ends, to the page: a segment or a page that was not written yet has another address in it.

    None where there is no log, or one that is not understood.

    Raises:
        OSError: it cannot be read.

    """
    names = sorted(
        (path.name for path in (pgdata / "pg_wal").iterdir() if _SEGMENT.fullmatch(path.name)),
        # Of several timelines the newest goes on where the others end.
        key=lambda name: (name[8:], name[:8]),
        reverse=True,
    )
    for name in names:
        with (pgdata / "pg_wal" / name).open("rb") as file:
            begin = file.read(_HEADER.size)
            if len(begin) < _HEADER.size:
                continue
            _, _, _, address, _, _, segment_size, page_size = _HEADER.unpack(begin)
            if page_size < _HEADER.size or segment_size % page_size or not segment_size:
                continue
            number = int(name[8:16], 16) * ((1 << 32) // segment_size) + int(name[16:], 16)
            if address != number * segment_size:
                continue  # an old one, kept to be written over
            last = address
            for offset in range(page_size, segment_size, page_size):
                file.seek(offset + _ADDRESS_OFFSET)
                here = file.read(_ADDRESS.size)
                if len(here) < _ADDRESS.size or _ADDRESS.unpack(here)[0] != address + offset:
                    break
                last = address + offset
            return int(last + page_size)
    return None
