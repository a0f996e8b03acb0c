"""Cases side by side, each lane of them a process of its own: a round waits for most of its time, and leaves a core to another."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import harness
from matrix import Row

LANES = 2
_PDEATHSIG = 1  # of prctl(2)
Note = Callable[[list[Row]], None]
Lane = Callable[[Note], object]  # does rounds, and tells of all that came of them so far after each


def run_lanes(lanes: Sequence[Lane], note: Note) -> list[str]:
    """Run lanes side by side; `note` is told of a lane's rows after each of its rounds.

    Return what went wrong with the lanes themselves, as sentences; the others have come to their end by then all the same.
    Where this is broken off, by Ctrl-C or by an error of `note`, they are interrupted as well, and end what they run.
    """
    # Not started anew: what a lane works on is a closure. Nothing else runs in this process that a fork would cut in half.
    context = multiprocessing.get_context("fork")
    running: dict[Connection, ForkProcess] = {}
    try:
        for number, lane in enumerate(lanes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(lane, number, len(lanes), sender, [*running, receiver]))
            process.start()
            sender.close()  # so that the lane's end is seen as the end of what it tells
            running[receiver] = process
        _listen(set(running), note)
    except BaseException:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGINT)
        raise
    finally:
        for receiver, process in running.items():
            receiver.close()  # whoever still tells something is not held up
            process.join()
    codes = [process.exitcode for process in running.values()]
    return [f"lane {number} ended with {code} before its end" for number, code in enumerate(codes) if code != 0]


def _work(lane: Lane, number: int, lanes: int, sender: Connection, others: list[Connection]) -> None:
    for receiver in others:  # with them gone, telling whoever has ended is an error
        receiver.close()
    # Whatever becomes of the one that began this: nobody would end the sidecars of this lane.
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGINT)
    # A sidecar that is stopped for a moment keeps its ports, and no other lane may take them meanwhile.
    harness.PORTS.share(number, lanes)
    lane(sender.send)


def _listen(receivers: set[Connection], note: Note) -> None:
    while receivers:
        for receiver in wait(receivers):
            assert isinstance(receiver, Connection)
            try:
                rows = receiver.recv()
            except (EOFError, OSError):  # it has ended, perhaps in the middle of what it told
                receivers.remove(receiver)
            else:
                note(rows)
