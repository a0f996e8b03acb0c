"""The matrix's outcome, as a table for people and as JSON."""

from typing import Any

from matrix import Row

HEAD = ("case", "rounds", "survived", "looked for", "lost", "longest outage")


def cells(row: Row) -> tuple[str, ...]:
    """Return what a row shows."""
    outage = "-" if row.longest_outage is None else f"{row.longest_outage:.1f} s"
    return (row.title, str(row.rounds), str(row.survived), str(row.looked_for), str(row.lost), outage)


def markdown(rows: list[Row]) -> str:
    """Return a table in Markdown with its sum as last line."""
    outages = [row.longest_outage for row in rows if row.longest_outage is not None]
    total = (
        "all",
        *(str(sum(getattr(row, name) for row in rows)) for name in ("rounds", "survived", "looked_for", "lost")),
        f"{max(outages):.1f} s" if outages else "-",
    )
    lines = [HEAD, *(cells(row) for row in rows), total]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEAD))]

    def drawn(line: tuple[str, ...]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([drawn(HEAD), rule, *map(drawn, lines[1:])])


def as_json(rows: list[Row], **run: Any) -> dict[str, Any]:
    """Return all that is known of a run."""
    return {**run, "cases": [vars(row) for row in rows]}
