"""The short form of `make torture`: one round of the cases that say most."""

import time

import pytest
from matrix import faults
from table import markdown
from torture import SHORT_BUDGET, Order, do, say, wanted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_nothing_is_lost_in_the_short_form() -> None:
    order = Order(time.monotonic() + SHORT_BUDGET, short=True)
    rows = do(order, [case.title for case in wanted(order)])
    say(f"\n{markdown(rows)}\n")
    assert faults(rows) == []
