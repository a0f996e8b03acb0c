"""Takes out of a Python environment what a sidecar never uses, and compiles what it does.

Standard library only: it runs in the image's build, before anything is installed that it could import.
"""

import argparse
import compileall
import os
import py_compile
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SPLIT_LIBRARIES = ".libs"  # shared libraries whose headers were rewritten for the wheel: stripping breaks them
_MEGABYTE = 1e6


@dataclass(frozen=True)
class Left:
    """Something that is left out of an environment.

    Attributes:
        name: what `--keep` calls it, and docs/image.md.
        patterns: of files or directories, from site-packages.
        but: packages that need theirs.

    """

    name: str
    patterns: tuple[str, ...]
    but: tuple[str, ...] = ()


LEFT_OUT = (
    Left("claude-code", ("claude_agent_sdk/_bundled/claude*",)),
    Left("pip", ("pip", "pip-*.dist-info", "../../../bin/pip*")),
    # numpy.testing, which others import, takes a type from there.
    Left("tests", ("**/tests",), but=("numpy",)),
    Left("onnxruntime-c-library", ("onnxruntime/capi/libonnxruntime.so*",)),
    Left("litellm-proxy-pages", ("litellm/proxy/_experimental/out",)),
    Left("sources-in-c", tuple(f"**/*.{end}" for end in ("c", "cc", "cpp", "h", "hpp", "pyx", "pxd", "pxi", "cu"))),
    Left("torch-headers", ("torch/include", "torch/share/cmake", "torch/test", "torch/**/*.a")),
    Left("type-stubs", ("**/*.pyi",)),
    Left("activation-scripts", ("../../../bin/[aA]ctivate*", "../../../install.log")),
)
# Compiled by the interpreter each time it is imported, which is seldom or never: its bytecode would be as large again.
UNCOMPILED = re.compile(
    r"/(litellm/proxy|claude_agent_sdk|transformers/models/(?!(?:auto|bert|encoder_decoder|align)/)[^/]+)/"
)


def site_packages(environment: Path) -> Path:
    """Return an environment's package directory. Raises SystemExit where it is none."""
    for found in environment.glob("lib/python3*/site-packages"):
        return found
    raise SystemExit(f"{environment} is no Python environment; expected lib/python3*/site-packages in it")


def matches(packages: Path, left: Left) -> Iterator[Path]:
    """Yield what there is of something to be left out."""
    for pattern in left.patterns:
        for path in sorted(packages.glob(pattern)):
            if not (len(path.parts) > len(packages.parts) and path.parts[len(packages.parts)] in left.but):
                yield path


def size(path: Path) -> int:
    """Return the bytes below a path, those of a link not counted."""
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):
        return sum(size(Path(entry.path)) for entry in os.scandir(path))
    return 0 if stat.S_ISLNK(status.st_mode) else status.st_size


def remove(packages: Path, left: Left) -> int:
    """Remove it, and return the bytes that this freed."""
    freed = 0
    for path in list(matches(packages, left)):
        if not path.exists() and not path.is_symlink():
            continue  # below something that went before
        freed += size(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return freed


def strip(packages: Path) -> int:
    """Take the debugging symbols out of extension modules, and return the bytes that this freed."""
    freed = 0
    for path in sorted(packages.rglob("*.so*")):
        if (
            path.is_symlink()
            or not path.is_file()
            or not re.search(r"\.so(\.\d+)*$", path.name)
            or any(part.endswith(_SPLIT_LIBRARIES) for part in path.parts)
        ):
            continue
        before = path.stat().st_size
        subprocess.run(["strip", "--strip-unneeded", path], check=True)  # noqa: S607 - the builder's own
        freed += before - path.stat().st_size
    return freed


def compile_all(root: Path, installed_at: str | None = None, uncompiled: re.Pattern[str] | None = UNCOMPILED) -> int:
    """Write bytecode that is valid whatever happens to the sources' times, and return its bytes.

    An image's build may reset times, and a read-only root cannot mend bytecode that went stale.
    """
    for stale in list(root.rglob("__pycache__")):
        shutil.rmtree(stale)
    # Bytecode that the compiling processes write for themselves meanwhile would be taken for done.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # Some packages ship templates and sources for other versions, which do not compile: quiet, and not a failure.
    compileall.compile_dir(
        root,
        maxlevels=64,
        force=True,
        quiet=2,
        rx=uncompiled,
        workers=0,
        stripdir=str(root) if installed_at else None,
        prependdir=installed_at,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return sum(path.stat().st_size for path in root.rglob("*.pyc"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Slim an environment, compile it, and print what each step changed, in megabytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--bytecode-only", action="store_true", help="a directory of modules: compile them, keep all")
    parser.add_argument("--all-bytecode", action="store_true", help="compile what is seldom imported too")
    parser.add_argument("--installed-at", help="where that directory will be, for tracebacks")
    parser.add_argument("--keep", action="append", default=[], choices=[left.name for left in LEFT_OUT])
    options = parser.parse_args(arguments)
    if options.bytecode_only:
        if not options.environment.is_dir():
            raise SystemExit(f"{options.environment} is no directory; expected one of modules")
        compile_all(options.environment, options.installed_at)
        return
    packages = site_packages(options.environment)
    for stale in list(packages.rglob("__pycache__")):
        shutil.rmtree(stale)
    changes = {left.name: -remove(packages, left) for left in LEFT_OUT if left.name not in options.keep}
    changes["debugging-symbols"] = -strip(packages)
    changes["bytecode"] = compile_all(packages, uncompiled=None if options.all_bytecode else UNCOMPILED)
    for name, change in changes.items():
        sys.stdout.write(f"{change / _MEGABYTE:+9.1f} MB  {options.environment.name}: {name}\n")
    sys.stdout.write(f"{size(options.environment) / _MEGABYTE:9.1f} MB  {options.environment.name}\n")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
