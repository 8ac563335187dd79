"""Every key of a run: frozen, strict pydantic models, one a section. Key names are unique across core sections.

THUDM/slime's name is used wherever it has one. A key's text is what `slime config keys` prints.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from slime_core.algorithms import algorithms

SCHEMA_VERSION = 1
SLIMES_OWN = {
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "eval_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "buffer_filter_path": "slime.rollout.data_source.pop_first",
}
"""What THUDM/slime has under these keys where nobody sets them: the core's own way, so the keys stay empty."""


class Section(BaseModel):
    """A frozen section: unknown keys and wrong types are errors, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @field_validator(*SLIMES_OWN, mode="before", check_fields=False)
    @classmethod
    def leave_out_slimes_own(cls, value: Any, info: ValidationInfo) -> Any:
        """Empty where a value names slime's default (`SLIMES_OWN`)."""
        return "" if str(value).replace(":", ".") == SLIMES_OWN[info.field_name or ""] else value


class ClusterSection(Section):
    """Where engines and trainers live."""

    cluster_backend: str = Field(
        "local", min_length=1, description="local (this machine), ray, or one of a plugin. Short flag: --cluster."
    )
    actor_num_nodes: int = Field(1, ge=1, description="Machines that train.")
    actor_num_gpus_per_node: int = Field(1, ge=1, description="Trainer ranks a machine; on CPU, processes.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes a GPU where torch sees one, on a Ray cluster where a machine of it has one."
    )
    cpu_threads: int = Field(
        0, ge=0, description="Threads of each process's torch, at most `OMP_NUM_THREADS`; 0 is the cores divided."
    )
    colocate: bool = Field(True, description="Engine and trainer share the device and take turns.")
    offload_train: bool = Field(
        True, description="On shared GPUs the trainer's state waits in main memory while SGLang generates."
    )
    offload_rollout: bool = Field(
        True, description="On shared GPUs SGLang gives its weights and KV cache back while the trainer trains."
    )
    ray_address: str = Field(
        "",
        description="Ray cluster to join: HOST:PORT, auto (that of this machine) or local (one of its own, which ends "
        "with the run). Empty: RAY_ADDRESS, or local.",
    )
    ray_placement_timeout: float = Field(
        60.0, gt=0, description="Seconds to wait for processors and GPUs that others' work on the Ray cluster holds."
    )
    ray_py_modules: tuple[str, ...] = Field(
        (),
        description="Wheels (of plugins, say) and package folders that ranks and engines on other machines of the Ray "
        "cluster get; nothing needs to be installed there.",
    )
    ray_env_vars: dict[str, str] = Field(
        {}, description="Environment of ranks and engines on the Ray cluster; Ray's tools show it."
    )
    max_restarts: int = Field(
        -1,
        ge=-1,
        description="How often a run goes on by itself after a process, server or machine of it was lost or hung; "
        "-1: 3 on a Ray cluster, 0 elsewhere.",
    )
    hang_timeout: float = Field(
        1800.0,
        ge=0,
        description="Seconds that a trainer call, or an engine with requests, may take without a sign of progress; "
        "then the run says who waits for whom and ends. 0: for ever.",
    )


class DataTask(Section):
    """One entry of `[[data.tasks]]`."""

    name: str = Field(description="What Prompt.task says; rewards and metrics are routed and reported by it.")
    prompt_data: str = Field("", description="JSONL, Parquet or hub data set, with @[a:b] for a slice; or a plugin's.")
    weight: float = Field(1.0, gt=0, description="Share of prompts, relative to the other tasks.")
    plugin: str = Field("", description="The plugin that owns the task.")
    generate: str = Field("", description="Function by path, module:function or file.py:function.")
    reward: str = Field("", description="Function by path, or an rm_type name.")
    input_key: str = Field("", description="As data.input_key, for this task.")
    label_key: str = Field("", description="As data.label_key, for this task.")
    n_samples_per_prompt: int = Field(0, ge=0, description="Samples a prompt; 0 takes the section's.")


class EvalTask(DataTask):
    """One entry of `[[eval.eval_tasks]]`: a set with its own sampling, template and judgement."""

    temperature: float = Field(-1.0, ge=-1, description="0 is greedy; -1 takes eval_temperature.")
    top_p: float = Field(0.0, ge=0, le=1, description="Nucleus; 1 is off, 0 takes eval_top_p.")
    top_k: int = Field(-1, ge=-1, description="0 is off; -1 takes eval_top_k.")
    max_response_len: int = Field(0, ge=0, description="New tokens; 0 takes eval_max_response_len.")
    apply_chat_template: Literal["auto", "on", "off"] = Field("auto", description="auto: as data.apply_chat_template.")
    apply_chat_template_kwargs: dict[str, Any] = Field({}, description="Laid over data.apply_chat_template_kwargs.")
    category_key: str = Field("", description="Column of a question's category; empty takes eval_category_key.")
    pass_reward: float = Field(0.0, description="Reward from which a sample is right; 0 takes eval_pass_reward.")


class DataSection(Section):
    """Where prompts come from."""

    prompt_data: str = Field("", description="JSONL (one object a line), Parquet or hub data set; @[a:b] is a slice.")
    input_key: str = Field("input", description="Column of the prompt: a string, or a list of chat messages.")
    label_key: str = Field("", description="Column of the label, handed to the reward.")
    metadata_key: str = Field("metadata", description="Column of a JSON object kept in Prompt.metadata.")
    tool_key: str = Field("", description="Column of tool definitions for the chat template.")
    id_key: str = Field("", description="Column of a row's own id; duplicates are errors.")
    multimodal_keys: dict[str, str] = Field(
        {}, description="Kind of media (image, video, audio) to its column; checked, and kept in the sample."
    )
    apply_chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the chat template.")
    rollout_shuffle: bool = Field(False, description="A new permutation every epoch, from (seed, epoch).")
    rollout_max_prompt_len: int = Field(0, ge=0, description="Tokens; 0 is what the context leaves.")
    overlong_prompt: Literal["drop", "truncate", "error"] = Field("drop", description="What a longer prompt meets.")
    max_bad_rows: int = Field(0, ge=0, description="Unreadable rows that are skipped, counted and copied out.")
    max_line_bytes: int = Field(8 << 20, ge=1024, description="Longest line of a JSONL file.")
    tasks: tuple[DataTask, ...] = Field((), description="Several data sets, with weights and their own functions.")


class RolloutSection(Section):
    """How samples are made."""

    hf_checkpoint: str = Field("", description="Folder (or hub name) of config, tokenizer and weights.")
    init_weights: Literal["load", "random"] = Field(
        "load", description="random: draw the weights from the seed; the folder then needs no safetensors."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that the model folder brings.")
    num_rollout: int = Field(100, ge=0, description="Steps of the (last) stage; each trains one rollout.")
    rollout_batch_size: int = Field(32, ge=1, description="Prompts a step.")
    n_samples_per_prompt: int = Field(8, ge=1, description="Rollouts a prompt.")
    rollout_max_response_len: int = Field(256, ge=1, description="New tokens a model turn, at most.")
    rollout_max_context_len: int = Field(0, ge=0, description="Prompt and response tokens; 0 is the model's own.")
    rollout_temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    rollout_top_p: float = Field(1.0, gt=0, le=1, description="Nucleus; 1 is off.")
    rollout_top_k: int = Field(0, ge=0, description="0 is off.")
    rollout_stop: tuple[str, ...] = Field((), description="Strings that end a response.")
    rollout_stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a response.")
    rollout_engine: str = Field(
        "local", min_length=1, description="local (the embedded engine), sglang, or one of a plugin."
    )
    rollout_slots: int = Field(
        0,
        ge=0,
        description="Sequences the embedded engine decodes at once, fewer where memory is short; "
        "0: a step's samples on a GPU (64 to 512), 64 on a CPU.",
    )
    rollout_num_gpus: int = Field(0, ge=0, description="GPUs of all servers; 0: the trainer's, which they share.")
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="GPUs of one server: its tensor-parallel size.")
    rollout_num_engines: int = Field(0, ge=0, description="Engines; 0 is what rollout_num_gpus gives; on a CPU, 1.")
    rollout_external_engine_addrs: tuple[str, ...] = Field(
        (), description="Servers that run already, http://HOST:PORT each; none are started."
    )
    rollout_engine_token_env: str = Field(
        "SLIME_SGLANG_TOKEN", description="Environment variable that holds the token of external servers."
    )
    rollout_engine_ca: str = Field(
        "", description="PEM file of authorities, for https servers that Python does not trust."
    )
    engine_topology: str = Field("", description="TOML file of several server groups and models.")
    rollout_router: Literal["auto", "builtin", "sglang"] = Field(
        "auto",
        description="Who spreads requests over servers: builtin is slime, sglang is SGLang's router; auto is SGLang's "
        "where it is installed and slime starts several servers of a model.",
    )
    rollout_middleware_paths: tuple[str, ...] = Field(
        (), description="Functions by path around every request to servers: async (request, next) -> Completion."
    )
    server_concurrency: int = Field(512, ge=1, description="Requests in flight a server; others wait here.")
    rollout_start_timeout: float = Field(900.0, gt=0, description="Seconds until a server must answer.")
    rollout_request_timeout: float = Field(1800.0, gt=0, description="Seconds for one request, its retries included.")
    rollout_max_retries: int = Field(3, ge=0, description="Of one request, where asking again is safe.")
    rollout_health_check_interval: float = Field(5.0, gt=0, description="Seconds between looks at a server.")
    rollout_health_check_timeout: float = Field(
        120.0, gt=0, description="Seconds without a new token while requests wait: the server counts as hung."
    )
    rollout_max_restarts: int = Field(3, ge=0, description="Of one server in a run; then it is retired.")
    min_healthy_engines: int = Field(1, ge=1, description="Fewer servers than this end the run.")
    update_weight_transport: Literal["auto", "disk", "tensor", "nccl"] = Field(
        "auto", description="How weights reach servers; auto: tensor on shared GPUs, nccl on others, disk on a CPU."
    )
    update_weight_buffer_size: int = Field(512 << 20, ge=1 << 20, description="Bytes of one bucket of weights.")
    update_weight_disk_dir: str = Field("", description="Folder of the disk transport; empty: in the run directory.")
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "retract",
        description="Running requests while weights change: ended and continued, moved back to the queue with their "
        "cache dropped, or kept with the old weights' cache.",
    )
    rollout_deterministic: bool = Field(
        False, description="SGLang's deterministic mode, a seed a request: runs repeat bit for bit, and slower."
    )
    check_weights: Literal["rolling", "all", "off"] = Field(
        "rolling", description="Tensors of servers compared with the trainer's after each step: some in turn, or all."
    )
    canary_band: float = Field(
        0.0, ge=0, description="Largest mean difference of trainer and engine log-probs; 0: from rounding."
    )
    dynamic_sampling: Literal["off", "equal_rewards"] = Field(
        "off", description="equal_rewards: drop groups whose rewards are all equal, and take the next prompts."
    )
    over_sampling_batch_size: int = Field(
        0, ge=0, description="Prompts in flight a step; the step takes the first that finish; 0 is rollout_batch_size."
    )
    max_dropped_groups: int = Field(0, ge=0, description="Dropped by filters in a row before an error; 0 is no limit.")
    partial_rollout: bool = Field(False, description="Unfinished surplus is kept and continued, not dropped.")
    mask_offpolicy_in_partial_rollout: bool = Field(
        False, description="Tokens from before the last continuation do not train."
    )
    max_staleness: int = Field(0, ge=0, description="0 trains on-policy; k lets the collector run k steps ahead.")
    async_schedule: Literal["lockstep", "free"] = Field("lockstep", description="How groups meet steps when ahead.")
    stale_policy: Literal["wait", "restart", "mask", "drop"] = Field(
        "wait",
        description="A free group about to grow older than max_staleness: training waits for it, it starts again, its "
        "older tokens leave the loss, or it is dropped.",
    )
    rollout_buffer_url: str = Field("", description="Rollouts are made elsewhere: URL of `slime buffer serve`.")
    rollout_buffer_token_env: str = Field(
        "SLIME_BUFFER_TOKEN", description="Environment variable that holds its token."
    )
    save_debug_rollout_data: str = Field("", description="Folder that gets every step's groups, a file a step.")
    load_debug_rollout_data: str = Field("", description="Folder of such files: rollouts come from there.")
    debug_rollout_only: bool = Field(False, description="Roll out and judge; train nothing.")
    debug_train_only: bool = Field(False, description="Train from load_debug_rollout_data, without an engine.")
    generate_timeout: float = Field(3600.0, gt=0, description="Seconds for one group's generation.")
    on_plugin_error: Literal["fail", "drop"] = Field("fail", description="A hook that raises: stop or drop the group.")
    rollout_function_path: str = Field("", description="Function by path that replaces the rollout of a step.")
    custom_generate_function_path: str = Field("", description="Function by path that generates one sample.")
    data_source_path: str = Field("", description="Class by path that replaces the data source.")
    rollout_sample_hook_path: tuple[str, ...] = Field((), description="Functions by path, called on each sample.")
    dynamic_sampling_filter_path: str = Field("", description="Function by path that keeps or drops a group.")
    rollout_sample_filter_path: str = Field("", description="Function by path that may set sample.remove_sample.")
    buffer_filter_path: str = Field("", description="Function by path that picks groups from the buffer.")
    run_done_path: str = Field("", description="Function by path, run_done(ctx): ends what the others have started.")
    custom_config_path: str = Field("", description="TOML, JSON or YAML file of more keys for functions by path.")


class TrainSection(Section):
    """How the policy learns."""

    train_backend: str = Field("fsdp", min_length=1, description="fsdp (FSDP2), megatron, or one of a plugin.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of compute; masters are float32. auto: bfloat16 where the processor has it."
    )
    loss_type: str = Field("policy_loss", description="policy_loss, sft_loss, or a name from slime_loss.")
    advantage_estimator: str = Field(
        "grpo",
        description=", ".join(one.name for one in algorithms().values() if one.terms)
        + ", or a name from slime_advantage.",
    )
    disable_grpo_std_normalization: bool = Field(False, description="Centre rewards in a group, do not divide by std.")
    grpo_std_scope: Literal["group", "batch"] = Field("group", description="Whose standard deviation divides.")
    credit_level: Literal["trajectory", "turn", "token"] = Field(
        "trajectory",
        description="What a reward is credited to: the whole response, a turn and what led there, a token.",
    )
    normalize_advantages: bool = Field(False, description="Whiten advantages over the step's trainable tokens.")
    pass_k: int = Field(4, ge=1, description="k of the pass_at_k estimator.")
    gae_gamma: float = Field(1.0, ge=0, le=1, description="Discount a token (a turn, with credit_level = turn).")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Of generalised advantage estimation.")
    policy_objective: Literal["auto", "clip", "cispo"] = Field(
        "auto", description="clip: PPO's clipped ratio. cispo: clipped weight on the log-prob. auto: the estimator's."
    )
    importance_level: Literal["auto", "token", "sequence", "sequence_token"] = Field(
        "auto", description="What a ratio is of: a token, the sequence's geometric mean (GSPO), its token variant."
    )
    loss_aggregation: Literal["auto", "rollout_mean", "token_mean", "rollout_sum", "constant"] = Field(
        "auto",
        description="Mean over rollouts of their token means, over all tokens of the step, of token sums, or token "
        "sums over loss_divisor. auto: the estimator's.",
    )
    loss_divisor: int = Field(0, ge=0, description="Tokens a rollout for constant; 0 is rollout_max_response_len.")
    eps_clip: float = Field(
        0.0, ge=0, le=1, description="The ratio's lower bound is 1 - eps_clip; 0: the estimator's."
    )
    eps_clip_high: float = Field(0.0, ge=0, description="The upper bound is 1 + eps_clip_high; 0: the estimator's.")
    eps_clip_c: float = Field(0.0, ge=0, description="Dual clip: bound of the loss at negative advantages; 0 is off.")
    use_rollout_logprobs: bool = Field(False, description="Old log-probs are the engine's, not the trainer's.")
    use_tis: bool = Field(False, description="Weigh tokens by trainer over engine probability (importance sampling).")
    tis_level: Literal["token", "sequence", "geometric"] = Field("token", description="What that ratio is of.")
    tis_mode: Literal["truncate", "clip", "mask"] = Field(
        "truncate",
        description="Cut above tis_clip, and where tis_clip_low is set (clip) below it; mask: weight 0 outside.",
    )
    tis_clip: float = Field(2.0, gt=0, description="Upper bound of the weight.")
    tis_clip_low: float = Field(0.0, ge=0, description="Lower bound of the weight.")
    tis_batch_normalize: bool = Field(False, description="Divide weights by their mean over the optimizer step.")
    use_rs: bool = Field(False, description="Reject tokens or sequences whose ratio is out of bounds.")
    rs_level: Literal["token", "sequence", "geometric"] = Field("geometric", description="What that ratio is of.")
    rs_lower_bound: float = Field(0.0, ge=0, description="0 is 1 / rs_upper_bound.")
    rs_upper_bound: float = Field(2.0, gt=0, description="Ratio above which is rejected.")
    rs_veto_threshold: float = Field(0.0, ge=0, description="Reject sequences with a token ratio below; 0 is off.")
    use_opsm: bool = Field(False, description="Mask sequences that are off-policy and have a negative advantage.")
    opsm_delta: float = Field(1e-4, ge=0, description="Mean of old minus new log-prob above which use_opsm masks.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Weight of KL to the reference model in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k3", description="Schulman's estimators; k1 has no gradient; low_var_kl is k3 within [-10, 10]."
    )
    use_unbiased_kl: bool = Field(False, description="Multiply the loss's KL by the importance ratio.")
    kl_coef: float = Field(0.0, ge=0, description="Weight of KL to the reference model in the reward.")
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field("k1", description="Estimator of the reward's KL.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    teacher_load: str = Field("", description="Teacher model folder of on-policy distillation.")
    teacher_place: Literal["trainer", "engine"] = Field(
        "trainer", description="Where the teacher scores: in the trainer, or a frozen engine (at temperature 1 only)."
    )
    opd_kl_coef: float = Field(0.0, ge=0, description="Weight of reverse KL to the teacher, added to advantages.")
    critic_load: str = Field("", description="Critic model folder; empty starts from the policy's weights.")
    critic_lr: float = Field(1e-5, ge=0, description="The critic's peak learning rate.")
    critic_lr_warmup_iters: int = Field(0, ge=0, description="Optimizer steps of the critic's linear warm-up.")
    value_clip: float = Field(0.2, ge=0, description="How far new values may leave the old ones; 0 is off.")
    num_critic_only_steps: int = Field(0, ge=0, description="Steps of a stage in which only the critic learns.")
    max_nonfinite_steps: int = Field(
        0,
        ge=0,
        description="Optimizer steps in a row with a loss or gradient that is not finite, skipped before an error.",
    )
    ref_load: str = Field("", description="Reference model folder; empty is the starting weights.")
    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Where decay ends.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up.")
    lr_warmup_iters: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    lr_decay_iters: int = Field(0, ge=0, description="Optimizer steps to min_lr; 0 is the whole stage.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, on matrices only.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW.")
    adam_beta2: float = Field(0.98, ge=0, lt=1, description="AdamW.")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW.")
    clip_grad: float = Field(1.0, ge=0, description="Global gradient norm; 0 is off.")
    num_steps_per_rollout: int = Field(1, ge=1, description="Optimizer steps a rollout.")
    global_batch_size: int = Field(0, ge=0, description="Rollouts an optimizer step; 0 follows num_steps_per_rollout.")
    max_tokens_per_gpu: int = Field(4096, ge=1, description="Tokens of a packed micro-batch.")
    gradient_checkpointing: bool = Field(False, description="Recompute layers in the backward pass.")
    gradient_checkpointing_layers: int = Field(
        0, ge=0, description="With it: so many layers alone, of each pipeline stage the first; 0 is all of them."
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="Compile what layers do between products: auto does on GPUs, from 50M parameters on."
    )
    logprob_chunk_tokens: int = Field(
        0, ge=0, description="Rows of [tokens, vocab] logits alive at once; 0: what 512 MiB hold, 64 MiB on a CPU."
    )
    custom_advantage_function_path: str = Field("", description="Function by path.")
    custom_loss_function_path: str = Field("", description="Function by path.")
    custom_tis_function_path: str = Field("", description="Function by path.")
    custom_pg_loss_reducer_function_path: str = Field("", description="Function by path.")
    rollout_data_postprocess_path: str = Field("", description="Function by path, called with the step's columns.")
    custom_convert_samples_to_train_data_path: str = Field("", description="Function by path.")
    custom_megatron_init_path: str = Field("", description="Function by path, called where a Megatron rank starts.")
    custom_megatron_before_log_prob_hook_path: str = Field("", description="Function by path, before scoring.")
    custom_megatron_before_train_step_hook_path: str = Field("", description="Function by path, before a step.")


class RewardSection(Section):
    """How samples are judged."""

    rm_type: str = Field("", description="A reward registered by name.")
    custom_rm_path: str = Field("", description="Function by path: async reward(args, sample, **kw) -> float.")
    group_rm: bool = Field(False, description="custom_rm_path gets the whole group's samples.")
    reward_key: str = Field("", description="Key of a dict reward that trains; the others become metrics.")
    reward_weights: dict[str, float] = Field({}, description="Weight of each of Reward.terms; empty trains on value.")
    reward_terms_normalize: bool = Field(
        False, description="Normalise each term in its group before they are weighed and added (GDPO)."
    )
    overlong_buffer_len: int = Field(0, ge=0, description="Last tokens before the limit that are penalised; 0 is off.")
    overlong_penalty_factor: float = Field(1.0, ge=0, description="Penalty at the limit.")
    mask_truncated: bool = Field(False, description="Truncated samples do not train, but count in their group.")
    reward_timeout: float = Field(60.0, gt=0, description="Seconds for one group's reward.")
    custom_reward_post_process_path: str = Field("", description="Function by path over a step's samples.")
    sandbox_level: Literal["auto", "strong", "medium", "none"] = Field(
        "auto",
        description="Isolation of code that a model or a data set brings; a level that this machine does not have is "
        "an error. auto: strong, or medium where strong is out of reach; none needs i_trust_this_code.",
    )
    i_trust_this_code: bool = Field(
        False, description="With sandbox_level = none: that code runs with your rights; only time and memory end it."
    )


class EvalSection(Section):
    """What is measured on the way."""

    eval_interval: int = Field(0, ge=0, description="Steps between evaluations; 0 is only at the end of a stage.")
    eval_async: bool = Field(
        False, description="Training goes on meanwhile: one of several engines keeps the weights of that version."
    )
    eval_prompt_data: tuple[str, ...] = Field((), description="NAME PATH pairs, as in slime.")
    eval_config: str = Field(
        "", description="slime's file of evaluation sets (YAML, JSON or TOML); they are added to eval_tasks."
    )
    eval_tasks: tuple[EvalTask, ...] = Field((), description="Evaluation sets, each with its own plugin and reward.")
    skip_eval_before_train: bool = Field(False, description="No evaluation before the first step.")
    n_samples_per_eval_prompt: int = Field(1, ge=1, description="Samples a prompt.")
    eval_temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    eval_top_p: float = Field(1.0, gt=0, le=1, description="Nucleus; 1 is off.")
    eval_top_k: int = Field(0, ge=0, description="0 is off.")
    eval_max_response_len: int = Field(0, ge=0, description="New tokens; 0 takes rollout_max_response_len.")
    eval_pass_reward: float = Field(1.0, description="Reward from which a sample is right, for pass@k and maj@k.")
    eval_category_key: str = Field(
        "", description="Column of a question's category; empty: the metadata's category, where rows have one."
    )
    eval_function_path: str = Field("", description="Function by path.")


class ReportSection(Section):
    """Where figures go."""

    save_samples: int = Field(4, ge=0, description="Best and worst samples kept a step for `slime show`.")
    use_wandb: bool = Field(False, description="Weights & Biases; WANDB_MODE=offline works.")
    wandb_project: str = Field("slime", description="Its project.")
    wandb_group: str = Field("", description="Its group.")
    export_final: bool = Field(True, description="Write final/, a Hugging Face folder.")
    save_interval: int = Field(20, ge=0, description="Steps between checkpoints; 0 is only at the end and on signals.")
    save_keep: int = Field(2, ge=1, description="Checkpoints kept, the newest of them; older ones are removed.")
    async_save: bool = Field(True, description="Write a checkpoint while training goes on; training waits for a copy.")
    ledger_keep_steps: int = Field(
        0, ge=0, description="Steps whose token payloads are kept behind the oldest checkpoint; 0 is all."
    )
    ledger_dir: str = Field("", description="Local folder of the ledger, where the run directory is on a network.")
    check_hooks: bool = Field(
        False, description="Watch what hooks do: hash what they may not change, judge 1 % of groups twice."
    )
    custom_rollout_log_function_path: str = Field("", description="Function by path.")
    custom_eval_rollout_log_function_path: str = Field("", description="Function by path.")


class Config(Section, extra="allow"):
    """A whole run, resolved. Written to config.toml in the run directory.

    Further tables are those of backends, such as ``[sglang]``; :meth:`table` reads one.
    """

    __pydantic_extra__: dict[str, dict[str, Any]]

    schema_version: int = Field(SCHEMA_VERSION, description="Of the recipe format.")
    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The run directory is runs/NAME-N.")
    seed: int = Field(0, ge=0, lt=2**63, description="Every draw of the run derives from it.")
    plugins: tuple[str, ...] = Field(
        (), description="Plugins to load, in order: names, or paths of Python files. Flag: --plugin, repeatable."
    )
    cluster: ClusterSection = ClusterSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    report: ReportSection = ReportSection()
    plugin: dict[str, dict[str, Any]] = Field({}, description="[plugin.NAME] tables, typed by each plugin.")
    stage: tuple[dict[str, Any], ...] = Field(
        (), description="[[stage]] tables: a name and overriding core keys; run in order, one version counter."
    )

    def table(self, name: str) -> dict[str, Any]:
        """The table ``[NAME]`` of a backend; empty where there is none."""
        return self.tables.get(name, {})

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables of backends, by name."""
        return self.__pydantic_extra__


SECTIONS = ("cluster", "data", "rollout", "train", "reward", "eval", "report")
