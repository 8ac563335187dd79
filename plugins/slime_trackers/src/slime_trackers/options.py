"""The keys of `[plugin.trackers]`; each is a flag of every run, and none changes what a run learns."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slime_core.config.sections import FIGURES, Section, key


class TrackerOptions(Section):
    """`[plugin.trackers]`; names are those of THUDM/slime's flags where it has one."""

    use_tensorboard: bool = key(False, "TensorBoard: event files.", FIGURES)
    tensorboard_dir: Path | None = key(None, "Their folder; without it RUN/tensorboard.", FIGURES)
    tb_project_name: str = key("", "A folder in tensorboard_dir.", FIGURES)
    tb_experiment_name: str = key("", "A folder in that; without it the run directory's name.", FIGURES)
    use_wandb: bool = key(False, "Weights & Biases; offline where no key is at hand.", FIGURES)
    wandb_project: str = key("slime", "Its project.", FIGURES)
    wandb_group: str = key("", "Its group.", FIGURES)
    wandb_team: str = key("", "Its team, which W&B calls entity.", FIGURES)
    wandb_host: str = key("", "URL of a server of your own.", FIGURES)
    wandb_mode: Literal["", "online", "offline", "disabled"] = key("", "In place of WANDB_MODE.", FIGURES)
    wandb_dir: Path | None = key(None, "Folder of its files; without it RUN/wandb.", FIGURES)
    wandb_run_id: str = key("", "Continue this run of W&B; a resumed run continues its own.", FIGURES)
    use_mlflow: bool = key(False, "MLflow.", FIGURES)
    mlflow_uri: str = key(
        "", "Server, or sqlite:///FILE; without it MLFLOW_TRACKING_URI, else RUN/mlflow.sqlite.", FIGURES
    )
    mlflow_experiment: str = key("slime", "Its experiment.", FIGURES)
    use_trackio: bool = key(False, "Trackio; its files are where TRACKIO_DIR says.", FIGURES)
    trackio_project: str = key("slime", "Its project.", FIGURES)
    trackio_space: str = key("", "A Hugging Face Space that shows it; without it everything stays here.", FIGURES)
    tracker_notes: str = key("", "A note on the run, for trackers that keep one.", FIGURES)
    tracker_tags: tuple[str, ...] = key((), "Tags, likewise.", FIGURES)
    tracker_samples_interval: int = key(
        10, "Steps between tables of samples (report.save_samples of a step); 0: none.", FIGURES, ge=0
    )
    tracker_histograms: bool = key(
        True, "Histograms of rewards, lengths, advantages and log-prob gaps, where a tracker has them.", FIGURES
    )
    prometheus_port: int = key(0, "Serve /metrics for Prometheus at this port; 0: do not.", FIGURES, ge=0, lt=65536)
    prometheus_host: str = key("127.0.0.1", "Address of it; anyone who reaches it reads the figures.", FIGURES)
    trace: bool = key(False, "Write RUN/trace.json, which Perfetto opens: what each sample's time went into.", FIGURES)
    trace_steps: int = key(0, "Steps that are traced, from the start or a resume; 0: all.", FIGURES, ge=0)
    otlp_endpoint: str = key("", "Send these traces to an OpenTelemetry collector, such as http://HOST:4318.", FIGURES)
