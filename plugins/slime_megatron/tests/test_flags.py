"""The table of flags against the installed megatron-core: what a row sets is there, what no row reaches has a reason."""

import dataclasses
import inspect
import subprocess
import sys
import typing
import warnings

import pytest

from slime_core.config.fields import core_keys
from slime_core.config.load import load_config
from slime_megatron.agreement import DEFAULTS
from slime_megatron.flags import flags, problems, values
from slime_megatron.flags_elsewhere import IDLE, ONLY, REFUSED
from slime_megatron.flags_of_model import MODEL
from slime_megatron.flags_of_run import RUN
from slime_megatron.layout import Layout

pytestmark = pytest.mark.unit

UNREACHED = {
    "functions that the trainer or a hook sets": "timers finalize_model_grads_func grad_scale_func no_sync_func "
    "grad_sync_func param_sync_func init_method output_layer_init_method embedding_init_method quant_recipe",
    "slime chooses by device and layout": "pipeline_dtype batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs "
    "pipeline_model_parallel_comm_backend use_ring_exchange_p2p perform_initialization masked_softmax_fusion "
    "persist_layer_norm apply_rope_fusion fused_single_qkv_rope clone_scatter_output_in_embedding",
    "the layout sets them": "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "[train] sets them": "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad moe_router_bias_update_rate",
    "another name is refused": "use_te_rng_tracker overlap_p2p_comm_warmup_flush fp4_param fp8_param fp8_wgrad "
    "muon_split_qkv average_in_collective gradient_reduce_div_fusion nccl_ub "
    "use_kitchen use_kitchen_attention kitchen_attention_backend heterogeneous_block_specs",
    "parts of what is refused": "fp8_quantizer_factory fp8_dot_product_attention fp8_multi_head_attention "
    "tp_only_amax_red num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_quantizer_factory mtp_standalone "
    "preserve_fp32_weights hetereogenous_dist_checkpoint store_param_remainders",
    "slime checks it itself": "check_for_nan_in_grad",
    "inference, which SGLang does": "flash_decode inference_rng_tracker inference_sampling_seed "
    "use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents",
    "Mamba": "is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path",
    "losses of sparse attention, which no bridge has": "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
    "an activation that no bridge has": "use_fused_weighted_squared_relu",
    "debugging and timing of megatron.training": "test_mode barrier_with_L1_time config_logger_dir "
    "log_num_zeros_in_grad",
    "megatron-core ignores it": "async_tensor_model_parallel_allreduce _cpu_offloading_context",
    "arguments that the model is built with": "self config transformer_layer_spec pre_process post_process "
    "parallel_output scatter_embedding_sequence_parallel mtp_block_spec pg_collection vp_stage",
}
SHARED = {"use_distributed_optimizer", "overlap_param_gather"}
LISTED = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "recompute_modules", "offload_modules")


@pytest.fixture(scope="module")
def installed():
    """Config name -> field -> dataclass field (None for arguments of GPTModel)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import MLATransformerConfig
    kinds = {"transformer": MLATransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    found = {name: {f.name: f for f in dataclasses.fields(kind)} for name, kind in kinds.items()}
    return found | {"model": dict.fromkeys(inspect.signature(GPTModel.__init__).parameters)}


def paths():
    return sorted({path for flag in flags().values() for path in flag.sets})


@pytest.mark.parametrize("path", paths())
def test_every_flag_sets_a_field_that_exists(installed, path):
    config, _, name = path.partition(".")
    own = {
        "layout": {field.name for field in dataclasses.fields(Layout)} | {"sequence", "of_chunk"},
        "vocabulary": {"multiple"},
        "bridge": {"sandwich", "layers_ahead"},
        "ahead": {"is_trained", "weight"},
    }
    assert name in (own | installed)[config]


def test_every_field_is_reached_or_has_a_reason(installed):
    reasons = [name for names in UNREACHED.values() for name in names.split()]
    assert len(reasons) == len(set(reasons))
    fields = {name for config in installed.values() for name in config}
    reached = {path.partition(".")[2] for path in paths()} | set(flags())
    assert sorted(fields - reached - set(reasons)) == []
    assert sorted(set(reasons) - fields) == [], "reasons for fields that are gone"
    assert sorted(set(reasons) & {path.partition(".")[2] for path in paths()}) == [], "reached after all"


def test_a_field_goes_by_megatrons_own_name_for_it(installed):
    named = {
        name: argument.removeprefix("--").replace("-", "_")
        for config in installed.values()
        for name, field in config.items()
        if field is not None
        for argument in field.metadata.get("argparse_meta", {}).get("arg_names", ())
    }
    assert named["layernorm_epsilon"] == "norm_epsilon"
    assert {name for name, argument in named.items() if argument not in flags()} == {"use_mamba_mem_eff_path"}


def test_choices_are_those_of_the_field(installed):
    compared = 0
    for flag in (*MODEL, *RUN):
        for path in flag.sets if flag.choices else ():
            config, _, name = path.partition(".")
            field = installed.get(config, {}).get(name)
            literal = field and next((a for a in (field.type, *typing.get_args(field.type)) if _literal(a)), None)
            if literal:
                compared += 1
                assert set(flag.choices) <= set(typing.get_args(literal)), flag.name
    assert compared >= 7


def _literal(annotation):
    return typing.get_origin(annotation) is typing.Literal


def test_types_are_those_of_the_field(installed):
    plain = {int: (int,), float: (float, int), str: (str,), bool: (bool,)}
    for flag in (*MODEL, *RUN):
        for path, meant in flag.sets.items():
            config, _, name = path.partition(".")
            field = installed.get(config, {}).get(name)
            wanted = field and {a for a in (field.type, *typing.get_args(field.type)) if a in plain}
            if wanted and meant is None and flag.kind is not list and flag.name not in LISTED:
                assert any(flag.kind in plain[one] or one in plain[flag.kind] for one in wanted), flag.name


def test_no_name_stands_in_two_tables():
    names = [flag.name for table in (MODEL, RUN, ONLY, IDLE, REFUSED) for flag in table]
    assert len(names) == len(set(names))


def test_a_name_that_the_core_has_is_not_megatrons_too():
    shared = {"train_backend", "context_parallel_size", "optimizer"}  # one value for both
    assert set(flags()) & set(core_keys()) == shared


def test_a_shared_name_is_set_once_and_goes_to_all():
    both = {flag.name for flag in RUN if {path.partition(".")[0] for path in flag.sets} == {"ddp", "optimizer"}}
    assert both == SHARED
    found = values({"use_distributed_optimizer": False})
    assert (found.ddp, found.optimizer) == ({"use_distributed_optimizer": False},) * 2


def test_a_field_that_a_bridge_leaves_out_has_megatrons_default(installed):
    from megatron.core.transformer import TransformerConfig

    plain = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    of_model = {"position_embedding_type", "rope_scaling_factor"}
    for name in set(DEFAULTS) - of_model:
        default = (installed["transformer"] | plain)[name].default
        assert DEFAULTS[name] == getattr(default, "__name__", default), name


def test_names_and_types_load_no_torch_and_no_megatron():
    code = (
        "import sys; from slime_megatron.flags import kinds, problems; kinds(); problems({'swiglu': True})\n"
        "print([name for name in ('torch', 'numpy', 'megatron', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("table", "code", "what", "fix"),
    [
        pytest.param({"swiglo": True}, "CFG01", "unknown key 'megatron.swiglo'", "megatron.swiglu", id="unknown"),
        pytest.param({"lr": 1e-6}, "CFG01", "unknown key 'megatron.lr'", "it is train.lr", id="of-train"),
        pytest.param({"clip_grad": 1.0}, "CFG01", "megatron.clip_grad", "it is train.clip_grad", id="clip"),
        pytest.param({"num_layers": "28"}, "CFG02", 'megatron.num_layers = "28"', "an integer", id="text"),
        pytest.param({"num_layers": True}, "CFG02", "megatron.num_layers = true", "an integer", id="bool"),
        pytest.param({"swiglu": 1}, "CFG02", "megatron.swiglu = 1", "true or false", id="number"),
        pytest.param({"rotary_base": "x"}, "CFG02", "megatron.rotary_base", "a number", id="no-number"),
        pytest.param({"recompute_granularity": "ful"}, "CFG03", "out of range", "did you mean 'full'", id="choice"),
        pytest.param({"recompute_modules": ["mlp", "x"]}, "CFG03", "out of range", "core_attn", id="choice-of-many"),
        pytest.param({"hidden_dropout": 0.1}, "CFG04", "hidden_dropout = 0.1", "it may be 0", id="dropout"),
        pytest.param({"attention_backend": "unfused"}, "CFG03", "unfused", '"auto", "flash"', id="unfused"),
        pytest.param({"optimizer": "sgd"}, "CFG04", "sgd", "adam", id="sgd"),
        pytest.param({"micro_batch_size": 1}, "CFG04", "--micro-batch-size", "--max-tokens-per-gpu", id="micro"),
        pytest.param({"train_iters": 5}, "CFG04", "--train-iters", "--num-rollout", id="iters"),
        pytest.param({"data_path": "x"}, "CFG04", "--data-path", "--prompt-data", id="data"),
        pytest.param({"fp16": True}, "CFG04", "--fp16", "--dtype bfloat16", id="fp16"),
        pytest.param({"fp8_format": "e4m3"}, "CFG04", "--fp8-format", "--dtype bfloat16", id="fp8"),
        pytest.param({"moe_token_dispatcher_type": "allgather"}, "CFG03", "allgather", "alltoall", id="allgather"),
        pytest.param(
            {"virtual_pipeline_model_parallel_size": 2}, "CFG04", "virtual", "--num-virtual-stages", id="old-name"
        ),
        pytest.param({"save": "x"}, "CFG04", "--save cannot", "--resume", id="save"),
        pytest.param({"use-distributed-optimizer": 3}, "CFG02", "use_distributed_optimizer", "true", id="dashes"),
    ],
)
def test_a_bad_name_or_value_is_refused_with_what_replaces_it(table, code, what, fix):
    (problem,) = problems(table)
    assert problem.code == code
    assert what in problem.what
    assert fix in problem.fix
    assert problem.keys == (("megatron", next(iter(table)).replace("-", "_")),)


def test_bf16_must_be_what_train_says():
    train = load_config(None, ["--dtype", "float32"]).train
    assert [problem.what for problem in problems({"bf16": True}, train=train)] == ["megatron.bf16 = true"]
    assert problems({"bf16": True}, train=train.model_copy(update={"dtype": "bfloat16"})) == []
    assert problems({"bf16": True}, train=train.model_copy(update={"dtype": "auto"})) == []


@pytest.mark.parametrize("flag", [pytest.param(flag, id=flag.name) for flag in REFUSED])
def test_every_refusal_says_why_and_what_instead(flag):
    reason, mark, instead = flag.text.partition("; ")
    assert mark == "; "
    assert min(len(reason), len(instead)) > 5


def test_a_flag_that_does_no_harm_is_accepted_with_a_notice():
    table = {"use_flash_attn": True, "spec": ["slime_plugins.models.glm4", "get_glm_spec"], "seq_length": 4096}
    assert problems(table) == []
    assert [text.split(" has no effect")[0] for text in values(table).notices] == [
        "--use-flash-attn",
        "--spec",
        "--seq-length",
    ]


def test_words_of_a_command_line_are_known_by_the_type_of_a_flag():
    config = load_config(
        None,
        [
            *("--swiglu", "--num-layers", "28", "--no-rope-fusion", "--spec", "a", "b", "--rotary-base", "1000000"),
            *("--moe-layer-freq", "[0, 1]", "--no-sequence-parallel", "--norm-epsilon", "1e-6"),
            *("--qk-layernorm", "true"),
        ],
    )
    assert config.table("megatron") == {
        "swiglu": True,
        "num_layers": 28,
        "no_rope_fusion": True,
        "spec": ["a", "b"],
        "rotary_base": 1e6,
        "moe_layer_freq": [0, 1],
        "sequence_parallel": False,
        "norm_epsilon": 1e-6,
        "qk_layernorm": True,
    }
