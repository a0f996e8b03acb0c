"""What Kubernetes, people and other versions do to the volume: healed, or blocked with the reason and nothing touched."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import psycopg
import pytest
from administrator import archive_of, ask, finished
from harness import RunningSidecar, call, give_to_the_sidecar, reachable_directory, wait_for

from sidecar import postgres_binaries


def fingerprint(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and modification time of everything below a directory."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in [directory, *directory.rglob("*")]
    }


@pytest.fixture(scope="module")
def volume_with_a_memory(model_dir: Path) -> Iterator[Path]:
    """Return a volume with one memory, made once and copied for each test."""
    with reachable_directory() as home:
        home.chmod(0o777)
        sidecar = RunningSidecar(home, made.api_venv(), model_dir)
        try:
            sidecar.start_ready()
            sidecar.retain("states", ["The beekeeper moved her hives beside the orchard."])
            assert sidecar.stop() == 0
        finally:
            sidecar.end()
        yield sidecar.volume


@pytest.fixture
def stopped(make_sidecar: Any, volume_with_a_memory: Path) -> Any:
    """Return a sidecar with one memory, stopped."""
    sidecar = make_sidecar()
    subprocess.run(["/bin/cp", "-a", str(volume_with_a_memory), str(sidecar.volume)], check=True)
    return sidecar


def test_modes_are_healed_at_every_start(stopped: Any) -> None:
    for mode in (0o770, 0o2770):
        # What a kubelet does for fsGroup: group rights on the whole tree, setgid on directories.
        subprocess.run(["/bin/chmod", "-R", "g+rwX", str(stopped.volume)], check=True)
        stopped.pgdata.chmod(mode)
        stopped.start_ready()
        assert stopped.pgdata.stat().st_mode & 0o777 == 0o700
        assert stopped.health()["memory_count"] == 1
        assert stopped.stop() == 0


def assert_blocked_untouched_and_ready_again(sidecar: Any, reason: str, says: str, mend: Any) -> None:
    before = fingerprint(sidecar.pgdata) if sidecar.pgdata.is_dir() else {}
    sidecar.start()
    body = sidecar.wait_state(f"blocked({reason})")
    assert says in body["detail"]
    assert body["reason"] == reason
    assert call(sidecar.control_port, "/livez").status == 200
    assert call(sidecar.control_port, "/startupz").status == 503
    refusal = sidecar.memory("/banks/states/memories/recall", "POST", {"query": "bees"})
    assert refusal.status == 503
    assert refusal.json()["subject"] == reason
    if sidecar.pgdata.is_dir():
        assert fingerprint(sidecar.pgdata) == before
    mend()
    sidecar.wait_ready()
    assert sidecar.health()["memory_count"] == 1
    assert sidecar.stop() == 0


def test_another_major_is_blocked(stopped: Any) -> None:
    path = stopped.pgdata / "PG_VERSION"
    right = path.read_text()
    path.write_text("14\n")
    assert_blocked_untouched_and_ready_again(
        stopped, "wrong-major", "made by PostgreSQL 14", lambda: path.write_text(right)
    )


def test_a_cluster_of_others_is_blocked(stopped: Any) -> None:
    mark = stopped.pgdata / "hindsight-sidecar.marker"
    content = mark.read_text()
    mark.unlink()

    def mend() -> None:
        mark.write_text(content)
        give_to_the_sidecar(mark)

    assert_blocked_untouched_and_ready_again(stopped, "foreign-cluster", "hindsight-sidecar adopt", mend)


def test_half_a_cluster_is_blocked(stopped: Any) -> None:
    path = stopped.pgdata / "PG_VERSION"
    moved = stopped.home / "PG_VERSION"
    shutil.move(path, moved)

    def mend() -> None:
        for method, where, body in (
            ("PUT", "/v1/restores", b"PGDMP"),
            ("POST", "/v1/migrations", {"from": "postgresql://a@b/c"}),
        ):
            refused = ask(stopped, method, where, body)
            assert refused.status == 503, refused.body
            assert refused.json()["detail"].startswith("damaged-cluster: "), "and not only once it is all here"
        shutil.move(moved, path)

    assert_blocked_untouched_and_ready_again(stopped, "damaged-cluster", "no PG_VERSION", mend)


def test_a_model_that_changed_or_is_missing_is_blocked(stopped: Any, model_dir: Path) -> None:
    copy = stopped.home / "model"
    shutil.copytree(model_dir, copy)
    stopped.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = str(copy)
    vocabulary = copy / "tokenizer.json"
    content = vocabulary.read_bytes()
    vocabulary.write_bytes(content + b" ")
    stopped.start()
    assert "tokenizer.json" in stopped.wait_state("blocked(model-changed)")["detail"]
    vocabulary.write_bytes(content)
    stopped.wait_ready()
    assert stopped.stop() == 0
    shutil.move(copy / "manifest.json", stopped.home / "manifest.json")
    stopped.start()
    assert "hindsight-bake" in stopped.wait_state("blocked(model-missing)")["detail"]
    shutil.move(stopped.home / "manifest.json", copy / "manifest.json")
    stopped.wait_ready()
    assert stopped.stop() == 0


def test_a_database_of_another_model_is_blocked(stopped: Any, model_dir: Path) -> None:
    copy = stopped.home / "model"
    shutil.copytree(model_dir, copy)
    stopped.settings["HINDSIGHT_SIDECAR_MODEL_DIR"] = str(copy)
    path = copy / "manifest.json"
    right = path.read_text()
    manifest = json.loads(right)
    for flavor in manifest["flavors"].values():
        flavor["identity"]["revision"] = "another"
    path.write_text(json.dumps(manifest))
    stopped.start()
    body = stopped.wait_state("blocked(model-mismatch)")
    assert "revision" in body["detail"]
    assert body["components"]["hindsight-api"]["pid"] is None
    path.write_text(right)
    stopped.wait_ready()
    assert stopped.stop() == 0


def sql(sidecar: Any, statement: str) -> None:
    """Run a statement as the superuser in the running database."""
    with psycopg.connect(host=str(sidecar.run_dir), user="postgres", dbname="hindsight", autocommit=True) as connection:
        connection.execute(statement)


def test_a_newer_schema_and_an_emptied_database_are_blocked(stopped: Any) -> None:
    stopped.start_ready()
    sql(stopped, "UPDATE public.alembic_version SET version_num = 'ffffffffffff'")
    assert stopped.stop() == 0
    stopped.start()
    assert "ffffffffffff" in stopped.wait_state("blocked(schema-newer)")["detail"]
    sql(stopped, "DROP TABLE public.alembic_version CASCADE; ALTER TABLE public.memory_units RENAME TO elsewhere")
    assert "no table memory_units" in stopped.wait_state("blocked(damaged-cluster)", 60)["detail"]
    assert stopped.health()["components"]["hindsight-api"]["pid"] is None
    assert stopped.stop() == 0


def test_a_restore_mends_a_newer_schema_and_an_emptied_database(stopped: Any) -> None:
    stopped.start_ready()
    archive = archive_of(stopped)
    for statement, reason in (
        ("UPDATE public.alembic_version SET version_num = 'ffffffffffff'", "schema-newer"),
        (
            "DROP TABLE public.alembic_version CASCADE; ALTER TABLE public.memory_units RENAME TO elsewhere",
            "damaged-cluster",
        ),
    ):
        sql(stopped, statement)
        assert stopped.stop() == 0
        stopped.start().wait_state(f"blocked({reason})", 60)
        refused = ask(stopped, "POST", "/v1/dumps")
        assert refused.status == 503, "what is there is not dumped as if it were good"
        assert refused.json()["detail"].startswith(f"{reason}: ")
        rehearsed = finished(stopped, ask(stopped, "PUT", "/v1/restores?dry_run=true", archive))
        assert rehearsed["outcome"] == "done", rehearsed["error"]
        assert stopped.wait_state(f"blocked({reason})")["components"]["hindsight-api"]["pid"] is None
        restored = finished(stopped, ask(stopped, "POST", "/v1/restores", {"upload": rehearsed["report"]["upload"]}))
        assert restored["outcome"] == "done", restored["error"]
        stopped.wait_ready()
        assert [found["text"] for found in stopped.recall("states", "Where did the beekeeper put her hives?")] == [
            "The beekeeper moved her hives beside the orchard."
        ]
        kept = [one["name"] for one in ask(stopped, "GET", "/v1/databases").json()["kept"]]
        assert restored["report"]["kept"] in kept, "what was there is kept"
    assert stopped.stop() == 0


def test_a_second_sidecar_waits_and_takes_over(make_sidecar: Any) -> None:
    first = make_sidecar().start_ready()
    first.retain("states", ["The glassblower keeps a kiln behind the bakery."])
    second = make_sidecar(PGDATA=str(first.pgdata))
    second.pgdata, second.volume = first.pgdata, first.volume
    second.start()
    assert "another sidecar holds" in second.wait_state("blocked(volume-locked)")["detail"]
    assert first.health_status() == 200
    assert len(first.recall("states", "Where is the kiln of the glassblower?")) == 1
    first.signal(signal.SIGTERM)
    assert first.wait_end() == 0
    second.wait_ready()
    assert second.health()["memory_count"] == 1
    assert second.stop() == 0


def test_a_volume_that_is_not_ours_is_blocked(stopped: Any) -> None:
    status = stopped.pgdata.stat()
    if os.geteuid() == 0:
        os.chown(stopped.pgdata, 54321, 54321)
        stopped.settings["HINDSIGHT_SIDECAR_RUN_AS"] = f"{status.st_uid}:{status.st_gid}"
        says = "runAsUser: 54321"
    else:  # only root can give it to somebody else, so it is only made unwritable
        stopped.volume.chmod(0o500)
        says = "mode 0500"
    before = stopped.pgdata.stat()
    stopped.start()
    assert says in stopped.wait_state("blocked(permissions)")["detail"]
    assert stopped.pgdata.stat() == before
    if os.geteuid() == 0:
        os.chown(stopped.pgdata, status.st_uid, status.st_gid)
    else:
        stopped.volume.chmod(0o700)
    stopped.wait_ready()
    assert stopped.stop() == 0


def test_stops_in_every_phase_are_clean(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    phases = ("starting(cluster)", "starting(postgres)", "starting(hindsight-api)")
    for phase in phases:
        sidecar.start()
        wait_for(lambda phase=phase: f'"state": "{phase}"' in sidecar.log_text(), 30, phase, every=0.005)
        began = time.monotonic()
        assert sidecar.stop() == 0
        assert time.monotonic() - began < 10
        assert not sidecar.postgres_pids()
        sidecar.log_path.unlink()
    sidecar.start_ready()
    assert sidecar.stop() == 0
    control = subprocess.run(
        [_program(sidecar, "pg_controldata"), "-D", str(sidecar.pgdata)], capture_output=True, text=True, check=True
    ).stdout
    assert "shut down" in control


def _program(sidecar: Any, name: str) -> str:
    return postgres_binaries.choose(None, int((sidecar.pgdata / "PG_VERSION").read_text())).program(name)


def test_a_stop_during_the_imports_is_clean(make_sidecar: Any) -> None:
    sidecar = make_sidecar()
    for moment in (0.25, 0.5):
        sidecar.start()
        due = time.monotonic() + moment
        wait_for(lambda due=due: time.monotonic() > due, 2, "the moment", every=0.01)
        assert sidecar.stop() == 0
    assert not sidecar.postgres_pids()


def test_blocked_for_too_long_ends_with_its_own_code(make_sidecar: Any) -> None:
    sidecar = make_sidecar(HINDSIGHT_SIDECAR_BLOCKED_EXIT_AFTER="1", HINDSIGHT_SIDECAR_MODEL_DIR="/nowhere").start()
    assert sidecar.wait_end(60) == 3
    assert "blocked(model-missing)" in sidecar.log_text()
