"""Who is asked for something, and a second model is not loaded where the whole container would end for it."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sidecar import hindsight_api, model, processes, sizing, upstream
from sidecar.errors import TransientError
from sidecar.hindsight_api import HindsightApi
from sidecar.processes import Listener
from sidecar.settings import Address, Settings
from sidecar.sizing import MIB


@pytest.mark.parametrize(
    ("left", "together", "runs", "refused"),
    [(100, True, True, True), (800, True, True, False), (100, False, True, False), (100, True, False, False),
     (None, True, True, False)],
)  # fmt: skip
def test_a_model_too_many(
    *, left: int | None, together: bool, runs: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "memory_left", lambda: None if left is None else left * MIB)
    monkeypatch.setattr(sizing, "die_together", lambda: together)
    monkeypatch.setattr(processes, "memory", lambda _: 700 * MIB)
    api: Any = SimpleNamespace(child=SimpleNamespace(pid=1) if runs else None)
    if not refused:
        HindsightApi._check_memory(api)
        return
    with pytest.raises(TransientError, match=r"has 700 MiB, 100 MiB are left .* would be ended for want of memory"):
        HindsightApi._check_memory(api)


@pytest.mark.parametrize(("own", "given"), [(0, 500), (-997, 500), (450, 550), (930, 1000), (1000, 1000)])
def test_short_of_memory_the_kernel_takes_hindsight_api_first(
    own: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"{own}\n")
    assert hindsight_api._oom_score() == given


ANOTHER = (
    "another program listens on port 8887, and hindsight-api does not yet; end it, or set HINDSIGHT_SIDECAR_API_LISTEN to a free "
    "address"
)


@pytest.mark.parametrize(
    ("who", "says", "told"),
    [
        (None, "it does not listen on 127.0.0.1:8887 yet", []),
        (Listener.NOBODY, "it does not listen on 127.0.0.1:8887 yet", []),
        (Listener.ANOTHER, ANOTHER, []),
        (Listener.ITSELF, None, []),
        (Listener.UNKNOWN, None, ["it cannot be told who listens on the address of hindsight-api"]),
    ],
)
def test_it_is_not_asked_before_it_listens_itself(
    who: Listener | None, says: str | None, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "listener", lambda port, pid: who if (port, pid) == (8887, 7) else Listener.NOBODY)
    api: Any = SimpleNamespace(
        child=None if who is None else SimpleNamespace(pid=7),
        _settings=SimpleNamespace(api_listen=Address("127.0.0.1", 8887)),
        _log=structlog.get_logger(),
        _listens=6,
    )
    with structlog.testing.capture_logs() as lines:
        for _ in range(2 if says is None else 1):
            assert asyncio.run(HindsightApi._not_there(api)) == says
            monkeypatch.setattr(processes, "member", lambda pid: processes.Member(pid, 1, "S", 0.0, 1))
    assert [line["event"] for line in lines] == told
    if says is None:
        for gone in (processes.Member(7, 1, "S", 0.0, 0), None):
            monkeypatch.setattr(processes, "member", lambda _, gone=gone: gone)
            assert asyncio.run(HindsightApi._not_there(api)) == "it has ended"


def test_what_compares_vectors_is_started_without_the_secrets_of_hindsight_api(
    bake: Callable[..., Path], installed: Callable[..., upstream.Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    async def similarities(_: object, __: object, env: dict[str, str], *___: object) -> list[float]:
        given.update(env)
        return [1.0]

    monkeypatch.setattr(upstream, "similarities", similarities)
    api: Any = HindsightApi.__new__(HindsightApi)
    api.child, api.installed, api._settings, api._identity = None, installed(), Settings(), {}
    api._environ = {
        "HINDSIGHT_API_LLM_API_KEY": "sesame-1",
        "OPENAI_API_KEY": "sesame-2",
        "HINDSIGHT_API_TENANT_API_KEY": "sesame-3",
    }
    assert asyncio.run(api.similarities(model.read(bake(), "onnx"), [("text", [1.0])])) == [1.0]
    assert given["HINDSIGHT_API_EMBEDDINGS_PROVIDER"] == "onnx"
    assert [name for name, value in given.items() if "sesame" in value] == []


def test_what_has_to_be_read_for_its_environment_is_not_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made_in: list[threading.Thread] = []
    began: list[Any] = []

    def environment(_: object) -> dict[str, str]:
        made_in.append(threading.current_thread())
        return {"A": "1"}

    def start(*words: Any) -> Any:
        assert words[2] == {"A": "1", "KEY": "2"}
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 0)
    api: Any = SimpleNamespace(
        _environment=environment,
        _tenant=SimpleNamespace(renew=lambda: {"KEY": "2"}),
        _scripts=SimpleNamespace(start=start),
        _begin=began.append,
        watch=SimpleNamespace(process=None),
    )
    asyncio.run(HindsightApi.start(api, Any))
    assert made_in != []
    assert threading.main_thread() not in made_in
    assert len(began) == 1
