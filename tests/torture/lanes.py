"""Cases side by side, each lane of them a process of its own: a round waits for most of its time, and leaves a core to another."""

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from matrix import Row

LANES = 2
Note = Callable[[list[Row]], None]
Lane = Callable[[Note], object]  # does rounds, and tells of all that came of them so far after each


class LaneError(RuntimeError):
    """A lane ended without having come to its end."""


def run_lanes(lanes: Sequence[Lane], note: Note) -> list[Row]:
    """Run lanes side by side and return the rows of all; `note` is told of the rows of all after each round of one.

    Raises:
        LaneError: one of them failed, or was killed; the others had come to their end by then.

    """
    # Not started anew: what a lane works on is a closure. Nothing else runs in this process that a fork would cut in half.
    context = multiprocessing.get_context("fork")
    seen: dict[Connection, list[Row]] = {}
    processes = []
    try:
        for lane in lanes:
            receiver, sender = context.Pipe(duplex=False)
            seen[receiver] = []
            processes.append(context.Process(target=_work, args=(lane, sender)))
            processes[-1].start()
            sender.close()  # so that the lane's end is seen as the end of what it tells
        _listen(seen, note)
    finally:
        # Also where somebody presses Ctrl-C: each lane got it too, and ends what it runs.
        for process in processes:
            process.join()
    if ended := [process.exitcode for process in processes if process.exitcode != 0]:
        raise LaneError(f"{len(ended)} of {len(lanes)} lanes did not come to their end: exit codes {ended}")
    return _all(seen)


def _work(lane: Lane, sender: Connection) -> None:
    lane(sender.send)


def _listen(seen: dict[Connection, list[Row]], note: Note) -> None:
    open_ones = set(seen)
    while open_ones:
        for receiver in wait(open_ones):
            assert isinstance(receiver, Connection)
            with suppress(EOFError):
                seen[receiver] = receiver.recv()
                note(_all(seen))
                continue
            open_ones.remove(receiver)


def _all(seen: dict[Connection, list[Row]]) -> list[Row]:
    return [row for rows in seen.values() for row in rows]
