"""What the administration commands show: tables, a restore's report, and its line for a change log."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sidecar.inspection import Inspection
from sidecar.progress import duration, size

# In the name of a kept database or cluster, and in that of a copy from before a version of hindsight-api.
_TIME = re.compile(r".*(?:hindsight_kept_|\.kept-)(\d{8}t\d{6}z)(?:_before_\w+)?")
Json = Mapping[str, Any]


def moment(text: str | None) -> str:
    """Return an ISO time as `2026-11-29 21:03 UTC`; a dash for none."""
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC" if text else "-"


def columns(rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns; those of the indexes in `right` are aligned to the right."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))] if cells else []
    aligned = set(right)
    return [
        "  ".join(
            cell.rjust(width) if index in aligned else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


# A restore ------------------------------------------------------------------------------------------------------


def restore_lines(operation: Json, name: str, sha256: str, model: Json | None) -> list[str]:
    """Return what came of a restore or of its rehearsal: before and after, what could not be proved, and one last line.

    Of one that did not end well: what differs, if that is why. `model` is the one at hand.
    """
    report = operation["report"]
    if operation["outcome"] != "done":
        comparison = report.get("comparison")
        return comparison_lines(comparison) if comparison and comparison["faults"] else []
    lines = [f"source    {name}{_hash(sha256, ', sha256 ')}"]
    if origin := report.get("from"):
        versions = {"postgres": origin["postgres"], "pg_dump": origin["pg_dump"], **(origin["versions"] or {})}
        lines.append(f"made      {moment(origin['made'])}, by {_versions(versions)}")
    if comparison := report.get("comparison"):
        lines += ["", *comparison_lines(comparison), ""]
        lines += [f"noted     {note}" for note in comparison["notes"]]
    lines += _model_lines(report.get("model"), model)
    lines += _dimension_lines(report.get("dimensions"), model)
    lines += [f"newer     {change}, since this began" for change in report.get("newer", [])]
    if agreed := report.get("agreement"):
        lines.append(
            f"embedded  {agreed['memories']} memories anew, similarity to their stored vectors {agreed['median_similarity']} (median)"
        )
    if recalled := report.get("recalled"):
        lines.append(
            f"recalled  {recalled['memories']} memories by their own texts, similarity {recalled['median_similarity']} (median)"
        )
    lines += [
        f"LATER     {change}, at the source since it was read: not here"
        for change in report.get("written_there_since", [])
    ]
    lines += [f"UNPROVED  {sentence}" for sentence in report.get("unproved", [])]
    if undo := report.get("still_frozen"):
        lines.append(f"FROZEN    the source still accepts no writes; undo it there, with psql: {undo}")
    last = rehearsed_line(operation, name) if report.get("dry_run") else restored_line(operation, name, sha256)
    return [*lines, "", last]


def _model_lines(there: Json | None, here: Json | None) -> list[str]:
    if here is None:
        return []
    if there is None:
        return [f"model     not recorded there, {model_text(here)} here"]
    if all(here.get(name) == value for name, value in there.items()):
        return [f"model     {model_text(here)}, there and here"]
    return [f"model     {model_text(there)} there, {model_text(here)} here: NOT EQUAL"]


def _dimension_lines(there: Mapping[str, int] | None, here: Json | None) -> list[str]:
    if not there or here is None:
        return []
    found = ", ".join("not fixed" if one < 0 else str(one) for one in sorted(set(there.values())))
    return [f"dimension {found} of the memories, {here['dimension']} of the model here"]


def _hash(sha256: str, before: str, after: str = "") -> str:
    return f"{before}{sha256}{after}" if sha256 else ""


def comparison_lines(comparison: Json) -> list[str]:
    """Return every table, and then every kind of definition, there and here."""
    rows: list[Sequence[object]] = [("table", "there", "here", "")]
    rows += [(line["name"], line["there"], line["here"], _verdict(line["equal"])) for line in comparison["tables"]]
    rows.append(("", "", "", ""))
    rows += [
        (kind, found["there"], found["here"], _verdict(found["there"] == found["here"] == found["equal"]))
        for kind, found in comparison["counts"].items()
    ]
    return columns(rows, right=(1, 2))


def _verdict(equal: bool | None) -> str:  # noqa: FBT001 - three values, as the report has them
    if equal is None:
        return "derived: made anew, not compared"
    return "equal" if equal else "NOT EQUAL"


def model_text(model: Json) -> str:
    """Return a model's identity in a few words."""
    return f"{model['id']}@{str(model['revision'])[:12]} {model['precision']}, {model['dimension']} dimensions"


def _versions(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def restored_line(operation: Json, name: str, sha256: str) -> str:
    """Return one line for a change log."""
    report = operation["report"]
    verb = {"migrate": "migrated", "adopt": "adopted"}.get(operation["kind"], "restored")
    what = "cluster" if operation["kind"] == "adopt" else "database"
    return (
        f"{moment(operation['ended'])}: {report['memories']} memories {verb} from {name}{_hash(sha256, ' (sha256 ', ')')}; "
        f"{_equal(report.get('comparison'))}; the old {what} is kept as {report['kept']}"
    )


def rehearsed_line(operation: Json, name: str) -> str:
    """Return one line about a dry run."""
    report = operation["report"]
    return (
        f"dry run: {report['memories']} memories of {name} can be restored ({_equal(report.get('comparison'))}); "
        "nothing was replaced"
    )


def _equal(comparison: Json | None) -> str:
    if comparison is None:
        return "it has no manifest to compare with"
    tables = sum(line["equal"] is True for line in comparison["tables"])
    counts = comparison["counts"]
    return f"{tables} tables, {counts['indexes']['equal']} indexes, {counts['constraints']['equal']} constraints equal"


def rolled_back_lines(operation: Json) -> list[str]:
    """Return what could not be proved, and one line for a change log."""
    report = operation["report"]
    return [
        *(f"UNPROVED  {sentence}" for sentence in report.get("unproved", [])),
        (
            f"{moment(operation['ended'])}: {report['served']} is served again; the database that was served until then is "
            f"kept as {report['kept']}"
        ),
    ]


# Lists ----------------------------------------------------------------------------------------------------------


def dump_lines(dumps: Sequence[Json]) -> list[str]:
    """Return the dumps of a volume as a table."""
    head = ("id", "made", "by", "memories", "size", "hindsight-api", "postgres", "sha256")
    return columns(
        [
            head,
            *(
                (
                    one["id"],
                    moment(one["made"]),
                    "schedule" if one.get("scheduled") else "hand",
                    one["memories"],
                    size(one["size"]),
                    one["versions"].get("hindsight-api"),
                    one["versions"].get("postgres"),
                    one["sha256"],
                )
                for one in dumps
            ),
        ],
        right=(3, 4),
    )


def schedule_lines(dumps: Json) -> list[str]:
    """Return what `/health` says of scheduled dumps."""
    success, failure = dumps["last_success"], dumps["last_failure"]
    good = f"latest {moment(success['time'])}, {success['id']}" if success else "none yet"
    lines = [f"dumps     {good}; next {moment(dumps['next'])}"]
    return [*lines, f"          last failure {moment(failure['time'])}: {failure['reason']}"] if failure else lines


def operation_lines(operations: Sequence[Json]) -> list[str]:
    """Return operations as a table."""
    head = ("id", "kind", "outcome", "phase", "started", "took")
    return columns(
        [
            head,
            *(
                (one["id"], one["kind"], one["outcome"], phase_text(one), moment(one["started"]), took(one))
                for one in operations
            ),
        ]
    )


def phase_text(operation: Json) -> str:
    """Return the phase, and how far it is while it runs."""
    percent = operation["percent"]
    running = operation["ended"] is None and percent is not None
    return f"{operation['phase']} {percent:.0f} %" if running else str(operation["phase"])


def took(operation: Json) -> str | None:
    """Return how long an operation took; None while it runs."""
    if operation["ended"] is None:
        return None
    began, ended = (datetime.fromisoformat(operation[name]) for name in ("started", "ended"))
    return duration((ended - began).total_seconds())


def operation_detail(operation: Json) -> list[str]:
    """Return one operation with its report."""
    rows: list[Sequence[object]] = [(name, operation[name]) for name in ("id", "kind", "outcome")]
    rows += [("phase", phase_text(operation)), ("started", moment(operation["started"])), ("took", took(operation))]
    rows += [("error", operation["error"])] if operation["error"] else []
    report = dict(operation["report"])
    comparison = report.pop("comparison", None)
    lines = columns(
        [*rows, *((name, value if isinstance(value, str) else json.dumps(value)) for name, value in report.items())]
    )
    return [*lines, "", *comparison_lines(comparison)] if comparison else lines


def inspection_lines(found: Inspection) -> list[str]:
    """Return what a file says of itself, and whether that is proved."""
    lines = [f"file      {found.name}, {size(found.size)}, sha256 {found.sha256}"]
    if found.header is not None:
        header = found.header
        return [
            *lines,
            f"dump      of database {header.database} of PostgreSQL {header.server}, by pg_dump {header.pg_dump}, {header.compression}",
            "NOT PROVED: a file of pg_dump says neither what its source held nor where it ends; `hindsight-sidecar restore --dry-run` reads it",
        ]
    manifest = found.manifest
    if manifest is None:
        return lines
    contents = manifest.contents
    tables = [(name, table.rows) for name, table in sorted(contents.tables.items())]
    return [
        *lines,
        f"archive   {manifest.id}, made {moment(manifest.made.isoformat())}, by {_versions(manifest.versions)}, {manifest.compression}",
        f"memories  {contents.memories}",
        f"model     {model_text(manifest.model) if manifest.model else 'not recorded'}",
        "",
        *columns([("table", "rows"), *tables], right=(1,)),
        "",
        f"whole: {len(tables)} tables, {len(contents.indexes)} indexes, {len(contents.constraints)} constraints, as they left their database",
    ]


def database_lines(kept: Sequence[Json]) -> list[str]:
    """Return the kept databases and clusters as a table."""
    rows = [(one["name"], served_until(one["name"]), size(one["size"])) for one in kept]
    return columns([("kept", "served until", "size"), *rows], right=(2,))


def served_until(name: str) -> str | None:
    """Return when a kept database or cluster was served last, which its name says."""
    time = _TIME.fullmatch(name)
    try:
        found = datetime.strptime(time[1] if time else "", "%Y%m%dt%H%M%Sz")  # noqa: DTZ007 - its z is UTC
    except ValueError:
        return None
    return f"{found:%Y-%m-%d %H:%M} UTC"
