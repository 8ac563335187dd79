"""slime's train.py and train_async.py: its flags become ours, MODEL_ARGS are held against config.json."""

import importlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from slime_core.config.fields import core_keys
from slime_core.errors import ConfigError
from slime_core.plugins.backends import tracker_keys
from slime_core.testing import tiny_model
from slime_megatron.flags import flags

pytestmark = pytest.mark.integration

TOOLS = Path(__file__).parents[3] / "tools"
QWEN3 = (
    *("--swiglu", "--num-layers", "28", "--hidden-size", "1024", "--ffn-hidden-size", "3072"),
    *("--num-attention-heads", "16", "--group-query-attention", "--num-query-groups", "8"),
    *("--use-rotary-position-embeddings", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--norm-epsilon", "1e-6", "--rotary-base", "1000000", "--vocab-size", "151936", "--kv-channels", "128"),
    "--qk-layernorm",
)
"""MODEL_ARGS of Qwen3-0.6B."""


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("launch")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of Qwen3-0.6B's shape without weights, rows, and a reward."""
    path = tmp_path_factory.mktemp("place")
    folder = tiny_model(path / "model", weights=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "tie_word_embeddings": True}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    (path / "rows.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    (path / "judge.py").write_text("async def reward(args, sample, **kw):\n    return 1.0\n")
    return path


def door(place, name, *words):
    rest = (
        *("--hf-checkpoint", "model", "--init-weights", "random", "--prompt-data", "rows.jsonl"),
        *("--custom-rm-path", "judge.py:reward", "--rollout-engine", "local", "--dry-run", "--json"),
    )
    command = [sys.executable, str(TOOLS / name), *words, *rest]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200, check=False)


def test_train_takes_a_script_of_slimes_and_plans_the_model_of_the_config(place):
    words = (
        *("--actor-num-gpus-per-node", "8", "--colocate", *QWEN3, "--save", "/models/x", "--save-interval", "20"),
        *("--rollout-batch-size", "32", "--global-batch-size", "256", "--n-samples-per-prompt", "8"),
        *("--balance-data", "--use-kl-loss", "--kl-loss-coef", "0.00", "--kl-loss-type", "low_var_kl"),
        *("--optimizer", "adam", "--lr", "1e-6", "--lr-decay-style", "constant", "--weight-decay", "0.1"),
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"),
        *("--context-parallel-size", "1", "--expert-model-parallel-size", "1", "--expert-tensor-parallel-size", "1"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "9216", "--attention-dropout", "0.0"),
        *("--hidden-dropout", "0.0", "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"),
        *("--attention-backend", "flash", "--rollout-top-k", "-1"),
    )
    done = door(place, "train.py", *words)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"]["train_backend"] == "megatron"
    assert plan["trainer"] | {"notices": []} == {
        "family": "qwen3",
        "ranks": 8,
        "layout": {"tp": 2, "pp": 2, "cp": 1, "dp": 2},
        "layers": [14, 14],
        "vocabulary": 152064,
        "sequence_parallel": True,
        "notices": [],
    }
    assert plan["stages"][0]["max_staleness"] == 0
    for flag in ("--save ", "--balance-data", "--use-kl-loss", "--use-dynamic-batch-size"):
        assert f"notice: {flag.strip()} is not needed" in done.stderr


def test_flags_that_disagree_with_the_config_are_named_and_nothing_starts(place):
    wrong = [*QWEN3]
    wrong[wrong.index("1000000")] = "10000"
    wrong[wrong.index("28")] = "36"
    done = door(place, "train.py", "--n-samples-per-prompt", "2", *wrong)
    assert (done.returncode, done.stdout.count("\n") < 12) == (2, True)
    text = done.stdout + done.stderr
    assert "--rotary-base 10000.0 disagrees with the model folder" in text
    assert "--num-layers 36 disagrees with the model folder, where num_layers is 28" in text
    assert "config.json: num_hidden_layers = 28" in text
    assert "command line: --num-layers" in text


def test_train_async_runs_a_step_ahead_on_gpus_of_its_own(launch):
    words, _ = launch.words_of(["--hf-checkpoint", "m"], ahead=1)
    assert words[-4:] == ["--max-staleness", "1", "--plugin", "models"]
    asked, _ = launch.words_of(["--max-staleness", "3"], ahead=1)
    assert asked.count("--max-staleness") == 1


def test_what_slime_has_without_a_flag_is_given_unless_a_recipe_speaks(launch):
    words, _ = launch.words_of(["--lr", "1e-6", "--n-samples-per-prompt=4"], ahead=0)
    assert words == [
        *("run", "--lr", "1e-6", "--n-samples-per-prompt=4", "--train-backend", "megatron"),
        *("--rollout-engine", "sglang", "--actor-num-gpus-per-node", "8", "--kl-loss-type", "k1", "--no-colocate"),
        *(
            "--loss-aggregation",
            "rollout_mean",
            "--eval-temperature",
            "1.0",
            "--eval-top-p",
            "1.0",
            "--eval-top-k",
            "0",
        ),
        *("--plugin", "models"),
    ]
    assert launch.words_of(["mine.toml"], ahead=0)[0] == ["run", "mine.toml", "--plugin", "models"]


def test_reward_types_of_slimes_names_come_with_their_plugin(launch):
    words, _ = launch.words_of(["--rm-type", "math"], ahead=0)
    assert words[-4:] == ["--plugin", "models", "--plugin", "rm_math"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(["--gamma", "0.9"], ["--gae-gamma", "0.9"], id="renamed"),
        pytest.param(["--lambd=0.9"], ["--gae-lambda", "0.9"], id="renamed-with-equals"),
        pytest.param(["--log-probs-chunk-size", "-1"], [], id="off"),
        pytest.param(["--rollout-top-k", "-1"], ["--rollout-top-k", "0"], id="off-by-another-number"),
        pytest.param(["--save", "/x", "--lr", "1"], ["--lr", "1"], id="with-its-value"),
        pytest.param(
            ["--calculate-per-token-loss"], ["--loss-aggregation", "token_mean"], id="a-flag-that-is-a-value"
        ),
        pytest.param(["--balance-data", "--lr", "1"], ["--lr", "1"], id="without-one"),
    ],
)
def test_flags_of_other_names_and_meanings(launch, given, words):
    found, _ = launch.words_of(given, ahead=0)
    assert found[1 : 1 + len(words)] == words
    assert found[1 + len(words)] == "--train-backend"


def test_a_flag_that_cannot_be_had_names_what_can(launch):
    with pytest.raises(ConfigError) as caught:
        launch.words_of(["--wandb-key", "secret"], ahead=0)
    assert (caught.value.code, caught.value.where) == ("CFG04", "command line: --wandb-key")
    assert "WANDB_API_KEY" in caught.value.fix
    assert "secret" not in str(caught.value)


def test_no_flag_of_the_table_is_one_of_ours_and_all_its_answers_are(launch):
    names = {name[2:].replace("-", "_") for name in launch.OTHERS} - {"save", "load", "calculate_per_token_loss"}
    assert not names & (set(core_keys()) | set(flags()))
    ours = {other.to for other in launch.OTHERS.values() if other.to} | set(launch.SLIMES)
    assert {name[2:].replace("-", "_") for name in ours} <= set(core_keys())


def test_every_flag_of_slime_is_known_translated_or_refused_with_what_replaces_it(launch):
    flags_of_slime = (Path(__file__).parent / "slime_flags.txt").read_text().split()
    known = (
        {key.rpartition(".")[2] for key in core_keys()} | set(flags()) | {"rm_url"} | set(tracker_keys())
    )  # rm_url: of rm_math
    unknown = [
        flag
        for flag in flags_of_slime
        if flag not in launch.OTHERS and not flag.startswith("--sglang-") and flag[2:].replace("-", "_") not in known
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--ref-update-interval", "4"], "ref_load"),
        (["--update-weight-mode", "delta"], "whole weights"),
        (["--dump-details", "out"], "--save-debug-rollout-data"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_flag_without_a_meaning_here_names_what_replaces_it(launch, words, fix):
    with pytest.raises(ConfigError, match="CFG04") as caught:
        launch.words_of(words, ahead=0)
    assert fix in caught.value.fix


def test_on_policy_distillation_keeps_slimes_weight_and_names_where_the_teacher_scores(launch):
    words, _ = launch.words_of(["--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "t"], ahead=0)
    assert words[1:5] == ["--teacher-place", "engine", "--teacher-load", "t"]
    assert words[words.index("--opd-kl-coef") + 1] == "1.0"
    lower, _ = launch.words_of(["--use-opd", "--opd-kl-coef", "0.5"], ahead=0)
    assert lower.count("--opd-kl-coef") == 1


def test_evaluation_samples_as_training_does_unless_a_flag_says_otherwise(launch):
    given = ["--rollout-temperature", "1.2", "rollout.rollout_temperature=0.8", "--rollout-top-k=-1"]
    words, _ = launch.words_of([*given, "--eval-top-p", "0.7"], ahead=0)
    assert "--rollout-top-k=0" in words
    known = dict(pairwise(words))
    assert (known["--eval-temperature"], known["--eval-top-p"], known["--eval-top-k"]) == ("0.8", "0.7", "0")
    assert words.count("--eval-top-p") == 1
