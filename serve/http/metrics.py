"""What Prometheus reads at /metrics."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvarn.serve.http.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The counters of one server; what the engine knows is asked when it is read."""

    def __init__(self, service: "Service") -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "kvarn_requests", "Requests by endpoint and HTTP code", ("endpoint", "code"), registry=self._registry
        )
        self.prompt_tokens = Counter("kvarn_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.generated_tokens = Counter("kvarn_generated_tokens", "Tokens generated", registry=self._registry)
        self.cached_tokens = Counter(
            "kvarn_cached_tokens", "Tokens of prompts that were reused instead of computed", registry=self._registry
        )
        self.first_token = Histogram(
            "kvarn_time_to_first_token_seconds",
            "From the request to the first token of an answer",
            buckets=_FIRST,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "kvarn_inter_token_seconds", "Between two tokens of an answer", buckets=_NEXT, registry=self._registry
        )
        self._registry.register(_EngineCollector(service))

    def text(self) -> bytes:
        """Everything, in Prometheus' text form."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, service: "Service") -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("kvarn_ready", "1 while requests are taken", value=self._service.status == "ready")
        yield GaugeMetricFamily("kvarn_in_flight", "Answers that run or wait", value=self._service.in_flight)
        yield GaugeMetricFamily("kvarn_queue_limit", "Answers that may wait", value=self._service.limits.max_queue)
        if self._service.served is None:
            return
        scheduler = self._service.served.engine.scheduler
        yield GaugeMetricFamily("kvarn_running", "Sequences that run", value=len(scheduler.running))
        yield GaugeMetricFamily("kvarn_waiting", "Sequences that wait", value=len(scheduler.waiting))
        yield CounterMetricFamily("kvarn_preemptions", "Preemptions", value=scheduler.counters.preemptions)
        for what, pool in (("blocks", scheduler.blocks), ("slots", scheduler.slots)):
            family = GaugeMetricFamily(f"kvarn_{what}", f"{what.capitalize()} of the cache by state", labels=["state"])
            held, kept = pool.num_held, pool.num_kept
            for state, count in (("held", held), ("kept", kept), ("free", pool.size - held - kept)):
                family.add_metric([state], count)
            yield family
