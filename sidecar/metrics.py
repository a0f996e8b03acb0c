"""Prometheus metrics: what `/health` tells, as numbers; docs/metrics.md is the table, and a test compares the two."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar import __version__
from sidecar.machine import Phase
from sidecar.schedule import Record
from sidecar.status import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "hindsight_sidecar"


class _StatusCollector(Collector):
    """Reads the current picture at each scrape."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that follow from the picture."""
        picture = self._status.picture
        yield GaugeMetricFamily(f"{_PREFIX}_ready", "1 while memory calls are served.", value=int(self._status.ready))
        state = GaugeMetricFamily(f"{_PREFIX}_state", "1 for the state the sidecar is in.", labels=["phase", "subject"])
        for phase in Phase:
            current = phase is picture.state.phase
            state.add_metric([phase, (picture.state.subject or "") if current else ""], int(current))
        yield state
        up = GaugeMetricFamily(f"{_PREFIX}_component_up", "1 while the component answers.", labels=["component"])
        restarts = GaugeMetricFamily(
            f"{_PREFIX}_component_restarts", "How often it ended unasked since this start.", labels=["component"]
        )
        for name, component in (("postgres", picture.postgres), ("hindsight-api", picture.api)):
            up.add_metric([name], int(component.get("state") == "up"))
            restarts.add_metric([name], component.get("restarts", 0))
        yield up
        yield restarts
        if picture.memory_count is not None:
            yield GaugeMetricFamily(f"{_PREFIX}_memories", "Rows in memory_units.", value=picture.memory_count)
        versions = InfoMetricFamily(f"{_PREFIX}", "Versions of the parts.")
        versions.add_metric(
            [], {"sidecar": __version__, **{n.replace("-", "_"): v or "" for n, v in picture.versions.items()}}
        )
        yield versions
        if picture.model is not None:
            model = InfoMetricFamily(f"{_PREFIX}_model", "Identity of the embedding model in use.")
            model.add_metric([], {name: str(value) for name, value in picture.model.items()})
            yield model
        if picture.dumps is not None:
            yield from _dumps(picture.dumps)


def _dumps(record: Record) -> Iterator[Metric]:
    outcomes = CounterMetricFamily(
        f"{_PREFIX}_scheduled_dumps", "How scheduled dumps ended since this start.", labels=["outcome"]
    )
    for outcome, count in record.outcomes.items():
        outcomes.add_metric([outcome], count)
    yield outcomes
    if record.success is not None:
        yield GaugeMetricFamily(
            f"{_PREFIX}_scheduled_dump_last_success_timestamp_seconds",
            "When the latest good scheduled dump was made.",
            value=record.success.made.timestamp(),
        )
    if record.failure is not None:
        yield GaugeMetricFamily(
            f"{_PREFIX}_scheduled_dump_last_failure_timestamp_seconds",
            "When a scheduled dump failed last since this start.",
            value=record.failure.time.timestamp(),
        )


class Metrics:
    """All metrics of one sidecar, in a registry of its own."""

    def __init__(self, status: Status) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(status))
        ProcessCollector(namespace=_PREFIX, registry=self.registry)
        self._refusals = Counter(
            f"{_PREFIX}_gateway_refusals",
            "Memory calls that the gateway answered itself.",
            ["reason"],
            registry=self.registry,
        )

        self._in_flight = Gauge(
            f"{_PREFIX}_gateway_calls_in_flight",
            "Memory calls that hindsight-api is answering.",
            registry=self.registry,
        )

    def watch_calls(self, in_flight: Callable[[], int]) -> None:
        """Ask this for the calls in flight at each scrape."""
        self._in_flight.set_function(in_flight)

    def count_refusal(self, reason: str) -> None:
        """Count a call that did not get through to hindsight-api."""
        self._refusals.labels(reason).inc()

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
