"""The command line, `hindsight-bake`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bake.errors import BakeError, UsageError, VerificationError
from bake.layout import MANIFEST
from bake.lock import Flavor, Lock, read_lock
from bake.report import write_json, write_lines
from bake.verify import check_files, verify

app = typer.Typer(
    help="Make and check model directories that hindsight-api loads by path, offline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class FlavorChoice(StrEnum):
    """What --flavor takes."""

    onnx = "onnx"
    torch = "torch"
    both = "both"

    def flavors(self) -> list[Flavor]:
        """Give the flavours meant, in order."""
        return [flavor for flavor in ("onnx", "torch") if self.value in (flavor, "both")]


Directory = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="A model directory that `snapshot` made.", metavar="DIR")
]
LockOption = Annotated[
    Path | None, typer.Option("--lock", dir_okay=False, help="Another models.lock than the one that is shipped.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@app.callback()
def options(context: typer.Context, lock: LockOption = None) -> None:
    """Read the lock, which every command needs."""
    context.obj = read_lock(lock)


@app.command("snapshot")
def make_snapshot(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A model of the lock.", metavar="NAME")],
    into: Annotated[Path, typer.Option(file_okay=False, help="The model directory becomes INTO/NAME.")],
    flavor: Annotated[FlavorChoice, typer.Option(help="Which files: for ONNX Runtime, for torch.")] = FlavorChoice.onnx,
    from_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Take the files from here and use no network."),
    ] = None,
) -> None:
    """Bring a model directory about: fetch it from the hub, or copy it, and check every file."""
    # Here, because only this command needs the hub's client, an extra that a run-time environment has not.
    try:
        from bake.snapshot import snapshot  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise BakeError(f"{error.name} is not installed; install hindsight-sidecar[bake]") from error

    lock: Lock = context.obj
    made = snapshot(name, lock.model(name), flavor.flavors(), into, from_dir)
    if made.unpinned:
        typer.echo(f"no sha256 is pinned for, and no hub was asked about: {', '.join(made.unpinned)}", err=True)
    size = sum(file.size for file in made.manifest.files)
    kind = "stand-in, not the model a database should stay with; " if made.manifest.stand_in else ""
    state = "made" if made.made else "is there already"
    typer.echo(f"{made.directory}: {state} ({kind}{len(made.manifest.files)} files, {size} bytes)")


@app.command("verify")
def verify_directory(
    context: typer.Context,
    directory: Directory,
    interpreter: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Python of hindsight-api's environment, which has to load the model."),
    ] = None,
    flavor: Annotated[
        FlavorChoice | None,
        typer.Option(help="Must be loadable. Default: what the directory and the interpreter have."),
    ] = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Check files and identity, then load the model as hindsight-api does, offline, and check its vectors."""
    report = verify(directory, context.obj, interpreter, flavor.flavors() if flavor else [])
    (write_json if as_json else write_lines)(report, sys.stdout)
    if not report.passed:
        raise typer.Exit(VerificationError.exit_code)


@app.command("manifest")
def print_manifest(context: typer.Context, directory: Directory) -> None:
    """Print the manifest, and check the files against it. Nothing is loaded."""
    report, manifest = check_files(directory, context.obj)
    if manifest is not None:
        typer.echo((directory / MANIFEST).read_text(encoding="utf-8"), nl=False)
    if not report.passed:
        write_lines(report, sys.stderr)
        raise typer.Exit(VerificationError.exit_code)


def main() -> None:
    """Run, and turn what stops it into a sentence on stderr and an exit code."""
    try:
        app()
    except BakeError as error:
        kind = "usage: " if isinstance(error, UsageError) else ""
        for line in str(error).splitlines():
            sys.stderr.write(f"hindsight-bake: {kind}{line}\n")
        raise SystemExit(error.exit_code) from error
    except OSError as error:
        sys.stderr.write(f"hindsight-bake: {error}\n")
        raise SystemExit(BakeError.exit_code) from error


if __name__ == "__main__":
    main()
