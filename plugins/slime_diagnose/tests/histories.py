"""Histories for tests of rules: the figures of the demo's GRPO stage as they were recorded, and changes to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slime_core.config.load import read
from slime_core.config.presets import settle
from slime_diagnose.history import History, Trained

RECORDED: dict[str, list[float]] = json.loads((Path(__file__).parent / "demo_grpo.json").read_text())
"""`slime run --plugin rm_math --seed 1`, stage grpo: 60 steps, reward 0.49 to 0.93, by metric."""
STEPS = 60
Series = Callable[[int], float | None] | float


def history(
    metrics: dict[str, Series] | None = None,
    flags: Sequence[str] = (),
    *,
    steps: int = STEPS,
    evaluations: dict[str, list[tuple[int, float]]] | None = None,
    samples: Sequence[dict[str, Any]] = (),
    trained: Sequence[Trained] = (),
    fingerprints: Sequence[str] = (),
) -> History:
    """The recorded figures with some of them replaced: a number, or a function of the step, 0 to 59."""
    changes = {
        name: series if callable(series) else (lambda _, value=series: value)
        for name, series in (metrics or {}).items()
    }
    rows = []
    for step in range(steps):
        figures = {name: values[step] for name, values in RECORDED.items()}
        figures |= {name: change(step) for name, change in changes.items()}
        rows.append({"version": step + 1, "stage": "main", "step": step, "of": STEPS, "metrics": figures})
    return History(
        name="main",
        config=_config(tuple(flags)),
        steps=rows,
        evaluations=[
            {"name": name, "version": version, "metrics": {"reward/mean": mean, "reward/std": 0.4, "prompts": 200.0}}
            for name, points in (evaluations or {}).items()
            for version, mean in points
        ],
        samples=samples,
        trained=trained,
        fingerprints=fingerprints,
    )


def sample(
    version: int, response: str, *, label: str = "7", reward: float = 0.0, rank: str = "best", row: int = 0
) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "version": version,
        "rank": rank,
        "id": f"main/{version}-{row}",
        "reward": reward,
        "status": "completed",
        "response_length": len(response),
        "prompt": f"question {version}.{row}",
        "response": response,
        "label": label,
    }


def rising(low: float, high: float) -> Callable[[int], float]:
    """A line from ``low`` to ``high`` with a ripple of 3 %."""
    return lambda step: (low + (high - low) * step / (STEPS - 1)) * (1.03 if step % 2 else 0.97)


@cache
def _config(flags: tuple[str, ...]) -> Any:
    words = ["--dtype", "float32", "--num-rollout", str(STEPS), "--lr", "6e-4", *flags]
    config = read(None, words, check=False).config
    return config.model_copy(update={"train": settle(config.train)})
