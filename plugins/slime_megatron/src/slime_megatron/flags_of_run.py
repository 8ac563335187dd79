"""Flags that say how a run goes: parallel sizes, recomputation, experts' traffic, gradients and optimizer."""

from __future__ import annotations

from typing import Any

from slime_megatron.flags import MegatronFlag


def _sets(name: str, kind: type, text: str, *paths: str, **more: Any) -> MegatronFlag:
    return MegatronFlag(name, kind, "run", text, dict.fromkeys(paths or (f"transformer.{name}",)), **more)


def _off(name: str, text: str, *paths: str) -> MegatronFlag:
    return MegatronFlag(name, bool, "run", text, dict.fromkeys(paths, False))


DTYPES = ("fp32", "bf16", "fp16", "fp8")

LAYOUT = (
    _sets("tensor_model_parallel_size", int, "Ranks that share each tensor.", "layout.tp"),
    _sets("pipeline_model_parallel_size", int, "Stages of layers.", "layout.pp"),
    _sets("num_virtual_stages_per_pipeline_rank", int, "Chunks of layers of a stage.", "layout.vp"),
    _sets("num_layers_per_virtual_pipeline_stage", int, "Layers of each of them.", "layout.of_chunk"),
    _sets(
        "pipeline_model_parallel_layout",
        str,
        "What each chunk has, in Megatron-LM's letters.",
        "layout.pattern",
    ),
    _sets(
        "microbatch_group_size_per_virtual_pipeline_stage",
        int,
        "Micro-batches that a chunk takes in a row; by default as many as stages.",
        "transformer.microbatch_group_size_per_vp_stage",
    ),
    _sets("context_parallel_size", int, "Ranks that share each sequence.", "layout.cp"),
    _sets("expert_model_parallel_size", int, "Ranks that share the experts.", "layout.ep"),
    _sets("expert_tensor_parallel_size", int, "Ranks that share each expert's tensors.", "layout.etp"),
    _sets("decoder_first_pipeline_num_layers", int, "Layers of the first stage.", "layout.first"),
    _sets("decoder_last_pipeline_num_layers", int, "Layers of the last stage.", "layout.last"),
    _sets("account_for_embedding_in_pipeline_split", bool, "The embedding counts as a layer."),
    _sets("account_for_loss_in_pipeline_split", bool, "The output layer counts as a layer."),
    _sets("sequence_parallel", bool, "Tensor-parallel ranks share activations between layers too.", "layout.sequence"),
    _sets(
        "make_vocab_size_divisible_by", int, "The vocabulary is filled up to a multiple of it.", "vocabulary.multiple"
    ),
)

MEMORY = (
    _sets(
        "recompute_granularity",
        str,
        "Layers that the backward pass makes again: whole, or parts.",
        choices=("full", "selective"),
    ),
    _sets("recompute_method", str, "Which whole layers.", choices=("uniform", "block")),
    _sets("recompute_num_layers", int, "Layers of a unit (uniform), or of a stage (block)."),
    _sets(
        "recompute_modules",
        list,
        "Which parts, with selective.",
        choices=("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    ),
    MegatronFlag(
        "recompute_activations",
        bool,
        "run",
        "Short for recompute_granularity = selective.",
        {"transformer.recompute_granularity": "selective"},
    ),
    _sets("moe_layer_recompute", bool, "Make expert layers again."),
    _sets("distribute_saved_activations", bool, "Tensor-parallel ranks share what is kept for recomputation."),
    _sets("num_microbatches_with_partial_activation_checkpoints", int, "Micro-batches that recompute less."),
    _sets("cpu_offloading", bool, "Activations wait in main memory; needs Transformer Engine."),
    _sets("cpu_offloading_num_layers", int, "Of how many layers."),
    _sets("cpu_offloading_double_buffering", bool, "Two buffers for their way back."),
    _sets("fine_grained_activation_offloading", bool, "Inputs of some modules wait in main memory."),
    _sets("offload_modules", list, "Of which modules."),
    _sets("min_offloaded_tensor_size", int, "Elements below which they stay."),
    _sets("memory_efficient_layer_norm", bool, "Norms keep less for the backward pass."),
    _sets("disable_parameter_transpose_cache", bool, "Transformer Engine keeps no transposed weights."),
)

NUMERICS = (
    _sets(
        "attention_backend",
        str,
        "On GPUs: varlen flash for all packs, or cuDNN for long sequences where it is faster.",
        choices=("auto", "flash"),
    ),
    _sets("deterministic_mode", bool, "Kernels that repeat bit for bit."),
    _sets("disable_bf16_reduced_precision_matmul", bool, "bfloat16 products are summed in float32."),
    _sets("fp32_residual_connection", bool, "Residuals in float32; not with Transformer Engine."),
    _off("no_bias_dropout_fusion", "The sum with the residual is not compiled.", "transformer.bias_dropout_fusion"),
    _off("no_bias_swiglu_fusion", "SwiGLU is not compiled.", "transformer.bias_activation_fusion"),
    _off("no_bias_gelu_fusion", "GELU is not compiled.", "transformer.bias_activation_fusion"),
    _off(
        "no_gradient_accumulation_fusion",
        "Weight gradients are added after their product.",
        "transformer.gradient_accumulation_fusion",
    ),
    _sets("use_te_activation_func", bool, "Transformer Engine's activations."),
)

EXPERTS = (
    _sets(
        "moe_token_dispatcher_type",
        str,
        "How tokens reach experts; allgather cannot take sequences of different lengths.",
        choices=("alltoall", "flex"),
    ),
    _sets("moe_enable_deepep", bool, "flex goes through DeepEP."),
    _sets("moe_flex_dispatcher_backend", str, "What flex goes through.", choices=("deepep", "hybridep")),
    _sets("moe_deepep_num_sms", int, "Processors of a GPU for DeepEP."),
    _sets("moe_hybridep_num_sms", int, "Processors of a GPU for HybridEP."),
    _sets("moe_grouped_gemm", bool, "One product for all experts of a rank; the default in bfloat16 on GPUs."),
    _sets("moe_permute_fusion", bool, "One kernel that sorts tokens by expert; needs Transformer Engine."),
    _sets("moe_router_fusion", bool, "One kernel for the router; needs Transformer Engine."),
    _sets("moe_shared_expert_overlap", bool, "Shared experts compute while tokens travel."),
    _sets("moe_router_dtype", str, "The router computes in it.", choices=("fp32", "fp64")),
    _sets(
        "moe_router_load_balancing_type",
        list,
        "Loss that spreads tokens over experts.",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    ),
    _sets("moe_aux_loss_coeff", list, "Its weight."),
    _sets("moe_z_loss_coeff", float, "Weight of a loss on the router's logits."),
    _sets("moe_per_layer_logging", bool, "These losses by layer."),
)

GRADIENTS = (
    _sets(
        "use_distributed_optimizer",
        bool,
        "Data-parallel ranks share optimizer states.",
        "ddp.use_distributed_optimizer",
        "optimizer.use_distributed_optimizer",
    ),
    _sets("overlap_grad_reduce", bool, "Gradients are summed during the backward pass.", "ddp.overlap_grad_reduce"),
    _sets(
        "overlap_param_gather",
        bool,
        "Weights are gathered during the forward pass.",
        "ddp.overlap_param_gather",
        "optimizer.overlap_param_gather",
    ),
    _off("no_align_param_gather", "Each stage gathers weights when it needs them.", "ddp.align_param_gather"),
    _sets(
        "accumulate_allreduce_grads_in_fp32",
        bool,
        "Gradients are added up and summed over ranks in float32; the default.",
        "ddp.grad_reduce_in_fp32",
    ),
    _off("grad_reduce_in_bf16", "Gradients in bfloat16.", "ddp.grad_reduce_in_fp32"),
    _sets("check_for_large_grads", bool, "Unusually large gradients end the run.", "ddp.check_for_large_grads"),
    _sets("ddp_bucket_size", int, "Elements summed at a time.", "ddp.bucket_size"),
    _sets(
        "ddp_pad_buckets_for_high_nccl_busbw", bool, "Buckets of a round size.", "ddp.pad_buckets_for_high_nccl_busbw"
    ),
    _sets(
        "ddp_reduce_scatter_with_fp32_accumulation",
        bool,
        "bfloat16 gradients are summed over ranks in float32.",
        "ddp.reduce_scatter_with_fp32_accumulation",
    ),
)

OPTIMIZER = (
    _sets(
        "apply_wd_to_qk_layernorm",
        bool,
        "Weight decay on norms of queries and keys.",
        "optimizer.apply_wd_to_qk_layernorm",
    ),
    _sets(
        "use_precision_aware_optimizer",
        bool,
        "Optimizer states in the types below; needs Transformer Engine.",
        "optimizer.use_precision_aware_optimizer",
    ),
    _sets("main_grads_dtype", str, "Gradients.", "optimizer.main_grads_dtype", choices=("fp32", "bf16")),
    _sets("main_params_dtype", str, "Master weights.", "optimizer.main_params_dtype", choices=("fp32", "fp16")),
    _sets("exp_avg_dtype", str, "First moments.", "optimizer.exp_avg_dtype", choices=DTYPES),
    _sets("exp_avg_sq_dtype", str, "Second moments.", "optimizer.exp_avg_sq_dtype", choices=DTYPES),
    _sets("optimizer_cpu_offload", bool, "Optimizer states in main memory.", "optimizer.optimizer_cpu_offload"),
    _sets(
        "optimizer_offload_fraction",
        float,
        "Which share of them; 1 by default.",
        "optimizer.optimizer_offload_fraction",
    ),
    _sets(
        "use_torch_optimizer_for_cpu_offload",
        bool,
        "torch's Adam there: the only one that there is.",
        "optimizer.use_torch_optimizer_for_cpu_offload",
    ),
    _sets(
        "overlap_cpu_optimizer_d2h_h2d",
        bool,
        "Copies to and from there during the step.",
        "optimizer.overlap_cpu_optimizer_d2h_h2d",
    ),
    _off("no_pin_cpu_grads", "Gradients there in pageable memory.", "optimizer.pin_cpu_grads"),
    _off("no_pin_cpu_params", "Weights there in pageable memory.", "optimizer.pin_cpu_params"),
)

AHEAD = (
    _sets(
        "enable_mtp_training", bool, "Train the layer that predicts one token further ahead too.", "ahead.is_trained"
    ),
    _sets("mtp_loss_scaling_factor", float, "Weight of its loss beside the policy's; 0.2 by default.", "ahead.weight"),
)

RUN = (*LAYOUT, *MEMORY, *NUMERICS, *EXPERTS, *GRADIENTS, *OPTIMIZER, *AHEAD)
