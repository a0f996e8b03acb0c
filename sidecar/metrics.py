"""Prometheus metrics: what `/health` tells, as numbers; docs/metrics.md is the table, and a test compares the two."""

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar import __version__
from sidecar.backoff import End
from sidecar.machine import LABELS
from sidecar.operation_metrics import Administration, OperationCollector
from sidecar.schedule import Record
from sidecar.status import Picture, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hindsight_sidecar"
# Told as 0 from the beginning: of a series that begins with its first event, that event is no increase.
REFUSALS = (
    "foreign-host",
    "foreign-origin",
    "unauthorized",
    "too-many-attempts",
    "not-ready",
    "failed",
    "timeout",
    "stalled",
    "too-many-connections",
)
ENDS: dict[str, list[End]] = {
    "postgres": [end for end in End if end is not End.HUNG],
    "hindsight-api": [end for end in End if end not in (End.NO_SPACE, End.REINITIALIZED)],
}
# Seconds, from a recall to an answer that an LLM has to write.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# When a counter began is when the process did, which there is a metric for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class _StatusCollector(Collector):
    """Reads the current picture at each scrape."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that follow from the picture."""
        picture = self._status.picture
        yield GaugeMetricFamily(f"{PREFIX}_ready", "1 while memory calls are served.", value=int(self._status.ready))
        yield from self._states()
        yield from _components(picture)
        yield from _sizes(picture)
        yield from _identities(picture)
        if picture.dumps is not None:
            yield from _scheduled_dumps(picture.dumps)

    def _states(self) -> Iterator[Metric]:
        names = ["phase", "subject"]
        state = GaugeMetricFamily(f"{PREFIX}_state", "1 for the state that the sidecar is in.", labels=names)
        seconds = CounterMetricFamily(f"{PREFIX}_state_seconds", "How long the states lasted.", labels=names)
        current, lasted = self._status.state.labels, self._status.seconds
        for labels in LABELS:
            state.add_metric(labels, int(labels == current))
            seconds.add_metric(labels, lasted.get(labels, 0.0))
        yield state
        yield seconds
        if self._status.first_ready_after is not None:
            yield GaugeMetricFamily(
                f"{PREFIX}_start_duration_seconds",
                "How long this start took until memory calls were served.",
                value=self._status.first_ready_after,
            )


def _components(picture: Picture) -> Iterator[Metric]:
    up = GaugeMetricFamily(f"{PREFIX}_component_up", "1 while the component answers.", labels=["component"])
    for name, component in (("postgres", picture.postgres), ("hindsight-api", picture.api)):
        up.add_metric([name], int(component.get("state") == "up"))
    yield up
    restarts = CounterMetricFamily(
        f"{PREFIX}_component_restarts",
        "How often the component had to begin again, by how it ended.",
        labels=["component", "reason"],
    )
    for name, ends in ENDS.items():
        for end in ends:
            restarts.add_metric([name, end], picture.ends.get(name, {}).get(end, 0))
    yield restarts


def _sizes(picture: Picture) -> Iterator[Metric]:
    sizes: list[tuple[str, str, int | None]] = [
        ("memories", "Rows in memory_units.", picture.memory_count),
        ("database_size_bytes", "Size of the served database.", picture.database_bytes),
        ("wal_size_bytes", "Size of Postgres' write-ahead log.", picture.wal_bytes),
    ]
    if (space := picture.space) is not None:
        sizes += [
            ("volume_size_bytes", "Size of the volume's filesystem.", space.size),
            ("volume_free_bytes", "What can still be written to the volume.", space.free),
        ]
    for name, meaning, value in sizes:
        if value is not None:
            yield GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=value)


def _identities(picture: Picture) -> Iterator[Metric]:
    versions = InfoMetricFamily(PREFIX, "Versions of the parts.")
    versions.add_metric(
        [], {"sidecar": __version__, **{n.replace("-", "_"): v or "" for n, v in picture.versions.items()}}
    )
    yield versions
    if picture.model is not None:
        model = InfoMetricFamily(f"{PREFIX}_model", "Identity of the embedding model in use.")
        model.add_metric([], {name: str(value) for name, value in picture.model.items()})
        yield model


def _scheduled_dumps(record: Record) -> Iterator[Metric]:
    outcomes = CounterMetricFamily(
        f"{PREFIX}_scheduled_dumps", "How scheduled dumps ended since this start.", labels=["outcome"]
    )
    for outcome, count in record.outcomes.items():
        outcomes.add_metric([outcome], count)
    yield outcomes
    if record.success is not None:
        yield GaugeMetricFamily(
            f"{PREFIX}_scheduled_dump_last_success_timestamp_seconds",
            "When the latest good scheduled dump was made.",
            value=record.success.made.timestamp(),
        )
    if record.failure is not None:
        yield GaugeMetricFamily(
            f"{PREFIX}_scheduled_dump_last_failure_timestamp_seconds",
            "When a scheduled dump failed last since this start.",
            value=record.failure.time.timestamp(),
        )


class Metrics:
    """All metrics of one sidecar, in a registry of its own."""

    def __init__(self, status: Status) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(status))
        ProcessCollector(namespace=PREFIX, registry=self.registry)
        self._requests = Counter(
            f"{PREFIX}_gateway_requests",
            "Memory calls, by method and by how they were answered.",
            ["method", "status"],
            registry=self.registry,
        )
        self._answers = Histogram(
            f"{PREFIX}_gateway_answer_seconds",
            "Time to the beginning of the answer, of memory calls that were answered with 2xx.",
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self._refusals = Counter(
            f"{PREFIX}_gateway_refusals",
            "Memory calls that the gateway answered itself.",
            ["reason"],
            registry=self.registry,
        )
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self._in_flight = Gauge(
            f"{PREFIX}_gateway_calls_in_flight",
            "Memory calls that hindsight-api is answering.",
            registry=self.registry,
        )

    def watch_calls(self, in_flight: Callable[[], int]) -> None:
        """Ask this for the calls in flight at each scrape."""
        self._in_flight.set_function(in_flight)

    def watch_operations(self, administration: Administration) -> None:
        """Tell of this one's operations from now on."""
        self.registry.register(OperationCollector(administration, PREFIX))

    def count_request(self, method: str, status: str) -> None:
        """Count a memory call that is over; `status` is as docs/metrics.md has it."""
        self._requests.labels(method, status).inc()

    def time_answer(self, seconds: float) -> None:
        """Note how long a memory call waited for the beginning of its answer."""
        self._answers.observe(seconds)

    def count_refusal(self, reason: str) -> None:
        """Count a call that did not get through to hindsight-api."""
        self._refusals.labels(reason).inc()

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
