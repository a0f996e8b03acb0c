"""A process environment without anybody's settings, before any test imports what reads them."""

import os

for name in list(os.environ):
    if name.startswith(("HINDSIGHT_", "PG")) and not name.startswith("HINDSIGHT_TEST_"):
        del os.environ[name]
