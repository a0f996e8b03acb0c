"""`hindsight-sidecar serve`: from the settings to the exit code."""

import contextlib
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from sidecar import paths, users
from sidecar.control_characters import written_out
from sidecar.errors import SettingsError

if TYPE_CHECKING:
    from sidecar.environment import Sorted
    from sidecar.listeners import Listeners
    from sidecar.settings import Settings

EXIT_STOPPED = 0
EXIT_FAULT = 1
EXIT_SETTINGS = 2
EXIT_GAVE_UP = 3
EXIT_HARD_STOP = 4
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last: a terminal that was closed
_OWNER_PATIENCE = 20.0  # seconds for what root has to know of the volume; some disks have to spin up first
_VOLUME_PATIENCE = 3.0  # seconds for what the program that follows can do without
_LEAVE_PATIENCE = 0.3  # seconds for what is under way once Postgres is gone
_DESCRIPTORS = 65_536  # enough, and not so many that a program which closes all of them takes its time
TERMINATION_LOG = Path("/dev/termination-log")
T = TypeVar("T")


def _end_at_once_when_asked() -> None:
    """Make a stop during the imports a clean one: nothing is running yet."""
    for number in _STOPS:
        signal.signal(number, lambda *_: os._exit(EXIT_STOPPED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _take_descriptors() -> None:
    """Raise the soft limit of open files, often 1024, as far as we may: the gateway takes two for a call."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave(code: int, sentence: str) -> int:
    """Say why the sidecar ends with this code, where people and Kubernetes look."""
    if code != EXIT_STOPPED:
        sys.stderr.write(f"hindsight-sidecar: {written_out(sentence)}\n")
        _write_termination_log(sentence)
    return code


def _write_termination_log(sentence: str) -> None:
    if TERMINATION_LOG.exists():
        try:
            TERMINATION_LOG.write_text(f"{sentence}\n", encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"hindsight-sidecar: {TERMINATION_LOG} cannot be written: {error.strerror}\n")


def _in_time(ask: Callable[[], T], patience: float) -> T:
    """Ask the volume something, in a process of its own that nobody has to wait for.

    Where the disk holds its caller in the kernel, nothing ends that: neither this process nor the program that it becomes
    could go on before one of its threads did.

    Raises:
        TimeoutError: it gave no answer within so many seconds.

    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if between == 0:
        os.setpgid(0, 0)
        if os.fork() == 0:
            _answer(ask, writer)
        os._exit(0)  # so that whoever takes orphans gets the other one
    os.close(writer)
    os.waitpid(between, 0)
    with open(reader, "rb") as answers:  # noqa: PTH123 - a descriptor
        answered, _, _ = select.select([answers], [], [], patience)
        data = answers.read() if answered else b""
    if not data:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(between, signal.SIGKILL)
        raise TimeoutError
    with contextlib.suppress(ChildProcessError):  # the orphan is ours where we are the first process
        os.waitpid(-between, 0)
    answer: T | Exception = pickle.loads(data)  # noqa: S301 - of our own process
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(ask: Callable[[], object], writer: int) -> NoReturn:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # whoever waits for the end of our output does not wait for a disk
        os.dup2(nothing, descriptor)
    answer: object
    try:
        answer = ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where it is waited for
        answer = error
    os.write(writer, pickle.dumps(answer))
    os._exit(0)


def _leave_root() -> None:
    """Start this program again without root's rights. Before anything else is imported, as a probe waits.

    Raises:
        SettingsError: nobody fits, or it cannot be known who does.

    """
    pgdata = Path(os.environ.get("PGDATA") or paths.PGDATA)
    run_dir = Path(os.environ.get("HINDSIGHT_SIDECAR_RUN_DIR") or paths.RUN_DIR)
    run_as = os.environ.get("HINDSIGHT_SIDECAR_RUN_AS")
    try:
        account = _in_time(lambda: users.choose(run_as, pgdata), _OWNER_PATIENCE)
    except TimeoutError:
        raise SettingsError(
            f"PGDATA {pgdata} gave no answer within {_OWNER_PATIENCE:g} s, and root becomes whoever owns it; look at its disk, or "
            "at what it is mounted from, or name the owner in HINDSIGHT_SIDECAR_RUN_AS, and the sidecar waits for it by itself"
        ) from None
    users.make_run_dir(run_dir, account)
    with contextlib.suppress(TimeoutError):  # what hangs is told by the program that follows
        _in_time(lambda: users.make_volume(pgdata.parent, account), _VOLUME_PATIENCE)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # kept for that program, which then takes them
    users.become(account)


def serve(*, welcome: bool) -> int:
    """Run the sidecar; return its exit code. With `welcome`, tell a person at the terminal what there is once ready."""
    _end_at_once_when_asked()
    _take_descriptors()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us: there is nobody to tell
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the process' life
    try:
        if os.geteuid() == 0:
            _leave_root()
        from sidecar.listeners import Listeners  # noqa: PLC0415
        from sidecar.settings import load  # noqa: PLC0415

        settings, found = load(os.environ)
        users.make_run_dir(settings.run_dir, None)
        listeners = Listeners(settings)
    except SettingsError as error:
        for fault in error.faults:
            sys.stderr.write(f"hindsight-sidecar: {fault}\n")
        _write_termination_log("; ".join(error.faults))
        return EXIT_SETTINGS
    import asyncio  # noqa: PLC0415 - the sockets are bound first

    from sidecar import log  # noqa: PLC0415

    log.configure(settings.log_format, settings.log_level)
    try:
        asyncio.run(_run(settings, found, listeners, welcome=welcome))
    finally:
        log.close()


async def _run(settings: "Settings", found: "Sorted", listeners: "Listeners", *, welcome: bool) -> NoReturn:
    """Run the sidecar, and end the process with its exit code."""
    import asyncio  # noqa: PLC0415

    from sidecar import log  # noqa: PLC0415
    from sidecar.running import Sidecar  # noqa: PLC0415

    sidecar = Sidecar(settings, found, listeners, welcome=welcome)
    loop = asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, sidecar.request_stop, number.name)
    code = await sidecar.run()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_LEAVE_PATIENCE)
    # What is not done by now tidies up on a disk that does not answer, or looks a name up in a network that does not: the
    # interpreter would wait for it, and for its threads.
    log.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
