"""`make image`, `make image-base`, `make bench`: `python -m bake.image build|base|bench|engine`."""

import argparse
import os
import sys
from collections.abc import Sequence

from bake.errors import BakeError, UsageError
from bake.image import base, bench, build, engine, plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bake.image", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("build", "build the image"),
        ("base", "make the base image from the Debian archive"),
        ("bench", "compare the image's size with that of the same parts put together plainly"),
        ("engine", "say which engine works here"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("--engine", default="", help=" or ".join(engine.NAMES))
        command.add_argument("--suite", default="forky", help=" or ".join(plan.SUITES))
        command.add_argument("--base", default="", help="another base image")
        if name in {"build", "bench"}:
            command.add_argument("--version", default="1.1.0", help="of hindsight-api")
            command.add_argument("--flavor", default="onnx", help=" or ".join(plan.FLAVORS))
            command.add_argument("--python", default=plan.PYTHON, help="Debian's package of the interpreter")
            command.add_argument("--model-dir", default="", help="directory with the model's files")
            command.add_argument("--torch-index", default="", help="address of an index of CPU wheels")
            command.add_argument("--tag", default="", help="another name for the image")
            for flag in ("stand-in", "reranker", "keep-claude-cli", "unless-built"):
                command.add_argument(f"--{flag}", default="", help="1 to have it")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Do what was asked for. Exit codes are those of `hindsight-bake`."""
    options = vars(_parser().parse_args(words))
    command, wanted = options.pop("command"), options.pop("engine")
    for flag in ("stand_in", "reranker", "keep_claude_cli", "unless_built"):
        if flag in options:
            options[flag] = options[flag].lower() not in {"", "0", "no", "false"}
    asked = plan.Asked(**options)
    try:
        if asked.suite not in plan.SUITES:
            raise UsageError(f"SUITE is {asked.suite!r}; expected forky (PostgreSQL 18) or trixie (PostgreSQL 17)")
        if wanted and wanted not in engine.NAMES:
            raise UsageError(f"ENGINE is {wanted!r}; expected {', '.join(engine.NAMES)}")
        {"build": _build, "base": _base, "bench": _bench, "engine": _engine}[command](asked, wanted or None)
    except BakeError as error:
        sys.stdout.flush()
        for line in str(error).splitlines():
            sys.stderr.write(f"{line}\n")
        raise SystemExit(error.exit_code) from error


def _build(asked: plan.Asked, wanted: str | None) -> None:
    plan.make(asked, os.environ)  # whatever cannot be asked for is said before an engine is looked for
    found = _engine(asked, wanted)
    planned = plan.make(asked, os.environ, build.revision(), build.base_digest(found, plan.base_of(asked)))
    into = build.directory_of(planned.tag)
    if asked.unless_built and build.is_built(found, planned, into):
        sys.stdout.write(f"==> {planned.tag} was built from this commit already\n")
        return
    build.forget(into)
    progress = build.build(found, planned, into)
    told = build.summary(found, planned, progress, into)
    build.note(planned, told, into)
    sys.stdout.write(f"\n{told}\n")


def _bench(asked: plan.Asked, wanted: str | None) -> None:
    planned = plan.make(asked, os.environ)
    found = _engine(asked, wanted)
    if not found.runs_containers:
        raise BakeError(f"{found.name} does not report sizes; use podman or docker (ENGINE=...)")
    if not found.has_image(planned.tag):
        raise BakeError(f"{planned.tag} is not here; run `make image` with the same variables first")
    naive = f"{planned.tag}-naive"
    into = build.directory_of(planned.tag)
    into.mkdir(parents=True, exist_ok=True)
    more = [*build.of_image(found, planned.tag), f"--tag={naive}"]
    build.run(found, planned, bench.NAIVE, into / "naive.log", more)
    told, passed = bench.report(bench.measure(found, planned.tag), bench.measure(found, naive), asked.flavor)
    sys.stdout.write(f"\n{told}\n")
    if not passed:
        raise BakeError("the image is larger than it may be")


def _base(asked: plan.Asked, wanted: str | None) -> None:
    base.make(engine.find(None, wanted), asked.suite, plan.base_of(asked))


def _engine(asked: plan.Asked, wanted: str | None) -> engine.Engine:
    found = engine.find(plan.base_of(asked), wanted)
    sys.stdout.write(f"==> {found.name} works\n")
    for variable, value in found.environment.items():
        sys.stdout.write(f"    with {variable}={value}, as its own settings do not run here\n")
    for reason in found.passed_over:
        sys.stdout.write(f"    {reason}\n")
    sys.stdout.flush()
    return found


if __name__ == "__main__":
    main()
