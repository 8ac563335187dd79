"""Functions written for THUDM/slime train by flags alone: real engine, real trainer, twice the same."""

import json
from pathlib import Path

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

SHAPES = Path(__file__).parents[2] / "plugins" / "slime_compat" / "tests" / "functions"
OWN = """
import torch

async def judge(args, sample, **kwargs):
    return {"score": len(sample.response_tokens) + sum(sample.response_tokens) / 100, "calls": sample.tool_call_count}

def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw):
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).clamp(max=args.clip_at)
    return pg_loss * ratio, loss_masks, {"ratio": ratio}

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: sum((v * m).sum() for v, m in zip(values.split(response_lengths), loss_masks)) / 100

def post(args, rollout_id, data):
    data["advantages"] = [a.clamp(-1, 1) for a in data["advantages"]]

def log(rollout_id, args, samples, metrics, seconds):
    with open("log.txt", "a") as file:
        file.write(f"{rollout_id} {len(samples)} {len(samples[0].response_tokens)}\\n")

def keep(args, samples, **kw):
    return True

def hook(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["step"] = rollout_id
"""


@pytest.fixture
def work(tmp_path):
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "more.toml").write_text("clip_at = 2.0\n")
    tiny_model(tmp_path / "model", hidden=16, layers=1)
    return tmp_path


def test_functions_around_every_part_of_a_step_train_and_repeat(forked_slime, work):
    flags = {
        "custom-generate-function-path": f"{SHAPES}/tool_shape.py:generate",
        "custom-rm-path": "own.py:judge",
        "reward-key": "score",
        "custom-tis-function-path": "own.py:tis",
        "custom-pg-loss-reducer-function-path": "own.py:reducer",
        "rollout-data-postprocess-path": "own.py:post",
        "custom-rollout-log-function-path": "own.py:log",
        "dynamic-sampling-filter-path": "own.py:keep",
        "rollout-sample-hook-path": "own.py:hook",
        "custom-config-path": "more.toml",
    }
    steps = []
    for name in ("one", "two"):
        done = forked_slime(
            *("run", "--hf-checkpoint", "model", "--prompt-data", "my.jsonl", "--input-key", "question"),
            *(
                "--label-key",
                "answer",
                "--num-rollout",
                "2",
                "--rollout-batch-size",
                "2",
                "--n-samples-per-prompt",
                "4",
            ),
            *("--rollout-max-response-len", "4", "--lr", "1e-3", "--cpu-threads", "1", "--run-dir", name),
            *(word for flag, value in flags.items() for word in (f"--{flag}", value)),
            cwd=work,
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
        steps.append([line["metrics"] for line in lines if line["kind"] == "step"])
    assert steps[0] == steps[1]
    assert all(step["tis/ratio"] > 0 for step in steps[0])
    logged = [line.split() for line in (work / "log.txt").read_text().splitlines()]
    assert [row[:2] for row in logged] == [["0", "8"], ["1", "8"]] * 2
    weights = [(work / name / "final" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert weights[0] != (work / "model" / "model.safetensors").read_bytes()


def test_a_generate_function_that_raises_stops_the_run_with_its_line(forked_slime, work):
    (work / "bad.py").write_text("async def generate(args, sample, sampling_params):\n    return sample.nothing\n")
    done = forked_slime(
        *("run", "--hf-checkpoint", "model", "--prompt-data", "my.jsonl", "--input-key", "question"),
        *(
            "--custom-generate-function-path",
            "bad.py:generate",
            "--custom-rm-path",
            f"{SHAPES}/tool_shape.py:reward_func",
        ),
        *("--num-rollout", "1", "--cpu-threads", "1", "--run-dir", "out", "--rollout-batch-size", "1"),
        cwd=work,
    )
    assert done.returncode == 4
    assert "PLG56" in done.stderr
    assert "bad.py:2" in done.stderr
    assert "Traceback" not in done.stderr
