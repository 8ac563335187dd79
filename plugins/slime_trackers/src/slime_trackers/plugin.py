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
    from slime_core.protocols import Sink
    from slime_core.types import Batch

LIBRARIES = {
    "use_tensorboard": ("tensorboard", "tensorboard"),
    "use_wandb": ("wandb", "wandb"),
    "use_mlflow": ("mlflow", "mlflow"),
    "use_trackio": ("trackio", "trackio"),
}
"""Key -> the module that it needs, and the extra of slime-trackers that installs it."""


class Trackers:
    """The plugin of one process."""

    slime_api = 1

    def __init__(self) -> None:
        self._arrays: dict[int, dict[str, Any]] = {}  # of the step in training, by the version that it makes

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
            if table.get(key) and find_spec(module) is None
        ]

    @hookimpl
    def slime_sinks(self, ctx: Context) -> list[Sink]:
        """A feed for each tracker."""
        from slime_trackers.feed import Tracker, TrackerFeed
        from slime_trackers.mlflow_run import MlflowRun
        from slime_trackers.tensorboard_run import TensorBoardRun
        from slime_trackers.trackio_run import TrackioRun
        from slime_trackers.wandb_run import WandbRun

        options = ctx.options
        kinds: dict[str, Callable[[], Tracker]] = {
            "use_tensorboard": TensorBoardRun,
            "use_wandb": WandbRun,
            "use_mlflow": MlflowRun,
            "use_trackio": TrackioRun,
        }
        return [
            TrackerFeed(tracker(), options, self._arrays) for key, tracker in kinds.items() if getattr(options, key)
        ]

    @hookimpl
    def slime_batch(self, batch: Batch, ctx: Context) -> None:
        """Keep what histograms are made of, for the report of the step."""
        from slime_trackers.arrays import step_arrays

        self._arrays.clear()
        if ctx.options.tracker_histograms:
            self._arrays[batch.version + 1] = step_arrays(batch)
