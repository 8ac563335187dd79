"""Models that can do less are trained all the same, saying so; what is fused is what the model itself computes."""

import copy
import logging

import numpy as np
import pytest
import torch
import trainer_bench as made
import transformers

from slime_core.testing.families import FAMILIES, RECURRENT, family_model
from slime_core.testing.models import char_tokenizer
from slime_core.trainers.compiling import Compiled
from slime_core.trainers.fsdp.model import FsdpPolicy

pytestmark = pytest.mark.unit


def folder_of(path, config):
    """A folder of another family, with weights."""
    if isinstance(config, str):
        return family_model(path, config)
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(str(path))
    config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id = len(tokenizer), 0, 1, None
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(str(path))
    return path


def cohere():
    """Logits are scaled after the output matrix."""
    return transformers.CohereConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.25,
    )


def mamba():
    """No attention at all: packed sequences would see each other."""
    return transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, use_mambapy=False)


def expected(path, batch):
    """Log-probs of transformers' own model, one sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), attn_implementation="eager").eval()
    found = np.zeros(len(batch.loss_mask), np.float32)
    for i in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        count, start = int(batch.response_lengths[i]), batch.response_offsets[i]
        with torch.no_grad():
            rows = model(input_ids=tokens[None], use_cache=False).logits[0, -count - 1 : -1].log_softmax(-1)
        found[start : start + count] = rows[torch.arange(count), tokens[-count:]].numpy()
    return found


FUSED = {"qwen2", "qwen3"}  # the table's Llama has biases
CASES = {"cohere": (cohere(), True, False), "mamba": (mamba(), False, True)}  # and whether logits are a product
CASES |= {name: (name, name not in RECURRENT, name != "gemma2") for name in FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_families_train_with_what_they_can_do(bench, tmp_path, caplog, name):
    config, packs, linear = CASES[name]
    path = folder_of(tmp_path / "model", config)
    with caplog.at_level(logging.WARNING):
        one = bench(folder=path, max_tokens_per_gpu=60)
    policy, batch = one.worker.policy, made.batch_of(vocab=60)
    assert (policy.packs, policy.linear_head, policy.fused) == (packs, linear, name in FUSED)
    assert ("one sequence a row" in caplog.text) == (not packs)
    found = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    np.testing.assert_allclose(found, expected(path, batch), atol=2e-4)
    assert one.call("step", batch)["optimizer_steps"] == 1.0


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "made_again"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_fused_layers_have_the_modules_own_gradient(bench, family, recompute):
    one, batch = bench(family, max_tokens_per_gpu=80, gradient_checkpointing=recompute), made.batch_of()
    assert one.worker.policy.fused
    with torch.no_grad():
        for (
            tensor
        ) in one.worker.actor.locals().values():  # norms of 1 and biases of 0 would hide what is done with them
            tensor.add_(torch.randn_like(tensor) * 0.05)
    fused = one.gradient(batch)
    one.worker.policy.fused = False
    own = one.gradient(batch)
    assert fused[0] == pytest.approx(own[0], rel=1e-5, abs=1e-6)
    for name, gradient in own[1].items():
        error = float((fused[1][name] - gradient).abs().max() / gradient.abs().max())
        assert error < 2e-5, (name, error)


@pytest.mark.nightly  # by day `test_rank_layouts.py` has compiled layers
@pytest.mark.parametrize(
    ("backend", "recompute"),
    [("aot_eager", False), ("aot_eager", True), ("inductor", False)],  # whose C++ takes a minute to build
)
def test_compiled_layers_have_the_modules_own_gradient(bench, backend, recompute):
    one, batch = bench(max_tokens_per_gpu=80, gradient_checkpointing=recompute, compile="on"), made.batch_of()
    policy = one.worker.policy
    assert policy.compiled
    policy.fused = False  # which comes first on a CPU
    function = type(policy.hf.model.layers[0]).forward
    policy._compiled[function] = Compiled(function, backend=backend)
    compiled = one.gradient(batch)
    (known,) = policy._compiled.values()  # of all layers
    assert known.works
    policy.compiled = False
    own = one.gradient(batch)
    assert compiled[0] == pytest.approx(own[0], rel=1e-5, abs=1e-6)
    for name, gradient in own[1].items():
        assert float((compiled[1][name] - gradient).abs().max() / gradient.abs().max()) < 2e-5, name


@pytest.mark.parametrize(("layers", "wanted"), [(0, [2, 2]), (1, [2, 1]), (5, [2, 2])])
def test_so_many_layers_alone_are_made_again(bench, layers, wanted):
    one = bench(gradient_checkpointing=True, gradient_checkpointing_layers=layers, max_tokens_per_gpu=10_000)
    policy, batch = one.worker.policy, made.batch_of()
    policy.fused, calls = False, [0, 0]

    def count(number):
        def hook(*_):
            calls[number] += 1

        return hook

    for number, layer in enumerate(policy.hf.model.layers):
        layer.mlp.register_forward_pre_hook(count(number))
    again = one.gradient(batch)
    assert calls == wanted  # one pack
    policy.recompute = 0
    kept = one.gradient(batch)
    for name, gradient in kept[1].items():
        assert torch.equal(again[1][name], gradient), name


def test_a_layer_that_computes_otherwise_is_not_fused(bench):
    hf = copy.deepcopy(bench().folder.build_model("float32"))
    hf.model.layers[1].mlp.act_fn = torch.nn.Tanh()  # the config still says silu
    policy = FsdpPolicy(hf, chunk=64)
    policy.try_model()
    assert (policy.packs, policy.linear_head, policy.fused) == (True, True, False)
