"""`slime plan` of a recipe and of a run, without torch, and what `--dry-run` shows of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
QWEN3_4B = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "hidden_size": 2560,
    "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
MEASURE = "import sys\nfrom slime_cli.main import main\ncode = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"


@pytest.fixture
def large(tmp_path):
    """A folder with the config of a model of 4 billion weights, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path)]


def test_a_plan_says_memory_time_and_settings_and_imports_no_torch(large):
    words = ["plan", *large, "--gpu", "h200", "--rollout-slots", "64", "--response-tokens", "100,200"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("4,022.5 M parameters", "masters", "KV cache", "fits: ", "a step", "MFU", "--response-tokens"):
        assert text in done.stdout


def test_a_plan_that_does_not_fit_ends_with_1_and_says_what_would(cli, large):
    done = cli("plan", *large, "--gpu", "4090", "--json")
    answer = json.loads(done.out)
    assert done.code == 1
    assert answer["short"] > 4 << 30
    for flags in answer["last_resort"].removeprefix("fits with ").split(", or with "):
        assert cli("plan", *large, "--gpu", "4090", *flags.split()).code == 0, flags
    words = ["plan", *large, "--gpu", "4090", "--lora-rank", "16", "--json"]
    switches = ["--no-gradient-checkpointing", "--no-fsdp-cpu-offload"]
    done = cli(*words, *switches, "--max-tokens-per-gpu", "16384")
    answer = json.loads(done.out)
    assert (done.code, answer["fits"]) == (1, False)
    (advice,) = answer["advice"]
    done = cli(*words, *advice["flags"].split())
    assert (done.code, json.loads(done.out)["fits"]) == (0, True)


def test_what_is_auto_is_chosen_as_a_run_would_choose_it(cli, large):
    done = cli("plan", *large, "--gpu", "4090", "--lora-rank", "16", "--rollout-slots", "32")
    assert done.code == 0
    assert "auto: micro-batches of" in done.out
    assert "gradient_checkpointing = true" in done.out


def test_a_run_that_only_generates_is_planned_beside_a_stage_that_only_trains(cli, large, tmp_path):
    (tmp_path / "r.toml").write_text('[[stage]]\nname = "a"\nloss_type = "sft_loss"\n[[stage]]\nname = "b"\n')
    words = ["plan", str(tmp_path / "r.toml"), *large, "--gpu", "h100", "--debug-rollout-only"]
    done = cli(*words, "--rollout-slots", "64")
    assert done.code == 0
    assert "engine weights" in done.out
    assert "auto:" not in done.out  # nothing was left to choose
    idle = cli(*words, "--loss-type", "sft_loss").out
    assert "engine weights" in idle
    assert "KV cache" not in idle


def test_all_gpus_are_planned_and_where_nothing_fits_the_plan_says_so(cli, large):
    answer = json.loads(cli("plan", *large, "--gpu", "h100", "--gpus", "9", "--json").out)
    assert sum(device["count"] for device in answer["devices"]) == 9
    small = cli("plan", *large, "--gpu", "gpu=4", "--lora-rank", "16", "--base-weights", "nf4")
    assert small.code == 1
    assert "more GPUs, or a smaller model" in small.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--gpu", "h400"), "--gpu h400 is not known"),
        (("--gpu", "h100", "--response-tokens", "9,3"), "--response-tokens 9,3 is not a length"),
        (("--gpu", "h100", "--lr", "-1", "--kl-coef", "-2"), "2 problems in the configuration"),
        (("--gpu", "h100", "--lora-rank", "8", "--lora-target-modules", "qq_proj"), "no layer of qwen3 is a target"),
        (("--gpu", "h100", "--lora-rank", "8", "--lora-exclude-modules", "o_porj"), "no layer of qwen3 is o_porj"),
        (("--gpu", "h100", "--lora-rank", "8", "--lora-target-modules", "q_proj", "v"), "no layer of qwen3 is v"),
    ],
    ids=["a gpu", "lengths", "two keys", "no target of adapters", "no layer to leave out", "one of two targets"],
)
def test_what_cannot_be_planned_is_refused(cli, large, words, text):
    done = cli("plan", *large, *words)
    assert (done.code, text in done.err) == (2, True)


def test_a_plan_for_processors_says_so_where_the_run_may_have_gpus(cli, large, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    notices = {
        device: "slime plan --gpu h100" in cli("plan", *large, "--device", device).out for device in ("cuda", "cpu")
    }
    assert notices == {"cuda": True, "cpu": False}


def test_a_dry_run_has_the_rows_of_the_plan(cli, own):
    done = cli("run", *own.flags, "--dry-run", "--device", "cpu")
    assert done.code == 0, done.err
    for text in ("what it takes", "gradients", "verdict", "KV cache"):
        assert text in done.out


def test_a_run_keeps_its_plan_and_is_shown_beside_it(cli, own):
    flags = ["--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--device", "cpu"]
    done = cli("run", *own.flags, *flags, "--run-dir", "here")
    assert done.code == 0, done.err
    files = sorted(path.name for path in Path("here/memory").iterdir())
    assert files == ["engine.json", "rank-0.json"]
    done = cli("plan", "here", "--json")
    answer = json.loads(done.out)
    assert {row["phase"] for row in answer["memory"]} >= {"train", "rollout"}
    assert all(row["planned"] > 0 for row in answer["memory"])
    assert any(row["measured"] > 0 for row in answer["memory"])
    assert answer["seconds"][-1]["measured"] > 0
    assert answer["lengths"]["response"]["measured"] >= 1
    assert "planned beside measured, 2 steps" in cli("plan", "here").out
