"""Every event that the sidecar logs has a name that never changes, and docs/events.md has all of them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar import machine

SOURCES = sorted(Path(machine.__file__).parent.glob("*.py"))
PAGE = Path(__file__).parents[2] / "docs/events.md"
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
PASSES_LINES_ON = {"log.py", "programs.py"}  # of children and programs, in their own words


@dataclass(frozen=True)
class Logged:
    """One place in the source that logs.

    Attributes:
        event: the expression that names it.
        levels: at which it is logged, as far as the place itself tells.
        components: one of them is whose it is, as far as its module tells.
        fields: what belongs to it by name; None among them stands for others, named where the code runs.

    """

    module: str
    line: int
    event: ast.expr
    levels: frozenset[str]
    components: frozenset[str]
    fields: frozenset[str | None]

    @property
    def name(self) -> str:
        assert isinstance(self.event, ast.Constant)
        return str(self.event.value)


def is_logger(node: ast.AST) -> bool:
    """Tell whether this is a logger: `self._log`, `log.get(...)`, or what a program's lines go to."""
    if isinstance(node, ast.Attribute):
        return node.attr == "_log"
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("log.get", "get")
    return isinstance(node, ast.Name) and node.id in ("tell", "logger")


def logged(path: Path) -> Iterator[Logged]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    components = frozenset(
        call.args[0].value
        for call in calls
        if ast.unparse(call.func) == "log.get" and isinstance(call.args[0], ast.Constant)
    )
    for call in calls:
        func, levels, owners = call.func, frozenset[str](), frozenset[str]()
        if isinstance(func, ast.Attribute) and func.attr in {*LEVELS, "log"} and is_logger(func.value):
            levels, owners = frozenset({LEVELS.get(func.attr, "")}), components
        elif not (isinstance(func, ast.Name) and func.id == "tell"):
            continue
        if isinstance(call.args[0], ast.Call):  # how far an upload is, told to the command's bar
            continue
        fields = frozenset(keyword.arg for keyword in call.keywords) - {"exc_info"}
        yield Logged(path.name, call.lineno, call.args[-1], levels, owners, fields)
    for node in ast.walk(tree):  # rendered without a logger
        if isinstance(node, ast.Dict):
            keys = {
                ast.literal_eval(key): value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            if "event" in keys:
                component = frozenset({ast.literal_eval(keys["component"])})
                yield Logged(
                    path.name,
                    node.lineno,
                    keys["event"],
                    frozenset(),
                    component,
                    frozenset(keys) - {"event", "component"},
                )


ALL = [one for path in SOURCES for one in logged(path)]
OURS = [one for one in ALL if one.module not in PASSES_LINES_ON or not isinstance(one.event, ast.Name)]


@dataclass(frozen=True)
class Row:
    components: frozenset[str]
    levels: frozenset[str]
    fields: frozenset[str]


def table() -> dict[str, Row]:
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            event, components, levels, fields, _ = cells
            quoted = [frozenset(re.findall(r"`([^`]+)`", cell)) for cell in (components, levels, fields)]
            assert event.strip("`") not in found
            found[event.strip("`")] = Row(*quoted)
    return found


@pytest.mark.parametrize("one", OURS, ids=lambda one: f"{one.module}:{one.line}")
def test_an_event_is_one_constant_and_what_it_is_about_are_fields(one: Logged) -> None:
    assert isinstance(one.event, ast.Constant), f"{one.module}:{one.line}: {ast.unparse(one.event)}"
    assert isinstance(one.event.value, str)
    assert not re.search(r"%[sdr]|\{\w*\}", one.event.value)
    assert "|" not in one.event.value  # it stands in a table


def test_only_lines_of_others_are_passed_on() -> None:
    passed = [one for one in ALL if one not in OURS]
    assert {one.module for one in passed} == PASSES_LINES_ON
    assert {ast.unparse(one.event) for one in passed} == {"line"}


def test_every_event_is_documented() -> None:
    assert len(OURS) > 30
    assert set(table()) == {one.name for one in OURS}


@pytest.mark.parametrize("name", sorted({one.name for one in OURS if isinstance(one.event, ast.Constant)}))
def test_an_event_is_documented_as_it_is_logged(name: str) -> None:
    row = table()[name]
    places = [one for one in OURS if one.name == name]
    for one in places:
        assert one.levels <= row.levels <= set(LEVELS)
        assert not one.components or one.components & row.components
    named = {field for one in places for field in one.fields}
    assert named - {None} <= row.fields
    assert None in named or named == row.fields


def loggers_go_where_they_are_seen(parents: dict[ast.AST, ast.AST], made: ast.Call) -> bool:
    """Tell whether a logger that is made here is used at once, or gets one of the names that `is_logger` knows."""
    parent = parents[made]
    if isinstance(parent, ast.Attribute):
        return parent.attr in LEVELS
    targets = [parent.target] if isinstance(parent, ast.AnnAssign) else getattr(parent, "targets", [])
    return bool(targets) and all(is_logger(target) for target in targets)


def method_goes_where_it_is_seen(parents: dict[ast.AST, ast.AST], method: ast.Attribute) -> bool:
    """Tell whether a logger's method is called here, or handed to a `tell`, or to what hears lines."""
    parent = parents[method]
    while isinstance(parent, ast.IfExp):
        parent = parents[parent]
    if isinstance(parent, ast.Assign):
        return ast.unparse(parent.targets[0]) == "tell"
    return isinstance(parent, ast.Call) or (isinstance(parent, ast.keyword) and parent.arg in ("tell", "hear"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_logger_is_one_that_is_looked_at_here(path: Path) -> None:
    """One by another name would log what no test sees."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("log.get", "structlog.get_logger"):
            assert loggers_go_where_they_are_seen(parents, node), where
        if isinstance(node, ast.Attribute) and node.attr in LEVELS and is_logger(node.value):
            assert method_goes_where_it_is_seen(parents, node), where
