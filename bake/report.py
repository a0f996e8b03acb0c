"""The output layer: the same report for people and for programs."""

import json
from typing import TextIO

from bake.verify import Report

MARKS = {True: "ok  ", False: "FAIL", None: "-   "}


def write_lines(report: Report, stream: TextIO) -> None:
    """One line a check, then the verdict."""
    stream.writelines(f"{MARKS[check.passed]}  {check.name}: {check.detail}\n" for check in report.checks)
    stream.write(f"{report.name}: {'verified' if report.passed else 'NOT what it has to be'}\n")


def write_json(report: Report, stream: TextIO) -> None:
    """One JSON object."""
    found = [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in report.checks]
    json.dump({"name": report.name, "passed": report.passed, "checks": found}, stream, indent=2)
    stream.write("\n")
