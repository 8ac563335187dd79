"""A run in MLflow: a server, or an SQLite file."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_core.types import StepReport
from slime_trackers.feed import TrackedRun, Tracker

LIMITS = {"metrics": 1000, "params": 100}
"""What one request may hold."""
VALUE = 6000  # characters of a parameter
NAME = 250  # and of a name


class MlflowRun(Tracker):
    """A run of MLflow that is named after the run directory."""

    name = "mlflow"

    def open(self, run: TrackedRun) -> str:
        """Start or continue it."""
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        options = run.options
        default = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.run_dir}/mlflow.sqlite"
        self._client = client = MlflowClient(options.mlflow_uri or default)
        if run.id:
            client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return run.id
        experiment = client.get_experiment_by_name(options.mlflow_experiment)
        local = not options.mlflow_uri and default.startswith("sqlite:")
        place = (run.run_dir / "mlflow").as_uri() if local else None
        number = experiment.experiment_id if experiment else client.create_experiment(options.mlflow_experiment, place)
        tags = dict.fromkeys(options.tracker_tags, "true") | {"slime.run_dir": str(run.run_dir)}
        tags |= {"mlflow.note.content": options.tracker_notes} if options.tracker_notes else {}
        self._id = str(client.create_run(number, run_name=run.run_dir.name, tags=tags).info.run_id)
        params = [Param(legal(name), str(value)[:VALUE]) for name, value in run.hyperparameters.items()]
        for part in parts_of(params, LIMITS["params"]):
            client.log_batch(self._id, params=part)
        return self._id

    def log(self, report: StepReport, figures: Mapping[str, float]) -> None:
        """Metrics at step ``version``, in names that MLflow takes."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(legal(name), value, now, report.version) for name, value in figures.items()]
        for part in parts_of(metrics, LIMITS["metrics"]):
            self._client.log_batch(self._id, metrics=part)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """An artifact ``samples/STEP.json``, in the shape of MLflow's tables."""
        columns = list(rows[0])
        table = {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}
        self._client.log_dict(self._id, table, f"samples/{step:06d}.json")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def legal(name: str) -> str:
    """A name that MLflow takes: letters, digits and ``_-. :/``, and no part that a path would not keep."""
    return posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)).lstrip("/.")[:NAME] or "_"


def parts_of(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    """The items in parts of at most ``count``."""
    return (items[start : start + count] for start in range(0, len(items), count))
