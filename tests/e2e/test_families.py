"""Every family of models trains by flags alone, and trainer and engine agree about its log-probs."""

import json

import pytest

from slime_core.testing.families import FAMILIES, family_model

pytestmark = pytest.mark.system

REWARD = '''
async def reward(args, sample, **kwargs):
    """Share of digits in the response."""
    return sum(char.isdigit() for char in sample.response) / max(1, len(sample.response))
'''


@pytest.fixture
def work(tmp_path):
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def train(slime, work):
    """Run two steps on the folder ``model``; the last step's line and what was said."""

    def run(*more, model="model"):
        done = slime(
            *("run", "--hf-checkpoint", model, "--prompt-data", "rows.jsonl", "--custom-rm-path", "digits.py:reward"),
            *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--lr", "1e-3"),
            *("--rollout-max-response-len", "30", "--cpu-threads", "1", "--run-dir", "out", *more),
            cwd=work,
        )
        assert done.returncode == 0, done.stderr
        line = (work / "out" / "metrics.jsonl").read_text().splitlines()[-1]
        return json.loads(line), done.stdout + done.stderr

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_by_flags_alone(train, work, name):
    """Responses go over the windows of 24 tokens; the differences are those of float32."""
    family_model(work / "model", name)
    line, said = train("--dtype", "float32")
    assert line["version"] == 2
    metrics = line["metrics"]
    assert metrics["grad_norm"] > 0
    assert metrics["train_rollout_logprob_abs_diff"] < 1e-4
    assert metrics["prompt_len/max"] + metrics["response_len/max"] > 24
    assert "slow" not in said
