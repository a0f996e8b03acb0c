"""How large an image is, told by an engine made of a small shell script."""

import json
from pathlib import Path

import pytest

from bake.errors import BakeError
from bake.image import __main__ as command_line
from bake.image import bench
from bake.image.bench import LIMIT, SHARE, Size, measure, real_bytes, report
from bake.image.engine import Engine

IMAGE = "hindsight-sidecar:1.1.0-onnx"
REPORTED = 1_000_000_000
STAND_IN = {
    "hindsight-sidecar.stand-in": "true",
    "hindsight-sidecar.model": "all-MiniLM-L6-v2",
    "hindsight-sidecar.flavor": "onnx",
}
# model.onnx or model.safetensors, and tokenizer.json, as bake/models.lock has them.
PINNED = {"onnx": 133_093_490 + 711_396, "torch": 133_466_304 + 711_396}


def engine(directory: Path, labels: dict[str, str] | None, manifest: str = "exit 1", name: str = "podman") -> Engine:
    """Return one whose image has these labels; it writes down what it is asked."""
    described = json.dumps([{"Id": "1f", "Size": REPORTED, "Config": {"Labels": labels}}])
    path = directory / name
    path.write_text(
        f'#!/bin/sh\necho "$*" >> "$0.calls"\ncase $1 in\ninspect) echo \'{described}\' ;;\nrun) {manifest} ;;\nesac\n'
    )
    path.chmod(0o755)
    return Engine(name, str(path))


@pytest.mark.parametrize("flavor", ["onnx", "torch"])
def test_the_real_models_bytes_are_those_of_the_lock(flavor: str) -> None:
    assert real_bytes(flavor) == PINNED[flavor]


@pytest.mark.parametrize("labels", [None, {}, {**STAND_IN, "hindsight-sidecar.stand-in": "false"}])
def test_without_a_stand_in_the_size_is_the_reported_one(labels: dict[str, str] | None, tmp_path: Path) -> None:
    assert measure(engine(tmp_path, labels), IMAGE) == Size(REPORTED, REPORTED)
    assert "run" not in (tmp_path / "podman.calls").read_text()


@pytest.mark.parametrize("flavor", ["onnx", "torch"])
def test_a_stand_ins_bytes_are_exchanged_for_the_real_models(flavor: str, tmp_path: Path) -> None:
    manifest = json.dumps({"files": [{"path": "model.onnx", "size": 22_000_000}, {"path": "config.json", "size": 650}]})
    podman = engine(tmp_path, {**STAND_IN, "hindsight-sidecar.flavor": flavor}, f"echo '{manifest}'")
    assert measure(podman, IMAGE) == Size(REPORTED, REPORTED - 22_000_650 + PINNED[flavor])
    assert (tmp_path / "podman.calls").read_text().splitlines()[-1] == (
        f"run --rm --network=none --entrypoint=/bin/cat {IMAGE} /opt/models/all-MiniLM-L6-v2/manifest.json"
    )


def test_an_image_without_a_model_is_a_sentence(tmp_path: Path) -> None:
    podman = engine(tmp_path, STAND_IN, "echo 'cat: No such file' >&2; exit 1")
    with pytest.raises(BakeError, match=r"^\S+ has no /opt/models/all-MiniLM-L6-v2/manifest.json: cat: No such file$"):
        measure(podman, IMAGE)


def test_buildah_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(BakeError, match=r"^buildah does not report sizes; use podman or docker$"):
        measure(engine(tmp_path, {}, name="buildah"), IMAGE)


@pytest.mark.parametrize(
    ("image", "naive", "passed"),
    [
        (Size(600_000_000, int(LIMIT)), 1_000_000_000, True),
        (Size(600_000_000, int(LIMIT) + 1), 1_000_000_000, False),
        (Size(600_000_001, 600_000_001), 1_000_000_000, False),
    ],
)
def test_the_limits_belong_to_what_passes(image: Size, naive: int, passed: bool) -> None:  # noqa: FBT001
    assert report(image, Size(naive, naive), "onnx")[1] is passed


def test_the_report() -> None:
    told, _ = report(Size(900_000_000, 1_010_000_000), Size(2_000_000_000, 2_000_000_000), "onnx")
    assert told.splitlines() == [
        "image      900 MB, 1010 MB with the real model (at most 1200)",
        "naive     2000 MB",
        "share     0.45 (at most 0.6)",
    ]
    assert (LIMIT, SHARE) == (1.2e9, 0.6)
    assert bench.NAIVE.is_file()


def test_there_has_to_be_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = Path(engine(tmp_path, {}).program)
    path.write_text('#!/bin/sh\n[ "$1 $4" != "inspect hindsight-sidecar:1.1.0-torch" ]\n')
    with pytest.raises(SystemExit):
        command_line.main(["bench", "--flavor=torch", "--torch-index=https://wheels.example/cpu"])
    told = "hindsight-sidecar:1.1.0-torch is not here; run `make image` with the same variables first\n"
    assert capsys.readouterr().err == told


def test_the_limit_is_the_onnx_flavours() -> None:
    large, naive = Size(1_900_000_000, 1_900_000_000), Size(4_000_000_000, 4_000_000_000)
    assert report(large, naive, "torch")[1]
    assert not report(large, naive, "onnx")[1]
