"""A trainer rank that computes nothing, for `bench_overhead.py --ranks`: it reads its frames and answers at once.

python -m idle_rank CALLS PARENT
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slime_core.clusters.proxy import Service, run
from slime_core.trainers.data_parallel import DataParallelRank, RankBatch
from slime_core.weights.flops import Flops


class IdleRank(Service):
    """Columns of a rank batch's rows, figures of a step; all other calls do nothing."""

    def meet(self, hello: dict[str, Any], run_dir: Path) -> str:
        """Keep what the driver says."""
        self._hello = hello
        return ""

    def join(self, place: str, errors: Path) -> DataParallelRank:
        """Its data-parallel rank."""
        flops = Flops(token=1e9, pair=1e5)
        return DataParallelRank(number=self._hello["rank"], size=self._hello["world"], context_parallel=1, flops=flops)

    def score(self, rank_batch: RankBatch, roles: frozenset[str]) -> dict[str, Any]:
        """Columns of its rows."""
        rows = np.full(len(rank_batch.batch.loss_mask), -1.0, np.float32)
        return {role: {"log_probs": rows, "entropy": rows} for role in roles}

    def step(self, rank_batch: RankBatch) -> dict[str, float]:
        """Figures."""
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "optimizer_steps": 1.0}

    def __getattr__(self, method: str) -> Any:
        return lambda *args: None


if __name__ == "__main__":
    run(IdleRank)
