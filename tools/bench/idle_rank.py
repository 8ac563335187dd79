"""A trainer rank that computes nothing, for `bench_overhead.py --ranks`: it reads its frames and answers at once.

python -m idle_rank CALLS PARENT
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slime_core.clusters.proxy import Service, run
from slime_core.trainers.data_parallel import Portion, RankSeat
from slime_core.weights.flops import Flops


class IdleRank(Service):
    """Columns of a portion's rows, figures of a step; all other calls do nothing."""

    def meet(self, hello: dict[str, Any], run_dir: Path) -> str:
        """Keep what the driver says."""
        self._hello = hello
        return ""

    def join(self, place: str, errors: Path) -> RankSeat:
        """Its seat."""
        flops = Flops(token=1e9, pair=1e5)
        return RankSeat(number=self._hello["rank"], ranks=self._hello["world"], over=1, flops=flops)

    def score(self, portion: Portion, roles: frozenset[str]) -> dict[str, Any]:
        """Columns of its rows."""
        rows = np.full(len(portion.batch.loss_mask), -1.0, np.float32)
        return {role: {"log_probs": rows, "entropy": rows} for role in roles}

    def step(self, portion: Portion) -> dict[str, float]:
        """Figures."""
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "optimizer_steps": 1.0}

    def __getattr__(self, method: str) -> Any:
        return lambda *args: None


if __name__ == "__main__":
    run(IdleRank)
