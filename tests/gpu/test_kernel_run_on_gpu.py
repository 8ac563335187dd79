"""Dialogues about kernels on GPUs: SGLang samples the turns, the judge compiles and times every kernel, GRPO learns.

The embedded default's recipe in two runs: its warm-up with the embedded engine, then GRPO with a server. The judge
measures on the last GPU, which with one GPU is everybody's. SLIME_GPU_TESTS_DEVICE=cpu tries all of it on a CPU, shorter.
"""

import json
import statistics
import tomllib
from pathlib import Path

import pytest
import torch
from carry_runs import CPU, SERVER, SHAPE, slime
from served_recipe import toml

from slime_kernelbench.plugin import __file__ as plugin_file

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(880)]

PLUGIN = Path(plugin_file).parent
STEPS = 2 if CPU else 12
WARMUP = ["--init-weights", "random", "--num-rollout", "8" if CPU else "1600", "--save-interval", "0"]
SMALL = {"mem_fraction_static": 0.2, "max_total_tokens": 20000}


def gpu_of_the_judge():
    """The UUID of the last GPU, as nvidia-smi has it."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.device_count() - 1).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def tables_of(recipe, stage, more):
    """The tables of a recipe with one of its stages put into them."""
    tables = {name: dict(table) for name, table in recipe.items() if isinstance(table, dict) and name != "plugin"}
    tables["plugin.kernelbench"] = recipe["plugin"]["kernelbench"]
    of = {"tasks": "data", "loss_type": "train", "advantage_estimator": "train"}
    of |= dict.fromkeys(("num_rollout", "rollout_batch_size", "n_samples_per_prompt"), "rollout")
    for key, value in stage.items():
        if key != "name":
            tables.setdefault(of.get(key, "train"), {})[key] = value
    for name, keys in more.items():
        tables.setdefault(name, {}).update(keys)
    return tables


def write(path, tables):
    lines = ['name = "kernels"', 'plugins = ["kernelbench", "models"]']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    path.write_text("\n".join([*lines, ""]))


@pytest.fixture
def folder(tmp_path, place):
    """The model in a shape that SGLang's kernels take, and a recipe for each of the two runs."""
    _, found = place
    recipe = tomllib.loads((PLUGIN / "recipes" / "default.toml").read_text())
    (tmp_path / "model").mkdir()
    for file in (PLUGIN / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    config = json.loads((PLUGIN / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config if CPU else {**config, **SHAPE}))
    warmup, grpo = recipe["stage"]
    server = {"python": found.python, "env": dict(found.env), **(SMALL if CPU else SERVER)}
    judge = {} if CPU else {"judge_gpus": [gpu_of_the_judge()], "judge_workers": 8, "judge_timeout": 120.0}
    write(tmp_path / "warm.toml", tables_of(recipe, warmup, {"eval": {"eval_tasks": []}}))
    more = {
        "plugin.kernelbench": {**judge, "family_heldout": 4 if CPU else 32},
        "eval": {"skip_eval_before_train": False},
        "reward": {"reward_timeout": 300.0},
        "sglang": server,
        "rollout": {"init_weights": "load", "rollout_engine": "sglang", "rollout_batch_size": 2 if CPU else 8},
    }
    write(tmp_path / "learn.toml", tables_of(recipe, grpo, more))
    return tmp_path


def test_a_run_through_sglang_learns_from_kernels_that_ran_on_the_gpu(folder):
    (folder / "warm.toml").rename(folder / "recipe.toml")
    slime(folder, "warm", *WARMUP, "--hf-checkpoint", "model")
    (folder / "learn.toml").rename(folder / "recipe.toml")
    rows = slime(
        folder, "learn", "--num-rollout", str(STEPS), "--hf-checkpoint", "warm/final", "--colocate", seconds=760
    )
    steps = [row for row in rows if row["kind"] == "step"]
    held = [row["metrics"]["reward/solved/mean"] for row in rows if row["kind"] == "eval"]
    turns = [json.loads(line) for line in (folder / "learn" / "kernelbench" / "turns.jsonl").read_text().splitlines()]
    print(
        "held out, share of dialogues solved:", held, "steps:", [row["metrics"]["reward/solved/mean"] for row in steps]
    )
    print(
        {name: round(statistics.median(s["seconds"].get(name, 0) for s in steps), 2) for name in steps[0]["seconds"]}
    )
    assert len(steps) == STEPS
    assert len(turns) > STEPS * 8
    if not CPU:
        timed = [turn["verdict"] for turn in turns if turn["verdict"]["status"] == "correct"]
        assert timed
        assert all(verdict["timing"] is not None or verdict["flags"] for verdict in timed)
        assert held[-1] > held[0]
