"""A timeline to an OpenTelemetry collector, over OTLP and HTTP: a trace a sample, and one a part of a step."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_trackers.timeline import LOOP

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for the collector."""


class OtlpExport:
    """A `timeline.SpanWriter`; the SDK sends in batches on a thread of its own, and drops what it cannot send."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._samples: dict[str, tuple[Any, float]] = {}  # the root of each, and the end of its last span
        self._tracer: Any = None
        self._provider: Any = None

    def open(self, run_dir: Path) -> None:
        """Start the exporter; the service is ``slime``, its instance the run directory's name."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "slime", "service.instance.id": run_dir.name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{self._endpoint.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=1 << 17, max_export_batch_size=2048)
        )
        self._tracer = self._provider.get_tracer("slime")

    def write(self, track: str, lane: int, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        """One span, below its sample's."""
        from opentelemetry.trace import set_span_in_context

        context = None
        if track != LOOP:
            root, last = self._samples.get(track) or (self._root(track, start), end)
            self._samples[track] = root, max(last, end)
            context = set_span_in_context(root)
        span = self._tracer.start_span(name, context=context, start_time=_ns(start), attributes=dict(facts))
        span.end(_ns(end))

    def _root(self, track: str, start: float) -> Any:
        return self._tracer.start_span("sample", start_time=_ns(start), attributes={"slime.sample": track})

    def leave(self, track: str) -> None:
        """End the sample's own span."""
        if track in self._samples:
            root, end = self._samples.pop(track)
            root.end(_ns(end))

    def flush(self) -> None:
        """Nothing: the SDK does it."""

    def finish(self) -> None:
        """Send the rest, on a thread."""
        self._thread = threading.Thread(target=self._provider.shutdown, name="slime-otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the rest is sent, for half a minute."""
        self._thread.join(CLOSE_SECONDS)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
