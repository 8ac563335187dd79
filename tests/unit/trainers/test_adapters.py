"""The FSDP trainer with adapters: what learns, what engines get, the reference, and families of models."""

import asyncio
import gc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import splits
import torch
import trainer_bench as made
from pictures import picture_batch
from safetensors.torch import load_file

from slime_core.errors import ConfigError
from slime_core.lora.layers import merged
from slime_core.testing import tiny_model, tiny_vision_model
from slime_core.testing.families import family_model
from slime_core.trainers.fsdp import low_rank
from slime_core.trainers.fsdp.trial import PolicyTrial
from slime_core.types import WeightRoute

pytestmark = pytest.mark.unit

Q, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.embed_tokens.weight"
REFERENCE = frozenset({"policy", "reference"})


@pytest.fixture
def adapted(bench):
    """A trainer of adapters that are no longer those of the start."""

    def make(**train):
        one = bench(**{"lora_rank": 4, "lora_alpha": 8.0, "max_tokens_per_gpu": 40} | train)
        one.thread.call(splits.fill_adapters, one.worker)
        return one

    return make


def batch_of():
    return splits.with_roles(made.batch_of(groups=2, rollouts=3))


def by_hand(one):
    """A weight with its adapter, summed in float32."""
    base, factors = one.worker.policy.base()[f"{Q}.weight"], one.parameters()
    return base.float() + 2.0 * factors[f"{Q}.lora_B.default"] @ factors[f"{Q}.lora_A.default"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_learn_and_the_base_is_held_in_the_dtype_of_compute(adapted, dtype):
    one = adapted(dtype=dtype)
    policy, learner = one.worker.policy, one.worker.actor
    base = {name: tensor.clone() for name, tensor in policy.base().items()}
    before = one.parameters()
    assert {str(tensor.dtype) for tensor in base.values()} == {f"torch.{dtype}"}
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    assert policy.masters is None
    one.call("step", batch_of())
    assert all(torch.equal(tensor, base[name]) for name, tensor in policy.base().items())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in one.parameters().items())
    assert set(learner.optimizer.moment1) == set(before)
    assert all(p.grad is None for name, p in policy.hf.named_parameters() if name in base)


def test_an_engine_of_the_process_reads_the_base_and_one_merged_copy(adapted):
    one = adapted()
    first = one.call("publish", 1).tensors
    assert torch.equal(first[f"{Q}.weight"], by_hand(one))
    assert first[EMBEDDING].data_ptr() == one.worker.policy.base()[EMBEDDING].data_ptr()
    assert not [name for name in first if "lora" in name]
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    one.call("step", batch_of())
    second = one.call("publish", 2).tensors
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert torch.equal(second[f"{Q}.weight"], by_hand(one))


def test_a_folder_holds_merged_weights_that_were_rounded_once(adapted, tmp_path):
    one = adapted(dtype="bfloat16")
    route = WeightRoute(transport="disk", folder=str(tmp_path / "w"), dtype="bfloat16")
    update = asyncio.run(one.trainer.publish(3, route))
    stored = load_file(str(Path(update.handle["folder"]) / "model.safetensors"))
    assert torch.equal(stored[f"{Q}.weight"], by_hand(one).bfloat16())
    assert torch.equal(stored[EMBEDDING], one.worker.policy.base()[EMBEDDING])
    original = load_file(str(one.folder.path / "model.safetensors"))
    assert stored.keys() == original.keys()


def test_the_reference_is_the_base_without_a_second_copy(adapted, bench):
    one, full = adapted(kl_loss_coef=0.1), bench()
    batch = batch_of()
    scored = one.call("score", batch, REFERENCE)
    base = full.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    np.testing.assert_allclose(scored["reference"]["log_probs"], base, atol=1e-5)
    assert np.abs(scored["policy"]["log_probs"] - scored["reference"]["log_probs"]).max() > 1e-3
    assert one.worker.frozen.tensors() == []
    assert one.worker.policy.adapters.active == "default"


def test_a_named_reference_takes_the_place_of_the_base(adapted, bench, tmp_path):
    other = tiny_model(tmp_path / "other", seed=4)
    one, full = adapted(kl_loss_coef=0.1, ref_load=str(other)), bench(folder=other)
    batch = batch_of()
    policy = one.call("score", batch, REFERENCE)
    np.testing.assert_allclose(
        policy["reference"]["log_probs"], full.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"],
        atol=1e-5,
    )  # fmt: skip
    again = one.call("score", batch, frozenset({"policy"}))
    assert np.array_equal(again["policy"]["log_probs"], policy["policy"]["log_probs"])


def test_log_probs_in_another_dtype_are_of_merged_weights(adapted):
    one, batch = adapted(), batch_of()
    scored = one.call("score", batch, frozenset({"policy", "bfloat16"}))
    difference = np.abs(scored["policy"]["log_probs"] - scored["bfloat16"]["log_probs"])
    assert 0 < difference.max() < 0.05


def test_models_in_another_dtype_leave_nothing_behind(adapted):
    """What tries the model at the start, and what scores: their embedding would stay until a collection of garbage."""
    shape = adapted(dtype="bfloat16").worker.policy.base()[EMBEDDING].shape

    def embeddings():
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        return [one for one in tensors if one.shape == shape and one.dtype == torch.float32]

    gc.collect()
    gc.disable()
    try:
        before = {id(one) for one in embeddings()}
        adapted(dtype="bfloat16").call("score", batch_of(), frozenset({"policy", "float32"}))
        assert not [one for one in embeddings() if id(one) not in before]
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v2"])
def test_families_agree_with_the_slow_way(adapted, tmp_path, family):
    one = adapted(folder=family_model(tmp_path / family, family), gradient_checkpointing=True)
    report = one.call("verify", batch_of())
    assert max(report["gradient_error"], report["loss_error"]) < 1e-5
    assert report["float64"] == 1


@pytest.mark.nightly
def test_compiled_layers_agree_with_the_slow_way(adapted, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    one = adapted(compile="on", lora_use_dora=True)
    report = one.call("verify", batch_of())
    assert max(report["gradient_error"], report["loss_error"]) < 1e-5
    assert all(one.works for one in one.worker.policy._compiled.values())


def test_a_model_of_pictures_has_adapters_on_its_text_model_alone(adapted, tmp_path):
    folder = tiny_vision_model(tmp_path / "v", "qwen3_vl")
    one = adapted(folder=folder, max_tokens_per_gpu=64)
    assert one.worker.policy.fused
    assert not [name for name in one.parameters() if "visual" in name]
    report = one.call("verify", picture_batch("qwen3_vl", one.folder.config))
    assert max(report["gradient_error"], report["loss_error"]) < 1e-5


@pytest.mark.parametrize(("factor", "rows"), [(1.0, None), (1.5, None), (1.5, 1024)], ids=["right", "all", "few"])
def test_rounding_in_half_precision_leaves_no_layer_out_and_a_wrong_gradient_does(
    adapted, tmp_path, monkeypatch, factor, rows
):
    """Of so wide a layer the gradients of q nearly cancel: bfloat16 is 0.1 off. Those of B that has 1,024 rows are small."""
    folder, product = tiny_model(tmp_path / "wide", hidden=1024, layers=1), low_rank._product

    def wrong(left, right):
        right_one = rows is not None and (left.shape[1] != rows or right.shape[1] >= rows)
        return (1.0 if right_one else factor) * product(left, right)

    monkeypatch.setattr(low_rank, "_product", wrong)
    assert adapted(folder=folder, dtype="bfloat16").worker.policy.fused == (factor == 1.0)


def test_a_critic_beside_adapters_is_trained_in_full(adapted):
    one = adapted(advantage_estimator="ppo", critic_lr=1e-3)
    batch = batch_of()
    batch.columns["values"] = batch.columns["rollout_log_probs"]
    batch.columns["returns"] = batch.columns["rollout_log_probs"] * 0.5
    metrics = one.call("step", batch)
    assert metrics["critic_grad_norm"] > 0
    assert f"{Q}.weight" in one.worker.critic.learner.parameters()


def test_merged_weights_are_summed_in_float32_and_rounded_once():
    weight = torch.full((2, 2), 1.0).bfloat16()
    a, b = torch.eye(2), torch.full((2, 2), 0.003)
    assert torch.equal(merged(weight, a, b, 2.0), torch.full((2, 2), 1.006).bfloat16())
    assert torch.equal(merged(weight, a, b, 2.0, dtype=torch.float32), 1.0 + 2.0 * b @ a)


def test_targets_that_no_layer_is_end_the_start(bench, tmp_path):
    with pytest.raises(ConfigError, match="no layer of Qwen3ForCausalLM"):
        bench(lora_rank=4, lora_target_modules=("c_attn",))
    for names in (("q_proj", "lm_head"), ("q_proj", "v_porj")):
        with pytest.raises(ConfigError, match=f"Qwen3ForCausalLM is: {names[1]} ") as raised:
            bench(lora_rank=4, lora_target_modules=names)
        assert raised.value.fix == "leave them out"
    for names in (("q_proj", "v_porj"), ("v_porj",), (r".*\.v_porj",), ("mlp", "up_proj")):
        with pytest.raises(ConfigError, match="modules without adapters that no layer") as raised:
            bench(lora_rank=4, lora_exclude_modules=names)
        assert raised.value.where == "train.lora_exclude_modules"
    mixture = family_model(tmp_path / "moe", "qwen3-moe")
    bench(folder=mixture, lora_rank=4, lora_exclude_modules=("mlp.experts", "layers.0.self_attn.q_proj", "lm_head"))
    targets = {"lora_target_modules": ("q_proj", "down_proj"), "lora_target_parameters": ("experts.up_proj",)}
    with pytest.raises(ConfigError, match=r"is: down_proj, experts\.up_proj ") as raised:
        bench(folder=mixture, lora_rank=4, **targets)
    assert "--lora-target-parameters" in raised.value.fix


def test_a_layer_is_tried_in_the_dtype_of_its_base(adapted):
    worker = adapted(dtype="bfloat16").worker
    tried = PolicyTrial(worker.policy.hf).layer(worker.policy.hf.model.layers[1])
    assert {tensor.dtype for tensor in tried} == {torch.bfloat16}
    assert worker.policy.fused


def test_layers_without_adapters_beside_those_that_have_some_are_fused(bench):
    one = bench(lora_rank=4, lora_target_modules=(r".*layers\.1\..*(q_proj|up_proj)",))
    assert one.worker.policy.fused
    one.thread.call(splits.fill_adapters, one.worker)
    report = one.call("verify", batch_of())
    assert max(report["gradient_error"], report["loss_error"]) < 1e-5
