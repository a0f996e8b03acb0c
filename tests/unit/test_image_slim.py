"""An environment of a few small files, slimmed as the image's build does it: by a process, with a `strip` of our own."""

import importlib.util
import marshal
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bake.image import slim

SLIM = slim.__file__
PACKAGES = "lib/python3.13/site-packages"
STAYS = (
    "hindsight_api/main.py",
    "numpy/core.py",
    "numpy/tests/test_core.py",
    "numpy/testing/__init__.py",
    "onnxruntime/capi/onnxruntime_pybind11_state.so",
    "litellm/main.py",
    "torch/nn.py",
    "torch/bin/torch_shm_manager",
    "testsuite/x.py",
    "hindsight_api/py.typed",
)
GOES = (
    "claude_agent_sdk/_bundled/claude",
    "pip/__init__.py",
    "pip-25.1.dist-info/METADATA",
    "litellm/tests/test_main.py",
    "litellm/deep/tests/test_deep.py",
    "numpydoc/tests/test_doc.py",
    "onnxruntime/capi/libonnxruntime.so.1.32.0",
    "litellm/proxy/_experimental/out/index.html",
    "numpy/core.h",
    "numpy/core.pyi",
    "pandas/window.pyx",
    "torch/include/torch.h",
    "torch/share/cmake/x.cmake",
    "torch/lib/libtorch.a",
    "../../../bin/pip3.13",
    "../../../bin/activate.fish",
    "../../../bin/Activate.ps1",
    "../../../install.log",
)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that is the whole PATH: its `strip` empties files, and writes them down."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "strip").write_text('#!/bin/sh\necho "$*" >> "$0.calls"\n: > "$2"\n')
    (directory / "strip").chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return directory


def environment(root: Path, *files: str) -> Path:
    """Make an environment with these files, from its package directory, and return that directory."""
    packages = root / PACKAGES
    packages.mkdir(parents=True)
    (root / "bin").mkdir()
    for name in files:
        path = Path(os.path.normpath(packages / name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n")
    return packages


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", SLIM, *map(str, arguments)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    return ran


def bytecode(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


def test_what_is_never_used_goes_and_the_rest_stays(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", *STAYS, *GOES)
    run(tmp_path / "env")
    assert [name for name in STAYS if not (packages / name).is_file()] == []
    assert [name for name in GOES if (packages / name).exists()] == []
    assert not (packages / "litellm/tests").exists()
    assert not (packages / "pip").exists()
    assert (tmp_path / "env/bin").is_dir()


def test_claude_code_can_be_kept(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "claude_agent_sdk/_bundled/claude", "pip/__init__.py")
    told = run(tmp_path / "env", "--keep", "claude-code").stdout
    assert (packages / "claude_agent_sdk/_bundled/claude").is_file()
    assert not (packages / "pip").exists()
    assert "claude-code" not in told


def test_only_what_has_a_name_can_be_kept(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "pip/__init__.py")
    assert "invalid choice: 'everything'" in run(tmp_path / "env", "--keep", "everything", code=2).stderr
    assert (packages / "pip").is_dir()


def test_a_link_goes_and_what_it_names_stays(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "onnxruntime/capi/libonnxruntime.so.1.32.0", "real/model.py")
    (packages / "onnxruntime/capi/libonnxruntime.so.1").symlink_to("libonnxruntime.so.1.32.0")
    (packages / "other").mkdir()
    (packages / "other/tests").symlink_to("../real")
    run(tmp_path / "env")
    assert list((packages / "onnxruntime/capi").iterdir()) == []
    assert not (packages / "other/tests").is_symlink()
    assert (packages / "real/model.py").is_file()


def test_extension_modules_are_stripped_but_not_split_libraries_and_links(tmp_path: Path, programs: Path) -> None:
    packages = environment(
        tmp_path / "env",
        "numpy/core.cpython-313-x86_64-linux-gnu.so",
        "torch/lib/libtorch_cpu.so",
        "pgvector/libpq.so.5",
        "numpy.libs/libopenblas64.so",
        "scipy.libs/inner/libgfortran.so.5",
        "numpy/core.py",
    )
    (packages / "torch/lib/libtorch.so").symlink_to("libtorch_cpu.so")
    run(tmp_path / "env")
    assert (programs / "strip.calls").read_text().splitlines() == [
        f"--strip-unneeded {packages}/numpy/core.cpython-313-x86_64-linux-gnu.so",
        f"--strip-unneeded {packages}/pgvector/libpq.so.5",
        f"--strip-unneeded {packages}/torch/lib/libtorch_cpu.so",
    ]


def test_a_name_that_only_has_so_in_it_is_not_stripped(tmp_path: Path, programs: Path) -> None:
    environment(tmp_path / "env", "litellm/prices.sorted.json", "x/data.source/y.py")
    run(tmp_path / "env")
    assert not (programs / "strip.calls").exists()


def test_each_change_is_told_in_megabytes(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "hindsight_api/main.py")
    (packages / "claude_agent_sdk/_bundled").mkdir(parents=True)
    (packages / "claude_agent_sdk/_bundled/claude").write_bytes(b"x" * 2_000_000)
    (packages / "x.so").write_bytes(b"x" * 1_000_000)
    told = [line.split() for line in run(tmp_path / "env").stdout.splitlines()]
    assert [line[-1] for line in told] == [
        *(left.name for left in slim.LEFT_OUT),
        "debugging-symbols",
        "bytecode",
        "env",
    ]
    changes = {line[-1]: line[0] for line in told}
    assert (changes["claude-code"], changes["debugging-symbols"], changes["tests"]) == ("-2.0", "-1.0", "+0.0")
    assert changes["env"] == "0.0"


def test_bytecode_stays_valid_whatever_happens_to_the_source(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "some/module.py")
    source = packages / "some/module.py"
    source.write_text("ANSWER = 'of the build'\n")
    run(tmp_path / "env")
    compiled = bytecode(source).read_bytes()
    # PEP 552: made from a hash, and the source is not looked at.
    assert compiled[4:8] == b"\x01\x00\x00\x00"
    source.write_text("ANSWER = 'of another time'\n")
    os.utime(source, (0, 0))
    words = [sys.executable, "-c", "from some.module import ANSWER; print(ANSWER)"]
    told = subprocess.run(words, env={"PYTHONPATH": str(packages)}, capture_output=True, text=True, check=True).stdout
    assert told == "of the build\n"
    assert bytecode(source).read_bytes() == compiled


def test_stale_bytecode_goes(tmp_path: Path) -> None:
    packages = environment(
        tmp_path / "env", "some/__pycache__/gone.cpython-313.pyc", "pandas/__pycache__/x.cpython-313.pyc", "some/x.py"
    )
    run(tmp_path / "env")
    assert [path.name for path in packages.rglob("*.pyc")] == [bytecode(Path("x.py")).name]


def test_seldom_imported_packages_have_no_bytecode(tmp_path: Path) -> None:
    compiled = (
        "litellm/main.py",
        "transformers/models/__init__.py",
        "transformers/models/auto/modeling_auto.py",
        "transformers/models/bert/modeling_bert.py",
        "transformers/pipelines/base.py",
    )
    left = (
        "litellm/proxy/server.py",
        "claude_agent_sdk/client.py",
        "transformers/models/llama/modeling_llama.py",
        "transformers/models/bert_japanese/x.py",
    )
    packages = environment(tmp_path / "env", *compiled, *left)
    run(tmp_path / "env")
    assert [name for name in compiled if not bytecode(packages / name).is_file()] == []
    assert [name for name in left if bytecode(packages / name).exists()] == []


def test_all_bytecode_where_it_is_wanted(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "transformers/models/llama/modeling_llama.py")
    run(tmp_path / "env", "--all-bytecode")
    assert bytecode(packages / "transformers/models/llama/modeling_llama.py").is_file()


def test_a_name_that_only_begins_like_one_of_them_is_compiled(tmp_path: Path) -> None:
    names = ("openai/_extras/pandas_proxy.py", "litellm/proxy_auth/__init__.py")
    packages = environment(tmp_path / "env", *names)
    run(tmp_path / "env")
    assert [name for name in names if not bytecode(packages / name).is_file()] == []


def test_a_source_that_does_not_compile_is_no_failure(tmp_path: Path) -> None:
    packages = environment(tmp_path / "env", "good.py", "template.py")
    (packages / "template.py").write_text("class {{ name }}:\n")
    ran = run(tmp_path / "env")
    assert bytecode(packages / "good.py").is_file()
    assert ran.stderr == ""


def test_an_overlay_has_the_names_that_its_files_will_have(tmp_path: Path, programs: Path) -> None:
    overlay = tmp_path / "overlay"
    packages = environment(overlay / "opt/sidecar", "sidecar/cli.py", "sidecar/tests/test_cli.py", "sidecar/x.so")
    assert run("--bytecode-only", overlay, "--installed-at", "/").stdout == ""
    code = marshal.loads(bytecode(packages / "sidecar/cli.py").read_bytes()[16:])  # noqa: S302 - just written
    assert code.co_filename == f"/opt/sidecar/{PACKAGES}/sidecar/cli.py"
    # And nothing but bytecode changes.
    assert (packages / "sidecar/tests/test_cli.py").is_file()
    assert not (programs / "strip.calls").exists()


def test_without_another_place_the_names_are_those_of_here(tmp_path: Path) -> None:
    (tmp_path / "python3.13").mkdir()
    (tmp_path / "python3.13/os.py").write_text("")
    run("--bytecode-only", tmp_path / "python3.13")
    code = marshal.loads(bytecode(tmp_path / "python3.13/os.py").read_bytes()[16:])  # noqa: S302 - just written
    assert code.co_filename == f"{tmp_path}/python3.13/os.py"


def test_a_directory_that_is_no_environment_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for directory in (tmp_path / "x", tmp_path / "nowhere"):
        assert run(directory, code=1).stderr == (
            f"{directory} is no Python environment; expected lib/python3*/site-packages in it\n"
        )


def test_nothing_to_compile_is_a_sentence(tmp_path: Path) -> None:
    told = run("--bytecode-only", tmp_path / "nowhere", code=1).stderr
    assert re.fullmatch(r".*/nowhere .+\n", told)


@pytest.mark.parametrize("spelling", ["env", "link"])
def test_an_environment_may_be_named_in_other_ways(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = environment(tmp_path / "env", "litellm/tests/x.py")
    (tmp_path / "link").symlink_to(tmp_path / "env")
    monkeypatch.chdir(tmp_path)
    run(spelling)
    assert not (packages / "litellm/tests").exists()


def test_it_needs_the_standard_library_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-I", "-S", SLIM, "--help"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=False).returncode == 0
