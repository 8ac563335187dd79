"""Verification of one step's gradient: it is recomputed the slow way, compared and recorded in ``verify.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.protocols import Trainer
    from slime_core.report.report import Report
    from slime_core.report.step_clock import StepClock
    from slime_core.types import Batch

FILE = "verify.json"
EACH = "gradient_error/"


@dataclass(slots=True, frozen=True)
class Verification:
    """Verify ``step``, counted from 1 (0: none), before it trains; ``record`` turns the comparison into metrics."""

    step: int
    record: Callable[[dict[str, float]], dict[str, float]]

    async def run(self, batch: Batch, trainer: Trainer, clock: StepClock) -> dict[str, float]:
        """Verify the batch of the step; returns its metrics, none for any other batch."""
        if batch.version + 1 != self.step:
            return {}
        with clock.part("verify"):
            return self.record(await trainer.verify(batch))


def write_verification(report: Report, version: int, verification: Mapping[str, float]) -> dict[str, float]:
    """Write ``verify.json`` into the run directory and say in one sentence whether the step's gradient is right.

    Args:
        version: the step, counted from 1
        verification: errors by name, from `Trainer.verify`

    Returns:
        ``verify/gradient_error``, ``verify/loss_error`` and ``verify/ok`` (1 or 0), for the step's metrics.
    """
    errors_by_name = {name.removeprefix(EACH): error for name, error in verification.items() if name.startswith(EACH)}
    worst = max(errors_by_name, key=lambda name: errors_by_name[name], default="")
    gradient, loss, limit = verification["gradient_error"], verification["loss_error"], verification["limit"]
    ok = gradient <= limit and loss <= limit
    kind = "float64" if verification.get("float64") else "float32"
    errors = f"gradient error {gradient:.1e} (worst: {worst or 'none'}), loss error {loss:.1e}, limit {limit:g}"
    verdict = "agrees with" if ok else "DIFFERS from"
    report.note(f"step {version} {verdict} the plain recomputation in {kind}: {errors}")
    answer = {
        "step": version,
        "ok": ok,
        "gradient_error": _number(gradient),
        "worst_parameter": worst,
        "loss": verification.get("loss", 0.0),
        "loss_error": _number(loss),
        "limit": limit,
        "recomputed_in": kind,
        "parameters": {name: _number(error) for name, error in errors_by_name.items()},
    }
    (report.run_dir.path / FILE).write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    return {"verify/gradient_error": gradient, "verify/loss_error": loss, "verify/ok": float(ok)}


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)
