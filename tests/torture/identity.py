"""Mistaken identity: a pid file that names somebody else, a second sidecar, and volumes and models that are not its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import made
from harness import RunningSidecar, call, give_to_the_sidecar, wait_for
from kills import crash
from ledger import BANK
from matrix import Case, Round, check_each_is_there_once
from postgres_server import UNPRIVILEGED
from reweighted import scrambled, turned
from rig import Rig
from victims import family

GROUP = "identity"
SLEEPER = ["/bin/sleep", "300"]
# Another pid, ipc and mount namespace, as a second container has them; what runs in there ends with its first process.
APART = ["/usr/bin/unshare", "--pid", "--ipc", "--mount-proc", "--fork", "--kill-child"]
# What a pod's pause container does: nothing, but for waiting for orphans.
PAUSE = """
import os, signal
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
print("up", flush=True)
while True:
    signal.pause()
"""
Pid = Callable[[], AbstractContextManager[str]]


# Pid files ------------------------------------------------------------------------------------------------------


@contextmanager
def a_thread() -> Iterator[str]:
    """Yield the number of a thread, which is no process's."""
    known, end = threading.Event(), threading.Event()
    found: list[int] = []

    def run() -> None:
        found.append(threading.get_native_id())
        known.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    known.wait()
    try:
        yield str(found[0])
    finally:
        end.set()
        thread.join()


@contextmanager
def running(argv: list[str]) -> Iterator[str]:
    """Yield the pid of a process of the sidecar's own user, which Postgres could signal."""
    process = subprocess.Popen(["/usr/bin/setpriv", *UNPRIVILEGED, "--", *argv])
    try:
        yield str(process.pid)
        assert process.poll() is None, f"a process that is not the sidecar's ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()


def a_sibling() -> AbstractContextManager[str]:
    return running(SLEEPER)


@contextmanager
def one_called_postgres() -> Iterator[str]:
    """Yield the pid of a process that is called postgres, and works elsewhere."""
    script = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'postgres'); time.sleep(300)"
    with running([sys.executable, "-I", "-S", "-c", script]) as pid:
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "postgres\n", 10, "its name")
        yield pid


@contextmanager
def a_zombie() -> Iterator[str]:
    process = subprocess.Popen(["/bin/true"])
    try:
        wait_for(lambda: ") Z " in Path(f"/proc/{process.pid}/stat").read_text(), 10, "its end", every=0.01)
        yield str(process.pid)
    finally:
        process.wait()


@contextmanager
def a_stranger() -> Iterator[str]:
    """Yield the pid of a process of another user, which Postgres may not signal."""
    if os.geteuid() != 0:
        yield "1"
        return
    process = subprocess.Popen(SLEEPER)
    try:
        yield str(process.pid)
        assert process.poll() is None, f"a stranger's process ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def nobody() -> Iterator[str]:
    yield ""


PIDS: dict[str, Pid] = {
    "a thread": a_thread,
    "a sibling": a_sibling,
    "another postgres": one_called_postgres,
    "a zombie": a_zombie,
    "a stranger": a_stranger,
}


def stale_pid_file(rig: Rig, pid: Pid, _: float) -> Round:
    """Start after a crash, where the pid file names somebody else by now; with `nobody` it is empty."""
    rig.begin()
    rig.start_ready()
    rig.store_some()
    crash(rig)
    path = rig.sidecar.pgdata / "postmaster.pid"
    with pid() as number:
        rest = path.read_text().splitlines()[1:]
        path.write_text("\n".join([number, *rest]) + "\n" if number else "")
        rig.start_ready()
    rig.store_some()
    return rig.survived(None)


# A second sidecar -----------------------------------------------------------------------------------------------


def second(rig: Rig) -> RunningSidecar:
    """Return one with everything of its own but the volume."""
    home = rig.sidecar.home / "second"
    home.mkdir()
    home.chmod(0o777)
    other = RunningSidecar(home, made.api_venv(), Path(rig.sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"]))
    other.volume, other.pgdata = rig.sidecar.volume, rig.sidecar.pgdata
    other.settings["PGDATA"] = str(other.pgdata)
    return other


@contextmanager
def waiting(rig: Rig, wrapper: list[str]) -> Iterator[RunningSidecar]:
    """Have a second one that waits and says for what, while the first has memories and serves; it ends afterwards."""
    rig.store_some()
    other = second(rig)
    try:
        other.start(wrapper)
        assert "another sidecar holds" in other.wait_state("blocked(volume-locked)")["detail"]
        rig.store_some()
        assert rig.sidecar.health_status() == 200
        yield other
    finally:
        if wrapper:
            end_contained(other)
        else:
            other.end()
        shutil.rmtree(other.home)


def two_on_a_volume(rig: Rig, wrapper: list[str], _: float) -> Round:
    """Have a second one wait until the first is killed, and serve then."""
    rig.begin()
    rig.start_ready()
    with waiting(rig, wrapper) as other:
        crash(rig)
        take_over(rig, other)
    rig.start_ready()
    return rig.survived(None)


def with_a_server_left(rig: Rig, _: float) -> Round:
    """Be killed alone, with a Postgres that does not end yet; a second one that does not see it waits for it."""
    rig.begin()
    rig.start_ready()
    with waiting(rig, APART) as other:
        pid_file = other.pgdata / "postmaster.pid"
        postmaster, content = rig.sidecar.pid_of("postgres"), pid_file.read_text()
        os.kill(postmaster, signal.SIGSTOP)
        try:
            os.kill(rig.pid, signal.SIGKILL)
            assert rig.sidecar.wait_end() == -signal.SIGKILL
            says = "another pid namespace still work"
            wait_for(lambda: says in (other.health()["detail"] or ""), 20, "what it waits for")
            assert pid_file.read_text() == content
        finally:
            os.kill(postmaster, signal.SIGCONT)
        take_over(rig, other)
    rig.start_ready()
    return rig.survived(None)


@contextmanager
def pod() -> Iterator[list[str]]:
    """Have the namespaces of a pod with shareProcessNamespace; yield what runs a container's program there, as no child of its first process."""
    argv = [*APART, sys.executable, "-I", "-S", "-c", PAUSE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            [pause] = [member.pid for member in family(process.pid) if member.parent == process.pid]
            yield ["/usr/bin/nsenter", f"--target={pause}", "--pid", "--ipc", "--mount", "--"]
            assert [member for member in family(pause) if member.pid != pause] == [], "orphans"
        finally:
            process.kill()


def contained(sidecar: RunningSidecar) -> int:
    """Return the pid of a sidecar that `pod` runs, as it is out here."""
    assert sidecar.process is not None
    [_, inner, *_] = family(sidecar.process.pid)
    return inner.pid


def in_a_pod(rig: Rig, _: float) -> Round:
    """Be killed where another process is the first one and takes the orphans; a second sidecar that waits there takes over."""
    rig.begin()
    with pod() as enter:
        rig.start(enter)
        rig.sidecar.wait_ready()
        with waiting(rig, enter) as other:
            os.kill(contained(rig.sidecar), signal.SIGKILL)
            take_over(rig, other)
            assert other.pid_of("postgres") == int((other.pgdata / "postmaster.pid").read_text().split()[0])
            os.kill(contained(other), signal.SIGTERM)
            assert other.wait_end() == 0
            wait_for(lambda: not rig.runs, 10, "the end of the first")
    rig.start_ready()
    return rig.survived(None)


def end_contained(sidecar: RunningSidecar) -> None:
    """End a sidecar whose wrapper does not pass a signal on."""
    if sidecar.process is not None and sidecar.process.poll() is None:
        with suppress(ValueError, ProcessLookupError):  # it has ended, or not begun; its wrapper is there
            os.kill(contained(sidecar), signal.SIGTERM)
    sidecar.end()


def take_over(rig: Rig, sidecar: RunningSidecar) -> None:
    """Wait until this sidecar serves, and look whether it has every memory, once each."""
    sidecar.wait_ready()
    listed = sidecar.memory(f"/banks/{BANK}/memories/list?limit=100000").json()["items"]
    check_each_is_there_once(rig.ledger.texts(), [item["text"] for item in listed])


# Volumes and models ---------------------------------------------------------------------------------------------


def refused(rig: Rig, reason: str, says: str) -> None:
    """Have it started, refuse with a reason, touch nothing, and answer for itself meanwhile."""
    sidecar = rig.sidecar
    before = fingerprint(sidecar.pgdata)
    rig.start()
    body = sidecar.wait_state(f"blocked({reason})", 60)
    assert says in body["detail"], body["detail"]
    assert call(sidecar.control_port, "/livez").status == 200
    assert sidecar.memory(f"/banks/{BANK}/memories/list").status == 503
    if reason in UNTOUCHED:
        assert fingerprint(sidecar.pgdata) == before


UNTOUCHED = {"wrong-major", "foreign-cluster"}  # no Postgres runs on what these say


def fingerprint(directory: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def mended(rig: Rig) -> Round:
    rig.sidecar.wait_ready()
    rig.store_some()
    return rig.survived(None)


def another_major(rig: Rig, _: float) -> Round:
    """Find a cluster that an older PostgreSQL made, with our mark in it."""
    rig.begin()
    sidecar = rig.sidecar
    ours = sidecar.volume / "ours"
    sidecar.pgdata.rename(ours)
    [initdb] = made.servers().glob("**/pginstall/bin/initdb")
    argv = ["/usr/bin/setpriv", *UNPRIVILEGED, "--", initdb, "-D", sidecar.pgdata, "--username=postgres", "--no-sync"]
    subprocess.run(argv, check=True, capture_output=True, env={"LC_ALL": "C"}, cwd="/")
    shutil.copy2(ours / "hindsight-sidecar.marker", sidecar.pgdata)
    give_to_the_sidecar(sidecar.pgdata / "hindsight-sidecar.marker")
    refused(rig, "wrong-major", "made by PostgreSQL")
    shutil.rmtree(sidecar.pgdata)
    ours.rename(sidecar.pgdata)
    return mended(rig)


def made_elsewhere(rig: Rig, _: float) -> Round:
    """Find a cluster that is not marked as ours."""
    rig.begin()
    mark = rig.sidecar.pgdata / "hindsight-sidecar.marker"
    content = mark.read_bytes()
    mark.unlink()
    refused(rig, "foreign-cluster", "hindsight-sidecar adopt")
    mark.write_bytes(content)
    give_to_the_sidecar(mark)
    return mended(rig)


def newer_schema(rig: Rig, _: float) -> Round:
    """Find a schema of a revision that the installed hindsight-api does not know."""
    rig.begin()
    rig.start_ready()
    with rig.connected() as connection:
        [(revision,)] = connection.execute("SELECT version_num FROM public.alembic_version").fetchall()
        connection.execute("UPDATE public.alembic_version SET version_num = 'ffffffffffff'")
    rig.stop()
    refused(rig, "schema-newer", "ffffffffffff")
    with rig.connected() as connection:
        connection.execute("UPDATE public.alembic_version SET version_num = %s", (revision,))
    return mended(rig)


def model_copy(rig: Rig) -> Path:
    """Have the sidecar use a copy of the model."""
    copy = rig.sidecar.home / "model"
    if not copy.exists():
        shutil.copytree(rig.sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"], copy)
        rig.sidecar.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = str(copy)
    return copy


def another_model(rig: Rig, _: float) -> Round:
    """Find a model that says of itself that it is another one, of the same dimension."""
    rig.begin()
    path = model_copy(rig) / "manifest.json"
    right = path.read_text(encoding="utf-8")
    manifest = json.loads(right)
    for flavor in manifest["flavors"].values():
        flavor["identity"]["revision"] = "another"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    refused(rig, "model-mismatch", "revision")
    path.write_text(right, encoding="utf-8")
    return mended(rig)


def other_weights(rig: Rig, make: Callable[[Path, Path, int], Path], _: float) -> Round:
    """Find a model of the same name, revision and dimension, with other weights, as its manifest says."""
    rig.begin()
    model, right = model_copy(rig), rig.sidecar.home / "right"
    model.rename(right)
    make(right, model, 7)
    refused(rig, "model-mismatch", "other weights")
    assert rig.sidecar.health()["components"]["hindsight-api"]["pid"] is None
    shutil.rmtree(model)
    right.rename(model)
    return mended(rig)


def changed_byte(rig: Rig, place: float) -> Round:
    """Find weights with one byte of another value, anywhere."""
    rig.begin()
    manifest = json.loads((model_copy(rig) / "manifest.json").read_text(encoding="utf-8"))
    name = manifest["flavors"]["onnx"]["model"]
    path = model_copy(rig) / name
    at = int(place * path.stat().st_size)
    flip(path, at)
    refused(rig, "model-changed", f"{name} has other content")
    flip(path, at)
    return mended(rig)


def flip(path: Path, at: int) -> None:
    """Turn one byte over."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def longer_file(rig: Rig, _: float) -> Round:
    """Find a file of the model that is one byte longer."""
    rig.begin()
    path = model_copy(rig) / "tokenizer.json"
    right = path.read_bytes()
    path.write_bytes(right + b" ")
    refused(rig, "model-changed", "tokenizer.json")
    path.write_bytes(right)
    return mended(rig)


def cases(rig: Rig) -> list[Case]:
    """Return all of them."""
    return [
        *(Case(GROUP, f"a pid file with {name}", partial(stale_pid_file, rig, pid)) for name, pid in PIDS.items()),
        Case(GROUP, "an empty pid file", partial(stale_pid_file, rig, nobody)),
        Case(GROUP, "two on a volume", partial(two_on_a_volume, rig, [])),
        Case(GROUP, "two on a volume, in namespaces of their own", partial(two_on_a_volume, rig, APART)),
        Case(GROUP, "two in namespaces of their own, and a Postgres that is left", partial(with_a_server_left, rig)),
        Case(GROUP, "a second one in a pod's namespaces", partial(in_a_pod, rig)),
        Case(GROUP, "a cluster of another major version", partial(another_major, rig)),
        Case(GROUP, "a cluster that was made elsewhere", partial(made_elsewhere, rig)),
        Case(GROUP, "a newer schema", partial(newer_schema, rig)),
        Case(GROUP, "a model of another identity", partial(another_model, rig)),
        Case(GROUP, "a model of the same identity with random weights", partial(other_weights, rig, scrambled)),
        Case(GROUP, "a model of the same identity that means as much", partial(other_weights, rig, turned)),
        Case(GROUP, "a model with one byte more", partial(longer_file, rig)),
        Case(GROUP, "a model with one changed byte", partial(changed_byte, rig)),
    ]
