"""The commands, with their options and help."""

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sidecar import __version__, probe
from sidecar.terminal import say

if TYPE_CHECKING:  # imported by what needs it, as it takes its time
    from sidecar.administration_client import Client

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_NOT_REACHABLE = 3
EXIT_REFUSED = 4
EXIT_UNVERIFIED = 5

app = typer.Typer(
    name="hindsight-sidecar",
    help="PostgreSQL, pgvector and hindsight-api as one supervised memory sidecar.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Url = Annotated[
    str | None, typer.Option("--url", help="The gateway to use; otherwise the one of the sidecar on this machine.")
]
ControlUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="A control address, such as a forwarded one; otherwise the control socket of the sidecar on this machine.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Report what would be; replace nothing.")]
DiscardNewer = Annotated[
    bool, typer.Option("--discard-newer", help="Leave what is stored meanwhile in the old database.")
]
ForceModel = Annotated[
    bool, typer.Option("--force-model", help="Serve memories that were embedded with another model.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Replace what is served without asking.")]


def _version(wanted: bool) -> None:
    if wanted:
        say(f"hindsight-sidecar {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run one of the commands."""


@app.command()
def serve(
    welcome: Annotated[bool, typer.Option("--welcome", help="Once ready, print addresses and what to try.")] = False,
) -> None:
    """Run the sidecar in the foreground until SIGTERM or Ctrl-C."""
    from sidecar.serve import serve as run  # noqa: PLC0415

    raise typer.Exit(run(welcome=welcome))


@app.command()
def health(as_json: Json = False) -> None:
    """Say whether memory calls are served: exit code 0 ready, 1 not ready, 3 no sidecar answers."""
    raise typer.Exit(probe.main(["--json"] if as_json else []))


def _ask(path: str) -> dict[str, Any]:
    try:
        status, body = probe.ask(path)
    except OSError as error:
        say(probe.nobody(error), err=True)
        raise typer.Exit(EXIT_NOT_REACHABLE) from error
    if status >= 400 and "title" in body:  # noqa: PLR2004 - the HTTP status
        say(f"{body['title']}: {body['detail']}", err=True)
        raise typer.Exit(EXIT_FAILED)
    found: dict[str, Any] = body
    return found


@app.command()
def status(as_json: Json = False) -> None:
    """Show state, components, versions, model and settings of the running sidecar."""
    body = _ask("/v1/status")
    seen = body["health"]
    ready = seen["status"] == "healthy"
    if as_json:
        say(json.dumps(body, indent=2, ensure_ascii=False))
        raise typer.Exit(EXIT_DONE if ready else EXIT_FAILED)
    subject = f"({seen['subject']})" if seen["subject"] else ""
    say(f"state     {seen['state']}{subject} since {seen['since']}")
    if seen["detail"]:
        say(f"          {seen['detail']}")
    for name, component in seen["components"].items():
        fault = f", {component['fault']}" if component.get("fault") else ""
        say(f"{name:<13} {component['state']}, pid {component['pid']}, {component['restarts']} restarts{fault}")
    say(f"memories  {seen['memory_count']} in {seen['pgdata']}")
    if seen.get("dumps"):
        from sidecar import reporting  # noqa: PLC0415

        say("\n".join(reporting.schedule_lines(seen["dumps"])))
    model = seen["model"]
    if model:
        say(
            f"model     {model['id']}@{model['revision'][:12]} {model['precision']}, {model['dimension']} dimensions, {model['pooling']}"
        )
    if seen["stand_in"]:
        say("          a STAND-IN, not the model this is made for: its memories cannot be used with the real one")
    say("versions  " + ", ".join(f"{name} {version}" for name, version in seen["versions"].items()))
    for name, value in body["settings"].items():
        say(f"  {name}={'' if value is None else value}")
    raise typer.Exit(EXIT_DONE if ready else EXIT_FAILED)


@app.command()
def smoke(url: Url = None, as_json: Json = False) -> None:
    """Do what an agent does, in a bank of its own that is deleted again: store, recall by meaning, list."""
    from sidecar import smoking  # noqa: PLC0415

    bank = f"hindsight-sidecar-smoke-{secrets.token_hex(4)}"
    target = url or f"http://{_ask('/v1/status')['settings']['HINDSIGHT_SIDECAR_LISTEN']}"
    report = asyncio.run(smoking.smoke(target, bank, os.environ, local=url is None))
    if as_json:
        say(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        for step in report.steps:
            say(f"ok    {step['step']:<32} {step['seconds']:6.3f} s  {step['shown']}")
        say(f"FAILED  {report.fault}" if report.fault else "smoke passed: memories come back by their meaning")
    if report.unreachable:
        raise typer.Exit(EXIT_NOT_REACHABLE)
    raise typer.Exit(EXIT_FAILED if report.fault else EXIT_DONE)


# Administration -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    """Make a sentence and an exit code of what goes wrong."""
    from sidecar.administering import said  # noqa: PLC0415
    from sidecar.administration_client import UnreachableError  # noqa: PLC0415
    from sidecar.errors import RefusedError, SidecarError, VerificationError  # noqa: PLC0415

    codes = {UnreachableError: EXIT_NOT_REACHABLE, RefusedError: EXIT_REFUSED, VerificationError: EXIT_UNVERIFIED}
    try:
        yield
    except (SidecarError, OSError) as error:
        say(said(error), err=True)
        raise typer.Exit(
            next((code for kind, code in codes.items() if isinstance(error, kind)), EXIT_FAILED)
        ) from error
    except KeyboardInterrupt as error:
        say("left", err=True)
        raise typer.Exit(EXIT_FAILED) from error


@contextlib.contextmanager
def _administration(url: str | None) -> Iterator["Client"]:
    """Have a client of the control API; what goes wrong with it becomes a sentence and an exit code."""
    from sidecar.administration_client import Client, checked_url, token_from  # noqa: PLC0415

    try:
        checked = None if url is None else checked_url(url)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _ending_well():
        yield Client(checked, token_from(os.environ) if url is not None else None)


@app.command()
def dump(
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE|-", help="Fetch the archive; otherwise it stays on the volume."),
    ] = None,
    compression: Annotated[Literal["gzip", "zstd", "none"], typer.Option(help="Of the dump in the archive.")] = "gzip",
    identifier: Annotated[str | None, typer.Option("--id", help="Fetch this dump instead of making one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a FILE that is there.")] = False,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """Dump the memories that are served into a portable archive, while they are served."""
    from sidecar import administering  # noqa: PLC0415
    from sidecar.destination import STDIO  # noqa: PLC0415

    if identifier is not None and output is None:
        raise typer.BadParameter("name the FILE to fetch it into, with -o")
    console = administering.Console(as_json=as_json, output_taken=output == STDIO)
    with _administration(url) as client:
        if identifier is not None and output is not None:
            wanted = identifier
            administering.fetch(client, lambda: administering.dump_of(client, wanted), console, output, force=force)
        else:
            administering.dump(client, compression, console, output, force=force)


@app.command()
def dumps(
    delete: Annotated[str | None, typer.Option("--delete", metavar="ID", help="Delete one.")] = None,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """List the dumps on the volume."""
    from sidecar import administering  # noqa: PLC0415

    with _administration(url) as client:
        if delete is not None:
            administering.delete_dump(client, delete)
        else:
            administering.list_dumps(client, administering.Console(as_json=as_json))


@app.command()
def restore(
    file: Annotated[str | None, typer.Argument(metavar="FILE|-", help="An archive, or a file of pg_dump -Fc.")] = None,
    dump: Annotated[str | None, typer.Option("--dump", metavar="ID", help="A dump on the volume instead.")] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    discard_newer: DiscardNewer = False,
    force_model: ForceModel = False,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """Serve the memories of an archive instead of those that are served now, which are kept."""
    from sidecar import administering  # noqa: PLC0415

    if (file is None) == (dump is None):
        raise typer.BadParameter("name a FILE (- for standard input) or a --dump of the volume, one of the two")
    wanted = administering.Wanted(yes, dry_run, discard_newer, force_model)
    with _administration(url) as client:
        source = administering.FileSource(client, file, dump)
        administering.restore(client, source, wanted, administering.Console(as_json=as_json))


@app.command()
def migrate(
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="postgresql://USER@HOST/DATABASE|http://HOST:PORT|FILE",
            help="A Postgres, the control address of another sidecar, or a file as `restore` takes it.",
        ),
    ],
    password_file: Annotated[
        str | None,
        typer.Option(
            "--password-file",
            metavar="FILE|-",
            help="What holds the Postgres password; otherwise PGPASSWORD or ~/.pgpass.",
        ),
    ] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Let the source Postgres accept no writes until the memories are here.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    discard_newer: DiscardNewer = False,
    force_model: ForceModel = False,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """Serve the memories of a Postgres, of another sidecar or of a file instead of those that are served now."""
    from sidecar import administering, migrating  # noqa: PLC0415

    wanted = administering.Wanted(yes, dry_run, discard_newer, force_model)
    with _administration(url) as client:
        try:
            source = migrating.source(client, origin, os.environ, freeze=freeze, password_file=password_file)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        administering.restore(client, source, wanted, administering.Console(as_json=as_json))


@app.command()
def adopt(
    database: Annotated[
        str | None, typer.Option("--database", metavar="NAME", help="Its database, where several have memories.")
    ] = None,
    crashed: Annotated[
        bool, typer.Option("--crashed", help="Its server was killed and runs nowhere: recover a copy.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    force_model: ForceModel = False,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """Serve the memories of a cluster at PGDATA that others made; it is kept as it is, under another name."""
    from sidecar import administering  # noqa: PLC0415

    wanted = administering.Wanted(yes, dry_run, discard_newer=False, force_model=force_model)
    with _administration(url) as client:
        source = administering.ForeignCluster(client, database, crashed=crashed)
        administering.restore(client, source, wanted, administering.Console(as_json=as_json))


@app.command()
def verify(file: Annotated[str, typer.Argument(metavar="FILE")], as_json: Json = False) -> None:
    """Say what an archive holds and whether it is whole; needs no sidecar."""
    from sidecar import administering  # noqa: PLC0415

    with _ending_well():
        administering.verify(file, administering.Console(as_json=as_json))


@app.command()
def operations(
    identifier: Annotated[str | None, typer.Argument(metavar="ID", help="Show one, with its report.")] = None,
    cancel: Annotated[str | None, typer.Option("--cancel", metavar="ID", help="Cancel one.")] = None,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """List what runs and what ran since the sidecar's start: dumps, restores, rollbacks."""
    from sidecar import administering  # noqa: PLC0415

    console = administering.Console(as_json=as_json)
    with _administration(url) as client:
        if cancel is not None:
            administering.cancel_operation(client, cancel, console)
        elif identifier is not None:
            administering.show_operation(client, identifier, console)
        else:
            administering.list_operations(client, console)


@app.command()
def databases(
    drop: Annotated[str | None, typer.Option("--drop", metavar="NAME", help="Drop one for good.")] = None,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """List the databases that were served before, and the clusters that were adopted from; all are kept."""
    from sidecar import administering  # noqa: PLC0415

    with _administration(url) as client:
        if drop is not None:
            administering.drop_database(client, drop)
        else:
            administering.list_databases(client, administering.Console(as_json=as_json))


@app.command()
def rollback(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Otherwise the latest.")] = None,
    yes: Yes = False,
    url: ControlUrl = None,
    as_json: Json = False,
) -> None:
    """Serve a kept database again; the one that is served now is kept instead."""
    from sidecar import administering  # noqa: PLC0415

    with _administration(url) as client:
        administering.rollback(client, name, administering.Console(as_json=as_json), yes=yes)
