"""Two ranks, and stages that are told what counts as a layer, or hand on residuals in float32; rank R writes found-R.

python stages_main.py RANK ROOT
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]

PP = {"pipeline_model_parallel_size": 2}
SPLITS = {
    "data": {},
    "embedding": PP | {"account_for_embedding_in_pipeline_split": True},
    "loss": PP | {"account_for_loss_in_pipeline_split": True},
}


def log_probs(ranks):
    """The policy's."""
    return ranks.worker.score(ranks.batch, frozenset({"policy"}))["policy"]["log_probs"]


def far(mine, theirs):
    """The largest difference."""
    return float(np.abs(mine - theirs).max())


def splits(rank, root):
    """Each way to share three layers, and what it makes of the checkpoint of the one before."""
    found, before, first = {}, None, None
    for name in (*SPLITS, "embedding"):
        ranks = Ranks(root, "dense", SPLITS[name], rank, 2)
        seen = found[f"{name} again" if name in found else name] = {}
        seen["layers"] = [layer.layer_number for layer in ranks.worker.policy.stage.decoder.layers]
        scored = log_probs(ranks)
        first = scored if first is None else first
        seen["log_probs"] = far(scored, first)
        seen["fingerprint"] = ranks.worker.fingerprint()
        if before is not None:
            seen["restored"] = [before[1], ranks.restore(before[0])]
            seen["restored log_probs"] = far(log_probs(ranks), before[2])
        ranks.step()
        path = root / f"saved-{len(found)}"
        ranks.save(path)
        before = path, ranks.worker.fingerprint(), log_probs(ranks)
    return found


def residuals(rank, root):
    """Log-probs and a step with residuals in float32, against without and against all in float32."""
    found = {}
    meant = log_probs(Ranks(root, "dense", {}, rank, 2))
    uneven = PP | {"decoder_first_pipeline_num_layers": 1}
    for dtype in ("float32", "bfloat16"):
        for wide in (False, True):
            flags = uneven | {"fp32_residual_connection": wide}
            ranks = Ranks(root, "dense", flags, rank, 2, dtype=dtype)
            before = log_probs(ranks)
            handed = ranks.worker.policy.stage.config.pipeline_dtype
            ranks.step()
            rows = [before.tolist(), log_probs(ranks).tolist()]
            error = float(np.sqrt(np.mean((before - meant) ** 2)))
            found[f"{dtype} {wide}"] = {"rows": rows, "error": error, "handed on": str(handed)}
    return found


if __name__ == "__main__":
    from cpu import cpu_redirect
    from saving_main import Ranks

    torch.set_num_threads(1)
    number, where = int(sys.argv[1]), Path(sys.argv[2])
    with cpu_redirect():
        answers = {"splits": splits(number, where), "residuals": residuals(number, where)}
    (where / f"found-{number}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
