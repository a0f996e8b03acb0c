"""The cluster that people have today is taken over: its memories come across, and it stays as it was."""

import functools
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import seed_cluster
from administrator import ask, finished
from harness import RunningSidecar, wait_for
from remembered import Remembered, recalls


@pytest.fixture
def blocked(make_sidecar: Any, remembered: Callable[[str], Remembered]) -> RunningSidecar:
    """Have a sidecar whose PGDATA is the seed's cluster."""
    sidecar: RunningSidecar = make_sidecar("0.8.4")
    seed_cluster.make(sidecar.pgdata, remembered("0.8.4").dump)
    seed_cluster.give_back(sidecar.pgdata)
    return sidecar


def adopt(sidecar: RunningSidecar, **body: Any) -> dict[str, Any]:
    return finished(sidecar, ask(sidecar, "POST", "/v1/adoption", body))


def beside(sidecar: RunningSidecar) -> list[str]:
    return sorted(path.name for path in sidecar.volume.iterdir() if path.name.startswith("pgdata."))


@pytest.mark.timeout(600)
def test_369_memories_of_the_seeds_cluster(
    blocked: RunningSidecar, remembered: Callable[[str], Remembered], memories: dict[str, Any]
) -> None:
    before = seed_cluster.fingerprint(blocked.pgdata)
    blocked.start().wait_state("blocked(foreign-cluster)", 60)
    rehearsed = adopt(blocked, dry_run=True)
    assert rehearsed["outcome"] == "done", rehearsed["error"]
    assert (rehearsed["report"]["memories"], rehearsed["report"]["dry_run"]) == (369, True)
    assert seed_cluster.fingerprint(blocked.pgdata) == before
    assert beside(blocked) == []
    assert blocked.health()["subject"] == "foreign-cluster"

    unasked = blocked.command("adopt")
    assert (unasked.returncode, "add --yes" in unasked.stderr) == (4, True), unasked
    done = blocked.command("adopt", "--yes")
    assert done.returncode == 0, done
    adopted = ask(blocked, "GET", "/v1/operations").json()["operations"][0]
    report = adopted["report"]
    assert done.stdout.splitlines()[-1].endswith(f"the old cluster is kept as {report['kept']}")
    assert f"369 memories adopted from the cluster at {blocked.pgdata}; " in done.stdout
    assert "embedded  10 memories anew" in done.stdout
    assert (report["memories"], report["database"], report["comparison"]["faults"]) == (369, "postgres", [])
    assert report["agreement"]["median_similarity"] > 0.8
    assert report["recalled"]["memories"] == 10
    assert beside(blocked) == [report["kept"]]
    assert seed_cluster.fingerprint(blocked.volume / report["kept"]) == before
    blocked.wait_ready()
    assert recalls(blocked, memories) == remembered("0.8.4").answers
    assert blocked.health()["origin"]["memories"] == 369
    again = ask(blocked, "POST", "/v1/adoption", {})
    assert (again.status, "this sidecar's own cluster" in again.json()["detail"]) == (422, True)

    assert blocked.stop() == 0
    blocked.start_ready()
    wait_for(lambda: blocked.health()["memory_count"] == 369, 5, "369 memories counted")
    assert [one["name"] for one in ask(blocked, "GET", "/v1/databases").json()["clusters"]] == [report["kept"]]
    assert report["kept"] in blocked.command("databases").stdout
    assert blocked.command("databases", "--drop", report["kept"]).returncode == 0
    assert beside(blocked) == []


@pytest.mark.timeout(300)
def test_a_crashed_one_is_recovered_in_a_copy(blocked: RunningSidecar) -> None:
    with seed_cluster.running(blocked.pgdata, last=signal.SIGKILL) as socket_dir:
        seed_cluster.execute(socket_dir, "UPDATE memory_units SET text = text || ' Indeed.'")
        blocked.start().wait_state("blocked(foreign-cluster)", 60)
        running = ask(blocked, "POST", "/v1/adoption", {})
        assert (running.status, "stop that server first" in running.json()["detail"]) == (422, True)
    wait_for(lambda: not blocked.postgres_pids(), 20, "the seed's processes gone")
    refused = ask(blocked, "POST", "/v1/adoption", {})
    assert (refused.status, "--crashed" in refused.json()["detail"]) == (422, True)
    before = seed_cluster.fingerprint(blocked.pgdata)
    rehearsed = adopt(blocked, crashed=True, dry_run=True)
    assert rehearsed["outcome"] == "done", rehearsed["error"]
    assert rehearsed["report"]["memories"] == 369
    assert seed_cluster.fingerprint(blocked.pgdata) == before


@pytest.mark.timeout(300)
def test_what_cannot_be_adopted_is_refused(blocked: RunningSidecar) -> None:
    blocked.start().wait_state("blocked(foreign-cluster)", 60)
    before = seed_cluster.fingerprint(blocked.pgdata)
    for body, told in (
        ({"database": "nowhere"}, "no database 'nowhere'; it has postgres"),
        ({"database": "template1"}, "no database 'template1'"),
    ):
        refused = adopt(blocked, **body)
        assert (refused["outcome"], told in refused["error"]) == ("refused", True), refused
    assert seed_cluster.fingerprint(blocked.pgdata) == before
    assert beside(blocked) == []
    (blocked.pgdata / "standby.signal").touch()
    standby = ask(blocked, "POST", "/v1/adoption", {})
    assert (standby.status, "it is a standby" in standby.json()["detail"]) == (422, True)
    (blocked.pgdata / "standby.signal").unlink()


@pytest.mark.timeout(300)
def test_what_cannot_be_served_is_put_back(blocked: RunningSidecar) -> None:
    before = seed_cluster.fingerprint(blocked.pgdata)
    blocked.start().wait_state("blocked(foreign-cluster)", 60)
    with socket.create_server(("127.0.0.1", blocked.api_port)):  # hindsight-api cannot start
        failed = adopt(blocked)
    assert failed["outcome"] == "verification-failed", failed
    assert "kept" not in failed["report"]
    blocked.wait_state("blocked(foreign-cluster)", 30)
    assert seed_cluster.fingerprint(blocked.pgdata) == before
    assert beside(blocked) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "phase",
    [
        "recall",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("swap", "verify again", "start hindsight-api")),
    ],
)
def test_cancelled_once_names_are_exchanged(phase: str, blocked: RunningSidecar) -> None:
    before = seed_cluster.fingerprint(blocked.pgdata)
    blocked.start().wait_state("blocked(foreign-cluster)", 60)
    operation = ask(blocked, "POST", "/v1/adoption", {}).json()
    wait_for(functools.partial(_reached, blocked, phase), 120, f"phase {phase}", every=0.005)
    ended = ask(blocked, "DELETE", f"/v1/operations/{operation['id']}").json()
    assert ended["error"] == "it was cancelled; nothing was replaced"
    assert "kept" not in ended["report"]
    blocked.wait_state("blocked(foreign-cluster)", 20)
    assert (seed_cluster.fingerprint(blocked.pgdata) == before, beside(blocked)) == (True, [])


def _reached(sidecar: RunningSidecar, phase: str) -> bool:
    return any(event.get("phase") == phase for event in sidecar.events())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "phase", [*(pytest.param(name, marks=pytest.mark.long) for name in ("copy", "dump", "load")), "swap"]
)
def test_kill_9_in_the_middle(phase: str, blocked: RunningSidecar) -> None:
    before = seed_cluster.fingerprint(blocked.pgdata)
    blocked.start().wait_state("blocked(foreign-cluster)", 60)
    operation = ask(blocked, "POST", "/v1/adoption", {})
    assert operation.status == 202

    def reached() -> bool:
        return any(event.get("phase") == phase for event in blocked.events())

    wait_for(reached, 120, f"phase {phase}", every=0.005)
    blocked.signal(signal.SIGKILL)
    blocked.wait_end()
    blocked.start()
    if phase == "swap":  # before the exchange was written down, or after it
        body = wait_for(lambda: _settled(blocked), 120, "a state that lasts")
        kept = [name for name in beside(blocked) if ".kept-" in name]
        assert (body["state"], len(kept)) in {("blocked", 0), ("ready", 1)}
        original = blocked.volume / kept[0] if kept else blocked.pgdata
    else:
        blocked.wait_state("blocked(foreign-cluster)", 60)
        original = blocked.pgdata
        assert "removing what was not finished" in blocked.log_text()
    assert seed_cluster.fingerprint(original) == before
    assert [name for name in beside(blocked) if ".kept-" not in name] == []
    if original == blocked.pgdata:
        adopted = adopt(blocked, dry_run=True)
        assert adopted["outcome"] == "done", adopted["error"]


def _settled(sidecar: RunningSidecar) -> dict[str, Any] | None:
    try:
        body = sidecar.health()
    except OSError:
        return None
    return body if body["state"] in {"ready", "blocked"} else None
