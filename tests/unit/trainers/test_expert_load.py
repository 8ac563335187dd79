"""Layers of experts under FSDP: products against the loop over experts, their load, and router biases that follow it.

As a program this is a rank of two: FOLDER OUT RANK WORLD.
"""

import sys
from pathlib import Path

import pytest
import torch
import trainer_bench as made
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from slime_convert.folder_writing import How
from slime_convert.fsdp_to_hf import fsdp_to_hf
from slime_core.errors import TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing.families import family_config, family_model
from slime_core.threads import TorchThread
from slime_core.trainers.expert_load import figures, moved_bias
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.experts import IMPLEMENTATION, use_kernels
from slime_core.weights.build import allocate
from slime_core.weights.folder import ModelFolder
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import TensorPart, lay_out

pytestmark = pytest.mark.unit

EXPERTS, CHOSEN, RATE = 16, 2, 0.125  # a power of two: float32 adds it exactly
LAYER = "model.layers.1.mlp"
BIAS = f"{LAYER}.gate.e_score_correction_bias"
SETTINGS = {"lr": 1e-3, "kl_loss_coef": 0.1, "max_tokens_per_gpu": 40, "moe_router_bias_update_rate": RATE}
DEEPSEEK = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: family_config("qwen3-moe", 64, num_experts=EXPERTS),
    "glm4_moe": lambda: family_config("glm4-moe", 64, n_routed_experts=EXPERTS),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense layer, and one of 16 experts whose router has a bias."""
    return family_model(tmp_path_factory.mktemp("model") / "m", "glm4-moe", n_routed_experts=EXPERTS)


def load_of(model, batch, experts=EXPERTS):
    """Tokens of each expert where transformers passes one sample at a time, [experts]."""
    chosen = []
    layer = model.get_submodule(f"{LAYER}.experts")
    handle = layer.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    with torch.no_grad():
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:]):
            model(input_ids=torch.from_numpy(batch.tokens[begin:end].astype("int64"))[None])
    handle.remove()
    return torch.bincount(torch.cat(chosen).flatten(), minlength=experts)


def train_rank(folder, out, rank=0, world=1):
    """Two steps; what each expert got, the biases and metrics go to ``OUT/load-WORLD.safetensors``."""
    thread, config = TorchThread(1), made.config_of(folder, **SETTINGS, adam_eps=1e-3)
    rendezvous = out / "meet" if world > 1 else None
    trainer = FsdpTrainer(
        config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
        rendezvous=rendezvous,
    )  # fmt: skip
    worker, batch = trainer._worker, made.batch_of()
    thread.call(worker.begin, config)
    bias = worker.actor.biases()[BIAS]
    bias.fill_(RATE)
    tensors = {"fingerprint": torch.tensor(list(bytes.fromhex(thread.call(worker.fingerprint))))}
    bias.zero_()
    batch.columns["reference"] = batch.columns["rollout_log_probs"]
    for step in range(2):
        metrics = thread.call(worker.step, batch)
        tensors |= {f"{step}.load": worker.expert_load.counts.clone()}
        tensors |= {f"{step}.{name}": torch.tensor(value).double() for name, value in metrics.items()}
    thread.call(worker.save, out / f"saved-{world}")
    worker.staging.wait()
    thread.call(worker.barrier)
    thread.call(worker.restore, out / f"saved-{world}")
    tensors |= {name: tensor.clone() for name, tensor in thread.call(worker.publish, 2).tensors.items()}
    if rank == 0:
        save_file(tensors, str(out / f"load-{world}.safetensors"))
    thread.close()


@pytest.mark.parametrize("family", CONFIGS)
def test_grouped_products_give_the_gradients_of_the_loop_over_experts(family):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()
    use_kernels(model)
    assert model.config._experts_implementation == IMPLEMENTATION
    passes = []
    for implementation, dtype in ((IMPLEMENTATION, torch.float32), ("eager", torch.float64)):
        model.set_experts_implementation(implementation)
        model.to(dtype).zero_grad()
        logits = model(input_ids=torch.tensor([[3, 9, 27, 17, 3]])).logits
        logits.square().mean().backward()
        passes.append((logits.detach(), {name: p.grad.double().clone() for name, p in model.named_parameters()}))
    (logits, gradients), (exact_logits, exact_gradients) = passes
    assert_close(logits.double(), exact_logits, rtol=1e-5, atol=1e-5)
    for name, exact in exact_gradients.items():
        assert (gradients[name] - exact).norm() <= 2e-5 * exact.norm(), name
    used = gradients[f"{LAYER}.experts.down_proj"].flatten(1).any(1)
    assert 0 < used.sum() < EXPERTS  # some have no row


def test_figures_of_a_load():
    counts = torch.tensor([[6, 2, 1, 3], [0, 0, 0, 0], [12, 0, 0, 0]])  # the second layer is dense
    expected = {"load_max_violation": (1 + 3) / 2, "load_max_violation/worst_layer": 3.0, "dead_experts": 3 / 8}
    assert figures(counts) == {f"moe/{name}": value for name, value in expected.items()}
    assert figures(counts[1:2]) == {}


def test_a_bias_moves_against_the_load():
    moved = moved_bias(torch.tensor([0.5, 0.0, -1.0, 2.0]), torch.tensor([6, 3, 1, 2]), 0.25)
    assert moved.tolist() == [0.25, 0.0, -0.75, 2.25]


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_tokens_per_gpu": 4096}, {"gradient_checkpointing": True}, {"loss_type": "sft_loss", "kl_loss_coef": 0}],
    ids=["small packs", "one pack", "layers made again", "loss within the pass"],
)
def test_the_load_is_that_of_samples_one_by_one_and_biases_follow_it(bench, folder, changes):
    one, batch = bench(folder=folder, **(SETTINGS | changes)), made.batch_of()
    batch.columns["reference"] = batch.columns["rollout_log_probs"]
    load = load_of(one.folder.build_model("float32"), batch)
    assert load.sum() == CHOSEN * len(batch.tokens)
    metrics = one.call("step", batch)
    assert one.worker.expert_load.counts.tolist() == [load.tolist()]
    expected = RATE * torch.sign(load.sum() / EXPERTS - load)
    assert torch.equal(one.worker.actor.biases()[BIAS], expected)
    assert torch.equal(one.call("publish", 1).tensors[BIAS], expected)
    assert metrics["moe/dead_experts"] == float((load == 0).double().mean())
    assert metrics["moe/load_max_violation"] == pytest.approx(float(load.max() * EXPERTS / load.sum() - 1))
    assert BIAS not in one.worker.actor.parameters()
    fingerprint = one.call("fingerprint")
    one.worker.actor.biases()[BIAS][-1] += RATE
    assert one.call("fingerprint") != fingerprint


def test_without_a_rate_or_a_step_biases_stay(bench, folder):
    still, skipped, batch = bench(folder=folder), bench(folder=folder, moe_router_bias_update_rate=1), made.batch_of()
    assert still.call("step", batch)["moe/load_max_violation"] > 0
    batch.columns["advantages"][:] = 0
    assert skipped.call("step", batch)["skipped_steps/no_gradient"] == 1
    for one in (still, skipped):
        assert not one.worker.actor.biases()[BIAS].any()


def test_biases_are_resumed_exactly_and_exported_and_the_reference_keeps_its_own(bench, folder, tmp_path):
    one, batch = bench(folder=folder, **SETTINGS), made.batch_of()
    score = ("score", batch, frozenset({"reference"}))
    first = one.call(*score)["reference"]["log_probs"]
    batch.columns["reference"] = first
    one.call("step", batch)
    one.call("save", tmp_path / "saved")
    expected = [one.call("step", batch) for _ in range(2)]
    assert (one.call(*score)["reference"]["log_probs"] == first).all()
    other = bench(folder=family_model(tmp_path / "other", "glm4-moe", seed=5, n_routed_experts=EXPERTS), **SETTINGS)
    other.worker.frozen.reference[BIAS] += 1
    other.call("restore", tmp_path / "saved")
    assert [other.call("step", batch) for _ in range(2)] == expected
    assert (other.call(*score)["reference"]["log_probs"] == first).all()
    other.call("export", tmp_path / "final")
    bias = load_file(tmp_path / "final" / "model.safetensors")[BIAS]
    assert bias.any()
    assert torch.equal(bias, one.worker.actor.biases()[BIAS])
    assert torch.equal(bias, other.call("slow_model").get_buffer(BIAS).float())
    (tmp_path / "step-3").mkdir()
    other.call("save", tmp_path / "step-3" / "trainer")
    fsdp_to_hf(tmp_path / "step-3", tmp_path / "hf", folder, How())
    assert torch.equal(Shards.open(tmp_path / "hf")[BIAS], bias)


def test_a_bias_is_float32_in_an_engine_that_computes_in_bfloat16_and_on_the_way_there(folder):
    model = allocate(ModelFolder.open(folder).config, "bfloat16", "cpu", None, False)
    state = model.state_dict()
    assert {state.pop(BIAS).dtype} | {tensor.dtype for tensor in state.values()} == {torch.float32, torch.bfloat16}
    parts = [TensorPart(name, shape, lambda whole: whole) for name, shape in (("a", (3,)), (BIAS, (16,)), ("b", (2,)))]
    buckets = lay_out(parts, "bfloat16")
    slots = [[(slot.name, slot.dtype, slot.begin, slot.end) for slot in bucket.slots] for bucket in buckets]
    assert slots == [[("a", torch.bfloat16, 0, 6), ("b", torch.bfloat16, 6, 10)], [(BIAS, torch.float32, 0, 64)]]
    assert len(lay_out(parts, "float32")) == 1


def test_a_rate_for_routers_without_a_bias_is_refused(bench, tmp_path):
    folder = family_model(tmp_path / "m", "qwen3-moe")
    with pytest.raises(TrainerError, match="no router of this model has a bias"):
        bench(folder=folder, moe_router_bias_update_rate=1e-3)


def test_two_ranks_have_the_load_biases_and_fingerprint_of_one(folder, zygote, tmp_path):
    train_rank(folder, tmp_path)
    zygote.together(tmp_path, [[__file__, folder, tmp_path, rank, 2] for rank in range(2)])
    one, two = (load_file(tmp_path / f"load-{world}.safetensors") for world in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert_close(two[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(one["1.load"], two["1.load"])
    assert torch.equal(one[BIAS], two[BIAS])
    assert one[BIAS].any()


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
