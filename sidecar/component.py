"""What Postgres and hindsight-api have in common: one process of ours, and a watch on it."""

import asyncio
from typing import Generic, TypeVar

from sidecar.child import Child
from sidecar.watch import Watch

W = TypeVar("W", bound=Watch)


class Component(Generic[W]):
    """A component that runs as one process.

    Attributes:
        child: its process, None where none of ours runs.
        watch: what is seen of it.
        watching: the task that looks, None where there is nothing to look at.

    """

    def __init__(self, watch: W) -> None:
        self.child: Child | None = None
        self.watch = watch
        self.watching: asyncio.Task[None] | None = None

    def _begin(self, child: Child) -> None:
        """Take a process that was just started, and look at it from now on."""
        self.child = child
        self.watching = asyncio.create_task(self.watch.run())

    def forget(self) -> Child | None:
        """Forget a process that has ended and return it; None where it runs or there is none."""
        child = self.child
        if child is None or child.returncode is None:
            return None
        self.stop_watching()
        self.child = None
        return child

    def stop_watching(self) -> None:
        """Look no more."""
        if self.watching is not None:
            self.watching.cancel()
            self.watching = None
        self.watch.end()
