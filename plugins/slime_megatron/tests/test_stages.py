"""What counts as a layer of a pipeline, and residuals in float32: nothing that is computed changes but rounding.

Two ranks do all of it, with a model of three layers.
"""

import numpy as np
import pytest
from megatron_ranks import PIPELINE, Ranks, answer, run_ranks

from slime_core.testing import tiny_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = [pytest.mark.integration, pytest.mark.nightly]

SPLITS = {
    "data": {},
    "embedding": PIPELINE | {"account_for_embedding_in_pipeline_split": True},
    "loss": PIPELINE | {"account_for_loss_in_pipeline_split": True},
    "interleaved": PIPELINE | {"pipeline_model_parallel_layout": "Et|t|t|L"},
}
LAYERS = {
    "data": [[1, 2, 3], [1, 2, 3]],
    "embedding": [[1], [2, 3]],
    "loss": [[1, 2], [3]],
    "interleaved": [[1, 3], [2]],
    "embedding again": [[1], [2, 3]],
}


@pytest.fixture(scope="module")
def ranks(zygote, tmp_path_factory):
    """What both found."""
    root = tmp_path_factory.mktemp("root")
    tiny_model(root / "dense", tied=True, layers=3)
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), splits_and_residuals, 2, root)


@pytest.mark.parametrize("split", LAYERS)
def test_the_embedding_or_the_output_counts_as_a_layer_and_log_probs_are_the_same(ranks, split):
    for rank, found in enumerate(ranks):
        assert found["splits"][split]["layers"] == LAYERS[split][rank]
        assert found["splits"][split]["log_probs"] < 1e-6
        assert found["splits"][split]["fingerprint"] == ranks[0]["splits"]["data"]["fingerprint"]


@pytest.mark.parametrize("split", ["embedding", "loss", "interleaved", "embedding again"])
def test_one_split_goes_on_with_the_checkpoint_of_another(ranks, split):
    for found in ranks:
        saved, restored = found["splits"][split]["restored"]
        assert saved == restored != found["splits"][split]["fingerprint"]
        assert found["splits"][split]["restored log_probs"] < 1e-6


def test_residuals_in_float32_change_nothing_that_is_float32(ranks):
    for found in ranks:
        assert found["residuals"]["float32 True"]["rows"] == found["residuals"]["float32 False"]["rows"]


def test_residuals_in_float32_are_handed_on_and_round_less(ranks):
    for found in ranks:
        plain, wide = (found["residuals"][f"bfloat16 {wide}"] for wide in (False, True))
        assert (plain["handed on"], wide["handed on"]) == ("torch.bfloat16", "torch.float32")
        assert 0 < wide["error"] < 0.9 * plain["error"]
        assert wide["rows"][0] != wide["rows"][1]


def splits_and_residuals(rank, root):
    """Everything on this rank."""
    return {"splits": splits(rank, root), "residuals": residuals(rank, root)}


def log_probs(ranks):
    """The policy's."""
    return ranks.worker.score(ranks.batch, frozenset({"policy"}))["policy"]["log_probs"]


def splits(rank, root):
    """Each way to share three layers, and what it makes of the checkpoint of the one before."""
    found, before, first = {}, None, None
    for name in (*SPLITS, "embedding"):
        ranks = Ranks(root, "dense", SPLITS[name], rank, 2)
        seen = found[f"{name} again" if name in found else name] = {}
        seen["layers"] = [n.layer_number for chunk in ranks.worker.policy.stage for n in chunk.decoder.layers]
        scored = log_probs(ranks)
        first = scored if first is None else first
        seen["log_probs"] = float(np.abs(scored - first).max())
        seen["fingerprint"] = ranks.worker.fingerprint()
        if before is not None:
            seen["restored"] = [before[1], ranks.restore(before[0])]
            seen["restored log_probs"] = float(np.abs(log_probs(ranks) - before[2]).max())
        ranks.step()
        path = root / f"saved-{len(found)}"
        ranks.save(path)
        before = path, ranks.worker.fingerprint(), log_probs(ranks)
    return found


def residuals(rank, root):
    """Log-probs and a step with residuals in float32, against without and against all in float32."""
    found = {}
    meant = log_probs(Ranks(root, "dense", {}, rank, 2))
    uneven = PIPELINE | {"decoder_first_pipeline_num_layers": 1}
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
    answer(splits_and_residuals)
