"""What is in the image, and what is not: everything for everyone to read, nothing that builds, nothing of the builder's."""

from pathlib import Path
from typing import Any

import pytest
from container import PYTHON, Image

WRITTEN = ("/opt/hindsight", "/run", "/tmp")  # noqa: S108
API_PYTHON = "/opt/hindsight-api/bin/python"
# What the engine brings, and what is written at run time.
WALK = """
import json, os, stat
found = []
def walk(top):
    for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
        if entry.path in ("/proc", "/sys", "/dev", "/run", "/tmp", "/opt/hindsight"):
            continue
        status = entry.stat(follow_symlinks=False)
        found.append((entry.path, status.st_mode))
        if stat.S_ISDIR(status.st_mode):
            try:
                walk(entry.path)
            except PermissionError:
                pass
walk("/")
"""


def test_everyone_may_read_everything(tested: Image) -> None:
    script = """
private = []
for path, mode in found:
    wanted = 0o555 if stat.S_ISDIR(mode) or mode & 0o111 else 0o444
    if not stat.S_ISLNK(mode) and mode & wanted != wanted:
        private.append(f"{path} {mode & 0o7777:04o}")
print(json.dumps([len(found), private]))
"""
    count, private = tested.python(WALK + script)
    assert count > 10000, "the whole image was walked"
    assert private == []


def test_nobody_gains_rights_and_nobody_can_change_a_file(tested: Image) -> None:
    script = """
print(json.dumps([
    [path for path, mode in found if stat.S_ISREG(mode) and mode & 0o6000],
    [path for path, mode in found if not stat.S_ISLNK(mode) and mode & 0o002 and not mode & 0o1000],
]))
"""
    assert tested.python(WALK + script) == [[], []]
    modes = tested.says("stat", "--format=%a %n", *WRITTEN, options=["--network=none"])
    assert modes.splitlines() == ["777 /opt/hindsight", "1777 /run", "1777 /tmp"]


def test_there_is_nothing_that_builds_or_installs(tested: Image) -> None:
    script = """
import glob, re
names = re.compile(r"(apt|apt-.*|pip[0-9.]*|uv|uvx|conda|npm|node|git|make|cmake|(.*-)?(gcc|g[+][+]|cc|c[+][+]|cpp|ld|as)"
                   r"|clang.*|rustc|cargo|go)(-[0-9.]+)?$")
places = ("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/lib/postgresql/*/bin", "/opt/*/bin")
import json
print(json.dumps([path for place in places for path in glob.glob(place + "/*") if names.match(path.rpartition("/")[2])]))
"""
    assert tested.python(script) == []


@pytest.mark.parametrize("python", ["/usr/bin/python3.??", PYTHON, API_PYTHON])
def test_no_interpreter_can_install(tested: Image, python: str) -> None:
    script = "import importlib.util as u; print([n for n in ('pip', 'ensurepip', 'uv') if u.find_spec(n)])"
    assert tested.says("sh", "-c", f'exec {python} -c "$1"', "sh", script) == "[]\n"


def test_nothing_of_the_machine_that_built_it_is_left(tested: Image) -> None:
    script = """
import json, os
paths = ("/build", "/run/secrets", "/etc/pip.conf", "/root/.cache", "/root/.config", "/root/.netrc", "/root/.pip",
         "/etc/apt/auth.conf", "/var/lib/apt/lists", "/var/log/apt", "/wheels", "/weights", "/stand-in", "/overlay")
print(json.dumps([path for path in paths if os.path.lexists(path)]))
"""
    options = ["--network=none", "--user=0:0"]  # root, as nobody else may look into /root
    assert tested.python(script, options=options) == []
    # What containers see of these is the engine's; the image's own come from wherever its base was made.
    for path in ("/etc/hostname", "/etc/resolv.conf"):
        ours = Path(path).read_text(encoding="utf-8").strip()
        assert tested.file(path) in (None, "") or tested.file(path) != ours, f"{path} is this machine's: {ours}"


def test_no_two_images_share_what_has_to_be_one_machines_own(tested: Image) -> None:
    assert tested.file("/etc/machine-id") in (None, "", "uninitialized")
    script = """
import json, os
print(json.dumps([os.path.join(top, name) for top, _, names in os.walk("/etc") for name in names
                  if not os.path.islink(os.path.join(top, name))
                  and b"PRIVATE KEY-----" in open(os.path.join(top, name), "rb").read()]))
"""
    assert tested.python(script, options=["--network=none", "--user=0:0"]) == [], "a private key that everyone has"


def test_it_trusts_debians_certificates_and_no_others(tested: Image) -> None:
    script = """
import json, pathlib, re
def certificates(*paths):
    pem = r"-----BEGIN CERTIFICATE-----(.*?)-----END"
    return {"".join(found.split()) for path in paths for found in re.findall(pem, path.read_text(), re.DOTALL)}
debians = certificates(*pathlib.Path("/usr/share/ca-certificates").rglob("*.crt"))
trusted = certificates(pathlib.Path("/etc/ssl/certs/ca-certificates.crt"), *pathlib.Path("/etc/ssl/certs").glob("*.pem"))
local = [str(path) for path in pathlib.Path("/usr/local/share").rglob("*.crt")]
print(json.dumps([len(debians), len(trusted), len(trusted - debians), local]))
"""
    debians, trusted, others, local = tested.python(script)
    assert trusted > 100
    assert others == 0, f"{others} of {trusted} certificates are not among Debian's {debians}"
    assert local == []


def test_the_bytecode_is_of_the_kind_that_no_changed_time_makes_stale(tested: Image) -> None:
    # A read-only root could not mend it, and hindsight-api takes 6 s longer to start without.
    script = """
import glob, json
stale = []
for path in glob.iglob("/usr/lib/python3*/**/*.pyc", recursive=True), glob.iglob("/opt/*/lib/**/*.pyc", recursive=True):
    for name in path:
        with open(name, "rb") as file:
            if int.from_bytes(file.read(8)[4:], "little") != 0b01:
                stale.append(name)
print(json.dumps(stale))
"""
    found: list[Any] = tested.python(script)
    assert found == []
