"""Makes the base image from the Debian archive, for machines that reach no registry."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bake.errors import BakeError
from bake.image.build import BASE_MADE_HERE
from bake.image.engine import Engine

_DEFAULT_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def mirror() -> str:
    """Return the address of the Debian archive that this machine's apt uses.

    Raises:
        BakeError: there is none.

    """
    try:
        told = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BakeError(f"apt's sources cannot be read ({error}); run this on a Debian machine") from error
    found = choose_mirror(told)
    if not found:
        raise BakeError("apt's sources name no mirror of the Debian archive; run `apt-get update` first, or add one")
    return found


def choose_mirror(targets: str) -> str:
    """Return the first address labelled Debian, or that ends like its archive's where lists were never fetched."""
    pairs = [line.partition(" ")[::2] for line in targets.splitlines()]
    labelled = [address for address, label in pairs if label == "Debian"]
    likely = [address for address, label in pairs if not label and address.rstrip("/").endswith("/debian")]
    return next(iter([*labelled, *likely]), "").rstrip("/")


def make(engine: Engine, suite: str, image: str) -> None:
    """Make it, replacing one of the same name.

    Raises:
        BakeError: mmdebstrap is not there, or failed.

    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise BakeError("mmdebstrap is not installed; apt-get install mmdebstrap")
    source = mirror()
    sys.stdout.write(f"==> {image} from {source}, suite {suite}\n")
    with tempfile.TemporaryDirectory(prefix="hindsight-base-") as scratch:
        tar = Path(scratch) / "base.tar"
        words = [program, "--variant=minbase", "--include=ca-certificates"]
        # A suite in development may lie on a mirror for longer than its release file is valid.
        words += ['--aptopt=Acquire::Check-Valid-Until "false"', "--quiet"]
        # They are the machine's that it is made on.
        words += ['--customize-hook=rm -f "$1/etc/hostname" "$1/etc/resolv.conf" "$1/etc/machine-id"']
        words += [f"--keyring={_DEFAULT_KEYRING}"] if _DEFAULT_KEYRING.is_file() else []
        ran = subprocess.run([*words, suite, tar, source], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise BakeError(f"mmdebstrap could not make {suite} from {source}:\n{ran.stderr.strip()}")
        _import(engine, tar, image)


def _import(engine: Engine, tar: Path, image: str) -> None:
    label = f"{BASE_MADE_HERE}=debian-archive"
    if engine.name == "buildah":
        container = _checked(engine, "from", "scratch")
        try:
            _checked(engine, "add", container, str(tar), "/")
            _checked(engine, "config", f"--label={label}", "--cmd=/bin/bash", container)
            _checked(engine, "commit", container, image)
        finally:
            engine.call("rm", container)
    else:
        _checked(engine, "import", f"--change=LABEL {label}", '--change=CMD ["/bin/bash"]', str(tar), image)


def _checked(engine: Engine, *words: str) -> str:
    ran = engine.call(*words, timeout=600)
    if ran.returncode:
        raise BakeError(f"{engine.name} {words[0]} failed: {ran.stderr.strip()}")
    return ran.stdout.strip()
