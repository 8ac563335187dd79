"""Where engines and trainers live; the only place that chooses a backend."""
