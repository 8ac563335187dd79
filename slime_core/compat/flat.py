"""The keys of slime's ``args`` in a config: flat, under THUDM/slime's names and with its meanings."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.fields import core_keys
from slime_core.config.presets import settle
from slime_core.config.schema import SECTIONS
from slime_core.config.sections.train import FEW_TOKENS
from slime_core.config.stages import rollout_slots
from slime_core.config.table_file import read_table
from slime_core.notices import notice
from slime_core.plugins.backends import engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.evaluation import EvalTask

_NONE_FOR_ZERO = ("rollout_max_context_len", "rollout_max_prompt_len", "global_batch_size", "lr_decay_iters")
_FOLLOWS = {  # keys that fall back on another where they are empty
    "eval_max_response_len": "rollout_max_response_len",
    "over_sampling_batch_size": "rollout_batch_size",
}
_NAMES = {  # slime's name -> ours
    "rollout_seed": "seed",
    "gamma": "gae_gamma",
    "lambd": "gae_lambda",
    "log_probs_chunk_size": "logprob_chunk_tokens",
    "log_probs_max_tokens_per_gpu": "max_tokens_per_gpu",
    "opd_teacher_load": "teacher_load",
    "offload": "colocate",
    "eval_reward_key": "reward_key",
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_max_context_len": "rollout_max_context_len",
    "eval_max_prompt_len": "rollout_max_prompt_len",
    "num_gpus_per_node": "actor_num_gpus_per_node",
    "critic_num_nodes": "actor_num_nodes",
    "critic_num_gpus_per_node": "actor_num_gpus_per_node",
}


def _repeat(value: object, names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), value)


_FIXED = {
    "rollout_global_dataset": True,
    "rewards_normalization": True,
    "compute_advantages_and_returns": True,
    "use_dynamic_batch_size": True,
    "balance_data": True,
    "get_mismatch_metrics": True,
    "update_weight_mode": "full",
    "update_weights_interval": 1,
    "start_rollout_id": 0,
    "micro_batch_size": 1,
    **_repeat(
        False,
        "balance_by_flops ci_test enable_mtp_training finetune keep_old_actor log_correct_samples log_multi_turn "
        "log_passrate no_load_optim no_load_rng no_save_optim release_train reset_optimizer_states "
        "use_distributed_post use_rollout_entropy use_stateless_adam use_tensorboard use_wandb",
    ),
    **_repeat(
        None,
        "ckpt_step custom_model_provider_path dump_details eval_min_new_tokens freeze_params_name_list http_proxy "
        "load load_debug_rollout_data_subsample log_reward_category mtp_num_layers num_epoch "
        "only_train_params_name_list opd_teacher_ckpt_step padded_vocab_size ref_ckpt_step ref_update_interval rm_url "
        "save_debug_train_data save_hf tb_experiment_name tb_project_name update_weight_local_checkpoint_dir "
        "wandb_group wandb_host wandb_mode wandb_project wandb_run_id wandb_team",
    ),
}
"""slime's flags for what a run here always or never does: they read as in a run of slime that does the same."""
_MASKS = {"assistant": "qwen", "last": "distill_qwen"}
_PLACES = {"engine": "sglang", "trainer": "megatron"}


def flat(config: Config) -> dict[str, Any]:
    """Every core key by its own name, which is unique over sections; empty values are None, as in slime.

    Options of plugins, of the trainer and of trackers are among them where no core key has their name.

    Raises:
        ConfigError: ``custom_config_path`` cannot be read, as :func:`read_table`.
    """
    from slime_core.data.opening import eval_tasks

    config = config.model_copy(update={"train": settle(config.train)})
    values: dict[str, Any] = {"seed": config.seed}
    for section in SECTIONS:
        model = getattr(config, section)
        values.update({name: getattr(model, name) for name in type(model).model_fields})
    for name, source in _FOLLOWS.items():
        values[name] = values[name] or values[source]
    for name in ("rollout_top_k", "eval_top_k"):
        values[name] = values[name] or -1
    values["max_tokens_per_gpu"] = values["max_tokens_per_gpu"] or FEW_TOKENS
    options = {name: value for table in config.plugin.values() for name, value in table.items()}
    values = {**_FIXED, **options, **values, **_derived(config)}
    values = {name: _empty(name, value) for name, value in values.items()}
    values |= {name: values[source] for name, source in _NAMES.items()}
    values["eval_datasets"] = [_eval_dataset(name, task, values) for name, task, _ in eval_tasks(config)]
    values = copy.deepcopy(values)  # what functions change in a list or table is theirs
    return {**values, **_more(config.rollout.custom_config_path, values)}


def _eval_dataset(name: str, task: EvalTask, values: Mapping[str, Any]) -> Namespace:
    """An evaluation set as slime's functions read it, each key filled from those of all sets."""
    by_path = ":" in task.reward or "." in task.reward
    names = ("input_key", "label_key", "tool_key", "metadata_key")
    templates = {"auto": values["apply_chat_template"], "on": True, "off": False}
    return Namespace(
        name=name,
        path=task.prompt_data,
        **{key: getattr(task, key, None) or values[key] for key in names},
        rm_type=(None if by_path else task.reward) or values["rm_type"],
        custom_rm_path=(task.reward if by_path else None) or values["custom_rm_path"],
        custom_generate_function_path=task.generate or values["custom_generate_function_path"],
        apply_chat_template=templates[task.apply_chat_template],
        apply_chat_template_kwargs=values["apply_chat_template_kwargs"] | task.apply_chat_template_kwargs,
        n_samples_per_eval_prompt=task.n_samples_per_prompt or values["n_samples_per_eval_prompt"],
        temperature=task.temperature if task.temperature >= 0 else values["eval_temperature"],
        top_p=task.top_p or values["eval_top_p"],
        top_k=(task.top_k or -1) if task.top_k >= 0 else values["eval_top_k"],
        max_response_len=task.max_response_len or values["eval_max_response_len"],
    )


def _empty(name: str, value: Any) -> Any:
    """``value``, or None for an empty one."""
    if isinstance(value, tuple):
        return list(value) or None
    return None if value == "" or (name in _NONE_FOR_ZERO and value == 0) else value


def _more(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``custom_config_path`` that the config has not taken in; what is null there is None for functions.

    Raises:
        ConfigError: as :func:`read_table`.
    """
    table = read_table(Path(path), "rollout.custom_config_path") if path else {}
    more = {name: value for name, value in table.items() if name not in core_keys() or value is None}
    for name in sorted(set(more) & set(values)):
        if more[name] not in (None, values[name]):
            notice(("custom_config_path", name), f"{path} sets args.{name} for functions; the run itself is the same")
    return more


def _derived(config: Config) -> dict[str, Any]:
    """Keys of slime that a config here holds under another name."""
    train, cluster = config.train, config.cluster
    return {
        "loss_mask_type": _MASKS.get(config.data.loss_mask_type, config.data.loss_mask_type),
        "multimodal_keys": config.data.multimodal_keys or None,
        "distributed_backend": "gloo" if cluster.device == "cpu" else "nccl",
        "calculate_per_token_loss": train.loss_aggregation == "token_mean",
        "grpo_std_normalization": not train.disable_grpo_std_normalization,
        "use_kl_loss": train.kl_loss_coef > 0,
        "use_opd": train.opd_kl_coef > 0,
        "use_routing_replay": train.routing_replay != "off",
        "use_rollout_routing_replay": train.routing_replay == "rollout",
        "opd_type": _PLACES[train.teacher_place] if train.opd_kl_coef > 0 else None,
        "use_critic": train.advantage_estimator == "ppo",
        "fully_async": config.rollout.max_staleness > 0,
        **_servers(config),
        **_trainer(config),
    }


def _trainer(config: Config) -> dict[str, Any]:
    """The layout of the trainer's ranks, and every key of its own table."""
    table = {name.replace("-", "_"): value for name, value in config.table(config.train.train_backend).items()}
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
    train = config.train
    sizes = {f"{kind}_parallel_size": 1 for kind in kinds} | {
        "tensor_model_parallel_size": train.tensor_parallel_size,
        "context_parallel_size": train.context_parallel_size,
    }
    sizes |= {name: table.get(name, size) for name, size in sizes.items()}
    world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    return {
        "world_size": world,
        "data_parallel_size": world // prod(sizes[f"{kind}_parallel_size"] for kind in kinds[:3]),
        "expert_tensor_parallel_size": sizes["tensor_model_parallel_size"],
        **sizes,
        **table,
    }


def _servers(config: Config) -> dict[str, Any]:
    """slime's names for what concerns SGLang: an option X of [sglang] is ``sglang_X``; so are some keys of ours."""
    rollout = config.rollout
    served = not engine_of(config).embedded
    options = {
        name.replace("-", "_"): value
        for name, value in config.table("sglang").items()
        if name not in ("python", "env", "router")
    }
    return {
        "sglang_dp_size": 1,
        "sglang_pp_size": 1,
        "sglang_speculative_algorithm": None,
        **{f"sglang_{name}": value for name, value in options.items()},
        "sglang_tp_size": rollout.rollout_num_gpus_per_engine,
        "sglang_server_concurrency": rollout.server_concurrency if served else rollout_slots(config),
        "sglang_router_request_timeout_secs": rollout.rollout_request_timeout,
        "sglang_enable_deterministic_inference": rollout.rollout_deterministic,
        "sglang_config": rollout.engine_topology or None,
        "rollout_external": bool(rollout.rollout_external_engine_addrs),
        "use_fault_tolerance": served and rollout.rollout_max_restarts > 0,
    }
