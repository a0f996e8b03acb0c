"""The short form of `make load`: some seconds of it, with room for what takes its time."""

import pytest
from judging import markdown, rows
from load import measure, short

pytestmark = [pytest.mark.integration, pytest.mark.alone]


def test_many_clients_are_served_and_nothing_is_lost() -> None:
    size = short()
    lines = rows(measure(size, print), size.limits)
    print(markdown(lines))  # noqa: T201 - shown where it fails
    assert [f"{line.what}: {line.measured}" for line in lines if not line.holds] == []
