"""Pictures through SGLang on one GPU: Qwen2.5-VL-3B's shape trains, and a small model learns to count.

Both are whole runs that share the GPU with their server, which has the vision tower too; the exact canary compares it.
"""

import json
import time

import numpy as np
import pytest
import torch
from PIL import Image
from served_recipe import enlarged_counting, toml

from slime_core.testing.vision import tiny_vision_model
from slime_core.weights.folder import ModelFolder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BAND = 0.05  # mean difference of log-probs, bfloat16 on both sides
SIDE, PROMPTS, SAMPLES, LENGTH = 448, 8, 4, 64
SERVER = {"mem_fraction_static": 0.3, "skip_server_warmup": True, "disable_piecewise_cuda_graph": True}
SERVER |= {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
TEXT = {  # of Qwen2.5-VL-3B
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


def write_shape(path):
    """A folder of the 3B shape without weights, and rows with noise of 448 x 448 pixels: 256 tokens each."""
    tiny_vision_model(path / "model", weights=False)
    config = json.loads((path / "model" / "config.json").read_text())
    config |= {"tie_word_embeddings": True, "dtype": "bfloat16"}
    config["text_config"] |= TEXT
    config["text_config"].pop("layer_types")
    config["vision_config"] |= TOWER
    (path / "model" / "config.json").write_text(json.dumps(config))
    file = path / "model" / "preprocessor_config.json"
    limits = {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    file.write_text(json.dumps(json.loads(file.read_text()) | limits))
    draw, rows = np.random.default_rng(0), []
    for number in range(PROMPTS):
        Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(path / f"{number}.png")
        rows.append({"question": "<image>abc", "images": [f"{number}.png"], "label": ""})
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "judge.py").write_text("async def reward(args, sample, **kw):\n    return sum(sample.tokens[-8:]) % 3\n")


def write_recipe(path, place, tables):
    """One of a colocated run with SGLang."""
    _, found = place
    tables = {
        "cluster": {"device": "cuda", "colocate": True},
        "sglang": {"python": found.python, **SERVER, "env": dict(found.env)},
        **tables,
    }
    parts = (f"[{name}]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in table.items()) for name, table in tables.items())
    (path / "recipe.toml").write_text("\n".join(parts))


def steps_of(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def plain_seconds(folder, steps=3):
    """A step of transformers' model on as many sequences as the run's, one at a time: forward, backward, AdamW."""
    model = ModelFolder.open(folder, init_weights="random").build_model(dtype="bfloat16", seed=0).cuda()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" not in name)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
    config, side = model.config, SIDE // 14
    ids = torch.randint(3, 80, (1, 16 + (side // 2) ** 2 + LENGTH), device="cuda")
    ids[0, 8] = config.vision_start_token_id
    ids[0, 9 : 9 + (side // 2) ** 2] = config.image_token_id
    words = {
        "pixel_values": torch.randn(side * side, 1176, device="cuda", dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, side, side]], device="cuda"),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(PROMPTS * SAMPLES):
            model(input_ids=ids, labels=ids, **words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def test_the_3b_shape_trains_with_sglang_on_one_gpu(place, slime, tmp_path):
    write_shape(tmp_path)
    data = {"prompt_data": "rows.jsonl", "input_key": "question", "label_key": "label"}
    rollout = {"hf_checkpoint": "model", "init_weights": "random", "rollout_engine": "sglang", "num_rollout": 2}
    rollout |= {"rollout_max_response_len": LENGTH, "rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES}
    tables = {
        "data": data | {"multimodal_keys": {"image": "images"}},
        "rollout": rollout | {"check_weights": "all"},
        "train": {"dtype": "bfloat16", "lr": 1e-6, "max_tokens_per_gpu": 4096},
        "reward": {"custom_rm_path": "judge.py:reward"},
        "report": {"save_interval": 0},
    }
    write_recipe(tmp_path, place, tables)
    done = slime("run", "recipe.toml", "--run-dir", "run", timeout=480)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        metrics = step["metrics"]
        assert metrics["train_rollout_logprob_abs_diff"] < BAND
        assert metrics["canary/tensors"] == 36 * 7 + 2 + 32 * 10 + 6  # of the text model and of the tower
    seconds = steps[-1]["seconds"]
    print(json.dumps({"slime": {name: round(value, 2) for name, value in seconds.items()}}))
    print(json.dumps({"plain step": round(plain_seconds(tmp_path / "model"), 2), "sequences": PROMPTS * SAMPLES}))


def test_a_small_model_learns_to_count_through_sglang(place, slime, tmp_path):
    """The example's recipe: a warm-up, then GRPO. SGLang's kernels take no float32; in bfloat16 the band is wide."""
    enlarged_counting(tmp_path)
    _, found = place
    words = [f"sglang.{name}={json.dumps(value)}" for name, value in SERVER.items()]
    words += [f"sglang.env.{name}={json.dumps(value)}" for name, value in found.env.items()]
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--canary-band", "0.1", "--colocate"]
    flags += ["--rollout-engine", "sglang", "--sglang-python", found.python]
    done = slime("run", "recipe.toml", *flags, *words, "--run-dir", "run", timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    warm, end = [line["metrics"]["reward/mean"] for line in lines if line["kind"] == "eval"]
    print(json.dumps({"held out": [warm, end], "seconds": steps_of(tmp_path / "run")[-1]["seconds"]}))
    assert end > warm + 0.15
