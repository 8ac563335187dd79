"""Advice holds: what it names fits, what is larger does not, and a split of GPUs is the best of all."""

from __future__ import annotations

import pytest
from measured import QWEN3_4B

from slime_core.config.load import load_config
from slime_core.planning.advice import (
    advice,
    fewer_slots,
    largest_slots,
    largest_tokens,
    remedies,
    replan,
    splits,
)
from slime_core.planning.decoding import Decoding
from slime_core.planning.footprint import Lengths
from slime_core.planning.fsdp import quantised_numbers
from slime_core.planning.gpus import gpu_of
from slime_core.planning.memory import MemoryPlan, fits
from slime_core.planning.sizes import ModelSizes
from slime_core.planning.time import TimePlan

pytestmark = pytest.mark.unit
LENGTHS = Lengths(prompt=200, response=800, longest=2248, p95=2000, source="the test")


def planned(gpu: str, *flags: str) -> MemoryPlan:
    given = ["--hf-checkpoint", "/", "--prompt-data", "/", "rollout.rollout_max_response_len=2048", *flags]
    return fits(load_config(None, given), QWEN3_4B, gpu_of(gpu), lengths=LENGTHS)


def test_the_largest_settings_fit_and_the_next_larger_ones_do_not() -> None:
    plan = planned("h200", "rollout.rollout_slots=64")
    tokens = largest_tokens(plan)
    assert tokens > plan.trainer.tokens if plan.trainer else False
    assert replan(plan, {"train.max_tokens_per_gpu": tokens}).fits
    assert not replan(plan, {"train.max_tokens_per_gpu": tokens + 1024}).fits
    slots = largest_slots(planned("h100=96"))
    assert 0 < slots < 256
    assert replan(planned("h100=96"), {"rollout.rollout_slots": slots}).fits
    assert not replan(planned("h100=96"), {"rollout.rollout_slots": slots + 1}).fits


def test_what_does_not_fit_is_made_to_by_the_keys_of_the_fastest_step() -> None:
    plan = planned("h100")
    assert not plan.fits
    (answer,) = advice(plan)
    assert answer.plan.fits
    assert answer.flags.startswith("--")
    best, others = TimePlan.of(answer.plan), [fewer_slots(plan, keys) for keys in remedies(plan)]
    assert best is not None
    assert sum(keys is not None for keys in others) >= 3
    for keys in others:
        time = TimePlan.of(replan(plan, keys)) if keys is not None else best
        assert time is not None
        assert time.total > 0.95 * best.total


def test_advice_names_no_keys_that_the_config_refuses() -> None:
    plan = planned("gpu=24", "--lora-rank", "8", "--optimizer", "paged_adamw_8bit")
    tried = list(remedies(plan))
    assert any("train.activation_offload" in keys for keys in tried)
    assert all("train.fsdp_cpu_offload" not in keys for keys in tried)


def test_floats_of_a_base_in_few_bits_are_written_and_read_at_each_decode_step() -> None:
    speeds = {}
    for sync in ("merged", "adapter"):
        plan = planned("h200", "--lora-rank", "8", "--base-weights", "nf4", "--lora-sync", sync)
        assert plan.engine is not None
        speeds[sync] = Decoding.of(plan.subject, plan.engine)
    inside = quantised_numbers(ModelSizes.of(QWEN3_4B))
    assert speeds["adapter"].bytes - speeds["merged"].bytes == int(inside * (0.53125 + 2))


def test_a_model_that_no_setting_fits_gets_no_advice() -> None:
    plan = planned("gpu=8")
    assert not plan.fits
    assert advice(plan) == []


def test_a_split_balances_trainer_and_engine() -> None:
    plan = planned("h200", "--rollout-engine", "sglang", "--actor-num-gpus-per-node", "8")
    ways = splits(plan, 8)
    assert {way.trainer + way.engine for way in ways} == {8}
    assert [way.seconds for way in ways] == sorted(way.seconds for way in ways)
    assert any(way.engine == 0 for way in ways)
    best = next(way for way in ways if way.engine)
    assert best.seconds < max(way.seconds for way in ways if way.engine)
    assert "waits" in best.waits
