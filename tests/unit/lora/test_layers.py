"""Adapters compute what peft's do: outputs and gradients, in float64; the same merged."""

import copy

import numpy as np
import peft
import pytest
import torch
from torch import nn

from slime_core.errors import ConfigError
from slime_core.lora.dropout import micro_keys
from slime_core.lora.layers import LoraExperts, LoraLinear, attach
from slime_core.lora.spec import LoraSpec
from slime_core.testing.families import family_model
from slime_core.types import MicroBatch
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 60
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
CASES = {
    "lora": ("qwen3", {"target_modules": ("q_proj", "down_proj")}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("qwen2", {"use_dora": True}),
    "regex": ("qwen3", {"target_modules": (r".*layers\.1\..*(up|v)_proj",)}),
    "excluded": ("qwen3", {"exclude_modules": ("o_proj", "layers.0.mlp.up_proj")}),
    "experts": ("qwen3-moe", {}),
    "experts alone": ("qwen3-moe", {"target_modules": (), "target_parameters": ("experts.down_proj",)}),
    "experts of transposed weights": ("gpt-oss", {"target_parameters": PARAMETERS}),
}


@pytest.fixture
def model(tmp_path):
    """Make a small model of a family in float64."""

    def build(family):
        built = ModelFolder.open(family_model(tmp_path / family, family)).build_model(attn_implementation="eager")
        if built._can_set_experts_implementation():
            built.set_experts_implementation("eager")  # grouped products know no float64
        return built.double()

    return build


def fill(parameters):
    """Numbers other than those of a fresh adapter, whose B is 0."""
    for number, (name, parameter) in enumerate(sorted(parameters.items())):
        values = torch.sin(torch.arange(parameter.numel()).double() + number) / 10
        with torch.no_grad():
            parameter.copy_(
                values.view(parameter.shape).abs() + 0.5 if "magnitude" in name else values.view_as(parameter)
            )


def peft_factors(name, ours, twin):
    """The parameter of peft that ours of a name is, with how ours is laid out there."""
    module, _, kind = name.removesuffix(".default").rpartition(".lora_")
    if kind in ("A", "B", "magnitude_vector"):
        return twin[f"{module}.lora_{kind}.default.weight"], lambda x: x
    kind, key = kind.split(".")
    wrapper = next(n for n in twin if n.startswith(module) and f"lora_{kind}" in n and twin[n].numel() == ours.numel()
                   and belongs(n, key, twin, module))  # fmt: skip
    if kind == "A":
        return twin[wrapper], lambda x: x.reshape(-1, x.shape[-1])
    return twin[wrapper], lambda x: x.permute(1, 2, 0).reshape(x.shape[1], -1)


def belongs(name, key, twin, module):
    """Whether peft's nested wrapper of a name is that of a weight: the inner one wraps what comes first."""
    nested = sorted({n.rpartition(".lora_")[0] for n in twin if n.startswith(module) and ".lora_" in n}, key=len)
    order = ["down_proj", "gate_up_proj"] if len(nested) > 1 else [key]
    return name.rpartition(".lora_")[0] == nested[order.index(key)]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_pefts(model, case):
    family, options = CASES[case]
    spec = LoraSpec(rank=4, alpha=6.0, **options)
    ours = model(family)
    twin = copy.deepcopy(ours)
    base = twin(input_ids=TOKENS).logits
    adapters = attach(ours, spec, seed=1)
    for module in adapters.modules.values():
        module.double()
    torch.testing.assert_close(ours(input_ids=TOKENS).logits, base, rtol=0, atol=1e-5)  # B is 0
    config = adapters.spec.to_peft(twin.name_or_path)
    wrapped = peft.get_peft_model(twin, peft.LoraConfig(**(config | {"inference_mode": False})))
    theirs = {n.removeprefix("base_model.model."): p for n, p in wrapped.named_parameters() if p.requires_grad}
    parameters = adapters.parameters()
    assert len(parameters) == len(theirs)
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == parameters.keys()
    fill(parameters)
    pairs = {name: peft_factors(name, parameter, theirs) for name, parameter in parameters.items()}
    for name, (other, layout) in pairs.items():
        other.data.copy_(layout(parameters[name].data))
    logits, want = ours(input_ids=TOKENS).logits, wrapped(input_ids=TOKENS).logits
    assert not torch.allclose(want, base, atol=1e-3)
    torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)
    logits.log_softmax(-1).square().sum().backward()
    want.log_softmax(-1).square().sum().backward()
    for name, (other, layout) in pairs.items():
        torch.testing.assert_close(layout(parameters[name].grad), other.grad, rtol=1e-7, atol=1e-9, msg=name)
    merged = {name: module.merged(key, "default") for name, (module, key) in adapters.weights().items()}
    with torch.no_grad():
        for name, weight in merged.items():
            ours.get_parameter(name).copy_(weight)
        with adapters.using(None):
            torch.testing.assert_close(ours(input_ids=TOKENS).logits, want.detach(), rtol=1e-9, atol=1e-9)


def test_all_linear_layers_are_those_of_peft_without_the_head(model):
    adapters = attach(model("qwen3"), LoraSpec(rank=2), seed=0)
    wrapped = peft.get_peft_model(model("qwen3"), peft.LoraConfig(r=2, target_modules="all-linear"))
    assert set(adapters.modules) == set(wrapped.base_model.targeted_module_names)
    assert all(isinstance(module, LoraLinear) for module in adapters.modules.values())
    assert adapters.spec.target_modules == (
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    )


def test_a_start_depends_on_the_seed_and_the_name_alone(model):
    one, other = (attach(model("qwen3"), LoraSpec(rank=2, target_modules=t), seed=3) for t in (("q_proj",), ("q_proj", "up_proj")))  # fmt: skip
    name = "model.layers.1.self_attn.q_proj.lora_A.default"
    assert torch.equal(one.parameters()[name], other.parameters()[name])
    a = one.parameters()[name].detach()
    assert a.dtype == torch.float32
    assert 0.9 < float(a.abs().max()) * a.shape[1] ** 0.5 <= 1


def test_adapters_are_chosen_by_name(model):
    built = model("qwen3").float()
    adapters = attach(built, LoraSpec(rank=2), seed=0, names=("solver", "critic"))
    fill(adapters.parameters("solver"))
    results = {}
    for name in ("solver", "critic", None):
        with adapters.using(name):
            results[name] = built(input_ids=TOKENS).logits
    assert torch.equal(results["critic"], results[None])
    assert not torch.allclose(results["solver"], results[None])
    assert adapters.parameters().keys() == adapters.parameters("solver").keys() | adapters.parameters("critic").keys()


def test_a_mask_is_of_the_token_not_of_its_place(model):
    layer = nn.Linear(512, 8)
    adapters = attach(Model(layer), LoraSpec(rank=2, dropout=0.25), seed=0)
    dropout, x = adapters.dropout, torch.ones(5, 512)
    assert torch.equal(dropout(x, 1), x)  # not training
    keys = torch.from_numpy(micro_keys(pack_of([5], [-1])))
    dropout.rows = keys
    whole = dropout(x, 1)
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(float((whole == 0).float().mean()) - 0.25) < 0.03
    dropout.rows = keys[2:4]
    assert torch.equal(dropout(x[2:4], 1), whole[2:4])
    assert not torch.equal(dropout(x[2:4], 2), whole[2:4])
    dropout.seed = 1
    assert not torch.equal(dropout(x[2:4], 1), whole[2:4])


def pack_of(lengths, prefix):
    """A pack of segments over the first tokens, each of the prompt 0 to 2 or a sequence of its own."""
    starts = np.cumsum([0, *lengths])
    tokens = np.concatenate([TOKENS[0, : starts[1]].numpy(), TOKENS[1, : starts[-1] - starts[1]].numpy()])
    none = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        samples=np.arange(len(lengths)), tokens=tokens, position_ids=none, cu_seqlens=starts.astype(np.int32),
        prefix=np.array(prefix, dtype=np.int32), predict=none, target=none, response=none, weight=none,
    )  # fmt: skip


def test_rows_have_the_same_keys_whether_they_share_a_prompt_or_not():
    shared = micro_keys(pack_of([3, 2, 2], [-1, 0, 0]))
    prompt, one, other = TOKENS[0, :3].numpy(), TOKENS[1, :2].numpy(), TOKENS[1, 2:4].numpy()
    alone = pack_of([5, 5], [-1, -1])
    alone.tokens = np.concatenate([prompt, one, prompt, other])
    keys = micro_keys(alone)
    assert np.array_equal(keys, [*shared[:3], *shared[3:5], *shared[:3], *shared[5:]])
    assert len({*shared.tolist()}) == 7


class Model(nn.Module):
    """A layer that stands for a model."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def get_output_embeddings(self):
        return None


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen3", {"target_modules": ("c_attn",)}, "no layer of Qwen3ForCausalLM"),
        ("qwen3", {"target_modules": ("embed_tokens",)}, "model.embed_tokens is Embedding"),
        ("qwen3-moe", {"dropout": 0.1}, "lora_dropout with adapters on experts"),
    ],
)
def test_what_has_no_adapters_is_refused_by_name(model, family, options, words):
    with pytest.raises(ConfigError, match=words):
        attach(model(family), LoraSpec(rank=2, **options), seed=0)


def test_experts_have_their_own_class(model):
    adapters = attach(model("qwen3-moe"), LoraSpec(rank=2), seed=0)
    experts = [module for module in adapters.modules.values() if isinstance(module, LoraExperts)]
    assert len(experts) == 2
    assert type(experts[0]).__name__ == "LoraQwen3MoeExperts"
    assert adapters.spec.target_parameters == ("experts.down_proj", "experts.gate_up_proj")
