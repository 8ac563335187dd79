"""What a run refuses before it makes a run directory or loads a model."""

import json
import os
from pathlib import Path

import pytest

from slime_cli.preflight import check_cores
from slime_core.config.load import load_config
from slime_core.lora.spec import LoraSpec

pytestmark = pytest.mark.integration

TRL = "def reward(prompts, completions, **kwargs):\n    return [0.0 for _ in completions]\n"


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (("--custom-rm-path", ""), "CFG04", "there is no reward for task 'default'"),
        (("--prompt-data", "empty.jsonl"), "DAT17", "empty.jsonl has no rows"),
        (("--prompt-data", "nobody/nothing"), "CFG05", "the data set nobody/nothing cannot be loaded"),
        (("--hf-checkpoint", "nobody/nothing"), "CFG05", "the model nobody/nothing is neither"),
        (("--label-key", "label"), "DAT18", "label_key"),
        (("--custom-rm-path", "trl.py:reward"), "PLG53", "'completions' is TRL's signature"),
        (("--eval-prompt-data", "held", "empty.jsonl"), "DAT17", "empty.jsonl has no rows"),
        (("--lora-rank", "4", "--lora-load", "run"), "TOK00", "/run/final/adapter\n"),
        (("--lora-rank", "4", "--lora-load", "run/final/adapter"), "CFG04", "fix: --lora-rank 2"),
    ],
    ids=[
        *("no reward", "no rows", "no such set", "no such model", "no such column", "a reward of TRL", "an empty set"),
        *("no adapter", "another rank"),
    ],
)
def test_missing_rewards_data_and_models_are_reported_before_a_run_directory_is_made(
    cli, own, monkeypatch, flags, code, text
):
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    Path("empty.jsonl").touch()
    Path("trl.py").write_text(TRL)
    Path("run/final/adapter").mkdir(parents=True)
    Path("run/final/adapter/adapter_config.json").write_text(json.dumps(LoraSpec(rank=2).to_peft("model")))
    done = cli("run", *own.flags, *flags)
    assert code in done.err
    assert text in done.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["run", "run --dry-run"])
def test_a_gpu_that_is_not_there_is_named(cli, own, monkeypatch, command):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = cli(*command.split(), *own.flags, "--device", "cuda")
    assert (done.code, "error CFG04  cluster.device = cuda, and torch sees no GPU on this machine" in done.err) == (
        2,
        True,
    )
    assert "--device cpu" in done.err


def test_a_dry_run_refuses_a_run_directory_that_cannot_be_made(cli, own):
    done = cli("run", *own.flags, "--run-dir", "/proc/x", "--dry-run")
    assert (done.code, "error STO110" in done.err, "/proc/x" in done.err) == (7, True, True)
    done = cli("run", *own.flags, "--run-dir", "here", "--dry-run")
    assert (done.code, sorted(os.listdir())) == (0, []), done.err


def test_ranks_that_share_cores_are_told():
    cores = len(os.sched_getaffinity(0))
    ranks = max(cores, 2) + 1

    def told(number, device="cpu"):
        flags = ["--device", device, "--actor-num-gpus-per-node", str(number), "--hf-checkpoint", "."]
        return check_cores(load_config(None, flags))

    assert told(ranks).startswith(f"notice: {ranks} trainer ranks share {cores} cores")
    assert told(1) == told(ranks, "cuda") == ""
