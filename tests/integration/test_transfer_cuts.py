"""Memories that are cut or damaged on their way, to the sidecar, from it or in a file: nothing is replaced or lost."""

import re
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import made
import pytest
from administrator import ask
from bad_line import BadLine, bad_line
from harness import PROGRAM, RunningSidecar, reachable_directory, store_as_they_are, wait_for

BANK = "moved"
TEXTS = ["The spare key is under the blue flower pot.", "The boat lies in the harbour of Rovinj."]
LATER = "The dentist wants to see Ada on Tuesday."
TOKEN = "a-token-of-this-test"  # noqa: S105 - no secret
SHARES = [0, 0.01, 0.5, 0.999]
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def sidecar(home: Path, model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar that serves one memory more than the archive has."""
    directory = home / "sidecar"
    directory.mkdir()
    directory.chmod(0o777)
    one = RunningSidecar(directory, made.api_venv(), model_dir, HINDSIGHT_SIDECAR_TOKEN=TOKEN)
    try:
        one.start_ready()
        store_as_they_are(one, BANK, TEXTS)
        assert one.command("dump", "-o", str(home / "whole.tar")).returncode == 0
        one.retain(BANK, [LATER])
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def archive(sidecar: RunningSidecar, home: Path) -> bytes:
    assert sidecar
    return (home / "whole.tar").read_bytes()


@pytest.fixture(scope="module")
def raw(archive: bytes, home: Path) -> bytes:
    """Return the file of pg_dump in it."""
    assert archive
    with tarfile.open(home / "whole.tar") as tar:
        member = tar.extractfile("memory.dump")
        assert member
        return member.read()


@pytest.fixture
def line(sidecar: RunningSidecar) -> Iterator[BadLine]:
    with bad_line(sidecar.control_port) as line:
        yield line


@pytest.fixture(autouse=True)
def nothing_changes(sidecar: RunningSidecar) -> Iterator[None]:
    """Whatever a test does, all memories are served, nothing is kept, and no upload or staged database is left."""
    yield
    found = sidecar.memory(f"/banks/{BANK}/memories/list").json()["items"]
    assert sorted(item["text"] for item in found) == sorted([*TEXTS, LATER])
    assert ask(sidecar, "GET", "/v1/databases").json() == {"kept": [], "clusters": []}
    wait_for(lambda: unfinished(sidecar) == [], 10, "nothing unfinished on the volume")
    assert sidecar.health_status() == 200


def unfinished(sidecar: RunningSidecar) -> list[str]:
    return [path.name for path in (sidecar.volume / "dumps").iterdir() if path.name.startswith(".")]


def restores(sidecar: RunningSidecar) -> list[str]:
    found = ask(sidecar, "GET", "/v1/operations").json()["operations"]
    return [one["outcome"] for one in found if one["kind"] == "restore"]


def command(*arguments: str | Path) -> Done:
    return subprocess.run(
        [PROGRAM, *arguments], env={"HINDSIGHT_SIDECAR_TOKEN": TOKEN}, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def the_sentence(done: Done, code: int) -> str:
    assert (done.returncode, done.stdout) == (code, ""), done
    [sentence] = done.stderr.splitlines()
    return sentence


# Upload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("share", [*SHARES, 1])
def test_an_upload_that_is_cut(share: float, framing: str, sidecar: RunningSidecar, archive: bytes) -> None:
    before = restores(sidecar)
    part = archive[: min(int(len(archive) * share), len(archive) - (framing == "length"))]
    head = f"PUT /v1/restores HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    if framing == "length":
        sent = f"{head}Content-Length: {len(archive)}\r\n\r\n".encode() + part
    else:  # whole chunks, and none that ends it
        chunks = [part[start : start + 10_000] for start in range(0, len(part), 10_000)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        sent = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", sidecar.control_port)) as connection:
        connection.sendall(sent)
        wait_for(lambda: unfinished(sidecar), 10, "an upload")
    wait_for(lambda: unfinished(sidecar) == [], 10, "the upload gone")
    assert restores(sidecar) == before


@pytest.mark.parametrize("share", SHARES)
def test_an_upload_of_the_command_that_is_cut(share: float, line: BadLine, home: Path, archive: bytes) -> None:
    line.prefix, line.to_server, line.after = b"PUT /v1/restores", True, int(len(archive) * share)
    sentence = the_sentence(command("restore", "--url", line.url, home / "whole.tar", "--yes"), 1)
    assert sentence.startswith("the connection was cut while the archive was sent (")
    assert line.bodies <= len(archive) * share


@pytest.mark.parametrize("place", ["manifest", "header", "dump", "end of the dump", "end"])
def test_one_bit_is_flipped_in_an_upload(place: str, line: BadLine, home: Path, archive: bytes) -> None:
    line.prefix, line.to_server, line.flips, line.after = b"PUT /v1/restores", True, True, places(archive)[place]
    sentence = the_sentence(command("restore", "--url", line.url, home / "whole.tar", "--yes"), 4)
    assert sentence.startswith("restore refused: ")
    assert line.bodies == len(archive)


def places(archive: bytes) -> dict[str, int]:
    """Return bytes of an archive of which each has to be right."""
    header = archive.index(b"memory.dump\0")
    size = int(archive[header + 124 : header + 135], 8)
    return {
        "manifest": 2000,
        "end": len(archive) - 700,
        "header": header + 3,
        "dump": header + 512 + size // 2,
        "end of the dump": header + 511 + size,
    }


# Download ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["no answer", *SHARES, "one bit"])
def test_a_download_that_is_cut_or_damaged(
    share: float | str, line: BadLine, sidecar: RunningSidecar, home: Path, archive: bytes
) -> None:
    file = home / "fetched.tar"
    line.prefix, line.flips = b"GET /v1/dumps/", share == "one bit"
    if share != "no answer":
        line.after = len(archive) // 2 if isinstance(share, str) else int(len(archive) * share)
    code = {"no answer": 3, "one bit": 5}.get(str(share), 1)
    sentence = the_sentence(command("dump", "--url", line.url, "-o", file), code)
    told = {"no answer": "no sidecar answers at ", "one bit": "what was downloaded has sha256 "}
    assert sentence.startswith(told.get(str(share), "the download was cut after "))
    assert [path.name for path in home.iterdir() if path.name.startswith(file.name)] == []

    [kept] = ask(sidecar, "GET", "/v1/dumps").json()["dumps"]
    assert f"hindsight-sidecar dump --id {kept['id']}" in sentence
    line.prefix = b"nothing"
    try:
        assert command("dump", "--url", line.url, "--id", kept["id"], "-o", file).returncode == 0
        assert re.search(r"^whole: ", command("verify", file).stdout, re.MULTILINE)
    finally:
        file.unlink(missing_ok=True)
        assert ask(sidecar, "DELETE", f"/v1/dumps/{kept['id']}").status == 204


# Files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [*SHARES, "manifest", "header", "dump", "end of the dump", "end"])
def test_an_archive_that_is_cut_or_damaged(
    share: float | str, sidecar: RunningSidecar, home: Path, archive: bytes
) -> None:
    file = home / "damaged.tar"
    file.write_bytes(cut_or_flipped(archive, share))
    sentence = the_sentence(command("verify", file), 5)
    done = sidecar.command("restore", str(file), "--yes")
    assert the_sentence(done, 4).endswith(sentence.removeprefix("damaged.tar").strip()), (done.stderr, sentence)


def cut_or_flipped(content: bytes, share: float | str) -> bytes:
    if isinstance(share, str):
        return flipped(content, places(content)[share])
    return content[: int(len(content) * share)]


@pytest.mark.parametrize("share", [*SHARES, "one bit"])
def test_a_file_of_pg_dump_that_is_cut_or_damaged(
    share: float | str, sidecar: RunningSidecar, home: Path, raw: bytes
) -> None:
    file = home / "damaged.dump"
    content = raw[: int(len(raw) * share)] if isinstance(share, float | int) else flipped(raw, len(raw) - 50)
    file.write_bytes(content)
    the_sentence(sidecar.command("restore", str(file), "--yes"), 4)
    # Without a server only its beginning is looked at, and that nothing is proved is said.
    done = command("verify", file)
    assert (done.returncode == 0 and "NOT PROVED" in done.stdout) or (share in (0, 0.01) and done.returncode == 5)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_what_a_file_of_pg_dump_cannot_show_is_said(sidecar: RunningSidecar, home: Path, raw: bytes) -> None:
    file = home / "damaged.dump"
    condition = re.search(rb"CREATE INDEX idx_memory_units\w* ON [^;]* WHERE [^;]*'(\w+)'", raw)
    assert condition is not None
    file.write_bytes(flipped(raw, condition.start(1)))
    done = sidecar.command("restore", str(file), "--dry-run")
    assert done.returncode == 0, done
    assert "UNPROVED  its rows have gzip's checksums, its names and definitions have none: a bit" in done.stdout


def test_a_name_that_is_not_there_in_the_end_is_told_of_a_file_of_pg_dump_as_well(
    sidecar: RunningSidecar, home: Path, raw: bytes
) -> None:
    file = home / "damaged.dump"
    file.write_bytes(flipped(raw, raw.index(b"CREATE INDEX idx_memory_units") + len(b"CREATE INDEX ")))
    assert "INDEX public idx_memory_units" in the_sentence(sidecar.command("restore", str(file), "--dry-run"), 5)
