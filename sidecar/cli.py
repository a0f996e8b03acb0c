"""The command line. `health` and `serve` are reached before anything heavy is imported."""

import sys


def main() -> None:
    """Run a command and exit with its code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["health"] and set(arguments[1:]) <= {"--json"}:
        from sidecar import probe  # noqa: PLC0415

        sys.exit(probe.main(arguments[1:]))
    if arguments[:1] == ["serve"] and set(arguments[1:]) <= {"--welcome"}:
        from sidecar.serve import serve  # noqa: PLC0415

        sys.exit(serve(welcome="--welcome" in arguments))
    from sidecar.commands import app  # noqa: PLC0415

    app()
