"""Routing replay through SGLang, which records the experts of every token on a GPU alone."""

import json

import pytest
import served_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

TABLES = {
    "name": "replay",
    "seed": 5,
    "cluster": served_recipe.BESIDE,
    "plugin.rm_math": {"digits": 2, "heldout_rows": 64},
}
WARMUP = {"num_rollout": 6, "rollout_batch_size": 64, "lr": 3e-4}
GRPO = {"num_rollout": 6, "rollout_batch_size": 32, "lr": 3e-5}


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_a_replayed_run_is_nearer_to_its_engine_than_one_without(graphs, place, slime, tmp_path):
    """Of a model of 64 experts in 8 layers, in bfloat16: gaps of log-probs over the same steps, printed."""
    module, sglang = place
    folder = module.make_folder(tmp_path / "model", "small-moe")
    server = {
        "python": sglang.python,
        **served_recipe.SMALL_SERVER,
        "disable_cuda_graph": not graphs,
        "env": sglang.env,
    }
    gaps = {}
    for kind in ("off", "rollout"):
        rollout = {"hf_checkpoint": folder, "rollout_max_response_len": 6}
        train = {"dtype": "bfloat16", "routing_replay": kind}
        tables = {**TABLES, "rollout": rollout, "train": train, "sglang": server}
        (tmp_path / "recipe.toml").write_text(served_recipe.recipe(warmup=WARMUP, grpo=GRPO, tables=tables))
        done = slime("run", "recipe.toml", "--run-dir", kind, timeout=270)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        rows = [json.loads(line) for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        steps = [row["metrics"] for row in rows if row["kind"] == "step" and row["stage"] == "grpo"]
        gaps[kind] = sum(step["train_rollout_logprob_abs_diff"] for step in steps) / len(steps)
        print(kind, gaps[kind], [step.get("routing_mismatch") for step in steps])
        assert ("routing_mismatch" in steps[0]) is (kind == "rollout")
    assert gaps["rollout"] < gaps["off"]
