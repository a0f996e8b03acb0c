"""What is quoted to a person at a terminal rules nothing there."""

import json
import re
from pathlib import Path

import pytest

import sidecar
from sidecar import administering, probe, terminal

HOSTILE = "a\x1b[2Jb\r12:00 ready\x07\x9b2J\x7f\u2028caf\u00e9\tc"
WRITTEN_OUT = "a\\u001b[2Jb\\u000d12:00 ready\\u0007\\u009b2J\\u007f\\u2028caf\u00e9\tc"


def test_control_characters_are_written_out_and_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say(f"{HOSTILE}\nnext")
    terminal.say(HOSTILE, err=True, newline=False)
    assert capsys.readouterr() == (f"{WRITTEN_OUT}\nnext\n", WRITTEN_OUT)


def test_json_stays_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    administering.Console(as_json=True).result({"error": HOSTILE}, list)
    told = capsys.readouterr().out
    assert json.loads(told) == {"error": HOSTILE}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028]", told)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_probe_rules_nothing_either(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "ask", lambda _: (503, {"state": "blocked", "detail": HOSTILE}))
    probe.main(arguments)
    told = capsys.readouterr().out
    assert "12:00 ready" in told
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028]", told)


def test_commands_say_everything_that_way() -> None:
    others = [path for path in Path(sidecar.__file__).parent.glob("*.py") if path.name != "terminal.py"]
    assert len(others) > 50
    assert [
        path.name
        for path in others
        if re.search(r"\btyper\.(secho|echo)\(|^\s*print\(", path.read_text(), re.MULTILINE)
    ] == []
