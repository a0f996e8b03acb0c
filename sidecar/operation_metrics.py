"""Metrics of operations: the one that runs, and how those before it ended."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.kinds import Kind, Outcome


class Running(Protocol):
    """What is told of an operation that runs; its attributes are those of `operations.Operation`."""

    kind: Kind
    started: datetime
    phase: str
    done: int
    total: int | None
    unit: str

    @property
    def fraction(self) -> float | None:
        """How much of its phase is done, from 0 to 1; None where it cannot be known."""


class Known(Protocol):
    """What is told of all operations."""

    @property
    def current(self) -> Running | None:
        """The one that runs."""

    @property
    def outcomes(self) -> Mapping[tuple[Kind, Outcome], int]:
        """How many of each kind ended how."""


class Administration(Protocol):
    """Whose operations are told of."""

    @property
    def operations(self) -> Known:
        """All that ran and runs."""

    @property
    def last_dump(self) -> datetime | None:
        """When the latest good dump was made."""


class OperationCollector(Collector):
    """Looks at operations at each scrape."""

    def __init__(self, administration: Administration, prefix: str) -> None:
        self._administration = administration
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of operations."""
        current = self._administration.operations.current
        running = self._gauge("running", "1 for the operation that runs.", "kind")
        for kind in Kind:
            running.add_metric([kind], int(current is not None and current.kind is kind))
        yield running
        if current is not None:
            yield from self._progress(current)
        ended = CounterMetricFamily(
            f"{self._prefix}_operations", "How operations ended since this start.", labels=["kind", "outcome"]
        )
        for kind in Kind:
            for outcome in Outcome:
                if outcome is not Outcome.RUNNING:
                    ended.add_metric([kind, outcome], self._administration.operations.outcomes.get((kind, outcome), 0))
        yield ended
        if self._administration.last_dump is not None:
            yield GaugeMetricFamily(
                f"{self._prefix}_dump_last_success_timestamp_seconds",
                "When the latest good dump was made.",
                value=self._administration.last_dump.timestamp(),
            )

    def _progress(self, current: Running) -> Iterator[Metric]:
        started = self._gauge("start_timestamp_seconds", "When the operation that runs began.", "kind")
        started.add_metric([current.kind], current.started.timestamp())
        yield started
        labels = [current.kind, current.phase]
        if current.fraction is not None:
            ratio = self._gauge("progress_ratio", "How much of its phase is done.", "kind", "phase")
            ratio.add_metric(labels, current.fraction)
            yield ratio
        if current.unit:
            done = self._gauge("done", "How much its phase has done.", "kind", "phase", "unit")
            done.add_metric([*labels, current.unit], current.done)
            yield done
            if current.total is not None:
                expected = self._gauge("expected", "How much its phase has to do.", "kind", "phase", "unit")
                expected.add_metric([*labels, current.unit], current.total)
                yield expected

    def _gauge(self, name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_operation_{name}", meaning, labels=labels)
