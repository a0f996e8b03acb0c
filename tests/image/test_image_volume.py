"""What Kubernetes and its people do to a volume: healed, or blocked with the line to change and nothing touched."""

import pytest
from container import BANK, CONTROL, KEPT, UID, VOLUME, Container, Image, Start, Volume


def assert_all_are_there(container: Container) -> None:
    assert sorted(container.listed(BANK)) == sorted(KEPT)
    assert container.recall(BANK, "Who wound up the timepiece when bad weather was coming?")[0] == KEPT[0]
    assert container.recall(BANK, "Where are the bees?")[0] == KEPT[1]


def assert_alive_and_not_ready(container: Container) -> None:
    assert container.running()
    live = container.curl(f"{CONTROL}/livez")
    assert live is not None
    assert live.status == 200
    assert container.memory(f"/banks/{BANK}/memories/list").status == 503
    assert container.exec("sh", "-c", "curl -sf http://127.0.0.1:8888/health").returncode == 22


def test_what_a_kubelet_does_for_fsgroup_is_healed(start: Start, with_memories: Volume) -> None:
    # For every mount: the group, its rights on the whole tree, setgid on directories. The filesystem's own directory too.
    with_memories.root("""
        mkdir -m 0700 lost+found
        chgrp -R 2000 .
        chmod -R g+rwX .
        find . -type d -exec chmod g+s {} +
        chmod g-rwx lost+found
    """)
    before = with_memories.listing("lost+found")
    assert [line.split()[2:4] for line in before] == [["2700", "0:2000"]]
    assert [line.split()[2:4] for line in with_memories.listing("pgdata")[:1]] == [["2770", f"{UID}:2000"]]
    container = start("--group-add=2000").wait_ready()
    assert_all_are_there(container)
    assert container.says("stat", "--format=%a", f"{VOLUME}/pgdata").strip()[-3:] == "700"
    container.retain(BANK, ["A fourth one, stored afterwards."])
    assert container.stop() == 0
    assert with_memories.cluster_state() == "shut down"
    assert with_memories.listing("lost+found") == before


def test_pgdata_as_the_mount_point_is_refused(start: Start, tested: Image, with_memories: Volume) -> None:
    before = with_memories.listing()
    blocked = start(options=[*tested.strict(), f"--volume={with_memories.source}/pgdata:{VOLUME}/pgdata"])
    body = blocked.wait_state("blocked(volume-layout)")
    assert body["reason"] == "volume-layout"
    assert f"mountPath: {VOLUME}" in body["detail"]
    assert_alive_and_not_ready(blocked)
    assert blocked.stop() == 0
    assert with_memories.listing() == before
    assert_all_are_there(start().wait_ready())


def test_no_volume_at_all_is_refused(start: Start, tested: Image) -> None:
    blocked = start(options=tested.strict())
    assert f"mount a volume at {VOLUME}" in blocked.wait_state("blocked(volume-layout)")["detail"]
    assert_alive_and_not_ready(blocked)
    assert blocked.stop() == 0


def test_pgdata_of_another_user_is_refused_until_it_is_ours(start: Start, with_memories: Volume) -> None:
    with_memories.root("chown -R 23456 pgdata")
    before = with_memories.listing("pgdata")
    container = start()
    body = container.wait_state("blocked(permissions)")
    assert body["reason"] == "permissions"
    assert "runAsUser: 23456" in body["detail"]
    assert f"chown -R {UID} {VOLUME}/pgdata" in body["detail"]
    assert_alive_and_not_ready(container)
    assert with_memories.listing("pgdata") == before
    with_memories.root(f"chown -R {UID} pgdata")
    assert_all_are_there(container.wait_ready())
    assert container.stop() == 0


def namespaces(container: Container) -> list[str]:
    return container.says("readlink", *(f"/proc/self/ns/{kind}" for kind in ("pid", "net", "ipc"))).splitlines()


@pytest.mark.long  # in other namespaces; tests/torture and test_volume_states.py have it without an engine
def test_the_second_on_a_volume_waits_and_takes_over(start: Start, with_memories: Volume) -> None:
    first = start().wait_ready()
    postgres = first.pid_of("postgres")
    second = start()
    assert "another sidecar holds" in second.wait_state("blocked(volume-locked)")["detail"]
    assert_alive_and_not_ready(second)
    assert not set(namespaces(first)) & set(namespaces(second))
    first.retain("two", ["The first one stored this beside a second."])
    assert first.recall("two", "What was stored while there were two?") == [
        "The first one stored this beside a second."
    ]
    assert first.pid_of("postgres") == postgres
    assert first.stop() == 0
    second.wait_ready()
    assert_all_are_there(second)
    assert second.listed("two") == ["The first one stored this beside a second."]

    third = start()
    third.wait_state("blocked(volume-locked)")
    second.retain("two", ["The second one stored this before it was killed."])
    second.kill()
    third.wait_ready()
    assert_all_are_there(third)
    assert len(third.listed("two")) == 2
    assert third.stop() == 0
    assert with_memories.cluster_state() == "shut down"
