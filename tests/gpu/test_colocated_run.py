"""A whole run on one GPU that engine and trainer share: `slime run`, memory given and taken at every step."""

import json

import pytest
import served_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = (("warmup", 3), ("grpo", 3))
TABLES = {
    "name": "colocated",
    "seed": 5,
    "cluster": {"device": "cuda", "cpu_threads": 4, "colocate": True},
    "train": {"dtype": "bfloat16"},
    "eval": {"eval_tasks": [{"name": "arithmetic_heldout"}]},
    "report": {"save_interval": 2},
    "plugin.rm_math": {"digits": 2, "heldout_rows": 64},
}
STAGES = {
    "warmup": {"num_rollout": 3, "rollout_batch_size": 64, "lr": 1e-3},
    "grpo": {"num_rollout": 3, "rollout_batch_size": 16, "lr": 3e-4},
}
GPU = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
}


GRAPHS = {"disable_cuda_graph": False, "cuda_graph_bs": [8, 64]}


def recipe(place, model, *, external="", more=None):
    _, found = place
    rollout = {"hf_checkpoint": model, "rollout_deterministic": True, "rollout_max_response_len": 6}
    if external:  # IPC is for servers of ours, and NCCL for one GPU a rank
        rollout |= {"rollout_external_engine_addrs": [external], "update_weight_transport": "disk"}
    sglang = {"python": found.python, **({} if external else GPU), **(more or {}), "env": found.env}
    return served_recipe.recipe(**STAGES, tables={**TABLES, "rollout": rollout, "sglang": sglang})


def steps_of(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def figures(run_dir):
    """What is a function of the seed: all metrics but times and bytes of the device."""
    return [
        {name: value for name, value in step["metrics"].items() if not name.endswith(("_seconds", "_bytes"))}
        for step in steps_of(run_dir)
    ]


@pytest.mark.parametrize("more", [{}, GRAPHS], ids=["plain", "graphs"])
def test_a_colocated_run_trains_saves_and_ends(more, place, folder, slime, tmp_path):
    """Own server, memory saver on: every step swaps memory, checkpoints are written, the final folder is there."""
    (tmp_path / "recipe.toml").write_text(recipe(place, folder, more=more))
    done = slime("run", "recipe.toml", "--run-dir", "out", timeout=420)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "restart" not in (tmp_path / "out" / "log" / "run.log").read_text()
    steps = steps_of(tmp_path / "out")
    assert [step["stage"] for step in steps] == [name for name, count in STEPS for _ in range(count)]
    for step in steps:
        assert step["metrics"]["swap/engine_release_bytes"] > 5e9
        assert step["metrics"]["swap/trainer_release_seconds"] >= 0
    print(json.dumps({n: round(v, 4) for n, v in steps[-1]["metrics"].items() if n.startswith(("swap/", "canary/"))}))
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()
    assert list((tmp_path / "out" / "checkpoints").glob("step-*"))


def test_a_run_repeats_bit_for_bit(place, folder, served, slime, tmp_path):
    """The same seed twice, on the server that is there: every metric and the fingerprint of the weights are equal."""
    (tmp_path / "recipe.toml").write_text(recipe(place, folder, external=served.url))
    for name in ("one", "two"):
        done = slime("run", "recipe.toml", "--run-dir", name, timeout=240, SLIME_SGLANG_TOKEN=served.token)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    one, two = figures(tmp_path / "one"), figures(tmp_path / "two")
    assert len(one) == sum(count for _, count in STEPS)
    for version, (first, second) in enumerate(zip(one, two, strict=True), 1):
        different = {name: (first[name], second.get(name)) for name in first if first[name] != second.get(name)}
        assert different == {}, f"step {version}"
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
