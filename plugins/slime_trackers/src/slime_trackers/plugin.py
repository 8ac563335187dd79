"""The plugin `trackers`: figures, samples and histograms of a run to the trackers that its options name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slime_core import Context, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from slime_core.config.problems import Problem
    from slime_core.config.schema import Config
    from slime_core.protocols import Sink, SpanObserver
    from slime_core.types import Batch
    from slime_trackers.timeline import Timeline

LIBRARIES = {
    "use_tensorboard": ("tensorboard", "tensorboard"),
    "use_wandb": ("wandb", "wandb"),
    "use_mlflow": ("mlflow", "mlflow"),
    "use_trackio": ("trackio", "trackio"),
    "prometheus_port": ("prometheus_client", "prometheus"),
    "otlp_endpoint": ("opentelemetry.exporter.otlp.proto.http", "otlp"),
}
"""Key -> the module that it needs, and the extra of slime-trackers that installs it."""


class Trackers:
    """The plugin of one process."""

    slime_api = 1

    def __init__(self) -> None:
        self._arrays: dict[int, dict[str, Any]] = {}  # of the step in training, by the version that it makes
        self._timelines: list[Timeline] = []
        self._observers: list[Any] = []  # sinks that see spans too

    @hookimpl
    def slime_options(self) -> type[BaseModel]:
        """The model of `[plugin.trackers]`."""
        from slime_trackers.options import TrackerOptions

        return TrackerOptions

    @hookimpl
    def slime_config_rules(self, config: Config) -> list[Problem]:
        """Libraries that are not installed."""
        from slime_core.config.problems import conflict

        table = config.plugin.get("trackers", {})
        return [
            conflict(
                f"{key} needs the package {module}, which is not installed here",
                [f"plugin.trackers.{key}"],
                fix=f"pip install 'slime-trackers[{extra}]'   or leave {key} out",
            )
            for key, (module, extra) in LIBRARIES.items()
            if table.get(key) and not is_installed(module)
        ]

    @hookimpl
    def slime_sinks(self, ctx: Context) -> list[Sink]:
        """A feed for each tracker."""
        from slime_trackers.chrome_trace import ChromeTrace
        from slime_trackers.feed import Tracker, TrackerFeed
        from slime_trackers.mlflow_run import MlflowRun
        from slime_trackers.otlp import OtlpExport
        from slime_trackers.prometheus import PrometheusEndpoint
        from slime_trackers.tensorboard_run import TensorBoardRun
        from slime_trackers.timeline import SpanWriter, Timeline
        from slime_trackers.trackio_run import TrackioRun
        from slime_trackers.wandb_run import WandbRun

        options = ctx.options
        kinds: dict[str, Callable[[], Tracker]] = {
            "use_tensorboard": TensorBoardRun,
            "use_wandb": WandbRun,
            "use_mlflow": MlflowRun,
            "use_trackio": TrackioRun,
        }
        feeds = [
            TrackerFeed(tracker(), options, self._arrays) for key, tracker in kinds.items() if getattr(options, key)
        ]
        endpoint = [PrometheusEndpoint(options.prometheus_host, options.prometheus_port)]
        writers: list[SpanWriter] = [ChromeTrace()] * options.trace + [OtlpExport(options.otlp_endpoint)] * bool(
            options.otlp_endpoint
        )
        ahead = ctx.config.rollout.max_staleness + 1
        self._timelines = [Timeline(writer, ahead, options.trace_steps) for writer in writers]
        self._observers = [*endpoint * bool(options.prometheus_port), *self._timelines]
        return [*feeds, *self._observers]

    @hookimpl
    def slime_spans(self, ctx: Context) -> list[SpanObserver]:
        """The endpoint of Prometheus, and the timelines."""
        return self._observers

    @hookimpl
    def slime_batch(self, batch: Batch, ctx: Context) -> None:
        """Keep what histograms are made of, for the report of the step."""
        from slime_trackers.arrays import step_arrays

        for timeline in self._timelines:
            timeline.batch(batch)
        self._arrays.clear()
        if ctx.options.tracker_histograms:
            self._arrays[batch.version + 1] = step_arrays(batch)


def is_installed(module: str) -> bool:
    """Whether a module can be imported; its packages are, it is not."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False
