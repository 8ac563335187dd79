"""Whole runs that train adapters: killed and resumed to the same bits, shown, compared, and refused as full training."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from small_task import write_task

from slime_core.lora.folder import BaseForm, Factors, factors_of, write_adapter
from slime_core.lora.layers import attach
from slime_core.lora.spec import LoraSpec
from slime_core.weights.build import skeleton
from slime_core.weights.folder import read_config

pytestmark = pytest.mark.system

REWARD = '''
"""Share of digits."""


def reward(args, sample, **kw):
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("lora"), REWARD)


@pytest.fixture
def run(work, forked_slime):
    """`slime run` with adapters in the run directory of a name."""

    def run(name, *flags, **env):
        given = [
            *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
            *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", 4),
            *("--num-rollout", 3, "--rollout-batch-size", 2, "--n-samples-per-prompt", 3, "--kl-loss-coef", 0.01),
            *("--rollout-max-response-len", 8, "--lr", "3e-2", "--save-interval", 2, "--dtype", "float32"),
            *("--device", "cpu", "--cpu-threads", 1, "--no-async-save", "--lora-rank", 4, "--lora-dropout", 0.1),
        ]
        return forked_slime("run", *given, "--run-dir", work / name, *flags, **env), work / name

    return run


def write_start(path, model):
    """An adapter to start from, that was trained on a base in 4 bits."""
    adapters = attach(skeleton(read_config(model)), LoraSpec(rank=4), seed=0)
    factors = {
        weight: Factors(torch.sin(torch.arange(one.a.numel())).view(one.a.shape), torch.zeros(one.b.shape))
        for weight, one in factors_of(adapters, "default").items()
    }
    write_adapter(path, adapters.spec.to_peft(str(model)), factors, BaseForm("nf4", "float32"))
    return path


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_run_resumes_its_adapters_to_the_same_bits_and_not_as_full_training(run, work, forked_slime):
    start = write_start(work / "start", work / "model")
    done, calm = run("calm", "--lora-load", start)
    assert done.returncode == 0, done.stderr
    assert f"{start} was trained with base_weights = nf4, and starts here with auto" in done.stderr, done.stderr
    killed, path = run("killed", "--lora-load", start, SLIME_FAILPOINT="loop.stepped:3=kill")
    assert killed.returncode == -9
    shutil.rmtree(start)  # the checkpoint has the adapters
    saved = {file.name for file in (path / "checkpoints" / "step-2" / "trainer").iterdir()}
    assert {"adapter.default.safetensors", "base.json"} < saved
    assert "parameters.safetensors" not in saved
    full = forked_slime("run", "--resume", path, "--lora-rank", 0, "--lora-dropout", 0, "--lora-load", "")
    assert (full.returncode, "CFG13" in full.stderr, "train.lora_rank" in full.stderr) == (2, True, True), full.stderr
    resumed = forked_slime("run", "--resume", path)
    assert resumed.returncode == 0, resumed.stderr
    assert files_of(path / "final") == files_of(calm / "final")
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} < files_of(calm / "final").keys()
    differences = forked_slime("diff", calm, path)
    assert differences.returncode == 0, differences.stderr + differences.stdout
    shown = forked_slime("show", calm)
    assert shown.returncode == 0, shown.stderr
    learning = sum(
        tensor.numel() for tensor in load_file(calm / "final" / "adapter" / "adapter_model.safetensors").values()
    )
    assert f"default: rank 4, {learning:,} parameters learn beside " in shown.stdout, shown.stdout
    replayed = forked_slime("replay", calm, "--step", 3)
    assert replayed.returncode == 0, replayed.stderr
    reported = forked_slime("report", calm)
    assert reported.returncode == 0, reported.stderr
    assert json.loads((calm / "run.json").read_text())["status"] == "finished"
