"""The short form of `make torture`: one round of the cases that say most."""

import pytest
from matrix import faults
from torture import SHORT_BUDGET, torture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_nothing_is_lost_in_the_short_form() -> None:
    assert faults(torture(SHORT_BUDGET, short=True)) == []  # it prints its table
