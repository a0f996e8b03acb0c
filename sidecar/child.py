"""A child process: started without our privileges or our terminal, heard line by line, waited for exactly once."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_CHUNK = 65536
LINE_MAX = 16384  # bytes; a longer line is passed on in pieces
_GOES_ON = b"\t"  # before a further piece, as Postgres has it before a further line: neither begins what it says
_LAST_CHUNKS = 16  # as much as a pipe holds
_IF_WE_LIVE = '[ "$PPID" = "$1" ] || exit 75; shift; exec "$@"'
_TAIL = 20  # lines kept to explain an exit


class LineSplitter:
    """Cuts a byte stream into lines of at most `LINE_MAX` bytes, whatever the chunks are; further pieces of a longer one begin with a tab."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete now."""
        lines = []
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            lines += _pieces(line)
        *pieces, self._rest = _pieces(self._rest)
        return [line.rstrip(b"\r").decode("utf-8", "backslashreplace") for line in (*lines, *pieces)]

    def finish(self) -> list[str]:
        """Return what was left without a final newline."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "backslashreplace")] if rest else []


def _pieces(line: bytes) -> list[bytes]:
    pieces = []
    while len(line) > LINE_MAX:
        pieces.append(line[:LINE_MAX])
        line = _GOES_ON + line[LINE_MAX:]
    return [*pieces, line]


class Child:
    """A running child.

    Its end is told by its pidfd and one `waitpid`, never by the end of its output: a grandchild may hold the pipe.

    Attributes:
        name: the component's name in log lines.
        pid: its process id.
        tail: its last lines.

    """

    def __init__(
        self, name: str, process: "subprocess.Popen[bytes]", output: int, hear: Callable[[str], object]
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._process = process
        self._output = output
        self._hear = hear
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(output, self._read)

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        death_signal: signal.Signals,
        hear: Callable[[str], object],
        stdin: int = subprocess.DEVNULL,
        keeps: Sequence[int] = (),
    ) -> "Child":
        """Start a program in a session of its own; it gets `death_signal` should we die without stopping it.

        `hear` is called with every line that it writes, to either output; descriptors that it `keeps` are open in it as well.

        `setpriv` sets the signal in the child itself, since one set before a change of user would be lost with it. We may
        have died before that: the child looks whether its parent is still us, and ends where it is not.

        Raises:
            OSError: it could not be started.

        """
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        try:
            process = subprocess.Popen(
                [
                    "/usr/bin/setpriv",
                    f"--pdeathsig={death_signal.name.removeprefix('SIG')}",
                    "--",
                    *("/bin/sh", "-c", _IF_WE_LIVE, "sh", str(os.getpid())),
                    *argv,
                ],
                stdin=stdin,
                stdout=writer,
                stderr=writer,
                env=dict(env),
                cwd=cwd,
                pass_fds=keeps,
                # Its own session: Ctrl-C in a terminal reaches us alone, and we stop the children in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return cls(name, process, reader, hear)

    @property
    def returncode(self) -> int | None:
        """The exit status once it has ended (negative: the signal that ended it), None before."""
        return self._exited.result() if self._exited.done() else None

    def on_end(self, call: Callable[[], object]) -> None:
        """Have this called, from the event loop, once it has ended."""
        self._exited.add_done_callback(lambda _: call())

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens where it has ended already."""
        if not self._exited.done():
            self._process.send_signal(number)

    def kill_session(self) -> None:
        """End it and all that it started. For short programs that are safe to kill."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout: float | None = None) -> int | None:  # noqa: ASYNC109 - None is an answer here
        """Wait for its end, at most `timeout` seconds; return its exit status, or None where it still runs."""
        done, _ = await asyncio.wait({self._exited}, timeout=timeout)
        return self._exited.result() if done else None

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        for _ in range(_LAST_CHUNKS):  # its last words, before anyone learns of its end
            self._read()
        # What it started ends with it. Before it is reaped, as until then nobody else can have its number.
        # (Postgres' own processes have sessions of their own and end by themselves.)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._exited.set_result(self._process.wait())

    def _read(self) -> None:
        if self._output < 0:
            return
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._emit(self._splitter.feed(data))
            return
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._output = -1
        self._emit(self._splitter.finish())

    def _emit(self, lines: list[str]) -> None:
        for line in lines:
            self.tail.append(line)
            self._hear(line)
