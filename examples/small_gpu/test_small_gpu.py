"""Both recipes train a small model on a processor, with what they say of memory."""

import json
from pathlib import Path

import pytest

from slime_core.testing import tiny_model

HERE = Path(__file__).parent
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("recipe", ["recipe.toml", "full.toml"])
def test_a_short_run_trains(train, tmp_path, recipe):
    model = tiny_model(tmp_path / "model", hidden=64, layers=1, context_len=1024, chat_template=CHAT)
    sizes = ("--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
    run = train(HERE / recipe, "--hf-checkpoint", model, *sizes, "--rollout-max-response-len", "8")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "step" for line in lines) == 1
    assert (run / "final").is_dir()
