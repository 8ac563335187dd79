"""What megatron-core's configs are made of: a bridge, the model's config, [megatron] and [train].

    config.json --bridge--> the model  --- flags that describe it must agree
    [megatron]  --flags---> the run        defaults here, then flags, then what slime fixes
    [train]                 dtype, learning rate, clipping

`settings` is arithmetic over plain values and imports no megatron; `build` makes the config objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields as fields_of, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from slime_core.config.problems import Problem, dotted, raise_all
from slime_core.errors import ConfigError, install_line
from slime_core.lora.spec import DEFAULT, LoraSpec
from slime_core.weights.prediction_layers import layers
from slime_megatron import layout as layouts
from slime_megatron.agreement import disagreements
from slime_megatron.flags import Values, problems, values
from slime_megatron.layout import Layout
from slime_megatron.missing import IMPLIED, OFFLOAD, installed, missing, unused

if TYPE_CHECKING:
    from slime_convert.bridge import Bridge, Sizes
    from slime_core.config.problems import Origins
    from slime_core.config.sections.train import TrainSection
    from slime_core.trainers.compiling import Choice

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's default of make_vocab_size_divisible_by."""

GPT_FIELDS = frozenset(
    {
        "position_embedding_type",
        "rotary_percent",
        "rotary_base",
        "rope_scaling",
        "rope_scaling_factor",
        "max_sequence_length",
        "share_embeddings_and_output_weights",
        "seq_len_interpolation_factor",
    }
)
"""Arguments of GPTModel that a bridge may give; all other fields of a bridge are the config's."""
MLA_OWN = frozenset({"rotary_percent", "rotary_base"})
"""Of these, what MLATransformerConfig has as a field of its own."""


AHEAD_WEIGHT = 0.2
"""slime's default of mtp_loss_scaling_factor."""
KERNELS = ("moe_permute_fusion", "moe_router_fusion")
"""Fields that make experts faster where Transformer Engine is."""
GROUP = "microbatch_group_size_per_vp_stage"
ALIGNED = 16  # bytes: what torch's grouped product wants rows of matrices to be a multiple of


@dataclass(slots=True, frozen=True, kw_only=True)
class MegatronSettings:
    """Everything that a rank makes its model and its optimizer of: plain values, the same on every rank.

    Types are names here (``params_dtype: "bfloat16"``, ``activation_func: "silu"``); `build` looks them up.

    Example:
        made = settings(bridge, folder.config, config.table("megatron"), config.train, world=8, device="cuda")
        configs = build(made)
        model = PackedGPT(configs.transformer, bridge, vocab=made.sizes.vocab, **made.model)
    """

    layout: Layout
    sizes: Sizes
    mla: bool
    transformer: Mapping[str, Any]  # fields of TransformerConfig or MLATransformerConfig
    model: Mapping[str, Any]  # arguments of GPTModel: vocab_size, max_sequence_length, rotary_base ...
    ddp: Mapping[str, Any]  # fields of DistributedDataParallelConfig
    optimizer: Mapping[str, Any]  # fields of OptimizerConfig
    vocabulary_multiple: int  # rows of the vocabulary are filled up to one
    frozen_tower: bool = True  # train.freeze_vision_tower
    ahead: float = 0.0  # weight of the loss of the layer that predicts further ahead; 0 does without the layer
    compile: Choice = "auto"  # train.compile
    lora: LoraSpec | None = None  # of the policy's adapters; None trains the whole model
    adapters: tuple[str, ...] = (DEFAULT,)  # their names
    adapter_load: str = ""  # the folder that they start from
    base_weights: str = "auto"  # what their base is held in
    notices: tuple[str, ...] = ()

    @property
    def pack_multiple(self) -> int:
        """Of which the micro-batches of an optimizer step are a multiple: those that a chunk takes in a row."""
        return int(self.transformer.get(GROUP, self.layout.pp)) if self.layout.vp > 1 else 1


def settings(
    bridge: Bridge,
    hf_config: Any,
    megatron: Mapping[str, Any],
    train: TrainSection,
    world: int,
    device: str,
    *,
    origins: Origins | None = None,
) -> MegatronSettings:
    """What a run's model, data parallelism and optimizer are made of, everything about them checked.

    Args:
        bridge: of the model's family.
        hf_config: the config of its folder.
        megatron: the [megatron] table.
        train: the [train] section; ``dtype`` is settled.
        world: trainer ranks.
        device: ``cpu`` or ``cuda``.
        origins: where each flag was written, for messages.

    Raises:
        ConfigError: CFG01 to CFG04 flags that are unknown or mean nothing here, flags that disagree with the folder's
            config.json, a layout that ranks or model do not divide by; all of a kind in one message.
        DataError: TOK00 the config lacks an attribute.
    """
    megatron = {name.replace("-", "_"): value for name, value in megatron.items()}
    if train.context_parallel_size > 1:
        megatron.setdefault("context_parallel_size", train.context_parallel_size)
    _raise(problems(megatron, train=train), origins)
    model_fields = bridge.megatron(hf_config)
    layout = Layout.of(megatron, world, bridge.sizes(hf_config).layers)
    multiple = int(megatron.get("make_vocab_size_divisible_by", VOCABULARY_MULTIPLE)) * layout.tp
    sizes = bridge.sizes(hf_config, multiple)
    _raise(disagreements(megatron, bridge, hf_config, model_fields, sizes), origins)
    mla = bridge.attention == "mla"
    options = values(megatron)
    _raise(missing(options, device), origins)
    run, notices = _run(options.transformer, device)
    shared = _shared_sequence(megatron, layout)
    fields = {**model_fields, "multi_latent_attention": mla}
    layouts.check(layout, sizes, fields, sequence_parallel=shared, origins=origins)
    _raise([*_uneven_units(run, layout, sizes), *_small_group(run, layout)], origins)
    engine = _engine(device) and not train.lora_rank  # its layers would hide what adapters take
    unaligned = _unaligned(model_fields, layout, train) if sizes.experts and not engine else []
    _raise(unaligned if run.get("moe_grouped_gemm") else [], origins)
    if not sizes.experts:
        model_fields = {
            name: value for name, value in model_fields.items() if not name.startswith(("moe_", "num_moe"))
        }
    of_model = {name: value for name, value in model_fields.items() if name in GPT_FIELDS}
    of_config = {
        name: value for name, value in model_fields.items() if name not in GPT_FIELDS or (mla and name in MLA_OWN)
    }
    fixed = _fixed(layout, train, device, mla=mla, shared=shared)
    if run.get("fp32_residual_connection"):
        fixed["pipeline_dtype"] = "float32"  # what stages hand on
    defaults = _defaults(device, sizes, train, engine=engine, grouped=not unaligned)
    return MegatronSettings(
        layout=layout,
        sizes=sizes,
        mla=mla,
        transformer=_ordered(defaults | of_config | run | fixed),
        model=_ordered(_model_defaults(hf_config, sizes) | of_model | {"vocab_size": sizes.padded_vocab}),
        ddp=_ordered(_ddp_defaults() | options.ddp),
        optimizer=_ordered(_optimizer_defaults(options) | options.optimizer | _of_train(train)),
        vocabulary_multiple=multiple,
        frozen_tower=train.freeze_vision_tower,
        ahead=_ahead(options.ahead, bridge, hf_config, len(layout.chunks(sizes.layers)[-1]), origins),
        compile=train.compile,
        lora=LoraSpec.of(train),
        adapters=train.lora_adapters or (DEFAULT,),
        adapter_load=train.lora_load,
        base_weights=train.base_weights,
        notices=(*options.notices, *notices, *unused(options)),
    )


def _ahead(
    options: Mapping[str, Any], bridge: Bridge, hf_config: Any, last_chunk: int, origins: Origins | None
) -> float:
    """Weight of the loss of the layer that predicts further ahead; 0 where none is trained.

    Args:
        last_chunk: decoder layers beside the output matrix
    """
    if not options.get("is_trained"):
        return 0.0
    weight, reasons = float(options.get("weight", AHEAD_WEIGHT)), []
    if not bridge.ahead:
        reasons.append(f"the bridge of {bridge.family} has no rows for such a layer")
    elif layers(hf_config) != 1:
        reasons.append(
            f"one such layer is trained, and config.json has num_nextn_predict_layers = {layers(hf_config)}"
        )
    if not last_chunk:
        reasons.append("it is built like the layer before the output matrix, and the last chunk of layers is empty")
    if weight <= 0:
        reasons.append(f"it learns from its loss alone, and --mtp-loss-scaling-factor is {weight:g}")
    key = (("megatron", "enable_mtp_training"),)
    problems = [
        Problem(
            code="CFG04",
            what="the layer that predicts further ahead cannot be trained",
            keys=key,
            why=reason,
            fix="leave --enable-mtp-training out",
        )
        for reason in reasons[:1]
    ]
    _raise(problems, origins)
    return weight


def _raise(problems: list[Problem], origins: Origins | None) -> None:
    placed = [origins.place(problem) if origins else problem for problem in problems]
    raise_all([one if one.where else replace(one, where=", ".join(map(dotted, one.keys))) for one in placed])


def _run(options: Mapping[str, Any], device: str) -> tuple[dict[str, Any], list[str]]:
    """The run's fields with what they imply; kernels that are faster and not installed are left out with a notice."""
    options_now, notices = dict(options), []
    if options.get("recompute_granularity") == "full":
        options_now = {"recompute_method": "uniform", "recompute_num_layers": 1} | options_now
    if not _engine(device):
        for flag in KERNELS:
            if options_now.pop(flag, False):
                notices.append(f"--{flag.replace('_', '-')} has no effect: Transformer Engine is not there")
    return options_now, notices


def _uneven_units(run: Mapping[str, Any], layout: Layout, sizes: Sizes) -> list[Problem]:
    """A problem where a stage's layers are not whole units of those that are made again together."""
    if (run.get("recompute_granularity"), run.get("recompute_method")) != ("full", "uniform"):
        return []
    counts = sorted({len(chunk) for chunk in layout.chunks(sizes.layers)} - {0})
    unit, whole = run["recompute_num_layers"], gcd(*counts)
    if unit > 0 and whole % unit == 0:
        return []
    chunks = "stages" if layout.vp == 1 else "their chunks"
    works = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
    return [
        Problem(
            code="CFG04",
            what=f"megatron.recompute_num_layers = {unit} does not divide the layers of a pipeline stage",
            keys=(("megatron", "recompute_num_layers"),),
            why=f"uniform recomputes whole units of layers, and {chunks} have {' or '.join(map(str, counts))}",
            fix=f"one of {works}\nor --recompute-method block",
        )
    ]


def _small_group(run: Mapping[str, Any], layout: Layout) -> list[Problem]:
    """A problem where a chunk would wait for micro-batches that the stages behind it still have."""
    size = run.get(GROUP, layout.pp)
    if size >= layout.pp:
        return []
    flag = "microbatch_group_size_per_virtual_pipeline_stage"
    return [
        Problem(
            code="CFG03",
            what=f"megatron.{flag} = {size} is out of range",
            keys=(("megatron", flag),),
            why=f"there are {layout.pp} pipeline stages, each of which has a micro-batch at a time",
            fix=f"set {flag} to an integer >= {layout.pp}",
        )
    ]


def _unaligned(fields: Mapping[str, Any], layout: Layout, train: TrainSection) -> list[Problem]:
    """A problem where the matrices of experts are none for torch's grouped product."""
    dtype = train.dtype
    multiple = ALIGNED // (2 if dtype == "bfloat16" else 4)
    widths = {
        "hidden_size": int(fields["hidden_size"]),
        "an expert's width on a rank": int(fields.get("moe_ffn_hidden_size") or fields["ffn_hidden_size"])
        // layout.etp,
        "lora_rank": train.lora_rank,
    }
    if not (odd := {name: width for name, width in widths.items() if width % multiple}):
        return []
    return [
        Problem(
            code="CFG04",
            what="megatron.moe_grouped_gemm cannot multiply matrices of this model's experts",
            keys=(("megatron", "moe_grouped_gemm"),),
            why=f"rows of {multiple} {dtype} numbers go together, and "
            + " and ".join(f"{name} is {width}" for name, width in odd.items()),
            fix="leave moe_grouped_gemm out: experts compute one after the other"
            + ("\nor --expert-tensor-parallel-size 1" if layout.etp > 1 and "hidden_size" not in odd else ""),
        )
    ]


def _shared_sequence(megatron: Mapping[str, Any], layout: Layout) -> bool:
    """Sequence parallelism: on where tensors are shared, unless it is switched off."""
    flag = megatron.get("sequence_parallel")
    return layout.tp > 1 if flag is None else bool(flag) and layout.tp > 1


def _defaults(device: str, sizes: Sizes, train: TrainSection, *, engine: bool, grouped: bool) -> dict[str, Any]:
    """What a flag or the bridge may say otherwise.

    Args:
        engine: whether layers are Transformer Engine's
        grouped: whether torch's grouped product takes the experts
    """
    gpu = device == "cuda"
    defaults: dict[str, Any] = {
        "add_bias_linear": False,
        "bias_dropout_fusion": gpu,
        "bias_activation_fusion": gpu,
        "gradient_accumulation_fusion": gpu,  # `accumulating` has it where Apex is not
        "transformer_impl": "transformer_engine" if engine else "local",
        "deallocate_pipeline_outputs": gpu,
        "moe_token_dispatcher_type": "alltoall",  # dense pipelines too: allgather wants equal lengths
    }
    if train.gradient_checkpointing:
        some = train.gradient_checkpointing_layers
        defaults |= {
            "recompute_granularity": "full",
            "recompute_method": "block" if some else "uniform",
            "recompute_num_layers": some or 1,
        }
    if sizes.experts:
        defaults |= {
            "moe_grouped_gemm": engine or (gpu and grouped and train.dtype == "bfloat16"),
            "moe_permute_fusion": engine,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
        }
    return defaults


def _fixed(layout: Layout, train: TrainSection, device: str, *, mla: bool, shared: bool) -> dict[str, Any]:
    """What nothing may say otherwise."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "pipeline_model_parallel_layout": layout.pattern or None,
        "num_layers_in_first_pipeline_stage": layout.first,
        "num_layers_in_last_pipeline_stage": layout.last,
        "sequence_parallel": shared,
        "multi_latent_attention": mla,
        "params_dtype": train.dtype,
        "pipeline_dtype": train.dtype,
        "bf16": train.dtype == "bfloat16",
        "calculate_per_token_loss": True,
        "variable_seq_lengths": layout.pp > 1,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,  # rows of a pack have positions of their own
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.vp > 1,  # else stages of a short interleaved pipeline wait for each other forever
        "moe_router_bias_update_rate": 0.0,  # biases move once a step was made: `expert_load`
        "cuda_graph_scope": (),  # megatron-core's default warns that it is an old one
        "use_cpu_initialization": device == "cpu",
    }


def _model_defaults(hf_config: Any, sizes: Sizes) -> dict[str, Any]:
    return {
        "position_embedding_type": "rope",
        "max_sequence_length": int(getattr(hf_config, "max_position_embeddings", 0) or 1 << 20),
        "share_embeddings_and_output_weights": sizes.tied,
    }


def _ddp_defaults() -> dict[str, Any]:
    return {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "check_for_nan_in_grad": False}


def _optimizer_defaults(options: Values) -> dict[str, Any]:
    defaults = {"optimizer": "adam", "use_distributed_optimizer": True}
    return defaults | (IMPLIED if options.optimizer.get(OFFLOAD) else {})


def _of_train(train: TrainSection) -> dict[str, Any]:
    """What [train] alone says."""
    keys = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    fields: dict[str, Any] = {key: getattr(train, key) for key in keys}
    return fields | {"bf16": train.dtype == "bfloat16", "params_dtype": train.dtype}


def _ordered(table: dict[str, Any]) -> Mapping[str, Any]:
    return {name: table[name] for name in sorted(table)}


def _engine(device: str) -> bool:
    return device == "cuda" and installed("transformer_engine")


@dataclass(slots=True, frozen=True)
class Built:
    """megatron-core's config objects."""

    transformer: Any
    ddp: Any
    optimizer: Any


def build(settings: MegatronSettings) -> Built:
    """The config objects of megatron-core; imports it.

    Raises:
        ConfigError: CFG04 the installed megatron-core refuses a value, or has no such field.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if settings.mla else TransformerConfig
    return Built(
        transformer=_build(kind, settings.transformer),
        ddp=_build(DistributedDataParallelConfig, settings.ddp),
        optimizer=_optimizer(OptimizerConfig, settings.optimizer),
    )


def _optimizer(kind: Any, table: Mapping[str, Any]) -> Any:
    """Masters in main memory are nowhere else; megatron-core asks for Transformer Engine then, and does not use it."""
    apart = "use_precision_aware_optimizer"
    if not (table.get(OFFLOAD) and table.get(apart)):
        return _build(kind, table)
    optimizer = _build(kind, {**table, apart: False})
    for name, value in {apart: True, f"{apart}_no_fp8_or_ds_fp8": True, "store_param_remainders": False}.items():
        setattr(optimizer, name, value)
    return optimizer


def _build(kind: Any, table: Mapping[str, Any]) -> Any:
    fields = {field.name for field in fields_of(kind)}
    if missing := [name for name in table if name not in fields]:
        raise ConfigError(
            f"the installed megatron-core has no {kind.__name__}.{missing[0]}",
            code="CFG04",
            where=", ".join(f"megatron.{name}" for name in missing),
            why="the flag or the model's family needs another version of it",
            fix=f"{install_line('megatron')} --upgrade",
        )
    try:
        return kind(**{name: _looked_up(name, value) for name, value in table.items()})
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"megatron-core refuses the settings: {error}",
            code="CFG04",
            where=f"[megatron], as {kind.__name__}",
            fix="change the flag that the message names",
        ) from error


def _looked_up(name: str, value: Any) -> Any:
    """A value of ours as megatron-core wants it: types and functions by name."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    if name.endswith("dtype") and name != "moe_router_dtype":
        import torch

        return getattr(
            torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}.get(value, value)
        )
    if name == "activation_func":
        return _activation(value)
    if name == "attention_backend":
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    return value


def _activation(name: str) -> Any:
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "relu": F.relu,
        "quick_gelu": quick_gelu,
        "squared_relu": squared_relu,
    }
    if name not in functions:
        raise ConfigError(
            f"there is no activation function '{name}'",
            code="CFG04",
            where="the bridge's activation_func",
            fix="one of " + ", ".join(functions),
        )
    return functions[name]
