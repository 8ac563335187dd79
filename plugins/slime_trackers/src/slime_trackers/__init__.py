"""Trackers for slime: TensorBoard, MLflow, Trackio, Weights & Biases, a Prometheus endpoint, and traces."""

__version__ = "0.1.0"
