"""One card of 24 GiB: the recipes of examples/small_gpu under a cap, their peak on the device, engine and context in it."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch

from slime_core.kernels.quantised import QuantisedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

ROOT = Path(__file__).parents[2]
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
GIB = 1 << 30
CASES = {
    "qlora": ("qwen3-4b", "recipe.toml", (), 22.0),
    "full": ("qwen3-0.6b", "full.toml", (), 23.5),
    "8bit": ("qwen3-0.6b", "full.toml", ("--optimizer", "adamw_8bit"), 23.5),
    "paged": ("qwen3-0.6b", "full.toml", ("--optimizer", "paged_adamw_8bit"), 23.5),
}


def model_of(path, preset):
    """A model of a preset's shape, drawn on the GPU, with a tokenizer of characters and a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from slime_core.testing.models import VOCAB, char_tokenizer

    assert importlib.util.find_spec("slime_models"), "install plugins/slime_models"
    from slime_models.presets import presets

    config = AutoConfig.for_model(**vars(presets()[preset].config))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    char_tokenizer(VOCAB, CHAT).save_pretrained(str(path))
    del model
    torch.cuda.empty_cache()
    return path


def peak_of(process):
    """Bytes of the device that are taken at most until the process ends, beyond what others had."""
    total, peak, ended = torch.cuda.mem_get_info()[1], 0, threading.Event()
    threading.Thread(target=lambda: (process.wait(), ended.set()), daemon=True).start()
    while not ended.wait(0.02):
        peak = max(peak, total - torch.cuda.mem_get_info()[0])
    return peak


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_trains_under_the_cap(case, tmp_path):
    preset, recipe, flags, limit = CASES[case]
    if "adamw_8bit" in "".join(flags):
        pytest.importorskip("bitsandbytes")
    model = model_of(tmp_path / "model", preset)
    free, total = torch.cuda.mem_get_info()
    sizes = ("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4")
    command = [sys.executable, "-m", "slime_cli.main", "run", ROOT / "examples" / "small_gpu" / recipe]
    command += ["--hf-checkpoint", model, "--run-dir", tmp_path / "run", "--save-interval", "0", *sizes, *flags]
    command += ["--rollout-max-response-len", "2048"]
    with (tmp_path / "log").open("w") as log:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment)
        peak = peak_of(process) - (total - free)
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0, text[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    print(f"{case}: peak {peak / GIB:.2f} GiB", *[line for line in text.splitlines() if "auto:" in line], sep="\n")
    assert len(steps) == 2
    slots = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["rollout"]["rollout_slots"]
    assert f"{slots} sequences at once" in text
    assert peak / GIB < limit


def test_a_process_above_its_cap_runs_out_of_memory_though_the_card_has_more():
    code = (
        "import torch; from slime_core.memory import limit_gpu, gpu_memory, free_gpu_memory\n"
        "device = torch.device('cuda', 0); limit_gpu(device, 4.0)\n"
        "assert gpu_memory(device) < 3.5 * 2**30 and free_gpu_memory(device) <= gpu_memory(device)\n"
        "torch.empty(3 << 30, dtype=torch.uint8, device=device)\n"
        "try: torch.empty(4 << 30, dtype=torch.uint8, device=device)\n"
        "except torch.cuda.OutOfMemoryError: raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7


def test_a_base_in_4_bits_goes_to_the_device_one_weight_at_a_time(tmp_path):
    from slime_core.config.load import load_config
    from slime_core.plugins import load_plugins
    from slime_core.trainers.fsdp.worker import FsdpWorker
    from slime_core.weights.folder import ModelFolder

    model = model_of(tmp_path / "model", "qwen3-0.6b")
    flags = ["--hf-checkpoint", str(model), "--device", "cuda", "--dtype", "bfloat16", "--base-weights", "nf4"]
    config = load_config(None, [*flags, "--lora-rank", "8"])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    from slime_core.lora.base_weights import rounding
    from slime_core.weights.build import skeleton

    folder = ModelFolder.open(model)
    put = rounding(skeleton(folder.config), "nf4", torch.device("cuda"), folder.tensors())
    hf = folder.build_model("bfloat16", put=put)
    stored = sum(p.stored_bytes for p in hf.parameters() if isinstance(p, QuantisedWeight))
    largest = max(p.numel() for p in hf.parameters() if isinstance(p, QuantisedWeight))
    assert torch.cuda.max_memory_allocated() - before < stored + 40 * largest
    worker = FsdpWorker(config, load_plugins(config), folder, 0, 1, "cuda", None)
    worker.begin(config)
    base = [p for p in worker.policy.base().values() if isinstance(p.detach(), QuantisedWeight)]
    assert sum(p.numel() for p in base) == sum(p.numel() for p in hf.parameters() if isinstance(p, QuantisedWeight))
