"""What a config becomes: fields by hand, both ways to write rotary settings, and values that are refused by name."""

import ast
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core import DataError
from slime_models.families import BRIDGES
from slime_models.fields import rope, rotary_base

pytestmark = pytest.mark.unit


def changed(small, **values):
    """The small model's config with other values; a plain object, so that nothing checks them before the bridge."""
    raw = {**small.config.to_dict(), "model_type": small.config.model_type, **values}
    raw.setdefault("num_experts", raw.get("num_local_experts"))
    return SimpleNamespace(**raw)


def test_llama_with_scaled_angles(models):
    fields = models["llama"].bridge.megatron(models["llama"].config)
    assert {name: fields[name] for name in ("rotary_base", "rope_scaling", "rope_scaling_factor")} == {
        "rotary_base": 500000,
        "rope_scaling": True,
        "rope_scaling_factor": 8.0,
    }
    assert (fields["num_layers"], fields["num_query_groups"], fields["kv_channels"]) == (3, 4, 8)
    assert (fields["add_qkv_bias"], fields["qk_layernorm"], fields["add_bias_linear"]) == (False, False, False)
    assert models["llama-tied"].bridge.megatron(models["llama-tied"].config)["rope_scaling"] is False


def test_biases_norms_and_ties_by_family(models):
    wanted = {"qwen2": (True, False, True), "qwen3": (False, True, False), "glm4": (True, False, False)}
    for name, values in wanted.items():
        fields = models[name].bridge.megatron(models[name].config)
        keys = ("add_qkv_bias", "qk_layernorm", "share_embeddings_and_output_weights")
        assert tuple(fields[key] for key in keys) == values, name


def test_glm4_rotates_half_of_each_head_in_pairs(models):
    fields = models["glm4"].bridge.megatron(models["glm4"].config)
    assert (fields["rotary_percent"], fields["rotary_interleaved"]) == (0.5, True)
    assert models["glm4"].bridge.sandwich
    assert models["glm4-unbiased"].bridge.megatron(models["glm4-unbiased"].config)["add_qkv_bias"] is False


def test_qwen3_has_experts_in_every_step_th_layer_but_the_dense_ones(models):
    stepped, mixed = models["qwen3_moe"], models["qwen3_moe-mixed"]
    assert stepped.bridge.megatron(stepped.config)["moe_layer_freq"] == [0, 1, 0]
    assert mixed.bridge.megatron(mixed.config)["moe_layer_freq"] == [1, 0, 1]
    assert mixed.sizes.moe_layers == frozenset({0, 2})
    normed = [small.bridge.megatron(small.config)["moe_router_pre_softmax"] for small in (stepped, mixed)]
    assert normed == [True, False]


def test_without_a_layer_of_experts_there_are_none(models):
    small = models["qwen3_moe"]
    config = changed(small, mlp_only_layers=[1])
    assert small.bridge.megatron(config)["num_moe_experts"] is None
    assert not any(entry.expert >= 0 for entry in small.bridge.entries(config))


def test_deepseek_chooses_groups_only_where_there_is_a_choice(models):
    small = models["deepseek_v3"]
    fields = small.bridge.megatron(small.config)
    assert (fields["moe_layer_freq"], fields["moe_shared_expert_intermediate_size"]) == ([0, 1, 1], 32)
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (2, 1)
    everywhere = small.bridge.megatron(changed(small, topk_group=2))
    assert (everywhere["moe_router_num_groups"], everywhere["moe_router_group_topk"]) == (None, None)


def test_latent_attention_with_and_without_yarn(models):
    keys = ("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
    small, plain = models["deepseek_v3"], models["deepseek_v3-halves"]
    fields = small.bridge.megatron(small.config)
    assert tuple(fields[key] for key in keys) == ("yarn", 4.0, 4096, 1.0, 1.0)
    fields = plain.bridge.megatron(plain.config)
    assert tuple(fields[key] for key in keys) == ("rope", 1.0, 16384, 1.0, 0.0)
    assert (fields["qk_head_dim"], fields["qk_pos_emb_head_dim"], fields["v_head_dim"]) == (8, 8, 6)


def test_yarn_whose_magnitude_has_one_part_only_is_as_transformers_reads_it(models):
    small = models["deepseek_v3"]
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 0.7}
    fields = small.bridge.megatron(changed(small, rope_parameters=settings))
    assert (fields["mscale"], fields["mscale_all_dim"]) == (1.0, 0.0)


def test_halves_are_turned_into_pairs_and_pairs_are_left():
    bridge = BRIDGES["deepseek_v3"]
    kinds = {
        (row.kind, row.when.endswith("not rope_interleave")) for row in bridge.rows if "rope_interleave" in row.when
    }
    assert kinds == {("rows", False), ("rope_heads", True), ("rope_tail", True)}


def test_rotary_settings_are_read_in_both_ways_they_are_written():
    old = SimpleNamespace(rope_theta=1e6, rope_scaling={"type": "llama3", "factor": 8.0})
    new = SimpleNamespace(rope_parameters={"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0})
    for config in (old, new):
        found = rope(config)
        assert (found["rope_type"], found["rope_theta"], found["factor"]) == ("llama3", 1e6, 8.0)
    assert rotary_base(SimpleNamespace()) == 10000
    assert (rotary_base(old), type(rotary_base(old))) == (1000000, int)
    assert rotary_base(SimpleNamespace(rope_theta=1234.5)) == 1234.5


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding_window = 8"),
        ("mistral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window = 8"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob = True"),
        ("glm4", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "topk_group = 2"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts = 0"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "attention_factor": 1.1}}, "attention_factor = 1.1"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "truncate": False}}, "truncate = False"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, "mscale = None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_the_layers_cannot_express_is_refused_by_name_and_value(models, name, values, field):
    small = models[name]
    small.bridge.megatron(changed(small))  # fine as it was
    with pytest.raises(DataError) as error:
        small.bridge.entries(changed(small, **values))
    assert error.value.code == "TOK200"
    assert f"config.json has {field}" in error.value.what
    assert "fsdp" in error.value.fix


def test_a_config_without_a_size_is_refused(models):
    config = changed(models["qwen3"])
    del config.intermediate_size
    with pytest.raises(DataError, match="has no intermediate_size") as error:
        models["qwen3"].bridge.megatron(config)
    assert error.value.code == "TOK00"


def test_every_field_is_one_of_megatron_core_s():
    """Read from its source, so that it is not imported."""
    folders = [Path(folder) / "core" for folder in PathFinder.find_spec("megatron").submodule_search_locations]
    core = next(folder for folder in folders if (folder / "models").is_dir())
    known = set(_arguments(core / "models" / "gpt" / "gpt_model.py", "GPTModel"))
    for file, name in (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("transformer/transformer_config.py", "MLATransformerConfig"),
    ):
        known |= {item.target.id for item in _class(core / file, name).body if isinstance(item, ast.AnnAssign)}
    for bridge in BRIDGES.values():
        assert set(bridge.fields) - known == set(), bridge.family


def _class(file, name):
    return next(n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)


def _arguments(file, name):
    init = next(n for n in _class(file, name).body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return [argument.arg for argument in init.args.args]
