"""The control API against its own description: what nobody thought of is sent to both of its addresses, and no fault comes back."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from harness import RunningSidecar, running_sidecar
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from wire import relayed

TOKEN = "a-token-of-this-test"  # noqa: S105 - no secret
CASES = 2000  # at least, over both addresses
BOUND = 120.0  # seconds for one address; some 30 on two idle cores
SEED = 6
REFUSED = ["400", "401", "403", "404", "405", "409", "413", "416", "422", "429", "503"]


@pytest.fixture(scope="module")
def administered(model_dir: Path) -> Iterator[RunningSidecar]:
    """Return a running sidecar of this module's own: everything is done to it."""
    with running_sidecar(model_dir, HINDSIGHT_SIDECAR_TOKEN=TOKEN) as sidecar:
        yield sidecar


def config(**headers: str) -> SchemathesisConfig:
    """Return what is generated and what is checked: all of it, but that the document cannot say what is refused.

    Without headers nobody is asked for a token, as over the socket.
    """
    guarded = {"enabled": bool(headers)}
    return SchemathesisConfig.from_dict(
        {
            "seed": SEED,
            "headers": headers,
            "request-timeout": 30.0,
            "generation": {
                "max-examples": 40 if headers else 80,  # each is tried without its token as well
                "database": "none",
                "no-shrink": True,
                "deterministic": True,
                "with-security-parameters": bool(headers),
            },
            "phases": {"stateful": {"enabled": False}},
            "checks": {
                "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "503"]},
                "positive_data_acceptance": {"expected-statuses": ["2xx", "3xx", *REFUSED]},
                "negative_data_rejection": {"expected-statuses": REFUSED},
                "ignored_auth": guarded,
                "missing_required_header": guarded,
            },
        }
    )


def tried(url: str, **headers: str) -> tuple[Counter[int], list[str]]:
    """Send what is generated from the description that is served at a URL.

    Returns how often each status was answered, and every failure of a check with what it was about.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config(**headers))
    answers: Counter[int] = Counter()
    failures: list[str] = []
    stream = from_schema(schema).execute()
    deadline = time.monotonic() + BOUND
    for event in stream:
        if isinstance(event, events.NonFatalError | events.FatalError):
            failures.append(str(event))
        if isinstance(event, events.ScenarioFinished):
            recorder = event.recorder
            answers.update(
                interaction.response.status_code
                for interaction in recorder.interactions.values()
                if interaction.response
            )
            failures += [
                f"{recorder.label}: {check.failure_info.failure}"
                for checks in recorder.checks.values()
                for check in checks
                if check.failure_info is not None
            ]
        assert time.monotonic() < deadline, f"{answers.total()} cases in {BOUND:g} s"
    return answers, failures


def test_nothing_that_can_be_sent_makes_a_fault(administered: RunningSidecar) -> None:
    answers, failures = tried(f"http://127.0.0.1:{administered.control_port}", Authorization=f"Bearer {TOKEN}")
    with relayed(administered.run_dir / "control.sock") as port:
        more, over_the_socket = tried(f"http://127.0.0.1:{port}")
    assert failures + over_the_socket == []
    assert {status for status in answers + more if status >= 500} <= {503}
    assert answers.total() + more.total() >= CASES
    assert not [event for event in administered.events() if "unexpected" in event["event"]]
    assert administered.health_status() == 200
