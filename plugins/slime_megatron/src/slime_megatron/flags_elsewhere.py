"""Flags of Megatron-LM that mean nothing here: fixed by slime, harmless, or refused with what replaces them.

A refusal's text is the reason, then, after a semicolon, what to do instead.
"""

from __future__ import annotations

from slime_megatron.flags import MegatronFlag


def _only(name: str, kind: type, text: str, *choices: object) -> MegatronFlag:
    return MegatronFlag(name, kind, "only", text, {}, choices)


def _idle(names: str, text: str, kind: type = bool) -> tuple[MegatronFlag, ...]:
    return tuple(MegatronFlag(name, kind, "idle", text) for name in names.split())


def _refused(names: str, text: str, kind: type = list) -> tuple[MegatronFlag, ...]:
    return tuple(MegatronFlag(name, kind, "refused", text) for name in names.split())


ONLY = (
    _only("bf16", bool, "train.dtype sets the compute dtype", True, False),
    _only("attention_dropout", float, "a policy has no dropout: its log-probs must be those of the engine", 0),
    _only("hidden_dropout", float, "a policy has no dropout: its log-probs must be those of the engine", 0),
    _only("attention_softmax_in_fp32", bool, "attention's softmax is always in float32", True),
    _only("calculate_per_token_loss", bool, "losses are summed, and divided once by the whole step's count", True),
    _only("variable_seq_lengths", bool, "packs have different lengths", True),
    _only("optimizer", str, "the keys of [train] are Adam's", "adam"),
    _only("ckpt_format", str, "checkpoints of Megatron models are torch_dist folders", "torch_dist"),
    _only("group_query_attention", bool, "num_query_groups of config.json decides", True),
    _only("use_mcore_models", bool, "all models are megatron-core's", True),
    _only("moe_token_drop_policy", str, "no token is dropped", "probs"),
    _only("decoupled_weight_decay", bool, "AdamW", True),
    _only("cp_comm_type", list, "context-parallel ranks gather keys and values", "all_gather", "p2p"),
    _only("distributed_backend", str, "GPUs talk through NCCL", "nccl"),
    _only("train_backend", str, "[megatron] is Megatron's", "megatron"),
)

IDLE = (
    *_idle("spec", "layers come from the bridge of the model's family", list),
    *_idle(
        "no_masked_softmax_fusion no_rope_fusion no_persist_layer_norm no_position_embedding", "slime does so anyway"
    ),
    *_idle("use_flash_attn cross_entropy_loss_fusion use_cpu_initialization", "slime chooses by the device"),
    *_idle("cross_entropy_fusion_impl", "slime chooses by the device", str),
    *_idle("no_check_for_nan_in_loss_and_grad", "slime checks loss and gradient, and names the samples"),
    *_idle("no_create_attention_mask_in_dataloader", "there are no masks: sequences are packed"),
    *_idle("disable_gloo_process_groups use_persistent_ckpt_worker ckpt_fully_parallel_load", "slime decides"),
    *_idle("ckpt_fully_parallel_save ckpt_assume_constant_structure enable_experimental", "slime decides"),
    *_idle("no_align_grad_reduce no_barrier_with_level_1_timing", "slime decides"),
    *_idle("tokenizer_type tokenizer_model", "the tokenizer is that of rollout.hf_checkpoint", str),
    *_idle(
        "seq_length encoder_seq_length decoder_seq_length",
        "sequences are packed up to train.max_tokens_per_gpu",
        int,
    ),
    *_idle("init_method_std embedding_init_method_std", "weights come from rollout.hf_checkpoint", float),
    *_idle("init_method_xavier_uniform no_initialization", "weights come from rollout.hf_checkpoint"),
    *_idle("no_overlap_p2p_communication", "chunks of an interleaved pipeline compute while what they sent travels"),
    *_idle("no_one_logger no_log_loss_scale_to_tensorboard", "slime reports by [report]"),
    *_idle("log_interval distributed_timeout_minutes", "slime reports each step and sets its own timeouts", int),
)

_TYPES = "models compute in bfloat16 or float32; --dtype bfloat16"
_DATA = "data comes from [data]; --prompt-data FILE.jsonl"
_FSDP = "this is Megatron's own sharding; --train-backend fsdp shards parameters"
_LOOP = "slime runs its own loop, nothing of megatron.training; "
_SAVES = _LOOP + "slime run --resume RUN_DIR, and --save-interval N"

REFUSED = (
    *_refused("virtual_pipeline_model_parallel_size", "it is an old name; --num-virtual-stages-per-pipeline-rank N"),
    *_refused("overlap_p2p_comm", "chunks of an interleaved pipeline do so anyway; leave it out"),
    *_refused(
        "overlap_p2p_communication_warmup_flush",
        "stages send the length of each pack before the pack; leave it out",
    ),
    *_refused(
        "overlap_param_gather_with_optimizer_step",
        "a step is made once its norm is known to be finite; --overlap-param-gather",
    ),
    *_refused(
        "fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis fp16_lm_cross_entropy "
        "params_dtype autocast_dtype enable_autocast",
        _TYPES,
    ),
    *_refused(
        "fp8_format fp8 fp8_recipe fp8_param_gather fp8_margin fp8_interval fp8_amax_history_len "
        "fp8_amax_compute_algo no_fp8_wgrad first_last_layers_bf16 fp4_format fp4 fp4_recipe fp4_param_gather "
        "kitchen_config_file kitchen_recipe_number te_precision_config_file moe_router_padding_for_fp8 "
        "moe_router_padding_for_quantization reuse_grad_buf_for_mxfp8_param_ag activation_func_fp8_input_store",
        _TYPES,
    ),
    *_refused(
        "data_path train_data_path valid_data_path test_data_path split mock_data num_workers data_cache_path "
        "dataloader_type eod_mask_loss reset_position_ids reset_attention_mask vocab_file merge_file "
        "vocab_extra_ids",
        _DATA,
    ),
    *_refused("micro_batch_size batch_size", "packs replace micro-batches of a size; --max-tokens-per-gpu N"),
    *_refused("rampup_batch_size", "a step has a fixed number of rollouts; --global-batch-size N"),
    *_refused("train_iters train_samples exit_interval", _LOOP + "--num-rollout N"),
    *_refused("exit_duration_in_mins", _LOOP + "--stop-after 40m"),
    *_refused("eval_iters", "evaluation sets are evaluated whole; --eval-interval N"),
    *_refused(
        "save load no_save_optim no_load_optim no_load_rng no_save_rng finetune ckpt_step use_dist_ckpt", _SAVES
    ),
    *_refused("lr_warmup_fraction lr_warmup_samples warmup", "warm-up is counted in steps; --lr-warmup-iters N"),
    *_refused(
        "lr_decay_samples lr_wsd_decay_style lr_wsd_decay_iters", "decay is counted in steps; --lr-decay-iters N"
    ),
    *_refused(
        "start_weight_decay end_weight_decay weight_decay_incr_style", "weight decay is fixed; --weight-decay X"
    ),
    *_refused("decoupled_lr decoupled_min_lr head_lr_mult", "all weights have one learning rate; --lr X"),
    *_refused(
        "sgd_momentum muon_momentum muon_no_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec "
        "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor",
        "the optimizer is Adam; --adam-beta1 X --adam-beta2 X",
    ),
    *_refused("padded_vocab_size", "the vocabulary is filled up to a multiple; --make-vocab-size-divisible-by N"),
    *_refused(
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy use_torch_fsdp2 "
        "fsdp_double_buffer fsdp_manual_registration keep_fp8_transpose_cache suggested_communication_unit_size "
        "use_nccl_ub disable_symmetric_registration no_gradient_reduce_div_fusion init_model_with_meta_device",
        _FSDP,
    ),
    *_refused("ddp_num_buckets", "buckets are given by their size; --ddp-bucket-size N"),
    *_refused(
        "num_distributed_optimizer_instances",
        "all data-parallel ranks share one copy of the optimizer states; --use-distributed-optimizer",
    ),
    *_refused("ddp_average_in_collective", "gradients are summed, and divided once by the whole step; leave it out"),
    *_refused(
        "cuda_graph_impl cuda_graph_scope enable_cuda_graph external_cuda_graph cuda_graph_warmup_steps "
        "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph te_rng_tracker",
        "a recorded graph needs equal shapes, and packs differ; leave it out",
    ),
    *_refused(
        "tp_comm_overlap tp_comm_overlap_cfg tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad "
        "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend symmetric_ar_type",
        "its buffers want equal shapes, and packs differ; --sequence-parallel alone",
    ),
    *_refused(
        "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release "
        "defer_embedding_wgrad_compute wgrad_deferral_limit",
        "it needs a different schedule; leave it out",
    ),
    *_refused(
        "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank",
        "slime packs sequences for context-parallel ranks itself; --context-parallel-size N",
    ),
    *_refused(
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_input_jitter_eps "
        "moe_router_force_load_balancing moe_token_dropping",
        "the trainer's log-probs must be those of the engine, which drops no token and adds no noise; leave it out",
    ),
    *_refused("moe_extended_tp", "megatron-core ignores it; --expert-tensor-parallel-size N"),
    *_refused("moe_use_legacy_grouped_gemm", "it comes without distributed checkpoints; --moe-grouped-gemm"),
    *_refused("moe_router_topk_limited_devices", "it is an old name; --moe-router-num-groups --moe-router-group-topk"),
    *_refused("moe_use_upcycling moe_upcycling_granularity", "the checkpoint is trained as it is; leave it out"),
    *_refused("moe_enable_routing_replay", "slime says what routers replay; --routing-replay rollout"),
    *_refused("apply_query_key_layer_scaling", "slime's core attention scales once; leave it out"),
    *_refused("batch_invariant_mode", "it changes kernels of the whole process; --deterministic-mode"),
    *_refused(
        "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
        "attention scores are not kept; leave it out",
    ),
    *_refused(
        "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
        "layers are those of config.json; leave it out",
    ),
    *_refused("transformer_impl", "Transformer Engine is used where it is installed; leave it out"),
    *_refused("use_tp_pp_dp_mapping", "ranks are in the order tp-cp-ep-dp-pp; leave it out"),
    *_refused("disable_jit_fuser", "it changes the whole process; --no-bias-swiglu-fusion --no-bias-dropout-fusion"),
    *_refused(
        "nccl_communicator_config_path high_priority_stream_groups use_sharp",
        "NCCL is set up by its environment variables; leave it out",
    ),
    *_refused("use_legacy_models yaml_cfg", _LOOP + "leave it out"),
    *_refused(
        "tensorboard_dir tensorboard_log_interval timing_log_level",
        "figures go by [plugin.trackers]; --use-wandb, --use-tensorboard",
    ),
    *_refused("profile_step_start profile_step_end use_pytorch_profiler", _LOOP + "leave it out"),
    *_refused("cpu_offloading_weights cpu_offloading_activations", "weights stay on the GPU; --cpu-offloading"),
    *_refused(
        "model_parallel_size encoder_num_layers decoder_num_layers",
        "it is an old name; --tensor-model-parallel-size N",
    ),
)
