"""Whole runs by flags: PPO with its critic, and distillation with the teacher in the trainer or as an engine."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
from recorded import run_here
from safetensors.torch import load_file

from slime_core.clusters import build_cluster
from slime_core.config.load import load_config
from slime_core.testing import tiny_model

pytestmark = pytest.mark.system


class Recorder:
    """A trainer that keeps the batches and the metrics of its steps."""

    def __init__(self, trainer):
        self._trainer = trainer
        self.steps = []

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    async def step(self, batch):
        metrics = await self._trainer.step(batch)
        self.steps.append((batch, metrics))
        return metrics


@pytest.fixture
def run(tmp_path):
    """Two steps by flags; answers each step's batch and metrics, and the run's folder."""
    tiny_model(tmp_path / "model")
    rows = "".join(f'{{"q": "{a}+{b}=", "a": "{a + b}"}}\n' for a in range(3) for b in range(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "digits.py").write_text(
        "def reward(args, sample, **kw):\n    return sum(char.isdigit() for char in sample.response) / 3\n"
    )

    def start(name, *flags):
        config = load_config(
            None,
            [
                *("--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "rows.jsonl")),
                *("--input-key", "q", "--label-key", "a", "--custom-rm-path", f"{tmp_path / 'digits.py'}:reward"),
                *("--num-rollout", "2", "--rollout-batch-size", "3", "--n-samples-per-prompt", "4"),
                *("--rollout-max-response-len", "9", "--lr", "1e-3", "--max-tokens-per-gpu", "40"),
                *("--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", *flags),
            ],
        )
        kept = []

        @asynccontextmanager
        async def watched(config, plugins, report):
            async with build_cluster(config, plugins, report) as parts:
                parts.trainer = Recorder(parts.trainer)
                yield parts
                kept.extend(parts.trainer.steps)
                await parts.trainer.save(tmp_path / name / "state")
                await parts.trainer.saved()

        run_here(tmp_path / name, config, cluster=watched)
        return kept

    return start


def test_ppo_trains_policy_and_critic(run, tmp_path):
    flags = ["--critic-lr", "1e-2", "--num-critic-only-steps", "1", "--gae-lambda", "0.9", "--kl-coef", "0.05"]
    (first, alone), (second, both) = run("ppo", "--advantage-estimator", "ppo", *flags)
    assert not first.columns["values"].any()  # a new head
    assert second.columns["values"].any()  # has learnt
    assert (alone["critic_only_steps"], alone["optimizer_steps"], both["optimizer_steps"]) == (1.0, 0.0, 1.0)
    for batch, metrics in ((first, alone), (second, both)):
        assert {"values", "returns", "advantages", "policy", "reference"} <= set(batch.columns)
        assert metrics["value_loss"] > 0
        assert metrics["critic_grad_norm"] > 0
        np.testing.assert_allclose(
            batch.columns["returns"], batch.columns["advantages"] + batch.columns["values"], atol=1e-5
        )
    assert (second.columns["policy"] == second.columns["reference"]).all()  # the policy stood still
    start, end = (load_file(tmp_path / path / "model.safetensors") for path in ("model", "ppo/final"))
    assert any((start[name] != tensor).any() for name, tensor in end.items())
    assert "critic.score.weight" in load_file(tmp_path / "ppo" / "state" / "critic.safetensors")


def test_a_teacher_gives_the_same_advantages_in_the_trainer_and_as_an_engine(run, tmp_path):
    teacher = tiny_model(tmp_path / "teacher", "llama", seed=4, hidden=32, layers=1)
    flags = ["--advantage-estimator", "on_policy_distillation", "--teacher-load", str(teacher)]
    here, there = (run(place, *flags, "--teacher-place", place) for place in ("trainer", "engine"))
    assert "teacher" in here[0][0].columns
    assert "teacher_log_probs" in there[0][0].columns
    assert "teacher" not in there[0][0].columns
    (one, metrics), (other, _) = here[0], there[0]
    assert (one.tokens == other.tokens).all()
    assert metrics["optimizer_steps"] == 1.0
    scale = np.abs(one.columns["advantages"]).max()
    assert scale > 0.01
    np.testing.assert_allclose(other.columns["advantages"], one.columns["advantages"], atol=2e-5)
    want = one.columns["teacher"] - one.columns["policy"]
    np.testing.assert_allclose(one.columns["advantages"], np.where(one.loss_mask > 0, want, 0), atol=1e-5)


def test_a_teacher_of_another_vocabulary_stops_both_ways_before_the_first_step(run, tmp_path):
    teacher = tiny_model(tmp_path / "teacher", vocab="0123456789+=")
    flags = ["--advantage-estimator", "on_policy_distillation", "--teacher-load", str(teacher)]
    for place in ("trainer", "engine"):
        with pytest.raises(RuntimeError, match="TRN104"):
            run(f"bad-{place}", *flags, "--teacher-place", place)


def test_a_reward_that_never_varies_is_explained_in_the_log(run, tmp_path):
    (tmp_path / "digits.py").write_text("def reward(args, sample, **kw):\n    return 0.5\n")
    steps = run("flat", "--num-rollout", "5", "--advantage-estimator", "grpo")
    assert [metrics["skipped_steps/no_gradient"] for _, metrics in steps] == [1.0] * 5
    log = (tmp_path / "flat" / "log" / "run.log").read_text()
    assert "5 optimizer steps in a row changed no weight: every advantage is 0" in log
    start, end = (load_file(tmp_path / path / "model.safetensors") for path in ("model", "flat/final"))
    assert all((start[name] == tensor).all() for name, tensor in end.items())
