"""Conversations, then pairs, then sampling: three stages of one run, and DPO step by step beside TRL's."""

import json
import math
import signal
from itertools import groupby

import pytest
from recorded import steps_of

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + '>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
STAGES = """
[rollout]
hf_checkpoint = "model"
rollout_batch_size = 4
n_samples_per_prompt = 2
rollout_max_response_len = 4
num_rollout = 3
[data]
prompt_data = "talks.jsonl"
apply_chat_template = true
[reward]
custom_rm_path = "digits.py:reward"
[train]
lr = 3e-3
dtype = "float32"
[cluster]
cpu_threads = 1
[[stage]]
name = "sft"
prompt_data = "talks.jsonl"
input_key = "messages"
loss_type = "sft_loss"
n_samples_per_prompt = 1
[[stage]]
name = "dpo"
prompt_data = "pairs.jsonl"
input_key = "prompt"
loss_type = "dpo_loss"
[[stage]]
name = "grpo"
prompt_data = "talks.jsonl"
input_key = "question"
"""


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model", hidden=32, chat_template=TEMPLATE)
    user, assistant = ({"role": role, "content": ""} for role in ("user", "assistant"))
    sums = [(a, b) for a in range(5) for b in range(5)]
    talks = [
        {
            "question": f"{a}+{b}=",
            "messages": [
                {**user, "content": f"{a}+{b}="},
                {**assistant, "content": str(a + b)},
                {**user, "content": "+1="},
                {**assistant, "content": str(a + b + 1)},
            ],
        }
        for a, b in sums
    ]
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a}-{b}"} for a, b in sums]
    for name, rows in (("talks", talks), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits.py").write_text("def reward(args, sample, **kw):\n    return float(len(sample.response))\n")
    (tmp_path / "recipe.toml").write_text(STAGES)
    return tmp_path


def weights(run):
    return (run / "final" / "model.safetensors").read_bytes()


def test_conversations_then_pairs_then_sampling_and_a_kill_in_each(slime, work):
    done = slime("run", "recipe.toml", "--run-dir", "out", cwd=work)
    assert done.returncode == 0, done.stderr
    steps, _ = steps_of(work / "out", 9)
    talk, pair = steps[0][0], steps[3]
    runs = [mask for mask, _ in groupby(talk.loss_mask)]
    assert runs == [1, 0, 1], "an answer, the words between, and the other answer"
    assert talk.tokens[-1] == 1, "which ends with the end token"
    assert [sample.reward for sample in pair] == [1, 0] * 4
    assert pair[0].response != pair[1].response
    lines = [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]
    figures = [line["metrics"] for line in lines if line.get("kind", "step") == "step"]
    first, last = figures[3], figures[5]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-4), "policy and reference are equal"
    assert last["dpo/margin"] > first["dpo/margin"]
    assert "train_rollout_logprob_abs_diff" not in first, "nothing was drawn"
    for nth in (2, 5, 8):
        name = f"killed-{nth}"
        killed = slime("run", "recipe.toml", "--run-dir", name, cwd=work, SLIME_FAILPOINT=f"loop.stepped:{nth}=kill")
        assert killed.returncode == -signal.SIGKILL
        resumed = slime("run", "--resume", name, cwd=work)
        assert resumed.returncode == 0, resumed.stderr
        assert weights(work / name) == weights(work / "out")


@pytest.mark.parametrize(("objective", "smoothing"), [("sigmoid", 0.0), ("ipo", 0.0)])
def test_steps_of_dpo_are_trls(slime, work, objective, smoothing):
    steps = 3
    done = slime(
        *("run", "--hf-checkpoint", "model", "--prompt-data", "pairs.jsonl", "--input-key", "prompt"),
        *("--loss-type", "dpo_loss", "--dpo-objective", objective, "--n-samples-per-prompt", "2"),
        *("--rollout-batch-size", "4", "--num-rollout", steps, "--lr", "1e-3", "--dtype", "float32"),
        *("--adam-beta2", "0.999", "--clip-grad", "1000000", "--cpu-threads", "1", "--run-dir", "out"),
        *("--weight-decay", "0"),
        cwd=work,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]
    ours = [line["metrics"] for line in lines if line.get("kind", "step") == "step"]
    reference = trl_steps(work, objective, steps)
    for name, theirs in (("loss", "loss"), ("grad_norm", "grad_norm")):
        assert [step[name] for step in ours] == pytest.approx([step[theirs] for step in reference], rel=2e-3)


def trl_steps(work, objective, steps):
    """Loss and gradient norm of TRL's DPOTrainer over the same rows in the same order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    config = DPOConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        loss_type=objective,
        beta=0.1,
        logging_steps=1,
        max_grad_norm=1e6,
        weight_decay=0.0,
        adam_epsilon=1e-8,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype="float32")
    trainer = DPOTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]
