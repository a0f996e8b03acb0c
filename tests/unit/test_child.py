"""Real children, for real exit codes; every wait has a deadline."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.child import LINE_MAX, Child, LineSplitter

T = TypeVar("T")
ENV = {"PATH": "/usr/bin:/bin", "GIVEN": "yes"}
WITHIN = 20.0  # seconds, for what takes none
FDS = Path("/proc/self/fd")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WITHIN):
            return await work

    return asyncio.run(bounded())


def shell(script: str, hear: Callable[[str], object] = print, death: signal.Signals = signal.SIGKILL) -> Child:
    return Child.start("it", ["/bin/sh", "-c", script], env=ENV, cwd=Path("/"), death_signal=death, hear=hear)


async def heard(script: str) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    code = await shell(script, lines.append).wait()
    return code, lines


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until a condition holds; the deadline is `run`'s."""
    while not condition():  # noqa: ASYNC110 - of another process, which has no event
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


# Lines ---------------------------------------------------------------------------------------------------------


def split(chunks: list[bytes]) -> list[str]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


def test_a_line_without_its_newline_is_kept_back_until_the_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\r\nthr") == ["two"]
    assert splitter.finish() == ["thr"]
    assert splitter.finish() == []


def test_bytes_that_are_no_utf8_are_shown_and_not_lost() -> None:
    assert split([b"a\xffb\n\xc3\xa9"]) == ["a\\xffb", "\u00e9"]


@given(
    st.lists(st.integers(1, 3 * LINE_MAX // 2), max_size=4),
    st.lists(st.integers(0, 3 * LINE_MAX), max_size=4),
    st.booleans(),
)
def test_lines_do_not_depend_on_the_chunks_they_come_in(sizes: list[int], lengths: list[int], ended: bool) -> None:  # noqa: FBT001
    data = b"\n".join(b"x" * length for length in lengths) + (b"\n" if ended else b"")
    chunks, rest = [], data
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    lines = split([*chunks, rest])
    assert lines == split([data])
    assert all(len(line) <= LINE_MAX for line in lines)
    assert "".join(lines).replace("\t", "") == data.replace(b"\n", b"").decode()


@pytest.mark.parametrize("length", [LINE_MAX - 1, LINE_MAX, LINE_MAX + 1, 2 * LINE_MAX])
def test_a_full_line_is_not_followed_by_an_empty_one(length: int) -> None:
    for chunks in ([b"x" * length + b"\n"], [b"x" * length, b"\n"], [b"x"] * length + [b"\n"]):
        lines = split(chunks)
        assert all(line.startswith("\t") for line in lines[1:]), "a piece begins nothing"
        assert sum(line.count("x") for line in lines) == length


# Ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 126, 255])
def test_the_exit_code_is_exact(code: int) -> None:
    assert run(heard(f"exit {code}")) == (code, [])


def test_forty_children_at_once_each_with_its_own_exit_code() -> None:
    async def work() -> None:
        children = [shell(f"echo {number}; exit 7") for number in range(40)]
        assert await asyncio.gather(*(child.wait() for child in children)) == [7] * 40
        assert [list(child.tail) for child in children] == [[str(number)] for number in range(40)]
        assert [child.returncode for child in children] == [7] * 40

    run(work())


def test_a_signal_is_a_negative_exit_status() -> None:
    async def work() -> None:
        child = shell("exec cat /dev/zero > /dev/null")
        assert child.returncode is None
        assert await child.wait(0.01) is None
        child.send(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        child.send(signal.SIGKILL)  # nothing happens any more
        child.kill_session()
        assert await child.wait() == -signal.SIGKILL

    run(work())


def test_several_may_wait_and_one_may_give_up() -> None:
    async def work() -> None:
        child = shell("exec sleep 600")
        waits = [asyncio.ensure_future(child.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        child.send(signal.SIGKILL)
        assert await asyncio.gather(*waits[1:]) == [-signal.SIGKILL] * 2

    run(work())


def test_a_program_that_is_not_there_is_told_by_its_exit_code() -> None:
    async def work() -> None:
        lines: list[str] = []
        child = Child.start(
            "it", ["/nonexistent/program"], env=ENV, cwd=Path("/"), death_signal=signal.SIGKILL, hear=lines.append
        )
        assert await child.wait() == 127
        assert "/nonexistent/program" in lines[0]

    run(work())


def test_a_directory_that_is_not_there_is_an_error_and_leaves_nothing_open() -> None:
    async def work() -> None:
        before = list(FDS.iterdir())
        with pytest.raises(OSError, match="nonexistent"):
            Child.start("it", ["/bin/true"], env=ENV, cwd=Path("/nonexistent"), death_signal=signal.SIGKILL, hear=print)
        assert len(list(FDS.iterdir())) == len(before)

    run(work())


# What it is given -----------------------------------------------------------------------------------------------


def test_it_has_the_given_environment_and_nothing_else() -> None:
    code, lines = run(heard("env; pwd"))
    assert code == 0
    assert {line.split("=")[0] for line in lines[:-1]} <= {"PATH", "GIVEN", "PWD", "SHLVL", "_", "OLDPWD"}
    assert lines[-1] == "/"


def test_it_has_a_session_of_its_own_no_input_and_no_descriptor_of_ours() -> None:
    async def work() -> None:
        with Path("/etc/passwd").open("rb") as ours:  # noqa: ASYNC230
            os.set_inheritable(ours.fileno(), True)  # noqa: FBT003
            lines: list[str] = []
            child = shell(
                "ls /proc/self/fd; cat; ps -o sid= -p $$ 2>/dev/null || cut -d' ' -f6 /proc/$$/stat", lines.append
            )
            assert await child.wait() == 0
        assert lines[:-1] == ["0", "1", "2", "3"]  # 3: the directory that ls reads
        assert int(lines[-1]) == child.pid

    run(work())


# What it says --------------------------------------------------------------------------------------------------


def test_both_outputs_are_heard_in_order_and_the_last_line_needs_no_newline() -> None:
    assert run(heard("echo out; echo err >&2; printf last")) == (0, ["out", "err", "last"])


def test_its_last_words_are_heard_before_its_end_is_told() -> None:
    async def work() -> None:
        for _ in range(20):
            lines: list[str] = []
            child = shell("printf 'x%.0s\\n' $(seq 500)", lines.append)
            await child.wait()
            assert len(lines) == 500

    run(work())


def test_its_last_words_are_heard_also_where_its_end_is_seen_first() -> None:
    async def work() -> None:
        lines: list[str] = []
        child = shell("printf 'x%.0s\\n' $(seq 500); printf last", lines.append)
        # The loop must not turn: nothing was read yet.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        child._loop.remove_reader(child._output)
        child._reap()
        assert child.returncode == 0
        assert len(lines) == 501

    run(work())


def test_five_megabytes_are_heard_whole_while_the_loop_turns() -> None:
    async def work() -> None:
        lines: list[str] = []
        child = shell("yes 'a line of forty characters, as logs have' | head -c 5000000", lines.append)
        turns = 0
        while await child.wait(0) is None:
            turns += 1
            await asyncio.sleep(0)
        assert child.returncode == 0
        assert sum(len(line) + 1 for line in lines) in (5_000_000, 5_000_001)
        assert turns > 10

    run(work())


def test_the_tail_keeps_the_last_twenty_lines() -> None:
    async def work() -> None:
        child = shell("seq 100", lambda _: None)
        await child.wait()
        assert list(child.tail) == [str(number) for number in range(81, 101)]

    run(work())


# What it leaves ------------------------------------------------------------------------------------------------


def test_a_grandchild_that_holds_the_pipe_does_not_hold_up_the_end_and_is_ended() -> None:
    async def work() -> None:
        lines: list[str] = []
        child = shell("sleep 600 & echo $!; exit 3", lines.append)
        assert await child.wait() == 3
        await until(lambda: not alive(int(lines[0])))

    run(work())


def test_a_grandchild_with_a_session_of_its_own_does_not_hold_up_the_end_either() -> None:
    async def work() -> None:
        lines: list[str] = []
        child = shell("setsid sh -c 'echo $$; exec sleep 600' & read line < /dev/null; exec sleep 600", lines.append)
        await until(lambda: lines)
        child.send(signal.SIGTERM)
        try:
            assert await child.wait() == -signal.SIGTERM
        finally:
            os.kill(int(lines[0]), signal.SIGKILL)

    run(work())


def test_kill_session_ends_it_with_all_that_it_started() -> None:
    async def work() -> None:
        lines: list[str] = []
        child = shell("sleep 600 & echo $!; wait", lines.append)
        await until(lambda: lines)
        child.kill_session()
        assert await child.wait() == -signal.SIGKILL
        await until(lambda: not alive(int(lines[0])))

    run(work())


PARENT = """
import asyncio, signal, sys
from pathlib import Path
from sidecar.child import Child

# A shell ignores it for what it starts in the background, and that is inherited; the sidecar handles it itself.
signal.signal(signal.SIGINT, signal.SIG_DFL)

async def main():
    child = Child.start("it", ["/bin/sleep", "600"], env={"PATH": "/bin"}, cwd=Path("/"),
                        death_signal=signal.SIGINT, hear=print)
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def test_it_does_not_outlive_us_whatever_ends_us() -> None:
    source = Path(sys.modules["sidecar"].__path__[0]).parent
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(source)}
    )
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait(WITHIN)
        parent.stdout.close()

    async def work() -> None:
        await until(lambda: not alive(pid))

    run(work())


def test_it_does_not_begin_where_we_died_before_it_could_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        # As if its parent had been another process, which is gone: the signal of that death was never set.
        monkeypatch.setattr("sidecar.child.os.getpid", lambda: 1)
        lines: list[str] = []
        child = shell("echo ran", lines.append)
        assert await child.wait() == 75
        assert lines == []

    run(work())


def test_nothing_is_left_open_of_children_that_ended() -> None:
    async def work(count: Callable[[], Awaitable[int]]) -> None:
        await heard("true")
        before = await count()
        for _ in range(5):
            await heard("echo x")
        await until(lambda: len(list(FDS.iterdir())) <= before)

    async def count() -> int:
        return len(list(FDS.iterdir()))

    run(work(count))
