"""What is asked for, and what an engine is told for it; the machine's certificates and pip settings are out of sight."""

import re
from pathlib import Path

import pytest

from bake.errors import UsageError
from bake.image import plan
from bake.image.plan import ROOT, Asked, base_of, faults, make, own_version, tag_of, versions
from bake.lock import read_lock

CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")
TORCH = Asked(flavor="torch", torch_index="https://wheels.example/cpu")
EVERYTHING = Asked(
    flavor="torch", reranker=True, keep_claude_cli=True, torch_index="https://wheels.example/cpu", tag="mine:1"
)


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_CA_BUNDLES", ())
    monkeypatch.setattr(plan, "_PIP_CONFIGURATIONS", ())


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (Asked(version="1.0.9"), "HINDSIGHT_VERSION is '1.0.9'; there are locks for 1.1.0, 0.8.4"),
        (Asked(version=""), "HINDSIGHT_VERSION is ''; there are locks for 1.1.0, 0.8.4"),
        (Asked(flavor="gguf"), "FLAVOR is 'gguf'; expected onnx or torch"),
        (Asked(suite="sid"), "SUITE is 'sid'; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)"),
        (
            Asked(stand_in=True, model_dir="/"),
            "STAND_IN and MODEL_DIR are both set; the stand-in comes from the package index, so set one of them",
        ),
        (
            Asked(model_dir="/no/such"),
            "MODEL_DIR is '/no/such', which is no directory; name the one that has the model's files",
        ),
        (
            Asked(flavor="torch"),
            "FLAVOR is torch, and the package index has only CUDA builds of it for most machines, some three gigabytes; give the address of PyTorch's own index of CPU wheels as TORCH_INDEX",
        ),
        (
            Asked(model_dir="/", reranker=True),
            "MODEL_DIR is '/', and RERANKER needs one directory for each model in it; missing: bge-small-en-v1.5, ms-marco-MiniLM-L6-v2",
        ),
        (
            Asked(version="0.8.4", reranker=True),
            "RERANKER is set, and hindsight-api 0.8.4 loads one with torch alone; set FLAVOR=torch",
        ),
    ],
)
def test_a_refusal_says_what_was_seen_and_what_to_do(asked: Asked, sentence: str) -> None:
    assert faults(asked, {}) == [sentence]
    with pytest.raises(UsageError) as caught:
        make(asked, {})
    assert str(caught.value) == sentence


def test_a_file_is_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("")
    [sentence] = faults(Asked(model_dir=str(tmp_path / "model.onnx")), {})
    assert "which is no directory" in sentence


def test_a_directory_for_each_model_is_enough_for_the_reranker(tmp_path: Path) -> None:
    asked = Asked(model_dir=str(tmp_path), reranker=True)
    (tmp_path / plan.MODEL).mkdir()
    assert [sentence.rpartition("; ")[2] for sentence in faults(asked, {})] == ["missing: ms-marco-MiniLM-L6-v2"]
    (tmp_path / plan.RERANKER).mkdir()
    assert faults(asked, {}) == []


def test_all_refusals_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        make(Asked(version="2", flavor="gguf", suite="sid", stand_in=True, model_dir="/no/such"), {})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "HINDSIGHT_VERSION",
        "FLAVOR",
        "SUITE",
        "STAND_IN",
        "MODEL_DIR",
    ]


@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(version="0.8.4"),
        Asked(suite="trixie"),
        Asked(stand_in=True),
        Asked(reranker=True),
        Asked(model_dir="/"),
        TORCH,
        EVERYTHING,
        Asked(version="0.8.4", flavor="torch", torch_index="https://wheels.example/cpu", reranker=True),
    ],
)
def test_what_can_be_asked_for(asked: Asked) -> None:
    assert faults(asked, {}) == []


def test_every_lock_is_a_version_and_the_newest_is_the_default() -> None:
    locks = {path.name for path in (ROOT / "locks").glob("hindsight-api-*.txt")}
    assert {f"hindsight-api-{version}-{flavor}.txt" for version in versions() for flavor in plan.FLAVORS} == locks
    assert Asked().version == versions()[0]


def test_versions_are_ordered_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").mkdir()
    for version in ("0.8.4", "1.1.0", "0.10.0"):
        (tmp_path / f"locks/hindsight-api-{version}-onnx.txt").write_text("")
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    assert versions() == ["1.1.0", "0.10.0", "0.8.4"]


def test_without_a_version_of_its_own_it_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sidecar").mkdir()
    (tmp_path / "sidecar/__init__.py").write_text('"""No version."""\n')
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    with pytest.raises(UsageError, match="has no __version__; run this in a checkout"):
        own_version()


def test_the_baked_models_are_in_the_lock() -> None:
    models = read_lock(None).models
    assert {plan.MODEL, plan.STAND_IN, plan.RERANKER} <= set(models)


@pytest.mark.parametrize(
    ("asked", "tag"),
    [
        (Asked(), "hindsight-sidecar:1.1.0-onnx"),
        (Asked(version="0.8.4"), "hindsight-sidecar:0.8.4-onnx"),
        (TORCH, "hindsight-sidecar:1.1.0-torch"),
        (Asked(suite="trixie"), "hindsight-sidecar:1.1.0-onnx-trixie"),
        (Asked(reranker=True), "hindsight-sidecar:1.1.0-onnx-reranker"),
        (Asked(stand_in=True), "hindsight-sidecar:1.1.0-onnx-standin"),
        (Asked(keep_claude_cli=True), "hindsight-sidecar:1.1.0-onnx-claude"),
        (
            Asked(suite="trixie", reranker=True, keep_claude_cli=True, stand_in=True),
            "hindsight-sidecar:1.1.0-onnx-trixie-reranker-claude-standin",
        ),
    ],
)
def test_the_name_says_what_differs(asked: Asked, tag: str) -> None:
    assert tag_of(asked) == tag
    assert make(asked, {}).tag == tag


def test_a_name_of_ones_own_wins() -> None:
    assert make(EVERYTHING, {}).tag == "mine:1"


@pytest.mark.parametrize(
    ("asked", "base"),
    [
        (Asked(), "docker.io/library/debian:forky-slim"),
        (Asked(suite="trixie"), "docker.io/library/debian:trixie-slim"),
        (Asked(base="registry.example/debian:1"), "registry.example/debian:1"),
    ],
)
def test_the_base_is_the_suites_or_the_one_asked_for(asked: Asked, base: str) -> None:
    planned = make(asked, {})
    assert base_of(asked) == base
    assert planned.base == planned.arguments["BASE"] == planned.labels["org.opencontainers.image.base.name"] == base


def test_the_arguments_of_the_default_image() -> None:
    assert make(Asked(), {}).arguments == {
        "BASE": "docker.io/library/debian:forky-slim",
        "POSTGRES": "18",
        "PYTHON": "python3.13",
        "HINDSIGHT_VERSION": "1.1.0",
        "FLAVOR": "onnx",
        "MODEL": "bge-small-en-v1.5",
    }


def test_what_else_is_asked_for_is_an_argument_too() -> None:
    asked = Asked(
        version="0.8.4",
        flavor="torch",
        suite="trixie",
        python="python3.14",
        reranker=True,
        keep_claude_cli=True,
        torch_index="https://wheels.example/cpu",
    )
    assert make(asked, {"HF_ENDPOINT": "https://hub.example"}).arguments == {
        "BASE": "docker.io/library/debian:trixie-slim",
        "POSTGRES": "17",
        "PYTHON": "python3.14",
        "HINDSIGHT_VERSION": "0.8.4",
        "FLAVOR": "torch",
        "MODEL": "bge-small-en-v1.5",
        "RERANKER": "1",
        "KEEP_CLAUDE_CLI": "1",
        "TORCH_INDEX": "https://wheels.example/cpu",
        "HF_ENDPOINT": "https://hub.example",
    }


@pytest.mark.parametrize("asked", [Asked(stand_in=True), Asked(model_dir="/")])
def test_the_hub_is_no_part_of_an_image_that_does_not_need_it(asked: Asked) -> None:
    assert "HF_ENDPOINT" not in make(asked, {"HF_ENDPOINT": "https://hub.example"}).arguments


def test_a_reranker_beside_the_stand_in_comes_from_the_hub() -> None:
    planned = make(Asked(stand_in=True, reranker=True), {"HF_ENDPOINT": "https://hub.example"})
    assert planned.arguments["HF_ENDPOINT"] == "https://hub.example"


def test_the_stand_in_is_another_model() -> None:
    planned = make(Asked(stand_in=True), {})
    assert planned.arguments["MODEL"] == "all-MiniLM-L6-v2"
    assert planned.labels["hindsight-sidecar.model"] == "all-MiniLM-L6-v2"
    assert planned.labels["hindsight-sidecar.stand-in"] == "true"


def test_labels() -> None:
    planned = make(Asked(), {}, revision="1f" * 20, base_digest="sha256:" + "e" * 64)
    assert planned.labels == {
        "org.opencontainers.image.title": "hindsight-sidecar",
        "org.opencontainers.image.description": "PostgreSQL, pgvector and hindsight-api as one supervised memory sidecar, offline at run time",
        "org.opencontainers.image.licenses": "MIT",
        "org.opencontainers.image.version": own_version(),
        "org.opencontainers.image.revision": "1f" * 20,
        "org.opencontainers.image.base.name": "docker.io/library/debian:forky-slim",
        "org.opencontainers.image.base.digest": "sha256:" + "e" * 64,
        "hindsight-sidecar.hindsight-api": "1.1.0",
        "hindsight-sidecar.flavor": "onnx",
        "hindsight-sidecar.model": "bge-small-en-v1.5",
        "hindsight-sidecar.stand-in": "false",
    }


def test_what_is_not_known_is_no_label() -> None:
    assert {"org.opencontainers.image.revision", "org.opencontainers.image.base.digest"}.isdisjoint(
        make(Asked(), {}).labels
    )


def test_given_weights_are_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    assert make(Asked(model_dir="weights"), {}).contexts == {"weights": tmp_path / "weights"}
    assert make(Asked(), {}).contexts == {}


def test_local_wheels_are_a_context_for_torch_alone(tmp_path: Path) -> None:
    environ = {"PIP_FIND_LINKS": str(tmp_path)}
    assert make(TORCH, environ).contexts == {"wheels": tmp_path}
    assert make(Asked(), environ).contexts == {}


def test_with_local_wheels_torch_needs_no_index(tmp_path: Path) -> None:
    planned = make(Asked(flavor="torch"), {"PIP_FIND_LINKS": str(tmp_path)})
    assert planned.contexts == {"wheels": tmp_path}
    assert "TORCH_INDEX" not in planned.arguments


@pytest.mark.parametrize("links", ["", "wheels", "/no/such/directory", "https://wheels.example/cpu"])
def test_other_links_are_no_context(links: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    environ = {"PIP_FIND_LINKS": links}
    assert make(TORCH, environ).contexts == {}
    assert len(faults(Asked(flavor="torch"), environ)) == 1


def test_secrets(tmp_path: Path) -> None:
    for name in ("bundle.pem", "pip.conf"):
        (tmp_path / name).write_text("")
    environ = {
        "SSL_CERT_FILE": str(tmp_path / "bundle.pem"),
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "HF_TOKEN": "hf_very_secret",
    }
    planned = make(Asked(), environ)
    assert planned.secrets == {
        "ca": str(tmp_path / "bundle.pem"),
        "pip": str(tmp_path / "pip.conf"),
        "hub_token": "env:HF_TOKEN",
    }
    assert "hf_very_secret" not in repr(planned)


def test_without_any_there_are_no_secrets() -> None:
    assert make(Asked(), {"HF_TOKEN": "", "SSL_CERT_FILE": "/no/such", "PIP_CONFIG_FILE": "/no/such"}).secrets == {}


def test_the_machines_own_files_are_secrets_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("second.pem", "pip.conf", "named.pem"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(plan, "_CA_BUNDLES", ("/no/such/first.pem", str(tmp_path / "second.pem")))
    monkeypatch.setattr(plan, "_PIP_CONFIGURATIONS", ("~/pip.conf",))
    assert make(Asked(), {}).secrets == {"ca": str(tmp_path / "second.pem"), "pip": str(tmp_path / "pip.conf")}
    named = {"SSL_CERT_FILE": str(tmp_path / "named.pem")}
    assert make(Asked(), named).secrets["ca"] == str(tmp_path / "named.pem")


@pytest.mark.parametrize("named", ["/dev/null", "/no/such"])
def test_where_a_pip_configuration_is_named_no_other_is_lent(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("")
    monkeypatch.setattr(plan, "_PIP_CONFIGURATIONS", (str(tmp_path / "pip.conf"),))
    assert make(Asked(), {"PIP_CONFIG_FILE": named}).secrets == {}


def test_the_containerfile_has_every_argument_and_no_other() -> None:
    passed = make(EVERYTHING, {"HF_ENDPOINT": "https://hub.example"}).arguments
    assert set(re.findall(r"^ARG (\w+)", CONTAINERFILE, re.MULTILINE)) == set(passed)


@pytest.mark.parametrize(
    "path", ["Containerfile", "bake/image/inventory.Containerfile", "bake/image/naive.Containerfile"]
)
def test_without_arguments_it_is_the_default_image(path: str) -> None:
    passed = make(Asked(), {}).arguments
    text = (ROOT / path).read_text(encoding="utf-8")
    defaults = set(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    assert defaults == {(name, passed.get(name, "")) for name, _ in defaults}


def test_the_containerfile_has_every_context_and_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"SSL_CERT_FILE": str(tmp_path / "file"), "PIP_CONFIG_FILE": str(tmp_path / "file"), "HF_TOKEN": "x"}
    planned = make(Asked(flavor="torch", model_dir=str(tmp_path)), environ | {"PIP_FIND_LINKS": str(tmp_path)})
    assert set(re.findall(r"^FROM scratch AS (\w+)$", CONTAINERFILE, re.MULTILINE)) == set(planned.contexts)
    assert set(re.findall(r"type=secret,id=(\w+)", CONTAINERFILE)) == set(planned.secrets)
