"""How far a recovery is: from lines of Postgres' log, and from the pages of the log that it replays."""

import struct
from pathlib import Path

import pytest

from sidecar.recovery import Recovery, end_of_log

SEGMENT, PAGE = 1024**2, 8192
CRASHED = "LOG:  database system was not properly shut down; automatic recovery in progress"


def test_its_lines_tell_where_it_is() -> None:
    syncing = "LOG:  syncing data directory (fsync), elapsed time: 11.00 s, current path: ./base/5"
    assert Recovery.begun("LOG:  database system was shut down at 2026-11-29") is None
    assert Recovery.begun("LOG:  redo done at 1/0EFFFF00 system usage: CPU: user: 1.00 s") is None
    assert Recovery.begun(CRASHED) is not None
    recovery = Recovery.begun(syncing)
    assert recovery is not None
    assert recovery.hear(syncing)
    assert recovery.sentence == "Postgres brings its files to the disk before it replays its log (11 s)"
    assert recovery.hear(CRASHED)
    assert recovery.sentence == "Postgres is about to replay its log"
    assert recovery.to_json()["percent"] is None
    assert recovery.hear("LOG:  redo starts at 0/FF000028")
    assert recovery.sentence == "Postgres replays its log (0 MiB)"
    recovery.ends = 0x1_0F000028
    assert recovery.hear("LOG:  redo in progress, elapsed time: 10.01 s, current LSN: 1/03000028")
    assert recovery.sentence == "Postgres replays its log (64 of 256 MiB, 25 %, in 10 s)"
    assert recovery.to_json() == {
        "lsn": "1/3000028", "end_lsn": "1/F000028", "replayed_bytes": 64 * 1024**2, "total_bytes": 256 * 1024**2,
        "percent": 25.0, "seconds": 10.01,
    }  # fmt: skip
    assert not recovery.hear("LOG:  checkpoint starting: end-of-recovery immediate wait")
    assert recovery.hear("LOG:  redo done at 1/0EFFFF00 system usage: CPU: user: 1.00 s")
    assert recovery.to_json()["percent"] == 100.0
    assert recovery.sentence.startswith("Postgres has replayed its log and writes its buffers out (")


def write(directory: Path, name: str, address: int, pages: int) -> None:
    """Write a segment of which so many pages are of `address`, and the rest of what was there before."""
    begin = struct.pack("=HHIQI4xQII", 0xD118, 2, 1, address, 0, 42, SEGMENT, PAGE)
    content = bytearray(SEGMENT)
    for number in range(SEGMENT // PAGE):
        at = number * PAGE
        struct.pack_into("=Q", content, at + 8, address + at if number < pages else at)
    content[: len(begin)] = begin
    (directory / name).write_bytes(content)


def test_the_end_of_the_log_is_where_its_pages_stop_being_its_own(tmp_path: Path) -> None:
    log = tmp_path / "pg_wal"
    (log / "archive_status").mkdir(parents=True)
    assert end_of_log(tmp_path) is None
    write(log, "000000010000000000000005", 5 * SEGMENT, SEGMENT // PAGE)
    write(log, "000000010000000000000006", 6 * SEGMENT, 3)
    write(log, "000000010000000000000007", 2 * SEGMENT, 9)  # an old one under the name of one to come
    (log / "000000010000000000000008").write_bytes(b"")
    (log / "000000010000000000000009").write_bytes(bytes(SEGMENT))
    assert end_of_log(tmp_path) == 6 * SEGMENT + 3 * PAGE
    write(log, "000000010000000100000000", 1 << 32, SEGMENT // PAGE)
    assert end_of_log(tmp_path) == (1 << 32) + SEGMENT


def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        end_of_log(tmp_path)
