"""What the commands say to a person."""

import typer

from sidecar.control_characters import written_out_lines


def say(text: str, *, err: bool = False, newline: bool = True) -> None:
    """Write a text of one line or several; what it quotes, such as the words of a program that failed, may be anybody's."""
    typer.echo(written_out_lines(text), err=err, nl=newline)
