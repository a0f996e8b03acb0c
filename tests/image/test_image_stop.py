"""The engine's own stop, 10 s and then SIGKILL: always in time, and the cluster always in order."""

from pathlib import Path

import pytest
from container import BANK, GATEWAY, PYTHON, Start, Volume
from harness import wait_for

HOLD = """
import http.client, socket, time
idle = socket.create_connection(("127.0.0.1", 8888))
kept = http.client.HTTPConnection("127.0.0.1", 8888)
kept.request("GET", "/health")
kept.getresponse().read()
print("holding", flush=True)
time.sleep(600)
"""
# An LLM that takes every question and answers none.
SILENT = """
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        print("asked", flush=True)
        threading.Event().wait()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 9999), Handler)
print("listening", flush=True)
server.serve_forever()
"""
LLM = (
    "--env=HINDSIGHT_API_LLM_PROVIDER=openai",
    "--env=HINDSIGHT_API_LLM_BASE_URL=http://127.0.0.1:9999/v1",
    "--env=HINDSIGHT_API_LLM_API_KEY=sk-nobodys",
    "--env=HINDSIGHT_API_LLM_MODEL=a-model",
)


def test_with_clients_connected_and_a_question_to_an_llm_outstanding(start: Start, with_memories: Volume) -> None:
    container = start(*LLM).wait_ready()
    container.session(PYTHON, "-c", HOLD).wait_line("holding")
    psql = container.session("psql", "-Atq")
    psql.tell("BEGIN; SELECT 'a transaction is open';\n")
    psql.wait_line("a transaction is open")
    llm = container.session(PYTHON, "-c", SILENT)
    llm.wait_line("listening")
    question = '{"query": "Where is the kiln?", "budget": "low"}'
    url = f"{GATEWAY}/v1/default/banks/{BANK}/reflect"
    asking = container.session("curl", "-s", "-H", "content-type: application/json", "-d", question, url)
    llm.wait_line("asked", 60)
    assert container.stop() == 0
    asking.wait_end()
    assert with_memories.cluster_state() == "shut down"


def test_in_every_phase_of_the_first_start(start: Start, volume: Volume) -> None:
    container = start()
    wait_for(lambda: Path(volume.source, "pgdata.making").exists(), 60, "a cluster in the making", every=0.01)
    assert container.stop() == 0
    # It is made in a second, and the engine may take longer to pass a signal on.
    assert "pgdata" not in names(volume) or volume.cluster_state() == "shut down"

    container = start()
    container.wait_state("starting(hindsight-api)")
    assert container.stop() == 0
    assert volume.cluster_state() == "shut down"

    container = start().wait_ready()
    assert "smoke passed" in container.says("hindsight-sidecar", "smoke")
    assert "pgdata.making" not in names(volume)
    assert container.stop() == 0
    assert volume.cluster_state() == "shut down"


def names(volume: Volume) -> list[str]:
    return volume.root("ls -A").split()


@pytest.mark.parametrize("limit", [[], ["--cpus=0.2"]])
def test_right_after_the_start(start: Start, volume: Volume, limit: list[str]) -> None:
    # Python itself takes its time before it can be told anything, and with little CPU it takes longer.
    container = start(*limit)
    assert container.stop() == 0
    assert "pgdata" not in names(volume) or volume.cluster_state() == "shut down"
