"""slime's train.py and train_async.py: its flags become ours, MODEL_ARGS are held against config.json."""

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from slime_core.testing import tiny_model

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


@pytest.fixture
def door(place, monkeypatch, capsys):
    """`python tools/NAME WORDS`, in this process: most of its seconds would go into imports."""
    rest = (
        *("--hf-checkpoint", "model", "--init-weights", "random", "--prompt-data", "rows.jsonl"),
        *("--custom-rm-path", "judge.py:reward", "--num-rollout", "100", "--rollout-max-response-len", "256"),
        *("--rollout-engine", "local", "--dry-run", "--json"),
    )

    def run(name, *words):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", [name, *words, *rest])
        with patch.dict(os.environ), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOLS / name), run_name="__main__")
        said = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=said.out, stderr=said.err)

    return run


def test_train_takes_a_script_of_slimes_and_plans_the_model_of_the_config(door, monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
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
    done = door("train.py", *words)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"]["train_backend"] == "megatron"
    assert plan["trainer"] | {"notices": []} == {
        "family": "qwen3",
        "ranks": 8,
        "layout": {"tp": 2, "pp": 2, "cp": 1, "dp": 2},
        "chunks": 1,
        "layers": [14, 14],
        "vocabulary": 152064,
        "sequence_parallel": True,
        "notices": [],
    }
    assert plan["stages"][0]["max_staleness"] == 0
    for flag in ("--save ", "--balance-data", "--use-kl-loss", "--use-dynamic-batch-size"):
        assert f"notice: {flag.strip()} is not needed" in done.stderr
    assert "notice: OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1: slime rounds weights to int4" in done.stderr


def test_flags_that_disagree_with_the_config_are_named_and_nothing_starts(door):
    wrong = [*QWEN3]
    wrong[wrong.index("1000000")] = "10000"
    wrong[wrong.index("28")] = "36"
    done = door("train.py", "--n-samples-per-prompt", "2", *wrong)
    assert (done.returncode, done.stdout.count("\n") < 12) == (2, True)
    text = done.stdout + done.stderr
    assert "--rotary-base 10000.0 disagrees with the model folder" in text
    assert "--num-layers 36 disagrees with the model folder, where num_layers is 28" in text
    assert "config.json: num_hidden_layers = 28" in text
    assert "command line: --num-layers" in text
