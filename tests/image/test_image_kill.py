"""kill -9 of the whole container under load: every acknowledged memory is there at the next start, and once."""

import os

import pytest
from container import Start, Volume, acknowledged
from harness import wait_for

ROUNDS = int(os.environ.get("HINDSIGHT_TEST_ROUNDS", "2"))
BANK = "killed"


@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_kill_of_the_container_under_load(start: Start, volume: Volume) -> None:
    texts: list[str] = []
    for number in range(1, ROUNDS + 1):
        container = start().wait_ready()
        if texts:
            container.check_each_is_there_once(BANK, texts)
        writer = container.writer(BANK, f"Round {number}")
        # Another moment each time.
        wait_for(lambda writer=writer, number=number: len(acknowledged(writer)) >= 7 * number, 60, "some stored")
        container.kill()
        writer.wait_end()
        stored = acknowledged(writer)
        assert stored, "a round in which nothing was stored shows nothing"
        texts += stored
        assert volume.cluster_state() == "in production"
    container = start().wait_ready()
    container.check_each_is_there_once(BANK, texts)
    assert container.stop() == 0
    assert volume.cluster_state() == "shut down"
