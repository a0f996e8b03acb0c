"""A volume that does not answer, as one from a network may: told, survived, and stopped with nobody's help."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import pytest
from faults import Alive, needs_fuse, on_a_volume_that_can_hang, processes_of, resume, stopped, wait_told
from harness import Answer, RunningSidecar, call, reachable_directory, store_as_they_are, wait_for
from postgres_server import UNPRIVILEGED

from sidecar.probe import SocketConnection
from sidecar.sizing import MIB

pytestmark = needs_fuse
TEXTS = ["The ferryman counts his passengers twice.", "The cooper seasons his oak for three winters."]
HUNG_AFTER = 5.0  # seconds
STOP_GRACE = 6.0  # seconds


@pytest.fixture(scope="module")
def hanging(model_dir: Path) -> Iterator[tuple[RunningSidecar, int]]:
    """Return a ready sidecar, and the pid of the server of its volume."""
    with reachable_directory() as home:
        home.chmod(0o777)
        settings = {
            "HINDSIGHT_SIDECAR_API_HUNG_AFTER": f"{HUNG_AFTER:g}",
            "HINDSIGHT_SIDECAR_STOP_GRACE": f"{STOP_GRACE:g}",
        }
        sidecar = RunningSidecar(home, made.api_venv(), model_dir, **settings)
        with on_a_volume_that_can_hang(sidecar) as server:
            sidecar.start_ready()
            store_as_they_are(sidecar, "hung", TEXTS)
            yield sidecar, server


def remembered(sidecar: RunningSidecar) -> list[str]:
    items = sidecar.memory("/banks/hung/memories/list?limit=100").json()["items"]
    return sorted(item["text"] for item in items)


def administer(sidecar: RunningSidecar, method: str, path: str) -> Answer:
    connection = SocketConnection(sidecar.run_dir / "control.sock", 1.0)
    try:
        connection.request(method, path)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def test_it_is_told_and_over_without_help(hanging: tuple[RunningSidecar, int]) -> None:
    sidecar, server = hanging
    before = sidecar.health()["components"]
    assert administer(sidecar, "POST", "/v1/dumps").status == 202
    with Alive(sidecar) as alive:
        with stopped([server]) as since:
            detail = wait_told(sidecar, since, "volume")
            assert f"{sidecar.volume} gave no answer within 2 s" in detail
            assert sidecar.health()["volume"]["state"] == "unresponsive"
            with pytest.raises(TimeoutError):  # what looks at the volume waits for it, alone
                administer(sidecar, "GET", "/v1/dumps")
            refused = sidecar.memory("/banks/hung/memories/recall", "POST", {"query": "oak"}, timeout=2)
            assert refused.status == 503
            assert refused.json()["subject"] == "volume"
            # Long enough for a hindsight-api that waits for Postgres, which waits for the volume, to count as hung.
            wait_for(lambda: time.monotonic() > since + HUNG_AFTER + 4, 20, "some seconds of a hung volume")
        sidecar.wait_ready(30)
    alive.check()
    assert sidecar.health()["components"] == before, "nothing was restarted"
    assert remembered(sidecar) == sorted(TEXTS)
    wait_for(lambda: last_operation(sidecar)["ended"], 60, "the dump's end")
    assert last_operation(sidecar)["outcome"] == "done", last_operation(sidecar)


def last_operation(sidecar: RunningSidecar) -> dict[str, Any]:
    found: list[dict[str, Any]] = administer(sidecar, "GET", "/v1/operations").json()["operations"]
    return found[0]


@contextlib.contextmanager
def upload_under_way(sidecar: RunningSidecar) -> Iterator[None]:
    """Have an upload of which a part is on the volume."""
    connection = SocketConnection(sidecar.run_dir / "control.sock", 20.0)
    try:
        connection.putrequest("PUT", "/v1/restores")
        connection.putheader("Content-Length", str(8 * MIB))
        connection.endheaders()
        connection.send(bytes(MIB))
        wait_for(
            lambda: [path.stat().st_size for path in sidecar.volume.glob("dumps/.incoming-*/upload")] == [MIB],
            20,
            "a part of the upload",
        )
        connection.send(b"less than is written at a time, so closing the file writes it")
        yield
    finally:
        connection.close()


def test_it_can_be_stopped_and_started_meanwhile(hanging: tuple[RunningSidecar, int]) -> None:
    sidecar, server = hanging
    sidecar.wait_ready(30)
    with upload_under_way(sidecar), stopped([server]) as since:
        wait_told(sidecar, since, "volume")
        began = time.monotonic()
        assert sidecar.stop() == 4, "Postgres could not be shut down in order"
        assert time.monotonic() - began < STOP_GRACE + 3
        wait_for(lambda: not processes_of(sidecar), 5, "nothing left")
        # Root would look at it for whom to become, before there is anything to answer; the next test has that.
        sidecar.start(["/usr/bin/setpriv", *UNPRIVILEGED])
        sidecar.wait_state("starting(volume)")
        with Alive(sidecar) as alive:
            body = wait_for(
                lambda: body if (body := sidecar.health())["detail"] else None, 10, "what the start waits for"
            )
            assert "gave no answer" in body["detail"]
        alive.check()
        assert call(sidecar.control_port, "/startupz").status == 503
        assert sidecar.stop() == 0
        sidecar.start(["/usr/bin/setpriv", *UNPRIVILEGED])
        wait_for(lambda: sidecar.health_status() == 503, 20, "an answer")
        resume([server])
        sidecar.wait_ready()
    assert remembered(sidecar) == sorted(TEXTS)
    assert sidecar.stop() == 0


def test_root_ends_where_it_cannot_see_whose_it_is_and_needs_only_the_name(
    hanging: tuple[RunningSidecar, int],
) -> None:
    sidecar, server = hanging
    sidecar.end()
    with stopped([server]) as since:
        # The kernel knows for a second whose PGDATA is.
        wait_for(lambda: time.monotonic() > since + 3, 5, "that nothing of it is remembered")
        sidecar.start()
        assert sidecar.wait_end(60) == 2
        assert f"PGDATA {sidecar.pgdata} gave no answer within 20 s" in sidecar.log_text()
        sidecar.settings["HINDSIGHT_SIDECAR_RUN_AS"] = "hindsight"
        sidecar.start()
        body = wait_for(
            lambda: body if (body := sidecar.wait_state("starting(volume)"))["detail"] else None,
            10,
            "what it waits for",
        )
        assert "gave no answer" in body["detail"]
        with Alive(sidecar) as alive:
            wait_for(lambda: len(alive.took["socket"]) > 10, 10, "some answers")
        alive.check()
        assert sidecar.stop() == 0
        sidecar.start()
        sidecar.wait_state("starting(volume)")
        resume([server])
        sidecar.wait_ready()
    assert remembered(sidecar) == sorted(TEXTS)
    assert sidecar.stop() == 0
