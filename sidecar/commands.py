"""The commands, with their options and help."""

import asyncio
import json
import os
import secrets
from typing import Annotated, Any

import typer

from sidecar import __version__, probe

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_NOT_REACHABLE = 3

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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hindsight-sidecar {__version__}")
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
        typer.echo(probe.nobody(error), err=True)
        raise typer.Exit(EXIT_NOT_REACHABLE) from error
    if status >= 400 and "title" in body:  # noqa: PLR2004 - the HTTP status
        typer.echo(f"{body['title']}: {body['detail']}", err=True)
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
        typer.echo(json.dumps(body, indent=2, ensure_ascii=False))
        raise typer.Exit(EXIT_DONE if ready else EXIT_FAILED)
    subject = f"({seen['subject']})" if seen["subject"] else ""
    typer.echo(f"state     {seen['state']}{subject} since {seen['since']}")
    if seen["detail"]:
        typer.echo(f"          {seen['detail']}")
    for name, component in seen["components"].items():
        fault = f", {component['fault']}" if component.get("fault") else ""
        typer.echo(f"{name:<13} {component['state']}, pid {component['pid']}, {component['restarts']} restarts{fault}")
    typer.echo(f"memories  {seen['memory_count']} in {seen['pgdata']}")
    model = seen["model"]
    if model:
        typer.echo(
            f"model     {model['id']}@{model['revision'][:12]} {model['precision']}, {model['dimension']} dimensions, {model['pooling']}"
        )
    if seen["stand_in"]:
        typer.echo(
            "          a STAND-IN, not the model this is made for: its memories cannot be used with the real one"
        )
    typer.echo("versions  " + ", ".join(f"{name} {version}" for name, version in seen["versions"].items()))
    for name, value in body["settings"].items():
        typer.echo(f"  {name}={'' if value is None else value}")
    raise typer.Exit(EXIT_DONE if ready else EXIT_FAILED)


@app.command()
def smoke(url: Url = None, as_json: Json = False) -> None:
    """Do what an agent does, in a bank of its own that is deleted again: store, recall by meaning, list."""
    from sidecar import smoking  # noqa: PLC0415

    bank = f"hindsight-sidecar-smoke-{secrets.token_hex(4)}"
    target = url or f"http://{_ask('/v1/status')['settings']['HINDSIGHT_SIDECAR_LISTEN']}"
    report = asyncio.run(smoking.smoke(target, bank, os.environ, local=url is None))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        for step in report.steps:
            typer.echo(f"ok    {step['step']:<32} {step['seconds']:6.3f} s  {step['shown']}")
        typer.echo(f"FAILED  {report.fault}" if report.fault else "smoke passed: memories come back by their meaning")
    if report.unreachable:
        raise typer.Exit(EXIT_NOT_REACHABLE)
    raise typer.Exit(EXIT_FAILED if report.fault else EXIT_DONE)
