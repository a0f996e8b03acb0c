"""Who we are and who the children become: no right is kept that the work does not need."""

import contextlib
import os
import pwd
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from sidecar.errors import SettingsError

DEFAULT_USER = "hindsight"
_NO_UID = 2**32 - 1  # means "leave it as it is" to the kernel
_NSS_WRAPPER = ("/usr/lib/*/libnss_wrapper.so", "/usr/lib/libnss_wrapper.so")


@dataclass(frozen=True)
class Account:
    """A uid and gid to run as, with the name that programs will see."""

    uid: int
    gid: int
    name: str


def _of_uid(uid: int, gid: int) -> Account:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid, gid, DEFAULT_USER)
    return Account(uid, entry.pw_gid, entry.pw_name)


def _parse(text: str) -> Account:
    user, _, group = text.partition(":")
    if user.isascii() and user.isdigit() and (not group or (group.isascii() and group.isdigit())):
        account = _of_uid(int(user), int(group or user))
        account = Account(account.uid, int(group), account.name) if group else account
    elif group:
        raise SettingsError(f"HINDSIGHT_SIDECAR_RUN_AS is {text!r}; expected a user name, a uid or UID:GID")
    else:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise SettingsError(
                f"HINDSIGHT_SIDECAR_RUN_AS names {user!r}, and there is no such user; make it"
            ) from None
        account = Account(entry.pw_uid, entry.pw_gid, entry.pw_name)
    if account.uid >= _NO_UID:
        raise SettingsError(f"HINDSIGHT_SIDECAR_RUN_AS is {text!r}, and uids end at {_NO_UID - 1}; name a smaller one")
    if account.uid == 0:
        raise SettingsError(
            "HINDSIGHT_SIDECAR_RUN_AS is root, and PostgreSQL refuses to run as root; name another user"
        )
    return account


def choose(run_as: str | None, pgdata: Path) -> Account:
    """Choose whom root becomes: the configured user, else the owner of the data, else the user `hindsight`.

    Raises:
        SettingsError: nobody fits.

    """
    if run_as:
        return _parse(run_as)
    try:
        status = pgdata.stat()
    except OSError:
        pass
    else:
        if status.st_uid != 0:
            return _of_uid(status.st_uid, status.st_gid)
    try:
        entry = pwd.getpwnam(DEFAULT_USER)
    except KeyError:
        raise SettingsError(
            "this is root, and PostgreSQL refuses to run as root; start the sidecar as another user, or name one in "
            f"HINDSIGHT_SIDECAR_RUN_AS, or make one: useradd --system {DEFAULT_USER}"
        ) from None
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name)


def make_run_dir(run_dir: Path, account: Account | None) -> None:
    """Make the run directory ours alone, before anything is put there.

    Root gives it to `account` where it is new or empty; a directory that others use is never taken over.

    Raises:
        SettingsError: it cannot be made, or is not ours.

    """
    owner = account.uid if account else os.geteuid()
    if not run_dir.is_absolute():
        raise SettingsError(f"HINDSIGHT_SIDECAR_RUN_DIR: {str(run_dir)!r} is a relative path; expected an absolute one")
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = run_dir.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise SettingsError(
                f"the run directory {run_dir} is a link; HINDSIGHT_SIDECAR_RUN_DIR has to name a directory"
            )
        if account and status.st_uid == 0 and not any(run_dir.iterdir()):
            _give(run_dir, account)
            status = run_dir.lstat()
        if status.st_uid == owner:
            run_dir.chmod(0o700)
    except OSError as error:
        raise SettingsError(
            f"the run directory {run_dir} cannot be made as uid {os.geteuid()} ({error.strerror}); mount a tmpfs at "
            f"{run_dir.parent}, or set HINDSIGHT_SIDECAR_RUN_DIR"
        ) from error
    if status.st_uid != owner:
        raise SettingsError(
            f"the run directory {run_dir} belongs to uid {status.st_uid}, and this is {owner}; remove it, or set "
            "HINDSIGHT_SIDECAR_RUN_DIR to one of its own"
        )


def _give(run_dir: Path, account: Account) -> None:
    try:
        os.chown(run_dir, account.uid, account.gid, follow_symlinks=False)
    except PermissionError as error:
        raise SettingsError(
            f"this is root without the right to become {account.name} (uid {account.uid}); start the sidecar as another user "
            "(--user 1000, runAsUser: 1000), or leave root the capabilities CHOWN, SETUID and SETGID"
        ) from error


def make_volume(volume: Path, account: Account) -> None:
    """Make a volume directory that is not there yet, owned by whom we become; one that exists is left as it is.

    What is in the way of that is told by whoever takes the volume.
    """
    with contextlib.suppress(OSError):
        if not volume.exists():
            volume.mkdir(mode=0o755, parents=True)
            os.chown(volume, account.uid, account.gid)
            volume.chmod(0o700)


def become(account: Account) -> None:
    """Start this program again as another user, for good: nothing of root's is left in the process."""
    groups = "--init-groups" if account.name and has_entry(account.uid) else "--clear-groups"
    argv = [
        "/usr/bin/setpriv",
        f"--reuid={account.uid}",
        f"--regid={account.gid}",
        groups,
        "--inh-caps=-all",
        "--no-new-privs",
        "--",
        *sys.orig_argv,
    ]
    os.execv(argv[0], argv)  # noqa: S606 - a shell is what this avoids


def has_entry(uid: int) -> bool:
    """Tell whether a uid has a passwd entry."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def identity_environment(run_dir: Path, home: Path) -> dict[str, str]:
    """Return the variables by which every child finds a user, also where the uid has no passwd entry.

    Without one, initdb and psql stop, and Python's getpass raises; libnss-wrapper answers for the system then.
    """
    uid, gid = os.geteuid(), os.getegid()
    name = pwd.getpwuid(uid).pw_name if has_entry(uid) else DEFAULT_USER
    found = {"HOME": str(home), "USER": name, "LOGNAME": name}
    if has_entry(uid):
        return found
    library = nss_wrapper()
    if library is not None:
        passwd, group = run_dir / "passwd", run_dir / "group"
        passwd.write_text(f"{name}:x:{uid}:{gid}:{name}:{home}:/usr/sbin/nologin\n", encoding="ascii")
        group.write_text(f"{name}:x:{gid}:\n", encoding="ascii")
        found |= {"LD_PRELOAD": str(library), "NSS_WRAPPER_PASSWD": str(passwd), "NSS_WRAPPER_GROUP": str(group)}
    return found


def nss_wrapper() -> Path | None:
    """Return where libnss_wrapper is, None where it is not installed."""
    for pattern in _NSS_WRAPPER:
        for path in Path("/").glob(pattern.removeprefix("/")):
            return path
    return None
