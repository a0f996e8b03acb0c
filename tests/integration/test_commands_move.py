"""The commands that move memories, against a real sidecar: files, pipes, a terminal, and what goes wrong."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import psycopg
import pytest
from harness import PROGRAM, RunningSidecar, reachable_directory, store_as_they_are, wait_for

BANK = "moved"
TEXTS = ["The spare key is under the blue flower pot.", "The boat lies in the harbour of Rovinj."]
LATER = "The dentist wants to see Ada on Tuesday."
TOKEN = "a-token-of-this-test"  # noqa: S105 - no secret
LINE = re.compile(
    r"20\d\d-\d\d-\d\d \d\d:\d\d UTC: (\d+) memories restored from (\S+|standard input) \(sha256 ([0-9a-f]{64})\); "
    r"(\d+) tables, (\d+) indexes, (\d+) constraints equal; the old database is kept as (hindsight_kept_\w+)"
)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def sidecar(home: Path, model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar that has two memories."""
    directory = home / "sidecar"
    directory.mkdir()
    directory.chmod(0o777)
    one = RunningSidecar(directory, made.api_venv(), model_dir, HINDSIGHT_SIDECAR_TOKEN=TOKEN)
    try:
        one.start_ready()
        store_as_they_are(one, BANK, TEXTS)
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def archive(sidecar: RunningSidecar, home: Path) -> Path:
    """Return an archive of the two memories."""
    file = home / "memory.tar"
    done = sidecar.command("dump", "-o", str(file))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith(f"{file}: {len(TEXTS)} memories in ")
    return file


@pytest.fixture
def later(sidecar: RunningSidecar, archive: Path) -> Iterator[None]:
    """Have one memory more than the archive has, and no staging database afterwards."""
    assert archive
    if LATER not in texts(sidecar):
        sidecar.retain(BANK, [LATER])
    assert sorted(texts(sidecar)) == sorted([*TEXTS, LATER])
    yield
    assert left_over(sidecar) == []


def texts(sidecar: RunningSidecar) -> list[str]:
    """Return all memories that are served."""
    found = sidecar.memory(f"/banks/{BANK}/memories/list").json()["items"]
    return [item["text"] for item in found]


def is_recalled(sidecar: RunningSidecar, question: str, text: str) -> bool:
    return bool(sidecar.recall(BANK, question)[0]["text"] == text)


def left_over(sidecar: RunningSidecar) -> list[str]:
    """Return databases that are neither served nor kept."""
    query = "SELECT datname FROM pg_database WHERE datname LIKE 'hindsight_staging%'"
    with database(sidecar) as connection:
        return [str(row[0]) for row in connection.execute(query).fetchall()]


def database(sidecar: RunningSidecar) -> Any:

    return psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="postgres", autocommit=True)


def kept(sidecar: RunningSidecar) -> list[str]:
    return [one["name"] for one in json.loads(sidecar.command("databases", "--json").stdout)["kept"]]


def dumps(sidecar: RunningSidecar) -> list[str]:
    return [one["id"] for one in json.loads(sidecar.command("dumps", "--json").stdout)["dumps"]]


# Files ---------------------------------------------------------------------------------------------------------


def test_a_dump_in_a_file_is_private_whole_and_not_left_on_the_volume(sidecar: RunningSidecar, archive: Path) -> None:
    assert archive.stat().st_mode & 0o7777 == 0o600
    assert [path.name for path in archive.parent.glob("memory.tar*")] == ["memory.tar"]
    assert dumps(sidecar) == []
    again = sidecar.command("dump", "-o", str(archive))
    assert again.returncode == 4
    assert "is there already" in again.stderr


def test_verify_needs_no_sidecar(archive: Path, home: Path) -> None:
    done = verify(archive)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^public\.memory_units +2$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("whole: ")
    raw = dump_in(archive)
    done = verify(raw)
    assert done.returncode == 0
    assert "of database hindsight of PostgreSQL" in done.stdout
    assert "NOT PROVED" in done.stdout
    content = archive.read_bytes()
    (home / "cut.tar").write_bytes(content[: len(content) * 2 // 3])
    done = verify(home / "cut.tar")
    assert (done.returncode, done.stdout) == (5, "")
    assert "cut short" in done.stderr


def verify(file: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PROGRAM, "verify", file, *options], env={}, capture_output=True, text=True, timeout=60, check=False
    )


def dump_in(archive: Path) -> Path:
    """Return the file of pg_dump that an archive carries."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile("memory.dump")
        assert member
        (archive.parent / "memory.dump").write_bytes(member.read())
    return archive.parent / "memory.dump"


@pytest.mark.usefixtures("later")
def test_restore_and_rollback(sidecar: RunningSidecar, archive: Path) -> None:
    done = sidecar.command("restore", str(archive), "--yes")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"^public\.memory_units +2 +2  equal$", done.stdout, re.MULTILINE)
    line = LINE.fullmatch(done.stdout.splitlines()[-1])
    assert line, done.stdout
    memories, name, checksum, tables, indexes, constraints, old = line.groups()
    assert (memories, name) == ("2", "memory.tar")
    assert checksum == json.loads(verify(archive, "--json").stdout)["sha256"]
    assert min(int(tables), int(indexes), int(constraints)) > 10
    assert kept(sidecar)[0] == old
    assert sorted(texts(sidecar)) == sorted(TEXTS)
    assert is_recalled(sidecar, "Where can I find the key to the house?", TEXTS[0])

    done = sidecar.command("rollback")
    assert (done.returncode, done.stdout) == (4, "")
    assert f"add --yes to serve {old} again" in done.stderr
    done = sidecar.command("rollback", old, "--yes")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert f"{old} is served again" in done.stdout
    assert sorted(texts(sidecar)) == sorted([*TEXTS, LATER])
    [now] = kept(sidecar)
    assert f"kept as {now}" in done.stdout
    assert sidecar.command("databases", "--drop", now).returncode == 0
    assert kept(sidecar) == []
    assert sidecar.command("databases", "--drop", now).returncode == 4
    kinds = [(one["kind"], one["outcome"]) for one in operations(sidecar)][:2]
    assert kinds == [("rollback", "done"), ("restore", "done")]


def operations(sidecar: RunningSidecar) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(sidecar.command("operations", "--json").stdout)["operations"]
    return found


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_without_a_yes_nothing_is_replaced(options: list[str], sidecar: RunningSidecar, archive: Path) -> None:
    before = kept(sidecar)
    done = sidecar.command("restore", str(archive), *options, stdin=subprocess.DEVNULL)
    assert done.returncode == (0 if options else 4), done
    assert done.stdout.splitlines()[-1].startswith("dry run: 2 memories of memory.tar can be restored (")
    told = done.stderr.splitlines()
    assert len(told) == (0 if options else 1)
    assert options or ("nothing was replaced" in told[0] and "--yes" in told[0])
    assert (kept(sidecar), LATER in texts(sidecar)) == (before, True)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("kind", ["html", "cut", "empty", "damaged"])
def test_what_is_no_whole_archive_is_refused(kind: str, sidecar: RunningSidecar, archive: Path, home: Path) -> None:
    file = home / kind
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes({
        "html": b"<!DOCTYPE html><html><title>502 Bad Gateway</title></html>" * 100,
        "cut": bytes(content[: len(content) * 2 // 3]),
        "empty": b"",
        "damaged": bytes(content),
    }[kind])  # fmt: skip
    sentence = {"html": "is an HTML page", "cut": "cut short", "empty": "is empty", "damaged": "sha256"}[kind]
    before = kept(sidecar)
    done = sidecar.command("restore", str(file), "--yes")
    assert (done.returncode, done.stdout) == (4, ""), done
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (kept(sidecar), LATER in texts(sidecar)) == (before, True)
    assert sidecar.command("health").returncode == 0


def test_a_file_of_pg_dump_says_what_is_not_proved(sidecar: RunningSidecar, archive: Path) -> None:
    raw = dump_in(archive)
    done = sidecar.command("restore", str(raw), "--dry-run")
    assert done.returncode == 0, done
    assert "UNPROVED  the file has no manifest" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "dry run: 2 memories of memory.dump can be restored (it has no manifest"
    )


# The volume ----------------------------------------------------------------------------------------------------


def test_dumps_on_the_volume(sidecar: RunningSidecar, home: Path) -> None:
    done = sidecar.command("dump", "--compression", "none")
    assert done.returncode == 0, done
    identifier = done.stdout.strip()
    assert dumps(sidecar) == [identifier]
    assert identifier in sidecar.command("dumps").stdout
    file = home / "fetched.tar"
    assert sidecar.command("dump", "--id", identifier, "-o", str(file)).returncode == 0
    assert identifier in verify(file).stdout
    done = sidecar.command("restore", "--dump", identifier, "--dry-run", "--json")
    assert (done.returncode, json.loads(done.stdout)["report"]["dry_run"]) == (0, True)
    latest = operations(sidecar)[0]
    shown = sidecar.command("operations", latest["id"])
    assert (shown.returncode, "public.memory_units" in shown.stdout) == (0, True)
    assert sidecar.command("dumps", "--delete", identifier).returncode == 0
    assert dumps(sidecar) == []
    assert sidecar.command("dumps", "--delete", identifier).returncode == 1


# Pipes ---------------------------------------------------------------------------------------------------------


def test_a_dump_through_a_pipe(sidecar: RunningSidecar) -> None:
    before = sorted(texts(sidecar))
    done = shell(sidecar, f"{PROGRAM} dump -o - | {PROGRAM} restore - --yes")
    assert done.returncode == 0, done
    line = LINE.fullmatch(done.stdout.splitlines()[-1])
    assert line
    assert line[2] == "standard input"
    assert f"sha256 {line[3]}" in done.stderr  # of the dump that was sent
    assert sorted(texts(sidecar)) == before
    assert dumps(sidecar) == []


def test_a_pipe_that_breaks_replaces_nothing(sidecar: RunningSidecar) -> None:
    before = kept(sidecar)
    done = shell(sidecar, f"{PROGRAM} dump -o - | head -c 20000 | {PROGRAM} restore - --yes")
    assert done.returncode == 4, done
    assert "cut short" in done.stderr
    assert "Traceback" not in done.stderr
    done = shell(sidecar, f"false | {PROGRAM} restore - --yes")
    assert done.returncode == 4
    assert "nothing came on standard input" in done.stderr
    assert kept(sidecar) == before
    for identifier in dumps(sidecar):  # kept, since the reader went away
        sidecar.command("dumps", "--delete", identifier)


def shell(sidecar: RunningSidecar, line: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/bash", "-c", f"set -o pipefail; {line}"],
        env=sidecar.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


# TCP -----------------------------------------------------------------------------------------------------------


def test_over_tcp_with_the_token(sidecar: RunningSidecar, home: Path) -> None:
    def at(url: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [PROGRAM, "dumps", "--url", url], env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    control = f"http://127.0.0.1:{sidecar.control_port}"
    secret = home / "token"
    secret.write_text(f"{TOKEN}\n")
    assert at(control, HINDSIGHT_SIDECAR_TOKEN=TOKEN).returncode == 0
    assert at(control, HINDSIGHT_SIDECAR_TOKEN_FILE=str(secret)).returncode == 0
    for wrong in ({}, {"HINDSIGHT_SIDECAR_TOKEN": "another"}):
        done = at(control, **wrong)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "send the token of HINDSIGHT_SIDECAR_TOKEN as `Authorization: Bearer <token>`\n"
    done = at(f"http://127.0.0.1:{sidecar.port}", HINDSIGHT_SIDECAR_TOKEN=TOKEN)
    assert done.returncode == 3
    assert "is that not the gateway's" in done.stderr
    file = home / "over-tcp.tar"
    done = subprocess.run(
        [PROGRAM, "dump", "--url", control, "-o", file], env={"HINDSIGHT_SIDECAR_TOKEN": TOKEN},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    done = subprocess.run(
        [PROGRAM, "restore", "--url", control, "--dry-run", file], env={"HINDSIGHT_SIDECAR_TOKEN": TOKEN},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done


# A terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal, and what it printed there."""

    def __init__(self, sidecar: RunningSidecar, *arguments: str) -> None:
        self._leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            [PROGRAM, *arguments],
            env={**sidecar.environment, "TERM": "xterm", "COLUMNS": "150"},
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)
        self._output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side is gone
            while data := os.read(self._leader, 65536):
                self._output += data

    @property
    def text(self) -> str:
        return self._output.decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.text or self.process.poll() is not None, 90, f"{text!r} in the terminal")
        assert text in self.text, self.text[-3000:]

    def end(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        os.close(self._leader)
        return code


@pytest.mark.usefixtures("later")
def test_a_terminal_asks_before_anything_is_replaced(sidecar: RunningSidecar, archive: Path) -> None:
    before = kept(sidecar)
    terminal = Terminal(sidecar, "restore", str(archive))
    terminal.wait_for("[y/N]")
    assert "restore: " in terminal.text  # the bar's phase
    assert "3 memories are served now; 2 memories of memory.tar come instead." in terminal.text
    assert LATER in texts(sidecar)
    terminal.press("n\n")
    assert terminal.end() == 4
    assert "nothing was replaced" in terminal.text
    assert (kept(sidecar), LATER in texts(sidecar)) == (before, True)

    terminal = Terminal(sidecar, "restore", str(archive))
    terminal.wait_for("[y/N]")
    terminal.press("y\n")
    assert terminal.end() == 0, terminal.text[-3000:]
    assert "memories restored from memory.tar" in terminal.text
    assert (len(kept(sidecar)), sorted(texts(sidecar))) == (len(before) + 1, sorted(TEXTS))

    terminal = Terminal(sidecar, "rollback")
    terminal.wait_for("[y/N]")
    assert f"{kept(sidecar)[0]}, served until " in terminal.text
    terminal.press("\n")
    assert terminal.end() == 4
    assert LATER not in texts(sidecar)


@pytest.mark.usefixtures("later")
def test_ctrl_c_cancels_the_restore(sidecar: RunningSidecar, archive: Path) -> None:
    before = kept(sidecar)
    terminal = Terminal(sidecar, "restore", str(archive), "--yes")
    terminal.wait_for("restore: ")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 1, terminal.text[-3000:]
    assert "restore cancelled: it was cancelled; nothing was replaced" in terminal.text
    assert operations(sidecar)[0]["outcome"] == "cancelled"
    assert (kept(sidecar), LATER in texts(sidecar)) == (before, True)
    done = sidecar.command("operations", "--cancel", operations(sidecar)[0]["id"])
    assert done.returncode == 4
