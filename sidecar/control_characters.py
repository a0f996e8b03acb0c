"""Control characters in texts from elsewhere: none of them may rule a terminal, or make a line look like another one."""

import re

# C0 but the tab, DEL, C1, and what some readers take for the end of a line.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def written_out(line: str) -> str:
    """Write control characters as JSON has them."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def written_out_lines(text: str) -> str:
    """Do the same to each line of a text of several."""
    return "\n".join(written_out(line) for line in text.split("\n"))
