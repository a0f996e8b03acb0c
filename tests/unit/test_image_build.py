"""The build with engines made of small shell scripts, which answer what real ones did; and its command line."""

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bake.errors import BakeError
from bake.image import __main__ as command_line
from bake.image import build, plan
from bake.image.build import (
    arguments,
    base_digest,
    directory_of,
    explain,
    image_id,
    image_size,
    layers,
    of_image,
    summary,
)
from bake.image.engine import Engine
from bake.image.plan import ROOT, Asked, Plan
from bake.image.progress import Progress

BASE = "docker.io/library/debian:forky-slim"
IMAGE = "hindsight-sidecar:1.1.0-onnx"
ID = "b95ad3164c7fc10c3ea5b15af24dd5cdd9e26a9e8eef9a0b7715ccf52d998871"
DIGEST = "sha256:eea974491fd979629f2ee794d2ca35c96ada02b8a5e4ab96bc3efe8602aa27ab"
PLAN = Plan(
    tag=IMAGE,
    base=BASE,
    arguments={"BASE": BASE, "FLAVOR": "torch"},
    labels={"hindsight-sidecar.flavor": "torch"},
    contexts={"weights": Path("/srv/weights")},
    secrets={"ca": "/etc/ssl/bundle.pem", "hub_token": "env:HF_TOKEN"},
)
BUILT = replace(PLAN, labels={plan.REVISION: "1f", "stand-in": "true"}, contexts={})
HUB = (
    "hindsight-bake: the model hub cannot be reached: tried to get the file list of BAAI/bge-small-en-v1.5 at 5c38ec7 "
    "from https://huggingface.co (ConnectError: Name or service not known); set HF_ENDPOINT to a hub that can be "
    "reached from here, or give the files with --from-dir, or ask for the stand-in all-MiniLM-L6-v2 by name"
)
HUB_EXPLAINED = (
    "the model hub cannot be reached: tried to get the file list of BAAI/bge-small-en-v1.5 at 5c38ec7 "
    "from https://huggingface.co (ConnectError: Name or service not known); "
    "give the model's files with MODEL_DIR=DIR, or ask for the stand-in by name with STAND_IN=1"
)
PODMAN_HISTORY = (
    '0 B|/bin/sh -c #(nop) LABEL "hindsight-sidecar.stand-in"="true"\n'
    '0 B|/bin/sh -c #(nop) CMD ["hindsight-sidecar", "serve"]\n'
    "0 B|/bin/sh -c #(nop) ARG POSTGRES\n"
    "1 MB|/bin/sh -c #(nop) COPY dir:75d9906674279493f4cb03fc5c3fac43697267628c5f259479a44479d59f5770 in / \n"
    "23.6 MB|/bin/sh -c #(nop) COPY dir:24a931c808c2de26a63cc27acaaa80e4fd2999144df9f00c27cac3961a9d346a in /opt/models/ \n"
    "167 MB|/bin/sh -c #(nop) COPY dir:4b1f3643779e39b1183ba0a9e873f716dc9df638ceadc82cf8e2ca0e6d427cd3 in / \n"
)
DOCKER_HISTORY = """\
0B|HEALTHCHECK &{["CMD" "hindsight-sidecar" "health"] "10s" "5s" "5m0s" "0s" '\\x03'}
0B|ENV PATH=/opt/sidecar/bin:/usr/lib/postgresql/18/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
0B|ARG POSTGRES=18
1.02MB|COPY /overlay/ / # buildkit
23.6MB|COPY /opt/models/ /opt/models/ # buildkit
167MB|COPY / / # buildkit
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that is the whole PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("CONTAINERS_CONF", raising=False)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    return directory


def program(name: str, script: str) -> Path:
    path = Path(os.environ["PATH"], name)
    path.write_text(f'#!/bin/sh\necho "$*" >> "$0.calls"\n{script}\n')
    path.chmod(0o755)
    return path


def calls(name: str) -> list[str]:
    path = Path(os.environ["PATH"], f"{name}.calls")
    return path.read_text().splitlines() if path.exists() else []


def answering(name: str, answer: Any) -> Engine:
    """Return an engine that answers everything with a text, or a document."""
    path = program(name, 'exec /bin/cat "$0.answer"')
    text = answer if isinstance(answer, str) else json.dumps(answer)
    path.with_name(f"{name}.answer").write_text(text)
    return Engine(name, str(path))


def builder(name: str = "podman", build: str = "") -> Engine:
    """Return an engine that has images and builds them, and says so."""
    described = json.dumps([{"Id": ID, "Size": 1018990781, "Config": {}, "RepoDigests": [f"debian@{DIGEST}"]}])
    path = program(
        name,
        f"case $1 in\ninspect) echo '{described}' ;;\n"
        f"history) echo '167 MB|/bin/sh -c #(nop) COPY dir:4b1f3643779e in / ' ;;\nbuild)\n"
        f"echo '[1/1] STEP 1/2: FROM {BASE} AS tools'\n"
        f"echo '    sidecar: unpacking'\n"
        f'for word; do case $word in --output=*) echo "{{}}" > "${{word##*dest=}}/sidecar.cdx.json" ;; esac; done\n'
        f"{build}\n;;\nesac",
    )
    return Engine(name, str(path))


@pytest.mark.parametrize("name", ["podman", "buildah"])
def test_the_words_for_podman_and_buildah(name: str) -> None:
    assert arguments(Engine(name, name), PLAN) == [
        "build",
        "--network=host",
        "--pull=never",
        "--format=docker",
        "--layers",
        f"--build-arg=BASE={BASE}",
        "--build-arg=FLAVOR=torch",
        "--build-context=weights=/srv/weights",
        "--secret=id=ca,src=/etc/ssl/bundle.pem",
        "--secret=id=hub_token,env=HF_TOKEN",
    ]


def test_the_words_for_docker_have_nothing_of_podmans() -> None:
    assert arguments(Engine("docker", "docker"), PLAN) == [
        "build",
        "--network=host",
        "--progress=plain",
        f"--build-arg=BASE={BASE}",
        "--build-arg=FLAVOR=torch",
        "--build-context=weights=/srv/weights",
        "--secret=id=ca,src=/etc/ssl/bundle.pem",
        "--secret=id=hub_token,env=HF_TOKEN",
    ]


def test_the_image_is_built_and_then_its_inventory(tmp_path: Path) -> None:
    into = tmp_path / "dist/x"
    build.build(builder(), PLAN, into)
    image, inspected, inventory = calls("podman")
    assert image.startswith("build --network=host ")
    assert image.endswith(
        f"--label=hindsight-sidecar.flavor=torch --tag={IMAGE} --file={ROOT}/Containerfile {tmp_path}"
    )
    assert inspected == f"inspect --type image {IMAGE}"
    assert inventory.endswith(
        f"--build-arg=IMAGE={ID} --build-arg=IMAGE_ID={ID} --output=type=local,dest={into} "
        f"--file={ROOT}/bake/image/inventory.Containerfile {tmp_path}"
    )
    assert "--tag" not in inventory
    assert "--label" not in inventory


def test_the_log_has_all_and_a_person_sees_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = build.build(builder(build="echo '--> 36937cdd42a'; echo 'a warning' >&2"), PLAN, tmp_path / "x")
    log = f"[1/1] STEP 1/2: FROM {BASE} AS tools\n    sidecar: unpacking\n--> 36937cdd42a\na warning\n"
    assert (tmp_path / "x/build.log").read_text() == log
    assert (tmp_path / "x/inventory.log").read_text() == log
    assert capsys.readouterr().out == "==> tools\n    sidecar: unpacking\n    a warning\n" * 2
    assert list(progress.seconds) == ["tools"]


def test_an_older_inventory_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/older.cdx.json").write_text("{}")
    build.build(builder(), PLAN, tmp_path / "x")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "build.log",
        "inventory.log",
        "sidecar.cdx.json",
    ]


def test_a_build_that_stops_says_where_and_has_no_inventory(tmp_path: Path) -> None:
    with pytest.raises(BakeError) as caught:
        build.build(builder(build="echo 'Error: no space left on device' >&2; exit 125"), PLAN, tmp_path / "x")
    assert str(caught.value).splitlines() == [
        f"Containerfile could not be built; the end of {tmp_path}/x/build.log:",
        f"    [1/1] STEP 1/2: FROM {BASE} AS tools",
        "        sidecar: unpacking",
        "    Error: no space left on device",
    ]
    assert len(calls("podman")) == 1


def test_an_inventory_that_stops_is_named_too(tmp_path: Path) -> None:
    podman = builder(build='case "$*" in *--output=*) exit 1 ;; esac')
    with pytest.raises(
        BakeError, match=rf"^inventory\.Containerfile could not be built; the end of {tmp_path}/x/inventory"
    ):
        build.build(podman, PLAN, tmp_path / "x")


def test_what_is_no_utf8_stops_no_build(tmp_path: Path) -> None:
    build.build(builder(build="printf 'caf\\351\\n'"), PLAN, tmp_path / "x")
    assert "caf\N{REPLACEMENT CHARACTER}" in (tmp_path / "x/build.log").read_text(encoding="utf-8")


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"[4/10] STEP 11/11: RUN x\n{HUB}\nError: building at STEP: exit status 3\n")
    assert explain(tmp_path / "log") == HUB_EXPLAINED


def test_so_it_is_with_docker(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        f'#9 [snapshot 7/7] RUN x\n#9 3.421 {HUB}\n#9 ERROR: process "x" did not complete successfully: exit code: 3\n'
        f"------\n > [snapshot 7/7] RUN x:\n3.421 {HUB}\n------\n"
    )
    assert explain(tmp_path / "log") == HUB_EXPLAINED


@pytest.mark.parametrize(
    "line",
    [
        "no sha256 is pinned for, and no hub was asked about: model.onnx",
        "hindsight-bake: usage: no model 'x'; the lock has bge-small-en-v1.5",
        "torch 2.9.0 is a CUDA build, and the image computes on the CPU; give the address of PyTorch's index",
    ],
)
def test_anything_else_is_the_end_of_the_log(line: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{number}\n" for number in range(1, 50)) + f"{line}\n")
    told = explain(tmp_path / "log").splitlines()
    assert told[0] == f"Containerfile could not be built; the end of {tmp_path}/log:"
    assert told[1:] == [*(f"    {number}" for number in range(26, 50)), f"    {line}"]


def test_layers_as_podman_tells_them() -> None:
    assert layers(answering("podman", PODMAN_HISTORY), IMAGE) == [
        ("167 MB", "/"),
        ("23.6 MB", "/opt/models/"),
        ("1 MB", "/"),
    ]
    assert calls("podman") == [f"history --no-trunc --format={{{{.Size}}}}|{{{{.CreatedBy}}}} {IMAGE}"]


def test_layers_as_docker_tells_them() -> None:
    assert layers(answering("docker", DOCKER_HISTORY), IMAGE) == [
        ("167MB", "/"),
        ("23.6MB", "/opt/models/"),
        ("1.02MB", "/"),
    ]


def test_buildah_tells_neither_layers_nor_size() -> None:
    buildah = answering("buildah", "")
    assert layers(buildah, IMAGE) == []
    assert image_size(buildah, IMAGE) is None
    assert calls("buildah") == []


@pytest.mark.parametrize("name", ["podman", "docker"])
def test_the_size_is_in_bytes(name: str) -> None:
    assert image_size(answering(name, [{"Id": ID, "Size": 1018990781}]), IMAGE) == 1018990781


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("podman", [{"Id": ID, "Digest": DIGEST}], ID),
        ("docker", [{"Id": f"sha256:{ID}", "RepoTags": [IMAGE]}], f"sha256:{ID}"),
        ("buildah", {"Type": "buildah 0.0.1", "FromImage": IMAGE, "FromImageID": ID, "ContainerID": ""}, ID),
    ],
)
def test_the_id(name: str, answer: Any, expected: str) -> None:
    assert image_id(answering(name, answer), IMAGE) == expected


@pytest.mark.parametrize(("name", "image"), [("podman", ID), ("buildah", ID), ("docker", IMAGE)])
def test_an_image_is_named_as_the_engine_knows_it_and_by_its_id(name: str, image: str) -> None:
    engine = answering(name, [{"Id": ID}])
    assert of_image(engine, IMAGE) == [f"--build-arg=IMAGE={image}", f"--build-arg=IMAGE_ID={ID}"]


@pytest.mark.parametrize("ask", [image_id, image_size, base_digest])
@pytest.mark.parametrize(
    "answer", ["echo 'Error: no such image' >&2; exit 125", "echo '[]'; echo 'Error: no such image' >&2"]
)
def test_an_image_that_is_not_here_is_a_sentence(ask: Callable[[Engine, str], object], answer: str) -> None:
    engine = Engine("podman", str(program("podman", answer)))
    with pytest.raises(BakeError, match=rf"^podman has no image {IMAGE}: Error: no such image$"):
        ask(engine, IMAGE)


MADE_HERE = {"hindsight-sidecar.base": "debian-archive"}


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("podman", [{"RepoDigests": [f"docker.io/library/debian@{DIGEST}"], "Config": {}}], DIGEST),
        ("docker", [{"RepoDigests": [f"debian@{DIGEST}"], "Config": {"Labels": None}}], DIGEST),
        ("docker", [{"RepoDigests": [], "Config": {"Labels": {}}}], ""),
        ("podman", [{"RepoDigests": None, "Config": None}], ""),
        ("podman", [{"RepoDigests": [f"localhost/x@{DIGEST}"], "Config": {"Labels": MADE_HERE}}], ""),
        ("buildah", {"FromImageDigest": DIGEST, "OCIv1": {"config": {}}}, DIGEST),
        ("buildah", {"FromImageDigest": DIGEST, "OCIv1": {"config": {"Labels": MADE_HERE}}}, ""),
    ],
)
def test_a_base_made_here_has_no_digest_of_a_registrys(name: str, answer: Any, expected: str) -> None:
    assert base_digest(answering(name, answer), BASE) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], "1f" * 20),
        (["1 .M N... 100644 100644 100644 2c5f259 2c5f259 README.md"], ""),
        (["? sidecar/new.py"], ""),
    ],
)
def test_the_revision_is_that_of_a_checkout_without_changed_and_new_files(told: list[str], expected: str) -> None:
    lines = [f"# branch.oid {'1f' * 20}", "# branch.head main", *told]
    program("git", f"printf '%s\\n' {shlex.join(lines)}")
    assert build.revision() == expected


def test_outside_of_a_checkout_there_is_no_revision() -> None:
    assert build.revision() == ""
    program("git", "echo 'fatal: not a git repository' >&2; exit 128")
    assert build.revision() == ""


def test_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    for name in ("sidecar.cdx.json", "debian.cdx.json"):
        (tmp_path / "x" / name).write_text("{}")
    progress = Progress(lambda: 0.0, {"tools": 8.04, "image": 131.96})
    assert summary(builder(), PLAN, progress, tmp_path / "x").splitlines() == [
        "image   hindsight-sidecar:1.1.0-onnx",
        "size    1019 MB",
        "layers",
        "     167 MB  /",
        "time",
        "      8.0 s  tools",
        "    132.0 s  image",
        "inside  x: debian.cdx.json, sidecar.cdx.json",
    ]
    assert "size    (buildah does not tell)" in summary(builder("buildah"), PLAN, progress, tmp_path / "x")


@pytest.mark.parametrize(
    ("tag", "directory"),
    [
        ("hindsight-sidecar:1.1.0-onnx", "1.1.0-onnx"),
        ("registry.example:5000/team/hindsight-sidecar:1.1.0-onnx", "1.1.0-onnx"),
        ("registry.example:5000/team/memory:7", "memory-7"),
        ("memory", "memory"),
    ],
)
def test_an_image_has_a_directory_of_its_own(tag: str, directory: str, tmp_path: Path) -> None:
    assert directory_of(tag) == tmp_path / "dist" / directory


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("build", "--engine=nerdctl"), "ENGINE is 'nerdctl'; expected podman, buildah, docker"),
        (("base", "--engine=nerdctl"), "ENGINE is 'nerdctl'; expected podman, buildah, docker"),
        (("engine", "--engine=nerdctl"), "ENGINE is 'nerdctl'; expected podman, buildah, docker"),
        (("build", "--suite=sid"), "SUITE is 'sid'; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)"),
        (("bench", "--suite=sid"), "SUITE is 'sid'; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)"),
        (("base", "--suite=sid"), "SUITE is 'sid'; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)"),
        (
            ("engine", "--suite=sid", "--engine=nerdctl"),
            "SUITE is 'sid'; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)",
        ),
        (
            ("build", "--stand-in=1", "--model-dir=/"),
            "STAND_IN and MODEL_DIR are both set; the stand-in comes from the package index, so set one of them",
        ),
        (
            ("build", "--version=0.8.4", "--reranker=1"),
            "RERANKER is set, and hindsight-api 0.8.4 loads one with torch alone; set FLAVOR=torch",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_said_before_any_engine_is_called(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    builder()
    with pytest.raises(SystemExit) as left:
        command_line.main(words)
    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"{sentence}\n")
    assert calls("podman") == []


@pytest.mark.parametrize("words", [(), ("push",), ("build", "--no-such-option=1"), ("base", "--stand-in=1")])
def test_usage(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("usage: bake.image")


def test_without_an_engine_each_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(["build"])
    assert left.value.code == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        "podman: not installed",
        "buildah: not installed",
        "docker: not installed",
    ]


def test_the_engine_that_works_is_told_with_the_reasons_of_those_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    builder("docker")
    command_line.main(["engine"])
    assert capsys.readouterr().out == "==> docker works\n    podman: not installed\n    buildah: not installed\n"
    command_line.main(["engine", "--engine=docker"])
    assert capsys.readouterr().out == "==> docker works\n"


def test_settings_that_an_engine_needs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    program("podman", '[ -n "$CONTAINERS_CONF" ]')
    command_line.main(["engine"])
    assert capsys.readouterr().out == (
        "==> podman works\n"
        f"    with CONTAINERS_CONF={ROOT}/bake/image/containers.conf, as its own settings do not run here\n"
    )


def test_from_the_words_to_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_CA_BUNDLES", ())
    monkeypatch.setattr(plan, "_PIP_CONFIGURATIONS", ())
    for name in ("HF_TOKEN", "HF_ENDPOINT", "SSL_CERT_FILE", "PIP_CONFIG_FILE", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    program("git", f"echo '# branch.oid {'1f' * 20}'")
    builder()
    command_line.main(["build", "--stand-in=1", "--engine=podman"])
    [built] = [call for call in calls("podman") if "--tag=hindsight-sidecar:1.1.0-onnx-standin" in call]
    assert "--build-arg=MODEL=all-MiniLM-L6-v2" in built
    assert f"--label=org.opencontainers.image.revision={'1f' * 20}" in built
    assert f"--label=org.opencontainers.image.base.digest={DIGEST}" in built
    told = capsys.readouterr().out
    assert told.startswith("==> podman works\n==> tools\n")
    assert "image   hindsight-sidecar:1.1.0-onnx-standin\n" in told
    assert (tmp_path / "dist/1.1.0-onnx-standin/sidecar.cdx.json").is_file()
    assert f"\n{(tmp_path / 'dist/1.1.0-onnx-standin/image.txt').read_text()}" in told


@pytest.mark.parametrize(
    ("labels", "told", "here", "expected"),
    [
        ({plan.REVISION: "1f", "stand-in": "true"}, True, True, True),
        ({plan.REVISION: "1f", "stand-in": "true", "more": "of the base"}, True, True, True),
        ({plan.REVISION: "2e", "stand-in": "true"}, True, True, False),
        ({plan.REVISION: "1f", "stand-in": "false"}, True, True, False),
        ({}, True, True, False),
        ({plan.REVISION: "1f", "stand-in": "true"}, False, True, False),
        ({plan.REVISION: "1f", "stand-in": "true"}, True, False, False),
    ],
)
def test_an_image_of_this_very_commit_is_known_by_its_labels(
    labels: dict[str, str],
    told: bool,  # noqa: FBT001
    here: bool,  # noqa: FBT001
    expected: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    if told:
        build.note(BUILT, "image ...", tmp_path)
    engine = answering("podman", [{"Id": ID, "Config": {"Labels": labels}}])
    if not here:
        engine = Engine("podman", str(program("podman", "exit 1")))
    assert build.is_built(engine, BUILT, tmp_path) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"arguments": {**PLAN.arguments, "RERANKER": "1"}},
        {"arguments": {**PLAN.arguments, "PYTHON": "python3.11"}},
        {"contexts": {"weights": Path("/srv/weights")}},
    ],
)
def test_with_what_no_label_tells_it_is_built_again(other: dict[str, Any], tmp_path: Path) -> None:
    build.note(BUILT, "image ...", tmp_path)
    engine = answering("podman", [{"Id": ID, "Config": {"Labels": dict(BUILT.labels)}}])
    assert build.is_built(engine, BUILT, tmp_path)
    assert not build.is_built(engine, replace(BUILT, **other), tmp_path)
    build.forget(tmp_path)
    assert not build.is_built(engine, BUILT, tmp_path)


def test_with_changes_it_is_built_again(tmp_path: Path) -> None:
    changed = replace(BUILT, labels={"stand-in": "true"})
    build.note(changed, "image ...", tmp_path)
    engine = answering("podman", [{"Id": ID, "Config": {"Labels": {"stand-in": "true"}}}])
    assert not build.is_built(engine, changed, tmp_path)


def test_an_image_that_was_built_is_left_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "is_built", lambda *_: True)
    builder()
    command_line.main(["build", "--stand-in=1", "--engine=podman", "--unless-built=1"])
    assert not [call for call in calls("podman") if call.startswith("build")]
    assert "hindsight-sidecar:1.1.0-onnx-standin was built from this commit already" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["image", "image-base", "bench", "engine"])
def test_what_make_passes_is_known(target: str) -> None:
    words = ["/usr/bin/env", "make", "--dry-run", target, "SUITE=trixie"]
    ran = subprocess.run(words, cwd=ROOT, env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    passed = ran.stdout.partition(" bake.image ")[2].replace("\\\n", " ")
    assert command_line._parser().parse_args(shlex.split(passed)).suite == "trixie"


@pytest.mark.parametrize(
    ("value", "expected"), [("", False), ("0", False), ("no", False), ("False", False), ("1", True), ("yes", True)]
)
def test_flags_as_make_passes_them(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    seen: list[tuple[Asked, str | None]] = []
    monkeypatch.setattr(command_line, "_build", lambda asked, wanted: seen.append((asked, wanted)))
    command_line.main(
        ["build", "--engine=", "--base=", f"--stand-in={value}", f"--reranker={value}", f"--keep-claude-cli={value}"]
    )
    assert seen == [(Asked(stand_in=expected, reranker=expected, keep_claude_cli=expected), None)]
