"""A process environment without anybody's settings, before any test imports what reads them."""

import os

import pytest

for name in list(os.environ):
    if name.startswith(("HINDSIGHT_", "PG")) and not name.startswith("HINDSIGHT_TEST_"):
        del os.environ[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-long` runs; a run of it alone asks for it with HINDSIGHT_TEST_LONG."""
    if os.environ.get("HINDSIGHT_TEST_LONG"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
