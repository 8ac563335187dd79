"""A user's own rows, reward function and model folder train by flags alone, with no plugin written."""

import json

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

REWARD = '''
async def reward(args, sample, **kwargs):
    """Share of digits in the response."""
    text = sample.response.strip()
    return sum(char.isdigit() for char in text) / max(1, len(text))
'''


@pytest.fixture
def work(tmp_path):
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(5)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen2", "llama"))]
)
def test_own_rows_and_reward_train_by_flags_alone(slime, work, family):
    tiny_model(work / "model", family=family)
    done = slime(
        *("run", "--hf-checkpoint", "model", "--prompt-data", "my.jsonl", "--input-key", "question"),
        *("--label-key", "answer", "--custom-rm-path", "my_reward.py:reward", "--num-rollout", "2"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"),
        *("--lr", "1e-3", "--cpu-threads", "1", "--run-dir", "out"),
        cwd=work,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    assert [line["version"] for line in steps] == [1, 2]
    from transformers import AutoModelForCausalLM

    final = AutoModelForCausalLM.from_pretrained(work / "out" / "final")
    start = AutoModelForCausalLM.from_pretrained(work / "model")
    moved = [name for (name, a), b in zip(final.named_parameters(), start.parameters()) if (a != b).any()]
    assert moved, "training changed no weight"
    shown = slime("show", "out", "--json", cwd=work)
    assert shown.returncode == 0, shown.stderr
    json.loads(shown.stdout)
