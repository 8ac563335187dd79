"""A bridge's fields, [megatron] and [train] as megatron-core's configs; what disagrees with config.json is named."""

import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from slime_convert.bridge import Bridge, Given
from slime_core.config.load import load_config
from slime_core.config.problems import Origins
from slime_core.errors import ConfigError
from slime_megatron.others import ModelContext, settings_of
from slime_megatron.settings import build, settings
from slime_megatron.smaller import smaller

pytestmark = pytest.mark.unit

FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": lambda config: config.head_dim,
    "layernorm_epsilon": "rms_norm_eps",
    "normalization": Given("RMSNorm"),
    "gated_linear_unit": Given(True),
    "activation_func": "hidden_act",
    "add_bias_linear": Given(False),
    "qk_layernorm": Given(True),
    "rotary_base": lambda config: config.rope_parameters["rope_theta"],
    "max_sequence_length": "max_position_embeddings",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}
EXPERTS = {
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
    "moe_layer_freq": lambda config: [0] + [1] * (config.num_hidden_layers - 1),
}
LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rope_type": Given("rope"),
}
GROUP_FLAG = "microbatch_group_size_per_virtual_pipeline_stage"
BRIDGE = Bridge(family="tiny", rows=(), fields=FIELDS)
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e6},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MODEL_ARGS = {
    "swiglu": True,
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "use_rotary_position_embeddings": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "rotary_base": 1000000,
    "vocab_size": 300,
    "kv_channels": 8,
    "qk_layernorm": True,
    "max_position_embeddings": 4096,
}


def train(*flags):
    return load_config(None, ["--dtype", "float32", *flags]).train


def made(table=(), *flags, bridge=BRIDGE, world=1, device="cpu", origins=None, **config):
    found = SimpleNamespace(**{**CONFIG, **config})
    return settings(bridge, found, dict(table), train(*flags), world, device, origins=origins)


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        made(*args, **options)
    return caught.value


def built(found):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core  # noqa: F401 its own imports warn
        from megatron.core.optimizer import OptimizerConfig  # noqa: F401
    return build(found)


def test_a_dense_model_comes_from_its_config_and_what_slime_fixes():
    found = made({"tensor_model_parallel_size": 2}, "--lr", "3e-6", "--weight-decay", "0.1", world=4)
    config = built(found).transformer
    assert (config.num_layers, config.hidden_size, config.num_query_groups, config.kv_channels) == (4, 32, 4, 8)
    assert config.activation_func is torch.nn.functional.silu
    assert (config.params_dtype, config.pipeline_dtype, config.bf16) == (torch.float32, torch.float32, False)
    assert (config.hidden_dropout, config.attention_dropout, config.calculate_per_token_loss) == (0.0, 0.0, True)
    assert (config.sequence_parallel, config.transformer_impl) == (True, "local")
    off = ("batch_p2p_comm", "persist_layer_norm", "masked_softmax_fusion", "gradient_accumulation_fusion")
    assert not any(getattr(config, name) for name in (*off, "apply_rope_fusion", "deallocate_pipeline_outputs"))
    assert config.use_cpu_initialization
    assert found.model == {
        "max_sequence_length": 4096,
        "position_embedding_type": "rope",
        "rotary_base": 1e6,
        "share_embeddings_and_output_weights": True,
        "vocab_size": 512,
    }
    assert (found.vocabulary_multiple, found.sizes.padded_vocab, found.layout.dp) == (256, 512, 2)
    assert (found.optimizer["lr"], found.optimizer["weight_decay"], found.optimizer["adam_beta2"]) == (3e-6, 0.1, 0.98)
    assert built(found).optimizer.use_distributed_optimizer
    assert (built(found).ddp.use_distributed_optimizer, built(found).ddp.grad_reduce_in_fp32) == (True, True)


def test_settings_travel_to_ranks():
    found = made({"recompute_granularity": "full"})
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301 our own


def test_bfloat16_is_computed_in_and_masters_stay_float32():
    found = built(made({"bf16": True}, "--dtype", "bfloat16", device="cuda"))
    assert (found.transformer.bf16, found.transformer.params_dtype) == (True, torch.bfloat16)
    assert (found.optimizer.bf16, found.optimizer.params_dtype) == (True, torch.bfloat16)
    assert found.optimizer.main_params_dtype == torch.float32
    assert found.transformer.bias_activation_fusion


def test_model_args_that_agree_change_nothing():
    assert made(MODEL_ARGS) == made()


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        pytest.param("num_layers", 5, "where num_layers is 4 | config.json: num_hidden_layers = 4", id="layers"),
        pytest.param("kv_channels", 16, "where kv_channels is 8 | config.json: head_dim = 8", id="a-function"),
        pytest.param("rotary_base", 10000, "rotary_base is 1000000.0 | config.json: rope_parameters =", id="nested"),
        pytest.param("norm_epsilon", 1e-5, "norm_epsilon is 1e-06 | config.json: rms_norm_eps = 1e-06", id="epsilon"),
        pytest.param("vocab_size", 320, "vocab_size is 300 | config.json: vocab_size = 300", id="vocabulary"),
        pytest.param("normalization", "LayerNorm", 'is "RMSNorm" | every tiny model has it so', id="given"),
        pytest.param("add_qkv_bias", True, "add_qkv_bias is false | no tiny model has it", id="absent"),
        pytest.param("swiglu", False, "gated_linear_unit is true | every tiny model has it so", id="not-swiglu"),
        pytest.param("disable_bias_linear", False, "add_bias_linear is false | every tiny", id="a-bias"),
        pytest.param("squared_relu", True, 'activation_func is "silu" | config.json: hidden_act', id="activation"),
        pytest.param("num_experts", 8, "num_experts is not set | no tiny model has it", id="experts"),
        pytest.param("multi_latent_attention", True, "is false | no tiny model has it", id="latent"),
        pytest.param("post_mlp_layernorm", True, "sandwich is false | no tiny model has it", id="sandwich"),
        pytest.param("position_embedding_type", "none", 'is "rope" | no tiny model has it', id="positions"),
        pytest.param("window_size", [128, 0], "window_size is not set | no tiny", id="window"),
        pytest.param(
            "max_position_embeddings", 8192, "is 4096 | config.json: max_position_embeddings", id="positions"
        ),
        pytest.param(
            "untie_embeddings_and_output_weights",
            True,
            "share_embeddings_and_output_weights is true | config.json: tie_word_embeddings = true",
            id="untied",
        ),
    ],
)
def test_a_flag_that_disagrees_is_refused_with_both_values_and_the_attribute(flag, value, says):
    error = refused(MODEL_ARGS | {flag: value})
    dashed = f"--{flag.replace('_', '-')} "
    first, second = says.split(" | ")
    assert error.code == "CFG04"
    assert error.where == f"megatron.{flag}"
    assert error.what.startswith(dashed)
    assert first in error.what
    assert second in error.why
    assert error.fix.splitlines() == [
        f"leave {dashed}out: the model is that of config.json",
        "or name another folder: --hf-checkpoint DIR",
    ]


def test_all_disagreements_stand_in_one_message_with_their_places():
    origins = Origins({("megatron", "num_layers"): "recipe.toml:7", ("megatron", "rotary_base"): "command line"})
    error = refused({"num_layers": 3, "rotary_base": 5e5, "hidden_size": 64}, origins=origins)
    assert error.what == "3 problems in the configuration"
    assert error.where == "recipe.toml:7, command line, megatron.hidden_size"
    assert "--num-layers 3" in error.why
    assert "--rotary-base 500000.0" in error.why
    assert "1, 2, 3. or name another folder: --hf-checkpoint DIR" in error.fix.splitlines()
    assert "--hidden-size 64" in error.why


@pytest.mark.parametrize(
    "freq", [[0, 1, 1, 1], "[0, 1, 1, 1]", "[0]*1+[1]*3", "([0]+[1]*3)"], ids=["list", "text", "sum", "brackets"]
)
def test_layers_with_experts_are_read_however_they_are_written(freq):
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, **EXPERTS})
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    found = made({"moe_layer_freq": freq, "num_experts": 8, "moe_router_topk": 2}, bridge=bridge, **sizes)
    assert found.sizes.moe_layers == {1, 2, 3}
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        made({"moe_layer_freq": [1, 1, 1, 1]}, bridge=bridge, **sizes)


@pytest.mark.parametrize("freq", ["[1]*99999999999", "__import__('os')", "[1]*[1]", "1/0", "[" * 99, -1, 0])
def test_a_pattern_of_layers_that_is_none_is_a_disagreement(freq):
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, **EXPERTS})
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    assert "--moe-layer-freq" in refused({"moe_layer_freq": freq}, bridge=bridge, **sizes).what


def test_experts_have_a_dispatcher_for_packs_and_a_router_in_float32():
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, **EXPERTS})
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    table = {"expert_model_parallel_size": 2, "moe_grouped_gemm": True, "moe_permute_fusion": True}
    found = made(table, bridge=bridge, world=2, **sizes)
    config = built(found).transformer
    assert (config.moe_token_dispatcher_type, config.moe_router_dtype) == ("alltoall", "fp32")
    assert (config.moe_grouped_gemm, config.moe_permute_fusion, config.moe_router_load_balancing_type) == (
        True,
        False,
        "none",
    )
    assert (config.moe_aux_loss_coeff, config.expert_model_parallel_size) == (0.0, 2)
    assert [text.split(" has")[0] for text in found.notices] == ["--moe-permute-fusion"]
    error = refused({"tensor_model_parallel_size": 2, "sequence_parallel": False}, bridge=bridge, world=2, **sizes)
    assert "no sequence_parallel" in error.what
    assert error.fix == "--sequence-parallel"


@pytest.mark.parametrize(
    ("device", "dtype", "table", "width", "grouped"),
    [
        ("cuda", "bfloat16", {}, 16, True),
        ("cuda", "bfloat16", {"moe_grouped_gemm": False}, 16, False),
        ("cuda", "float32", {}, 16, False),
        ("cpu", "float32", {}, 16, False),
        ("cuda", "bfloat16", {}, 12, False),  # torch's product takes rows of 16 bytes
        ("cuda", "bfloat16", {"tensor_model_parallel_size": 4}, 16, False),
        ("cuda", "bfloat16", {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, 16, True),
        ("cpu", "float32", {"moe_grouped_gemm": True}, 12, True),
    ],
)
def test_experts_are_one_product_where_that_is_faster_and_fits(device, dtype, table, width, grouped):
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, **EXPERTS})
    sizes = {"num_experts": 8, "moe_intermediate_size": width, "num_experts_per_tok": 2}
    found = made(table, "--dtype", dtype, bridge=bridge, world=4, device=device, **sizes)
    assert found.transformer["moe_grouped_gemm"] is grouped
    assert found.notices == ()


def test_one_product_for_experts_that_it_cannot_multiply_is_refused():
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, **EXPERTS})
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
    table = {"moe_grouped_gemm": True, "tensor_model_parallel_size": 4}
    error = refused(table, "--dtype", "bfloat16", bridge=bridge, world=4, device="cuda", **sizes)
    assert error.code == "CFG04"
    assert error.why == "rows of 8 bfloat16 numbers go together, and an expert's width on a rank is 4"
    assert error.fix.endswith("\nor --expert-tensor-parallel-size 1")
    odd = refused({"moe_grouped_gemm": True}, bridge=bridge, **{**sizes, "hidden_size": 30})
    assert odd.why == "rows of 4 float32 numbers go together, and hidden_size is 30"
    assert "expert-tensor" not in odd.fix


def test_latent_attention_takes_its_own_config():
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, **LATENT}, attention="mla")
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    table = {"multi_latent_attention": True, "v_head_dim": 6, "kv_channels": 128, "mscale": 1.0, "rotary_base": 1e6}
    found = made(table | {"rotary_scaling_factor": 1}, bridge=bridge, **sizes)
    config = built(found).transformer
    assert type(config).__name__ == "MLATransformerConfig"
    assert (config.kv_lora_rank, config.v_head_dim, config.rotary_base, config.rope_type) == (20, 6, 1e6, "rope")


@pytest.mark.parametrize(
    ("table", "flags", "fields"),
    [
        pytest.param({"recompute_granularity": "full"}, (), ("full", "uniform", 1), id="full"),
        pytest.param({}, ("--gradient-checkpointing",), ("full", "uniform", 1), id="gradient-checkpointing"),
        pytest.param(
            {}, ("--gradient-checkpointing", "--gradient-checkpointing-layers", "3"), ("full", "block", 3), id="some"
        ),
        pytest.param({"recompute_activations": True}, (), ("selective", None, None), id="selective"),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            (),
            ("full", "block", 2),
            id="block",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:If you are using transformer_engine")
def test_recomputation(table, flags, fields):
    config = built(made(table, *flags)).transformer
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == fields


@pytest.mark.parametrize(
    ("unit", "table", "world", "works"),
    [
        (7, {}, 1, "1, 2, 4"),
        (3, {}, 1, "1, 2, 4"),
        (0, {}, 1, "1, 2, 4"),
        (-1, {}, 1, "1, 2, 4"),
        (4, {"pipeline_model_parallel_size": 2}, 2, "1, 2"),
        (2, {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}, 2, "1"),
    ],
    ids=["too many", "uneven", "none", "negative", "a stage", "uneven stages"],
)
def test_units_that_a_stage_is_no_multiple_of_are_refused(unit, table, world, works):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": unit, **table}
    error = refused(full, world=world)
    assert f"recompute_num_layers = {unit} does not divide" in error.what
    assert error.fix == f"one of {works}\nor --recompute-method block"
    made({**full, "recompute_num_layers": 1}, world=world)
    made({**full, "recompute_method": "block"}, world=world)


def test_an_optimizer_in_main_memory_is_there_whole_unless_told():
    whole = made({"optimizer_cpu_offload": True}, device="cuda").optimizer
    assert (whole["optimizer_cpu_offload"], whole["optimizer_offload_fraction"]) == (True, 1.0)
    half = made({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, device="cuda").optimizer
    assert half["optimizer_offload_fraction"] == 0.5
    error = refused({"optimizer_cpu_offload": True})
    assert error.what == "megatron.optimizer_cpu_offload has nothing to offload"
    assert error.fix == "leave --optimizer-cpu-offload out"


def test_settings_of_another_model_leave_out_what_describes_the_policy():
    table = {"hidden_size": CONFIG["hidden_size"], "decoder_first_pipeline_num_layers": 1,
             "pipeline_model_parallel_size": 2, "recompute_granularity": "full"}  # fmt: skip
    teacher = SimpleNamespace(config=SimpleNamespace(**{**CONFIG, "num_hidden_layers": 6, "hidden_size": 64}))
    run = ModelContext(table, train(), 2, torch.device("cpu"), CONFIG["num_hidden_layers"], lambda config: BRIDGE)
    found = settings_of(teacher, BRIDGE, run)
    assert found.transformer["hidden_size"] == 64
    assert found.transformer["recompute_granularity"] == "full"
    assert (found.layout.pp, found.layout.first, found.layout.stages(6)) == (2, None, [3, 3])
    assert made(table, world=2).layout.first == 1


def test_settings_that_make_passes_smaller_are_those_that_the_layout_allows():
    wide = smaller(made({"recompute_granularity": "selective", "context_parallel_size": 2}, world=4))
    assert wide[:3] == [
        "megatron.recompute_granularity=full   (it is selective)",
        "megatron.context_parallel_size=4   (it is 2)",
        "megatron.tensor_model_parallel_size=2   (it is 1)",
    ]
    assert smaller(made({"recompute_granularity": "full"})) == ["megatron.optimizer_cpu_offload=true"]


@pytest.mark.parametrize("flag", ["use_precision_aware_optimizer", "cpu_offloading", "use_te_activation_func"])
def test_a_flag_whose_library_is_missing_is_refused(flag):
    error = refused({flag: True})
    assert error.what == f"megatron.{flag} needs transformer_engine, which cannot be used here"
    assert error.fix == f"install transformer_engine, or leave {flag} out"


def test_pipelines_exchange_sequences_of_different_lengths():
    found = made({"pipeline-model-parallel-size": 2, "decoder_last_pipeline_num_layers": 1}, world=2)
    config = built(found).transformer
    assert (config.variable_seq_lengths, config.num_layers_in_last_pipeline_stage) == (True, 1)
    assert found.layout.stages(4) == [3, 1]


def test_interleaved_pipelines_overlap_and_take_micro_batches_in_groups():
    flags = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    plain, grouped = made(flags, world=2), made({**flags, GROUP_FLAG: 3}, world=2)
    assert (plain.layout.vp, plain.pack_multiple, grouped.pack_multiple) == (2, 2, 3)
    config, other = built(plain).transformer, built(grouped).transformer
    assert (config.virtual_pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage) == (2, 2)
    assert (config.overlap_p2p_comm, other.microbatch_group_size_per_vp_stage) == (True, 3)
    assert made(world=2).pack_multiple == made({"pipeline_model_parallel_size": 2}, world=2).pack_multiple == 1
    error = refused({**flags, GROUP_FLAG: 1}, world=2)
    assert (error.code, error.fix) == ("CFG03", f"set {GROUP_FLAG} to an integer >= 2")


def test_a_pattern_of_chunks_reaches_megatron_core():
    found = made({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|tL"}, world=2)
    assert built(found).transformer.pipeline_model_parallel_layout.virtual_pipeline_model_parallel_size == 2


def test_the_vocabulary_is_filled_to_a_multiple_that_ranks_divide():
    found = made({"make_vocab_size_divisible_by": 10, "tensor_model_parallel_size": 4}, world=4)
    assert (found.vocabulary_multiple, found.sizes.padded_vocab) == (40, 320)


def test_settings_that_megatron_refuses_are_a_config_error():
    table = {"recompute_granularity": "full", "distribute_saved_activations": True, "tensor_model_parallel_size": 2}
    found = made(table, world=2)
    with pytest.raises(
        ConfigError, match="megatron-core refuses the settings: distribute_saved_activations"
    ) as caught:
        built(found)
    assert caught.value.code == "CFG04"


def test_a_field_that_the_installed_megatron_has_not_is_named():
    bridge = Bridge(family="tiny", rows=(), fields={**FIELDS, "of_tomorrow": Given(1)})
    with pytest.raises(ConfigError, match=r"no TransformerConfig\.of_tomorrow"):
        built(made(bridge=bridge))


def test_unknown_and_refused_names_stand_in_one_message():
    error = refused({"swiglo": True, "fp16": True, "num_layers": 9})
    assert error.what == "2 problems in the configuration"
    assert "megatron.swiglo" in error.why
    assert "--fp16" in error.why
