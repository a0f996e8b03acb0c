"""PostgreSQL's programs, played by small shell scripts."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog

from sidecar.postgres_binaries import Binaries
from sidecar.programs import ProgramError, Programs

T = TypeVar("T")
WITHIN = 20.0  # seconds, for what takes none
Make = Callable[[str], Programs]


@pytest.fixture(autouse=True)
def told() -> Iterator[list[Any]]:
    """Return the log lines."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def programs(tmp_path: Path) -> Make:
    """Return a function that makes an installation whose pg_dump is this script."""

    def make(script: str) -> Programs:
        (tmp_path / "pg_dump").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "pg_dump").chmod(0o755)
        return Programs(
            Binaries(tmp_path, 18, "18.6", (0, 8, 1)), {"PATH": "/usr/bin:/bin", "PGUSER": "hindsight"}, Path("/")
        )

    return make


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WITHIN):
            return await work

    return asyncio.run(bounded())


def fault(programs: Programs, *arguments: str) -> str:
    """Run it, and return its error's sentence."""
    with pytest.raises(ProgramError) as error:
        run(programs.run("pg_dump", arguments))
    return str(error.value)


def test_one_that_ends_well_and_complains_of_nothing_is_no_error(programs: Make, told: list[Any]) -> None:
    made = programs("echo 'saving the table errors'; echo 'no error, no warning' >&2")
    run(made.run("pg_dump", []))
    assert [(line["component"], line["event"], line["log_level"]) for line in told] == [
        ("pg_dump", "saving the table errors", "debug"),
        ("pg_dump", "no error, no warning", "debug"),
    ]


def test_its_lines_go_to_who_wants_them_and_its_complaints_to_the_log_as_well(programs: Make, told: list[Any]) -> None:
    lines: list[str] = []
    with pytest.raises(ProgramError):
        run(programs("echo one; echo 'error: two'").run("pg_dump", [], hear=lines.append))
    assert lines == ["one", "error: two"]
    assert [(line["event"], line["log_level"]) for line in told] == [("error: two", "warning")]


@pytest.mark.parametrize("code", [1, 3, 255])
def test_another_exit_code_is_an_error(code: int, programs: Make) -> None:
    assert fault(programs(f"exit {code}")) == f"pg_dump ended with exit code {code}: it said nothing"


@pytest.mark.parametrize(
    "line",
    ["pg_restore: error: could not execute query", "psql: FATAL:  role x does not exist", "pg_dump: warning: circular",
     "ERROR:  relation exists", "pg_restore: warning: errors ignored on restore: 1"],
)  # fmt: skip
def test_what_it_reports_as_an_error_is_one_whatever_its_exit_code(line: str, programs: Make, told: list[Any]) -> None:
    made = programs(f"echo beginning; echo '  {line}' >&2; echo ending")
    assert fault(made) == f"pg_dump ended with exit code 0: {line}"
    assert [(entry["event"].strip(), entry["log_level"]) for entry in told] == [
        ("beginning", "debug"),
        (line, "warning"),
        ("ending", "debug"),
    ]


def test_the_sentence_has_its_first_five_complaints(programs: Make) -> None:
    made = programs("for number in 1 2 3 4 5 6 7; do echo \"error: number $number\"; echo 'DETAIL: long'; done; exit 1")
    assert fault(made) == "pg_dump ended with exit code 1: " + "; ".join(f"error: number {n}" for n in (1, 2, 3, 4, 5))


def test_without_a_complaint_the_sentence_has_its_last_words(programs: Make) -> None:
    assert fault(programs("seq 100; exit 2")) == "pg_dump ended with exit code 2: 96 97 98 99 100"


def test_a_signal_is_told_as_one(programs: Make) -> None:
    assert fault(programs("echo so far; kill -9 $$")) == "pg_dump was ended by signal 9: so far"


def test_one_that_is_not_there_is_told(programs: Make, tmp_path: Path) -> None:
    made = programs("exit 0")
    with pytest.raises(ProgramError, match="pg_restore ended with exit code 127") as error:
        run(made.run("pg_restore", []))
    assert f"{tmp_path}/pg_restore" in str(error.value)


def test_it_gets_the_arguments_as_they_are_and_no_input(programs: Make) -> None:
    lines: list[str] = []
    arguments = ["--file=with space", "$HOME", "", "*", "a\"b'c"]
    made = programs('for one in "$@"; do echo "<$one>"; done; cat; pwd')
    run(made.run("pg_dump", arguments, hear=lines.append))
    assert lines == ["<--file=with space>", "<$HOME>", "<>", "<*>", "<a\"b'c>", "/"]


def test_its_environment_is_what_is_given_and_nothing_of_ours(programs: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "ours")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/ours")
    lines: list[str] = []
    more = {"PGPASSFILE": "/run/pgpass", "PGUSER": "other"}
    run(programs("exec /usr/bin/env").run("pg_dump", [], more=more, hear=lines.append))
    assert {line for line in lines if line.split("=")[0] not in ("PWD", "OLDPWD", "SHLVL", "_")} == {
        "PATH=/usr/bin:/bin",
        "PGUSER=other",
        "PGPASSFILE=/run/pgpass",
    }


# Cancellation --------------------------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    """Whether there is not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


def asleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False


def test_a_cancelled_one_is_killed_and_waited_for(programs: Make) -> None:
    async def work() -> None:
        lines: list[str] = []
        made = programs("trap '' INT TERM; echo $$; exec sleep 600")
        task = asyncio.create_task(made.run("pg_dump", [], hear=lines.append))
        while not (lines and asleep(int(lines[0]))):  # noqa: ASYNC110 - of another process, which has no event
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gone(int(lines[0]))

    run(work())


def test_what_a_cancelled_one_started_ends_with_it(programs: Make) -> None:
    async def work() -> None:
        lines: list[str] = []
        made = programs("sleep 600 & echo $!; wait")
        task = asyncio.create_task(made.run("pg_dump", [], hear=lines.append))
        while not lines:  # noqa: ASYNC110 - of another process, which has no event
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while asleep(int(lines[0])):  # noqa: ASYNC110 - whoever adopted it reaps it
            await asyncio.sleep(0.005)

    run(work())


def test_one_that_is_cancelled_as_it_is_started_is_gone_as_well(programs: Make) -> None:
    async def work() -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        before = children.read_text().split()
        task = asyncio.create_task(programs("exec sleep 600").run("pg_dump", []))
        await asyncio.sleep(0)
        [pid] = set(children.read_text().split()) - set(before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gone(int(pid))

    run(work())


def test_ten_at_once_do_not_mix_their_words(programs: Make) -> None:
    async def work() -> None:
        made = programs('echo "error: $1"; exit "$1"')
        ends = [made.run("pg_dump", [str(number)]) for number in range(1, 11)]
        assert [str(end) for end in await asyncio.gather(*ends, return_exceptions=True)] == [
            f"pg_dump ended with exit code {number}: error: {number}" for number in range(1, 11)
        ]

    run(work())
