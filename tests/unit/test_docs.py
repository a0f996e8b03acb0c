"""The operator's manual and the code say the same, compared in both directions."""

import ast
import inspect
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import promql_parser
import pytest
import typer.main
import yaml
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from bake.image import slim
from sidecar import api_environment, commands, control, gateway, machine, metrics, model, probe, serve
from sidecar.backoff import End
from sidecar.errors import Reason
from sidecar.hosts import FOREIGN_HOST, FOREIGN_ORIGIN
from sidecar.kinds import Kind, Outcome
from sidecar.machine import LABELS, Phase, Server, State, Subject, World
from sidecar.metrics import Metrics
from sidecar.operations import Operation, Operations
from sidecar.schedule import Failure, Made, Record
from sidecar.settings import Settings, secret_names, setting_names
from sidecar.status import RETRY_AFTER, Status
from sidecar.upstream import Upstream
from sidecar.volume import Space

NOW = datetime(2026, 11, 29, tzinfo=UTC)
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "settings.md",
    "endpoints.md",
    "commands.md",
    "migrating.md",
    "metrics.md",
    "events.md",
    "troubleshooting.md",
    "security.md",
]


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """Return what stands below a heading, up to the next of its level or above."""
    level = len(heading.split(maxsplit=1)[0])
    found = re.search(rf"^{re.escape(heading)}$\n(.*?)(?=^#{{1,{level}}} |\Z)", text(page), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no {heading!r}"
    return found[1]


def rows(content: str) -> list[list[str]]:
    """Return the cells of every table row but the headings."""
    cells = []
    lines = content.splitlines()
    for index, line in enumerate(lines):
        if not line.startswith("|") or line.startswith("|---"):
            continue
        if index + 1 < len(lines) and lines[index + 1].startswith("|---"):
            continue
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells


def headings(page: str) -> list[str]:
    """Return the anchors of a page."""
    found = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
    return [heading.lower().replace(" ", "-") for heading in found]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# image.md ------------------------------------------------------------------------------------------------------


def test_what_the_image_leaves_out_is_listed() -> None:
    listed = [quoted(row[0]) for row in rows(section("image.md", "## What was left out"))]
    assert {name for names in listed for name in names} == {left.name for left in slim.LEFT_OUT} | {"debugging-symbols"}


def test_every_variable_of_make_image_is_listed() -> None:
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    options = re.search(r"^image_options = (.*?[^\\])\n", makefile, re.MULTILINE | re.DOTALL)
    assert options
    used = set(re.findall(r"\$\(([A-Z_]+)\)", options[1])) | {"ENGINE", "SUITE", "BASE"}
    assert {quoted(row[0])[0] for row in rows(section("image.md", "## Build it"))} == used


# settings.md ---------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_the_table_of_settings_has_every_setting_with_its_default() -> None:
    documented = {quoted(name)[0]: default for name, default, _ in rows(text("settings.md"))}
    names = setting_names()
    assert documented == {names[name]: shown(field.default) for name, field in Settings.model_fields.items()}


def test_the_table_of_settings_has_each_once_and_says_something() -> None:
    table = rows(text("settings.md"))
    assert len(table) == len({name for name, _, _ in table}) == len(Settings.model_fields)
    assert all(len(meaning) > 20 for _, _, meaning in table)


def test_every_secret_is_called_one_and_has_its_file() -> None:
    secrets = [quoted(name)[0] for name, _, meaning in rows(text("settings.md")) if meaning.startswith("Secret.")]
    assert secrets == secret_names()
    assert set(re.findall(r"`(\w+_FILE)`", section("settings.md", "## Secrets from files"))) == {
        f"{name}_FILE" for name in secrets
    } | {"NAME_FILE"}


def test_every_bound_of_a_number_is_told() -> None:
    meanings = {quoted(name)[0]: meaning for name, _, meaning in rows(text("settings.md"))}
    for name, field in Settings.model_fields.items():
        for bound in field.metadata:
            for limit in (getattr(bound, "ge", None), getattr(bound, "le", None)):
                if limit is not None:
                    assert re.search(rf"\b{limit}\b", meanings[setting_names()[name]]), name


def test_every_choice_is_told() -> None:
    for name, field in Settings.model_fields.items():
        choices = re.findall(r"'([a-z]+)'", str(field.annotation)) if "Literal" in str(field.annotation) else []
        row = next(row for row in rows(text("settings.md")) if quoted(row[0])[0] == setting_names()[name])
        if name != "child_log_level":  # the same as log_level's
            assert set(choices) <= set(quoted(row[1] + row[2])), name


@pytest.mark.parametrize("flavor", ["onnx", "torch"])
def test_the_variables_that_the_sidecar_owns_are_listed(flavor: Any, bake: Callable[..., Path]) -> None:
    settings = Settings(flavor=flavor, reranker_dir=bake(kind="reranker"))
    owned = api_environment.owned(settings, model.read(bake(), flavor))
    content = section("settings.md", "## Variables of hindsight-api")
    listed = set(quoted(content))
    for name in owned:
        assert name in listed or name.removeprefix("HINDSIGHT_API_EMBEDDINGS_ONNX_") in listed, name


def test_no_variable_is_called_owned_that_is_not(bake: Callable[..., Path]) -> None:
    flavors: tuple[Literal["onnx", "torch"], ...] = ("onnx", "torch")
    owned = {
        name
        for flavor in flavors
        for name in api_environment.owned(
            Settings(flavor=flavor, reranker_dir=bake(kind="reranker")), model.read(bake(), flavor)
        )
    }
    (item,) = re.findall(r"^- \*\*Decided by the sidecar\.\*\*(.*?)^- ", text("settings.md"), re.MULTILINE | re.DOTALL)
    for name in quoted(item):
        if name.startswith("HINDSIGHT_API_") and not name.endswith("_"):
            assert name in owned


def test_what_is_refused_and_what_is_passed_is_listed() -> None:
    listed = set(quoted(section("settings.md", "## Variables of hindsight-api")))
    assert set(api_environment.defaults()) <= listed
    assert set(api_environment.defaults().values()) <= listed
    assert set(api_environment._PASSED_PREFIXES) <= listed
    assert set(api_environment._PASSED) <= listed
    assert set(api_environment._OFFLINE) <= listed


def test_what_the_page_calls_refused_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hindsight_api").mkdir()
    (item,) = re.findall(r"^- \*\*Refused\.\*\*(.*?)^- ", text("settings.md"), re.MULTILINE | re.DOTALL)
    named = [name for name in quoted(item) if name.startswith("HINDSIGHT_API_")]
    assert len(named) == 3
    for name in named:
        variable, _, value = name.partition("=")
        upstream = Upstream(tmp_path, "1.1.0", tmp_path / "hindsight_api")
        assert api_environment.check({variable: value or "x"}, {}, upstream), name


# endpoints.md --------------------------------------------------------------------------------------------------


def documented(heading: str) -> list[str]:
    return [quoted(row[0])[0] for row in rows(section("endpoints.md", heading))]


def app() -> Any:
    status = Status()
    return control.build(Settings(), status, Metrics(status))


def operations() -> list[str]:
    """Return every method and path of the control API."""
    paths = app().openapi()["paths"]
    return ["GET /openapi.json", *(f"{method.upper()} {path}" for path, methods in paths.items() for method in methods)]


def test_every_endpoint_of_the_control_api_is_documented() -> None:
    assert sorted(documented("## Control")) == sorted(operations())


def test_who_may_is_documented_as_it_is() -> None:
    table = {quoted(row[0])[0]: row[1] for row in rows(section("endpoints.md", "## Control"))}
    guarded = {operation for operation in operations() if " /v1/" in operation}
    assert {request for request, who in table.items() if who == "administrators"} == guarded


def test_every_member_of_an_operation_is_documented() -> None:
    members = [name for row in rows(section("endpoints.md", "## Operations")) for name in quoted(row[0])]
    assert sorted(members) == sorted(Operation(Kind.DUMP).to_json())
    told = {quoted(row[0])[0]: quoted(row[1]) for row in rows(section("endpoints.md", "## Operations"))}
    assert told["id"] == [kind.value for kind in Kind]
    assert told["outcome"] == [outcome.value for outcome in Outcome]


def test_every_path_that_the_gateway_answers_itself_is_documented() -> None:
    answered = [request for request in documented("## Gateway") if request.startswith("GET ")]
    assert sorted(answered) == sorted(f"GET {path}" for path in gateway._OPEN_PATHS)


def refusals() -> set[Any]:
    """Return every reason that the gateway gives where it answers a call itself."""
    return {
        node.args[1].value
        for node in ast.walk(ast.parse(inspect.getsource(gateway)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_refuse"
        and isinstance(node.args[1], ast.Constant)
    } | {FOREIGN_HOST.reason, FOREIGN_ORIGIN.reason, gateway.NO_ROOM}


def test_every_refusal_of_the_gateway_is_documented() -> None:
    refused = {
        row[0].strip("`") for row in rows(section("endpoints.md", "## Gateway")) if not row[0].startswith("`GET")
    }
    assert refused == refusals()
    assert f"`Retry-After: {RETRY_AFTER}`" in text("endpoints.md")


def test_every_member_of_health_is_documented() -> None:
    members = [quoted(row[0])[0] for row in rows(section("endpoints.md", "## Health"))]
    assert members == list(Status().body())
    states = next(row[1] for row in rows(section("endpoints.md", "## Health")) if row[0] == "`state`")
    assert quoted(states) == [phase.value for phase in Phase]


def test_every_address_is_the_default_of_its_setting() -> None:
    for heading, field in (
        ("## Gateway", "listen"),
        ("## Control", "control_listen"),
        ("## Metrics alone", "metrics_listen"),
    ):
        content = section("endpoints.md", heading)
        assert f"`{setting_names()[field]}`" in content
        default = Settings.model_fields[field].default
        if default is not None:
            assert content.lstrip().startswith(f"`{default}`")


# commands.md ---------------------------------------------------------------------------------------------------


def command_line() -> dict[str, set[str]]:
    """Return the options of every command."""
    group: Any = typer.main.get_command(commands.app)
    found = {"hindsight-sidecar": {option for parameter in group.params for option in parameter.opts}}
    for name, command in group.commands.items():
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        found[name] = {option for parameter in options for option in parameter.opts}
    return found


def test_every_command_is_documented() -> None:
    table = rows(text("commands.md").partition("## ")[0])
    named = [quoted(row[0])[0] for row in table if not quoted(row[0])[0].startswith("--")]
    assert named == [name for name in command_line() if name != "hindsight-sidecar"]


def test_every_option_is_documented_at_its_commands() -> None:
    table = [row for row in rows(text("commands.md")) if quoted(row[0]) and quoted(row[0])[0].startswith("--")]
    told: dict[str, set[str]] = {name: set() for name in command_line()}
    for option, of, _ in table:
        if option != "`--help`":
            for name in quoted(of):
                told[name] |= set(quoted(option))
    assert told == command_line()


def codes(module: Any) -> set[int]:
    return {value for name, value in vars(module).items() if name.startswith("EXIT_")}


def test_every_exit_code_is_documented() -> None:
    told = {int(row[0]) for row in rows(section("commands.md", "## Exit codes of serve"))}
    assert told == codes(serve)
    told = {int(row[0]) for row in rows(section("commands.md", "## Exit codes of the commands"))}
    assert told == codes(commands) | codes(probe) | {2}  # 2: typer's own, for wrong usage


# metrics.md ----------------------------------------------------------------------------------------------------


def everything() -> Metrics:
    """Return metrics of a sidecar of which all is known, in the middle of a dump."""
    status = Status()
    identity = model.Identity("id", "r", "float32", 384, "cls", True, "", "")  # noqa: FBT003
    made = model.Model(DOCS, "m", "model.onnx", 512, stand_in=False, files={}, loaded=frozenset(), identity=identity)
    status.update(
        memory_count=1,
        database_bytes=1,
        wal_bytes=1,
        space=Space(1, 2, 3),
        model=made.to_json(),
        versions={"hindsight-api": "1.1.0", "postgres": None},
        state=State(Phase.READY),
        dumps=Record("* * * * *", None, Made("x", NOW), Failure(NOW, "no space"), {"done": 1}),
    )
    found = Metrics(status)
    operations = Operations()
    operations._current = Operation(Kind.DUMP, phase="hash", total=10, unit="bytes")
    found.watch_operations(SimpleNamespace(operations=operations, last_dump=NOW))
    found.count_request("POST", "2xx")
    return found


def families() -> dict[str, Family]:
    """Return every metric by the name that is documented: that of its samples, and a histogram's own."""
    parsed = text_string_to_metric_families(everything().render().decode())
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in parsed}


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    exported = {
        name: (one.type, {label for sample in one.samples for label in sample.labels})
        for name, one in families().items()
    }
    content = text("metrics.md").partition("## How a component ended")[0]
    assert {quoted(row[0])[0]: (row[1], set(quoted(row[2]))) for row in rows(content)} == exported


def test_every_name_follows_the_conventions_of_prometheus() -> None:
    for name, one in families().items():
        assert re.fullmatch(r"hindsight_sidecar(_[a-z]+)+", name), name
        assert one.documentation, name
        assert name.endswith("_total") == (one.type == "counter"), name
        # Base units, at the end; and of a time when it was, as an age is old when it is read.
        assert not re.search(r"_(milliseconds|minutes|hours|kilobytes|megabytes|percent|age)(_|$)", name), name
        for unit in ("seconds", "bytes", "ratio", "info"):
            assert f"_{unit}" not in name or re.search(rf"_{unit}(_total)?$", name), name
        assert len(one.samples) < 50, f"{name} has too many series"


def test_every_end_of_a_component_is_documented() -> None:
    table = {row[0].strip("`"): row[1].strip("`") for row in rows(section("metrics.md", "## How a component ended"))}
    assert list(table) == list(End)
    for end, of in table.items():
        assert [name for name, ends in metrics.ENDS.items() if end in ends] == (
            list(metrics.ENDS) if of == "both" else [of]
        )


def test_every_refusal_is_told_from_the_beginning() -> None:
    assert set(metrics.REFUSALS) == refusals()


# troubleshooting.md --------------------------------------------------------------------------------------------


def paragraphs(heading: str) -> dict[str, str]:
    content = section("troubleshooting.md", heading)
    return dict(re.findall(r"^### (\S+)$\n(.*?)(?=^### |\Z)", content, re.MULTILINE | re.DOTALL))


def test_every_reason_to_be_blocked_has_its_paragraph() -> None:
    told = paragraphs("## Blocked")
    assert list(told) == [reason.value for reason in Reason]
    for reason, paragraph in told.items():
        assert len(quoted(paragraph)) >= 2, f"{reason}: say how to see it and which line to change"


def test_everything_that_a_start_waits_for_has_its_paragraph() -> None:
    assert list(paragraphs("## Starting and degraded")) == list(Subject)


def test_every_refusal_has_its_paragraph() -> None:
    told = re.findall(r"^- `([a-z-]+)`: ", section("troubleshooting.md", "## Memory calls are refused"), re.MULTILINE)
    assert sorted(told) == sorted(refusals())


def test_every_end_of_a_component_has_its_paragraph() -> None:
    content = section("troubleshooting.md", "## A component ends again and again")
    told = [name for names in re.findall(r"^- (`.*?`): ", content, re.MULTILINE) for name in quoted(names)]
    assert sorted(told) == sorted(End)


def test_every_state_that_may_be_told_is_listed() -> None:
    """What is `starting` or `degraded`, and why: the machine's own, and that of a sidecar that does not get to look."""
    seen = {
        machine.state_of(
            World(volume_held=held, cluster_prepared=prepared, postgres=postgres, database_checked=checked, ever_ready=ever),
            0.0,
        ).labels
        for held in (False, True)
        for prepared in (False, True)
        for postgres in Server
        for checked in (False, True)
        for ever in (False, True)
    }  # fmt: skip
    status = Status()
    status.update(state=State(Phase.READY), sampled=-math.inf)
    seen.add(status.state.labels)
    assert seen == {labels for labels in LABELS if labels[0] in (Phase.STARTING, Phase.DEGRADED)}


# alerts.yaml ---------------------------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(text("alerts.yaml"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


ADDED = {"job", "instance"}  # by Prometheus, to whatever it scrapes
ALERTS = pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])


def nodes(expression: str) -> list[Any]:
    """Return every part of an expression, the outer ones first."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return found


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found = [getattr(node, "vector_selector", node) for node in nodes(expression)]
    return [node for node in found if isinstance(node, promql_parser.VectorSelector)]


def series(name: str) -> list[dict[str, str]]:
    """Return the labels of every series of this name that the sidecar exports, or Prometheus for it."""
    if name == "up":
        return [{}]
    return [sample.labels for one in families().values() for sample in one.samples if sample.name == name]


@ALERTS
def test_every_metric_and_label_of_an_alert_is_exported(rule: dict[str, Any]) -> None:
    assert selectors(rule["expr"])
    for selector in selectors(rule["expr"]):
        exported = series(selector.name or "")
        assert exported, selector.name
        for matcher in selector.matchers.matchers:
            if matcher.name in ADDED:
                continue
            values = {labels[matcher.name] for labels in exported}
            for value in matcher.value.split("|"):
                assert value in values, f"{selector.name}: {matcher}"


@ALERTS
def test_every_label_that_an_alert_joins_or_tells_is_there(rule: dict[str, Any]) -> None:
    exported = {
        label for selector in selectors(rule["expr"]) for labels in series(selector.name or "") for label in labels
    }
    for node in nodes(rule["expr"]):
        modifier = getattr(node, "modifier", None)
        matching = getattr(modifier, "matching", modifier)
        labels = set(matching.labels) if matching is not None else set()
        assert labels <= exported | ADDED
        if isinstance(node, promql_parser.AggregateExpr):
            assert matching.type == promql_parser.AggModifierType.Without  # a `by` would lose who it is about
            exported -= labels
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert "instance" in told
    assert told <= exported | ADDED


@ALERTS
def test_every_alert_leads_to_a_paragraph(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook"].removeprefix("docs/").partition("#")
    placeholder = "{{ $labels.subject }}"
    anchors = [anchor.replace(placeholder, reason) for reason in Reason] if placeholder in anchor else [anchor]
    assert page == "troubleshooting.md"
    assert set(anchors) <= set(headings(page))


@ALERTS
def test_every_alert_says_how_bad_it_is_and_waits_for_a_time(rule: dict[str, Any]) -> None:
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert set(rule["annotations"]) == {"summary", "runbook"}
    promql_parser.parse_duration(rule.get("for", "1s"))


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    assert all(name.startswith("HindsightSidecar") for name in names)


# security.md ---------------------------------------------------------------------------------------------------


def test_every_promise_names_tests_that_are_there() -> None:
    tests = Path(__file__).parents[1]
    table = [row for row in rows(text("security.md")) if "::" in row[-1]]
    assert len(table) > 12
    for promise, named in table:
        assert quoted(named), promise
        for one in quoted(named):
            module, _, function = one.partition("::")
            found = [
                path for path in tests.glob(f"*/{module}") if f"\ndef {function}(" in path.read_text(encoding="utf-8")
            ]
            assert len(found) == 1, one


# All pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        content = text(name or page)
        assert content
        assert not anchor or anchor in headings(name or page), target


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_setting_that_is_mentioned_exists(page: str) -> None:
    content = text(page)
    known = command_line()
    for name, options in re.findall(r"hindsight-sidecar ([a-z]+)((?: --[a-z-]+)*)", content):
        assert name in known, name
        assert set(options.split()) <= known[name] | {"--help"}
    settings = set(setting_names().values()) | {f"{secret}_FILE" for secret in secret_names()}
    assert set(re.findall(r"HINDSIGHT_SIDECAR_[A-Z_]*[A-Z]", content)) <= settings


def test_the_settings_that_messages_speak_of_exist() -> None:
    settings = set(setting_names().values()) | {f"{secret}_FILE" for secret in secret_names()}
    for path in Path(machine.__file__).parent.glob("*.py"):
        for name in re.findall(r"HINDSIGHT_SIDECAR_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8")):
            assert name in settings, f"{path.name}: {name}"
