"""Figures of the driver for Prometheus, at http://127.0.0.1:PORT/metrics while the run goes on."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.types import StepReport

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from slime_core.protocols import Span

LAG = 1.0
"""Seconds that a scrape waits for the event loop; one that takes no longer is alive."""


class PrometheusEndpoint:
    """A sink and an observer of spans: every metric of the last step as a gauge, and what goes on just now.

    Example: PrometheusEndpoint("127.0.0.1", 9400)
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._metrics: dict[str, float] = {}
        self._last: StepReport | None = None
        self._last_time = 0.0
        self._open: Counter[str] = Counter()  # spans by name
        self._count: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)  # by name, and request_queue, request_prefill
        self._tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Serve.

        Raises:
            RuntimeError: the port is taken, or the address is not this machine's.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(self._port, self._host, registry)
        except OSError as error:
            fix = "set plugin.trackers.prometheus_port to a free one"
            raise RuntimeError(f"prometheus_port {self._port} of {self._host}: {error.strerror}; {fix}") from error

    def write(self, report: StepReport) -> None:
        """Keep the figures of a step or an evaluation."""
        self._metrics = {**self._metrics, **dict(report.items())}
        self._last, self._last_time = report, time.time()

    def close(self) -> None:
        """Serve no longer."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def begin(self, span: Span) -> None:
        """A span begins."""
        self._loop = self._loop or asyncio.get_running_loop()
        self._open[span.name] += 1

    def end(self, span: Span) -> None:
        """A span ends."""
        self._open[span.name] -= 1
        self._count[span.name] += 1
        self._seconds[span.name] += span.seconds or 0.0
        if span.name == "request":
            self._tokens += span.facts.get("tokens", 0)
            for part in ("queue", "prefill"):
                self._seconds[f"request_{part}"] += span.facts.get(part, 0.0)

    def describe(self) -> list[Metric]:
        """Nothing: what there is differs from run to run."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets; on a thread of the server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        last, phases = self._last, dict(self._open)
        now: dict[str, tuple[str, float]] = {
            "slime_version": ("Steps completed.", last.version if last else 0),
            "slime_stage_steps": ("Steps of the stage.", last.of if last else 0),
            "slime_last_step_timestamp_seconds": ("When the last step was reported; 0: none yet.", self._last_time),
            "slime_loop_lag_seconds": (
                f"What the event loop takes to answer; {LAG:g} or more: it hangs.",
                self._lag(),
            ),
            "slime_requests_in_flight": ("Requests that the engine has.", phases.pop("request", 0)),
            "slime_rewards_in_flight": ("Groups that are being judged.", phases.pop("reward", 0)),
        }
        for name, (text, value) in now.items():
            yield GaugeMetricFamily(name, text, value)
        phase = GaugeMetricFamily("slime_phase", "1 for what the loop does now.", labels=["phase"])
        for name, count in phases.items():
            phase.add_metric([name], count)
        yield phase
        spans = CounterMetricFamily("slime_spans", "Requests, rewards and parts of steps that ended.", labels=["span"])
        seconds = CounterMetricFamily("slime_span_seconds", "What they took.", labels=["span"])
        for family, values in ((spans, self._count), (seconds, self._seconds)):
            for name, value in dict(values).items():
                family.add_metric([name], value)
        yield from (spans, seconds)
        yield CounterMetricFamily("slime_generated_tokens", "Tokens that the engine returned.", self._tokens)
        for name, metric in legal_names(self._metrics).items():
            yield GaugeMetricFamily(name, f"{metric} of the last step that has it.", self._metrics[metric])

    def _lag(self) -> float:
        if self._loop is None:
            return 0.0
        answered, start = threading.Event(), time.monotonic()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # it is closed: the run is over
            return 0.0
        answered.wait(LAG)
        return time.monotonic() - start


def legal_names(metrics: Mapping[str, float]) -> dict[str, str]:
    """Names that Prometheus takes, by which each metric is found; of two that become one, the later gets ``_``."""
    names: dict[str, str] = {}
    for metric in sorted(metrics):
        name = "slime_metric_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        while name in names:
            name += "_"
        names[name] = metric
    return names
