"""Whole runs: two steps with a small random model whose every answer is read as a call, and the same after a kill."""

import json
import signal
from pathlib import Path

import pytest
from mcp_tasks import STDIO, TEMPLATES
from recorded import steps_of

from slime_core.testing.models import tiny_model

pytestmark = pytest.mark.system

PARSER = """
import os, signal
from pathlib import Path

HERE, CALLS = Path(__file__).parent, []


def read(text):
    CALLS.append(text)
    if len(CALLS) == 20 and (HERE / "kill").exists():
        (HERE / "kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return "", [("add", {"a": len(text), "b": sum(map(str.isalpha, text))})]


def reward(args, sample, **more):
    return float(sum(map(str.isdigit, sample.response)))
"""
RECIPE = """
plugins = ["mcp"]
seed = 3

[cluster]
device = "cpu"
cpu_threads = 1

[data]
prompt_data = "rows.jsonl"
input_key = "q"
apply_chat_template = true

[rollout]
hf_checkpoint = "model"
num_rollout = 2
rollout_batch_size = 4
n_samples_per_prompt = 2
rollout_max_response_len = 12
rollout_stop_token_ids = {stops}

[reward]
custom_rm_path = "calls.py:reward"

[train]
lr = 1e-2
dtype = "float32"

[plugin.mcp]
servers = [{{name = "tools", command = {command}, allow = ["add"]}}]
max_turns = 3
tool_parser = "calls.py:read"
"""


@pytest.fixture
def train(forked_slime, tmp_path):
    letters = "".join(map(chr, range(32, 127))) + "\n"
    template = (TEMPLATES / "qwen2_5.jinja").read_text()
    tiny_model(tmp_path / "model", hidden=32, vocab=letters, context_len=2048, chat_template=template)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": f"{n}+1="}) + "\n" for n in range(8)))
    (tmp_path / "calls.py").write_text(PARSER)
    command = json.dumps(STDIO["command"])
    (tmp_path / "recipe.toml").write_text(RECIPE.format(stops=list(range(3, 60)), command=command))

    def train(name, *flags, code=0):
        done = forked_slime("run", *(flags or ("recipe.toml", "--run-dir", name)), cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return tmp_path / name

    return train


def test_a_run_calls_tools_and_one_killed_in_a_dialogue_ends_in_the_same_weights(train, tmp_path):
    whole = train("whole")
    steps, _ = steps_of(whole, 2)
    metrics = [json.loads(line)["metrics"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for step, figures in zip(steps, metrics, strict=True):
        assert figures["train_rollout_logprob_abs_diff"] < 1e-5
        assert figures["mcp/errors/mean"] == 0
        assert figures["mcp/calls/mean"] == sum(s.metadata["mcp"]["calls"] for s in step) / len(step) > 0
        for sample in step:
            assert sample.response.count("<tool_response>") == sample.metadata["mcp"]["calls"]
            assert 0 < sum(sample.loss_mask) < sample.response_length
    (tmp_path / "kill").touch()
    killed = train("killed", code=-signal.SIGKILL)
    assert not (tmp_path / "kill").exists()
    train("killed", "--resume", killed)
    again, _ = steps_of(killed, 2)
    assert [[s.to_dict() for s in step] for step in again] == [[s.to_dict() for s in step] for step in steps]
    first, second = (Path(run, "final", "model.safetensors").read_bytes() for run in (whole, killed))
    assert first == second
