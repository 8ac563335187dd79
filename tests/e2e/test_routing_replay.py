"""Routing replay in whole runs: an engine whose routers are noisy, continued and many-turn samples, half precision."""

import json

import pytest
import torch
import torch.nn.functional as F
from recorded import run_here

from slime_core.config.load import load_config
from slime_core.engines.local import served
from slime_core.engines.local.twin import Twin
from slime_core.testing.families import family_model

pytestmark = pytest.mark.system

MOE = {"num_experts": 8, "hidden_size": 32, "moe_intermediate_size": 32, "norm_topk_prob": True}
HOOKS = '''
import asyncio
from dataclasses import replace


def reward(args, sample, **kw):
    """Share of digits, so that groups differ."""
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))


async def two_turns(group, ctx):
    """An observation between two turns, and one behind them; groups differ in length."""

    async def dialogue(sample):
        for _ in range(2):
            await ctx.generate(sample, replace(ctx.sampling, max_new_tokens=4 + 9 * (sample.group_index % 4)))
            sample.append_response(ctx.tokenizer.encode("=7+"), mask=0)

    await asyncio.gather(*map(dialogue, group.samples))
    return group
'''
NOISE = 3.0  # of router logits: nearly every choice is another than the trainer's own
SMALL = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8")


@pytest.fixture
def noisy_engine(monkeypatch):
    """From its first weights on, the engine's routers choose by logits with noise, and weigh by logits without.

    The noise of a row depends on its logits alone: a sequence that is computed again has the same.
    """
    noise = [0.0]

    def route(router, x):
        logits = F.linear(x.reshape(-1, router.hidden_dim), router.weight)
        experts = torch.topk(logits + noise[0] * torch.sin(1e4 * logits), router.top_k, dim=-1).indices
        weights = logits.softmax(-1).gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    class NoisyTwin(Twin):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            for module in self.model.modules():
                if type(module).__name__ == "Qwen3MoeTopKRouter":
                    module.forward = lambda x, router=module: route(router, x)

    load = served.ServedModel.load

    def then_noise(self, update):
        noise[0] = 0.0 if self.plan is None else NOISE  # a plan is chosen by numbers without noise
        load(self, update)
        noise[0] = NOISE

    monkeypatch.setattr(served, "Twin", NoisyTwin)
    monkeypatch.setattr(served.ServedModel, "load", then_noise)


def run(work, model, *flags, dtype="float32"):
    """The metrics of every step."""
    (work / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"{i % 5}+{i // 5}=", "a": ""}) + "\n" for i in range(25))
    )
    (work / "hooks.py").write_text(HOOKS)
    settings = [
        *("--hf-checkpoint", model, "--prompt-data", work / "rows.jsonl", "--input-key", "q", "--label-key", "a"),
        *("--custom-rm-path", f"{work / 'hooks.py'}:reward", "--seed", "4", "--dtype", dtype, "--device", "cpu"),
        *("--cpu-threads", "1"),
    ]
    config = load_config(None, [*map(str, settings), *flags])
    return run_here(work / f"run-{len(list(work.glob('run-*')))}", config)


def test_under_routing_noise_a_run_learns_with_replay_and_not_without(tmp_path, noisy_engine):
    """Sequences whose probability differs between engine and trainer by more than 1% are rejected: without replay all."""
    model = family_model(tmp_path / "model", "qwen3-moe", **MOE)
    settings = (*SMALL, "--lr", "3e-3")
    settings += ("--use-rs", "--rs-level", "sequence", "--rs-upper-bound", "1.01")
    rewards = {}
    for kind, count in (("off", "10"), ("rollout", "30")):
        steps = run(tmp_path, model, *settings, "--num-rollout", count, "--routing-replay", kind)
        rewards[kind] = [sum(step["reward/mean"] for step in part) / 5 for part in (steps[:5], steps[-5:])]
        gap = max(step["train_rollout_logprob_abs_diff"] for step in steps)
        assert gap < 1e-5 if kind == "rollout" else gap > 0.3
    assert steps[0]["routing_mismatch"] > 0.8
    assert rewards["rollout"][1] > rewards["rollout"][0] + 0.5
    assert abs(rewards["off"][1] - rewards["off"][0]) < 0.1


@pytest.mark.parametrize("turns", [False, True], ids=["continued", "turns"])
def test_continued_and_many_turn_samples_are_trained_with_the_experts_that_made_them(tmp_path, noisy_engine, turns):
    """Weights stand still, so that the trainer's log-probs are the engine's, token for token."""
    model = family_model(tmp_path / "model", "qwen3-moe", **MOE)
    settings = ["--over-sampling-batch-size", "6", "--partial-rollout", "--lr", "0", "--num-rollout", "4"]
    settings += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "3", "--rollout-max-response-len", "40"]
    if turns:
        settings += ["--custom-generate-function-path", f"{tmp_path / 'hooks.py'}:two_turns"]
    else:
        settings += ["--rollout-stop-token-ids", "3", "--rollout-stop-token-ids", "7", "--rollout-stop", "+"]
    steps = run(tmp_path, model, *settings, "--use-tis", "--routing-replay", "rollout")
    assert turns or sum(step["rollout/continued_samples"] for step in steps) > 0
    assert max(step["train_rollout_logprob_abs_diff"] for step in steps) < 1e-6
    assert min(step["routing_mismatch"] for step in steps) > 0.8


def test_in_half_precision_the_gap_of_experts_is_no_larger_than_that_of_a_dense_model(tmp_path):
    """Rounding differs between engine and trainer, and of experts that are close each takes another."""
    size = {"hidden_size": 64, "num_hidden_layers": 4}
    experts = family_model(tmp_path / "experts", "qwen3-moe", **MOE | size | {"num_experts": 32})
    dense = family_model(tmp_path / "dense", "qwen3", **size)
    settings = (*SMALL, "--num-rollout", "1", "--lr", "0", "--use-tis")
    name = "train_rollout_logprob_abs_diff"

    def gap(model, kind):
        steps = run(tmp_path, model, *settings, "--routing-replay", kind, dtype="bfloat16")
        return sum(step[name] for step in steps) / len(steps)

    dense_gap, plain_gap, replayed_gap = gap(dense, "off"), gap(experts, "off"), gap(experts, "rollout")
    assert replayed_gap <= dense_gap < plain_gap
