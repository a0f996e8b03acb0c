"""kill -9 of the whole container under load: every acknowledged memory is there at the next start, and once."""

import os
from collections import Counter

import pytest
from container import PYTHON, Container, Session, Start, Volume
from harness import wait_for

ROUNDS = int(os.environ.get("HINDSIGHT_TEST_ROUNDS", "3"))
BANK = "killed"
# Four lanes store one text after another, and print each once it is acknowledged.
WRITER = """
import http.client, json, os, sys, threading
def lane(name):
    number = 0
    while True:
        number += 1
        text = f"Round {sys.argv[1]}, lane {name}: letter {number} went out with the night train."
        connection = http.client.HTTPConnection("127.0.0.1", 8888, timeout=60)
        body = json.dumps({"items": [{"content": text}], "async": False})
        connection.request("POST", sys.argv[2], body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status == 200:
            os.write(1, (text + "\\n").encode())
for name in "abcd":
    threading.Thread(target=lane, args=(name,)).start()
"""


def acknowledged(writer: Session) -> list[str]:
    return [line for line in writer.lines() if line.startswith("Round ")]


def assert_each_is_there_once(container: Container, texts: list[str]) -> None:
    there = Counter(container.listed(BANK))
    assert [text for text in texts if there[text] != 1] == []
    assert [text for text, count in there.items() if count > 1] == [], "a memory is there twice"
    assert texts[-1] in container.recall(BANK, texts[-1])


@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_kill_of_the_container_under_load(start: Start, volume: Volume) -> None:
    texts: list[str] = []
    for number in range(1, ROUNDS + 1):
        container = start().wait_ready()
        if texts:
            assert_each_is_there_once(container, texts)
        writer = container.session(PYTHON, "-c", WRITER, str(number), f"/v1/default/banks/{BANK}/memories")
        # Another moment each time.
        wait_for(lambda writer=writer, number=number: len(acknowledged(writer)) >= 7 * number, 60, "some stored")
        container.kill()
        writer.wait_end()
        stored = acknowledged(writer)
        assert stored, "a round in which nothing was stored shows nothing"
        texts += stored
        assert volume.cluster_state() == "in production"
    container = start().wait_ready()
    assert_each_is_there_once(container, texts)
    assert container.stop() == 0
    assert volume.cluster_state() == "shut down"
