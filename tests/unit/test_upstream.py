import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.errors import SettingsError, TransientError
from sidecar.upstream import Revisions, Upstream, expected_version_body, find, known_names, revisions, similarities

Installed = Callable[..., Upstream]


def test_it_is_found_without_being_run(installed: Installed) -> None:
    made = installed("1.1.0")
    assert find(made.venv) == made
    assert made.python == made.venv / "bin/python"
    assert not made.is_0_8


def test_0_8_is_told_apart(installed: Installed) -> None:
    assert find(installed("0.8.4").venv).is_0_8


def test_an_environment_without_it_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"HINDSIGHT_SIDECAR_API_VENV is .*not installed there"):
        find(tmp_path)


def test_names_are_read_from_its_sources(installed: Installed) -> None:
    made = installed(names=("LLM_PROVIDER", "PORT"))
    (made.package / "deep").mkdir()
    (made.package / "deep/other.py").write_bytes(b"x = 'HINDSIGHT_API_DEEP_ONE' # \xff\n")
    assert known_names(made) == {"HINDSIGHT_API_LLM_PROVIDER", "HINDSIGHT_API_PORT", "HINDSIGHT_API_DEEP_ONE"}


def test_what_its_version_will_say_follows_from_the_environment(installed: Installed) -> None:
    made = installed()
    body = expected_version_body(made, {})
    assert body["api_version"] == "1.1.0"
    assert body["features"]["observations"] is True
    assert body["features"]["audit_log"] is False
    env = {
        "HINDSIGHT_API_LLM_PROVIDER": "none",
        "HINDSIGHT_API_AUDIT_LOG_ENABLED": "True",
        "HINDSIGHT_API_MCP_ENABLED": "0",
    }
    features = expected_version_body(made, env)["features"]
    assert (features["observations"], features["audit_log"], features["mcp"]) == (False, True, False)


def fake_python(made: Upstream, script: str) -> None:
    made.python.parent.mkdir(parents=True)
    made.python.write_text(f"#!/bin/sh\n{script}\n")
    made.python.chmod(0o755)


def test_revisions_are_the_last_line_that_it_writes(installed: Installed, tmp_path: Path) -> None:
    made = installed()
    fake_python(made, """echo "INFO  something"; echo '{"known": ["a1", "b2"], "heads": ["b2"]}'""")
    found = asyncio.run(revisions(made, {"PATH": os.defpath}, tmp_path))
    assert found == Revisions(frozenset({"a1", "b2"}), frozenset({"b2"}))


@pytest.mark.parametrize("script", ["echo '[]'; exit 3", "exit 0", "echo Traceback >&2; exit 1"])
def test_revisions_that_could_not_be_read_are_tried_again(script: str, installed: Installed, tmp_path: Path) -> None:
    made = installed()
    fake_python(made, script)
    with pytest.raises(TransientError, match="hindsight-api's upstream_probe did not answer"):
        asyncio.run(revisions(made, {"PATH": os.defpath}, tmp_path))


def test_similarities_are_asked_for_in_a_file_that_is_gone_afterwards(installed: Installed, tmp_path: Path) -> None:
    made = installed()
    fake_python(made, f"""cat "$3" > {tmp_path}/asked; echo '[0.9, 0.1]'""")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = asyncio.run(similarities(made, [("a", [1.0]), ("b", [0.5])], {"PATH": os.defpath}, scratch, tmp_path))
    assert found == [0.9, 0.1]
    assert (tmp_path / "asked").read_text() == '[["a", [1.0]], ["b", [0.5]]]'
    assert list(scratch.iterdir()) == []


def test_a_question_that_is_given_up_leaves_no_process(installed: Installed, tmp_path: Path) -> None:
    made = installed()
    fake_python(made, f"echo $$ > {tmp_path}/pid; exec sleep 600")

    async def work() -> int:
        asking = asyncio.ensure_future(revisions(made, {"PATH": os.defpath}, tmp_path))
        async with asyncio.timeout(20):
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        return int((tmp_path / "pid").read_text())

    pid = asyncio.run(work())
    assert not Path(f"/proc/{pid}").exists()
