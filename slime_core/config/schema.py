"""Every key of a run: frozen, strict pydantic models, one a section. Key names are unique across core sections.

THUDM/slime's name is used wherever it has one. A key's text is what `slime config keys` prints.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Section(BaseModel):
    """A frozen section: unknown keys and wrong types are errors, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class Task(Section):
    """One entry of `[[data.tasks]]` or `[[eval.eval_tasks]]`."""

    name: str = Field(description="What Prompt.task says; rewards and metrics are routed and reported by it.")
    prompt_data: str = Field("", description="JSONL, Parquet or hub data set, with @[a:b] for a slice; or a plugin's.")
    weight: float = Field(1.0, gt=0, description="Share of prompts, relative to the other tasks.")
    plugin: str = Field("", description="The plugin that owns the task.")
    generate: str = Field("", description="Function by path, module:function or file.py:function.")
    reward: str = Field("", description="Function by path, or an rm_type name.")
    input_key: str = Field("", description="As data.input_key, for this task.")
    label_key: str = Field("", description="As data.label_key, for this task.")
    n_samples_per_prompt: int = Field(0, ge=0, description="Samples a prompt; 0 takes the section's.")


class ClusterSection(Section):
    """Where engines and trainers live."""

    cluster_backend: Literal["local", "ray"] = Field(
        "local", description="local: this machine. Short flag: --cluster."
    )
    actor_num_nodes: int = Field(1, ge=1, description="Machines that train.")
    actor_num_gpus_per_node: int = Field(1, ge=1, description="Trainer ranks a machine; on CPU, processes.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where torch sees one.")
    cpu_threads: int = Field(0, ge=0, description="Threads of each process's torch; 0 is the cores divided by ranks.")
    colocate: bool = Field(True, description="Engine and trainer share the device and take turns.")


class DataSection(Section):
    """Where prompts come from."""

    prompt_data: str = Field("", description="JSONL (one object a line), Parquet or hub data set; @[a:b] is a slice.")
    input_key: str = Field("input", description="Column of the prompt: a string, or a list of chat messages.")
    label_key: str = Field("", description="Column of the label, handed to the reward.")
    metadata_key: str = Field("metadata", description="Column of a JSON object kept in Prompt.metadata.")
    tool_key: str = Field("", description="Column of tool definitions for the chat template.")
    id_key: str = Field("", description="Column of a row's own id; duplicates are errors.")
    apply_chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the chat template.")
    rollout_shuffle: bool = Field(False, description="A new permutation every epoch, from (seed, epoch).")
    rollout_max_prompt_len: int = Field(0, ge=0, description="Tokens; 0 is what the context leaves.")
    overlong_prompt: Literal["drop", "truncate", "error"] = Field("drop", description="What a longer prompt meets.")
    max_bad_rows: int = Field(0, ge=0, description="Unreadable rows that are skipped, counted and copied out.")
    max_line_bytes: int = Field(8 << 20, ge=1024, description="Longest line of a JSONL file.")
    tasks: tuple[Task, ...] = Field((), description="Several data sets, with weights and their own functions.")


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
    rollout_engine: Literal["local", "sglang"] = Field("local", description="local: the embedded engine.")
    rollout_slots: int = Field(64, ge=1, description="Sequences the embedded engine decodes at once.")
    max_staleness: int = Field(0, ge=0, description="0 trains on-policy; k lets the collector run k steps ahead.")
    async_schedule: Literal["lockstep", "free"] = Field("lockstep", description="How groups meet steps when ahead.")
    stale_policy: Literal["wait"] = Field("wait", description="For groups near the bound.")
    generate_timeout: float = Field(3600.0, gt=0, description="Seconds for one group's generation.")
    on_plugin_error: Literal["fail", "drop"] = Field("fail", description="A hook that raises: stop or drop the group.")
    rollout_function_path: str = Field("", description="Function by path that replaces the rollout of a step.")
    custom_generate_function_path: str = Field("", description="Function by path that generates one sample.")
    data_source_path: str = Field("", description="Class by path that replaces the data source.")
    rollout_sample_hook_path: tuple[str, ...] = Field((), description="Functions by path, called on each sample.")
    dynamic_sampling_filter_path: str = Field("", description="Function by path that keeps or drops a group.")
    rollout_sample_filter_path: str = Field("", description="Function by path that may set sample.remove_sample.")
    buffer_filter_path: str = Field("", description="Function by path that picks groups from the buffer.")
    custom_config_path: str = Field("", description="TOML, JSON or YAML file of more keys for functions by path.")


class TrainSection(Section):
    """How the policy learns."""

    train_backend: Literal["fsdp", "megatron"] = Field("fsdp", description="FSDP2, or Megatron-core.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of compute; masters are float32. auto: bfloat16 where the processor has it."
    )
    loss_type: str = Field("policy_loss", description="policy_loss, sft_loss, or a name from slime_loss.")
    advantage_estimator: str = Field("grpo", description="grpo, or a name from slime_advantage.")
    disable_grpo_std_normalization: bool = Field(False, description="Centre rewards in a group, do not divide by std.")
    loss_aggregation: Literal["rollout_mean", "token_mean"] = Field(
        "rollout_mean", description="Mean over rollouts of their token means, or over all tokens of the step."
    )
    eps_clip: float = Field(0.2, ge=0, lt=1, description="The ratio's lower bound is 1 - eps_clip.")
    eps_clip_high: float = Field(0.0, ge=0, description="The upper bound is 1 + eps_clip_high; 0 takes eps_clip.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Weight of KL to the reference model in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="Schulman's estimators; k1 has no gradient.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
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
    logprob_chunk_tokens: int = Field(1024, ge=1, description="Rows of [tokens, vocab] logits alive at once.")
    custom_advantage_function_path: str = Field("", description="Function by path.")
    custom_loss_function_path: str = Field("", description="Function by path.")
    custom_tis_function_path: str = Field("", description="Function by path.")
    custom_pg_loss_reducer_function_path: str = Field("", description="Function by path.")
    rollout_data_postprocess_path: str = Field("", description="Function by path, called with the step's columns.")
    custom_convert_samples_to_train_data_path: str = Field("", description="Function by path.")


class RewardSection(Section):
    """How samples are judged."""

    rm_type: str = Field("", description="A reward registered by name.")
    custom_rm_path: str = Field("", description="Function by path: async reward(args, sample, **kw) -> float.")
    group_rm: bool = Field(False, description="custom_rm_path gets the whole group's samples.")
    reward_key: str = Field("", description="Key of a dict reward that trains; the others become metrics.")
    reward_timeout: float = Field(60.0, gt=0, description="Seconds for one group's reward.")
    custom_reward_post_process_path: str = Field("", description="Function by path over a step's samples.")


class EvalSection(Section):
    """What is measured on the way."""

    eval_interval: int = Field(0, ge=0, description="Steps between evaluations; 0 is only at the end of a stage.")
    eval_prompt_data: tuple[str, ...] = Field((), description="NAME PATH pairs, as in slime.")
    eval_tasks: tuple[Task, ...] = Field((), description="Evaluation sets, each with its own plugin and reward.")
    skip_eval_before_train: bool = Field(False, description="No evaluation before the first step.")
    n_samples_per_eval_prompt: int = Field(1, ge=1, description="Samples a prompt.")
    eval_temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    eval_top_p: float = Field(1.0, gt=0, le=1, description="Nucleus; 1 is off.")
    eval_top_k: int = Field(0, ge=0, description="0 is off.")
    eval_max_response_len: int = Field(0, ge=0, description="New tokens; 0 takes rollout_max_response_len.")
    eval_function_path: str = Field("", description="Function by path.")


class ReportSection(Section):
    """Where figures go."""

    save_samples: int = Field(4, ge=0, description="Best and worst samples kept a step for `slime show`.")
    use_wandb: bool = Field(False, description="Weights & Biases; WANDB_MODE=offline works.")
    wandb_project: str = Field("slime", description="Its project.")
    wandb_group: str = Field("", description="Its group.")
    export_final: bool = Field(True, description="Write final/, a Hugging Face folder.")
    ledger_keep_payloads: bool = Field(True, description="Keep token payloads of trained samples.")
    custom_rollout_log_function_path: str = Field("", description="Function by path.")
    custom_eval_rollout_log_function_path: str = Field("", description="Function by path.")


class Config(Section):
    """A whole run, resolved. Written to config.toml in the run directory."""

    schema_version: int = Field(SCHEMA_VERSION, description="Of the recipe format.")
    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The run directory is runs/NAME-N.")
    seed: int = Field(0, ge=0, lt=2**63, description="Every draw of the run derives from it.")
    plugins: tuple[str, ...] = Field((), description="Plugins to load, in order. Flag: --plugin, repeatable.")
    cluster: ClusterSection = ClusterSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    report: ReportSection = ReportSection()
    plugin: dict[str, dict[str, Any]] = Field({}, description="[plugin.NAME] tables, typed by each plugin.")
    megatron: dict[str, Any] = Field({}, description="Megatron-core's own options.")
    sglang: dict[str, Any] = Field({}, description="SGLang's own options.")
    stage: tuple[dict[str, Any], ...] = Field(
        (), description="[[stage]] tables: a name and overriding core keys; run in order, one version counter."
    )


SECTIONS = ("cluster", "data", "rollout", "train", "reward", "eval", "report")
