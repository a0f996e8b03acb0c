"""The operator's manual and the code say the same, compared in both directions."""

import ast
import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest
import typer.main

from bake.image import slim
from sidecar import api_environment, commands, control, gateway, machine, model, probe, serve
from sidecar.errors import Reason
from sidecar.hosts import FOREIGN_HOST, FOREIGN_ORIGIN
from sidecar.machine import Phase, Server, State, World
from sidecar.metrics import Metrics
from sidecar.operations import Kind, Operation, Outcome
from sidecar.schedule import Failure, Made, Record
from sidecar.settings import Settings, secret_names, setting_names
from sidecar.status import RETRY_AFTER, Status
from sidecar.upstream import Upstream

NOW = datetime(2026, 11, 29, tzinfo=UTC)
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "settings.md",
    "endpoints.md",
    "commands.md",
    "migrating.md",
    "metrics.md",
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


def test_every_refusal_of_the_gateway_is_documented() -> None:
    refused = {
        row[0].strip("`") for row in rows(section("endpoints.md", "## Gateway")) if not row[0].startswith("`GET")
    }
    calls = [
        node.args[1].value
        for node in ast.walk(ast.parse(inspect.getsource(gateway)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_refuse"
        and isinstance(node.args[1], ast.Constant)
    ]
    assert refused == {*calls, FOREIGN_HOST.reason, FOREIGN_ORIGIN.reason}
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


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    status = Status()
    identity = model.Identity("id", "r", "float32", 384, "cls", True, "", "")  # noqa: FBT003
    made = model.Model(DOCS, "m", "model.onnx", 512, stand_in=False, files={}, identity=identity)
    status.update(
        memory_count=1,
        model=made.to_json(),
        versions={"hindsight-api": "1.1.0", "postgres": None},
        state=State(Phase.READY),
        dumps=Record("* * * * *", None, Made("x", NOW), Failure(NOW, "no space"), {"done": 1}),
    )
    metrics = Metrics(status)
    metrics.count_refusal("not-ready")
    rendered = metrics.render().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", rendered, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in types}
    for name, inside in re.findall(r"^(\w+)\{(.*)\} ", rendered, re.MULTILINE):
        labels[name] |= set(re.findall(r'(\w+)="', inside))
    table = {quoted(row[0])[0]: (row[1], set(quoted(row[2]))) for row in rows(text("metrics.md"))}
    assert table == {name: (types[name], labels[name]) for name in types}


# troubleshooting.md --------------------------------------------------------------------------------------------


def paragraphs(heading: str) -> dict[str, str]:
    content = section("troubleshooting.md", heading)
    return dict(re.findall(r"^### (\S+)$\n(.*?)(?=^### |\Z)", content, re.MULTILINE | re.DOTALL))


def test_every_reason_to_be_blocked_has_its_paragraph() -> None:
    told = paragraphs("## Blocked")
    assert list(told) == [reason.value for reason in Reason]
    for reason, paragraph in told.items():
        assert len(quoted(paragraph)) >= 2, f"{reason}: say how to see it and which line to change"


def test_every_component_has_its_paragraph() -> None:
    subjects = {
        machine.state_of(
            World(volume_held=held, cluster_prepared=prepared, postgres=postgres, database_checked=checked), 0.0
        ).subject
        for held in (False, True)
        for prepared in (False, True)
        for postgres in Server
        for checked in (False, True)
    }
    status = Status(clock=lambda: 1e12)
    status.update(state=State(Phase.READY))
    subjects |= set(re.findall(r"\((.*)\)", status.phase_text))
    assert set(paragraphs("## Starting and degraded")) == subjects


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
        headings = re.findall(r"^#+ (.*)$", content, re.MULTILINE)
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], target


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
