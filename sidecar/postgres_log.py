"""What a line of PostgreSQL says itself, told from what it only repeats: a client's text may have any words in it."""

import re

# elog.c: one of these comes after `log_line_prefix`, and a text of several lines goes on behind a tab. An SQLSTATE follows
# where `log_error_verbosity` is verbose.
_PART = re.compile(
    r"(?!\t).*?\b(DEBUG|LOG|INFO|NOTICE|WARNING|ERROR|FATAL|PANIC|DETAIL|HINT|QUERY|CONTEXT|LOCATION|BACKTRACE|STATEMENT):  "
    r"(?:[0-9A-Z]{5}: )?(.*)"
)
_WANT = r": (?:No space left on device|Disk quota exceeded)"
# A short write has no error of the system's, and that of pg_xact and its like stands in the DETAIL. The HINT "Check free disk
# space." says nothing: it comes with every error of a file that was to grow.
_SERVER = re.compile(
    r"(?:LOG|WARNING|ERROR|FATAL|PANIC|DETAIL):  "
    r"(?!could not create (?:shared memory segment|semaphores): )"  # System V's own limits have the same error
    rf"(?:[Cc]ould not|cannot) .*(?:{_WANT}|: wrote only \d+ of \d+ bytes(?: at \w+ \d+)?|: wrote too few bytes)\.?$"
)
# initdb writes what is wrong behind what it was about to do: "creating subdirectories ... initdb: error: could not ...".
_PROGRAM = re.compile(rf"(?!\t).*{_WANT}$")


def said(line: str) -> str:
    """Return what a server says in a line of its log, from the keyword on: `LOG:  ...`, `DETAIL:  ...`.

    Nothing where the line is none that it begins, but the rest of a text of several, or another program's.
    """
    found = _PART.match(line)
    return f"{found[1]}:  {found[2]}" if found else ""


def no_space(line: str) -> bool:
    """Tell whether by this line a server found no space, or a program that makes a cluster."""
    text = said(line)
    return bool(_SERVER.match(text) if text else _PROGRAM.match(line))
