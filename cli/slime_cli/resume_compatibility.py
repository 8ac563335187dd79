"""Resume compatibility: a table of changed keys with verdicts, from the saved and the present config.

    safe      the same weights                             resumes
    notice    the same mathematics, perhaps other bits      resumes with a notice
    unsafe    another experiment under the old one's name   refused unless --force-key names it

Every key of the schema has exactly one class; tables of plugins and backends are unsafe as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_core.config.fields import core_keys
from slime_core.config.problems import error_of
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.stages import stage_name, stages
from slime_core.config.validate import check_model
from slime_core.errors import ConfigError, nearest
from slime_core.plugins.backends import brought_by

Verdict = Literal["safe", "notice", "unsafe"]
PLUGINS = "plugins"
"""What `--force-key` calls plugins whose code changed."""
STAGE = "stage"


@dataclass(slots=True, frozen=True)
class Rule:
    """A class of keys and the reason why they are in it; ``keys`` are bare names."""

    verdict: Verdict
    reason: str
    keys: frozenset[str]


def _rule(verdict: Verdict, reason: str, keys: str) -> Rule:
    return Rule(verdict, reason, frozenset(keys.split()))


RULES = (
    _rule("safe", "a name", "name rollout_buffer_token_env"),
    _rule(
        "safe",
        "figures, exports and checkpoints do not train",
        "save_samples use_wandb wandb_project wandb_group export_final save_interval save_keep async_save "
        "ledger_keep_steps custom_rollout_log_function_path custom_eval_rollout_log_function_path "
        "save_debug_rollout_data check_hooks run_done_path",
    ),
    _rule(
        "safe",
        "evaluation draws nothing that trains",
        "eval_interval eval_async eval_prompt_data eval_config eval_tasks skip_eval_before_train eval_temperature "
        "n_samples_per_eval_prompt eval_top_p eval_top_k eval_max_response_len eval_pass_reward eval_category_key "
        "eval_function_path",
    ),
    _rule("safe", "a longer or shorter run of the same kind", "num_rollout"),
    _rule(
        "safe",
        "a limit, not a rule of what trains",
        "generate_timeout reward_timeout max_dropped_groups max_nonfinite_steps max_bad_rows on_plugin_error "
        "server_concurrency rollout_start_timeout rollout_request_timeout rollout_max_retries "
        "rollout_health_check_interval rollout_health_check_timeout rollout_max_restarts min_healthy_engines "
        "check_weights canary_band max_restarts hang_timeout sandbox_level i_trust_this_code",
    ),
    _rule("safe", "the embedded engine gives the same bits for any number of slots", "rollout_slots"),
    _rule("notice", "the same samples while prompts and responses fit both bounds", "rollout_max_context_len"),
    _rule(
        "notice",
        "the same mathematics on another machine or in another split; bits may differ",
        "cluster_backend ray_address ray_placement_timeout ray_py_modules ray_env_vars actor_num_nodes "
        "actor_num_gpus_per_node device cpu_threads colocate offload_train offload_rollout "
        "max_tokens_per_gpu gradient_checkpointing gradient_checkpointing_layers compile "
        "logprob_chunk_tokens teacher_place rollout_num_gpus "
        "rollout_num_gpus_per_engine rollout_num_engines rollout_external_engine_addrs rollout_engine_token_env "
        "rollout_engine_ca engine_topology rollout_router update_weight_transport update_weight_buffer_size "
        "update_weight_disk_dir",
    ),
    _rule("unsafe", "every draw derives from it", "seed"),
    _rule("unsafe", "the format of the recipe itself", "schema_version"),
    _rule("unsafe", "plugins make rollouts and rewards", PLUGINS),
    _rule(
        "unsafe",
        "other prompts, or in another order",
        "prompt_data input_key label_key metadata_key tool_key id_key multimodal_keys apply_chat_template "
        "apply_chat_template_kwargs rollout_shuffle rollout_max_prompt_len overlong_prompt max_line_bytes tasks "
        "data_source_path",
    ),
    _rule("unsafe", "another model", "hf_checkpoint init_weights trust_remote_code ref_load teacher_load critic_load"),
    _rule(
        "unsafe",
        "other samples",
        "rollout_batch_size n_samples_per_prompt rollout_max_response_len rollout_temperature "
        "rollout_top_p rollout_top_k rollout_stop rollout_stop_token_ids rollout_engine rollout_function_path "
        "rollout_deterministic pause_generation_mode rollout_middleware_paths "
        "custom_generate_function_path rollout_sample_hook_path custom_config_path",
    ),
    _rule(
        "unsafe",
        "other groups meet a step",
        "dynamic_sampling over_sampling_batch_size partial_rollout mask_offpolicy_in_partial_rollout max_staleness "
        "async_schedule stale_policy dynamic_sampling_filter_path rollout_sample_filter_path buffer_filter_path",
    ),
    _rule(
        "unsafe",
        "rollouts come from elsewhere, or nothing trains",
        "rollout_buffer_url load_debug_rollout_data debug_rollout_only debug_train_only",
    ),
    _rule(
        "unsafe",
        "other rewards",
        "rm_type custom_rm_path group_rm reward_key reward_weights reward_terms_normalize overlong_buffer_len "
        "overlong_penalty_factor mask_truncated custom_reward_post_process_path",
    ),
    _rule(
        "unsafe",
        "another loss or advantage",
        "loss_type advantage_estimator disable_grpo_std_normalization grpo_std_scope credit_level "
        "normalize_advantages pass_k gae_gamma gae_lambda policy_objective importance_level loss_aggregation "
        "loss_divisor eps_clip eps_clip_high eps_clip_c use_rollout_logprobs use_tis tis_level tis_mode tis_clip "
        "tis_clip_low tis_batch_normalize use_rs rs_level rs_lower_bound rs_upper_bound rs_veto_threshold use_opsm "
        "opsm_delta kl_loss_coef kl_loss_type use_unbiased_kl kl_coef kl_reward_type entropy_coef opd_kl_coef "
        "value_clip custom_advantage_function_path custom_loss_function_path custom_tis_function_path "
        "custom_pg_loss_reducer_function_path rollout_data_postprocess_path custom_convert_samples_to_train_data_path "
        "custom_megatron_init_path custom_megatron_before_log_prob_hook_path "
        "custom_megatron_before_train_step_hook_path",
    ),
    _rule(
        "unsafe",
        "another optimizer or schedule",
        "lr min_lr lr_decay_style lr_warmup_iters lr_decay_iters weight_decay adam_beta1 adam_beta2 adam_eps "
        "clip_grad num_steps_per_rollout global_batch_size critic_lr critic_lr_warmup_iters num_critic_only_steps",
    ),
    _rule("unsafe", "saved weights and states are of this kind", "train_backend dtype"),
    _rule("unsafe", "the ledger lies there: a run without its ledger has lost its samples", "ledger_dir"),
)
STRUCTURE = Rule("unsafe", "stages have other names or another order", frozenset())
EARLIER = Rule("unsafe", "versions of later stages count from the end of this one", frozenset())
SCHEDULE = Rule("unsafe", "the learning rate decays over the whole stage (set lr_decay_iters to fix it)", frozenset())
LAYOUT = Rule("notice", "the same mathematics in another layout, or with other memory; bits may differ", frozenset())
"""Of a backend's keys that it calls resumable; its other keys change what is learnt, or may."""
TABLE = Rule("unsafe", "only its plugin or backend knows what it changes", frozenset())


@dataclass(slots=True, frozen=True, kw_only=True)
class ConfigChange:
    """A key whose value is not that of the saved run; with several stages, perhaps of one of them."""

    key: str  # train.lr, plugin.rm_math.digits, stage.warmup.train.lr
    was: Any
    now: Any
    verdict: Verdict
    reason: str

    def named_by(self, force: str) -> bool:
        """Whether ``--force-key FORCE`` means this key: in full, without its stage, or its bare name."""
        force = force.replace("-", "_")
        key = self.key.replace("-", "_")
        ways = {key, key.rpartition(".")[2]}
        if key.startswith("stage."):
            ways.add(key.split(".", 2)[2])
        return force in ways or any(way.startswith((f"{force}.", f"{force}[")) for way in ways)


def rule_of(name: str) -> Rule:
    """The class of a core key by its bare name; a key that no class has is unsafe."""
    return next((rule for rule in RULES if name in rule.keys), Rule("unsafe", "no class has it", frozenset()))


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[ConfigChange]:
    """Changed keys of two whole configs as plain tables (secrets redacted in both), in the schema's order.

    Raises:
        ConfigError: CFG01 to CFG03, where the saved one is not a config of this version.
    """
    before, after = stages(_config(was)), stages(_config(now))
    names = [stage_name(stage) for stage in before], [stage_name(stage) for stage in after]
    if names[0] != names[1]:
        structure = ConfigChange(
            key=STAGE, was=names[0], now=names[1], verdict=STRUCTURE.verdict, reason=STRUCTURE.reason
        )
        before, after = before[-1:], after[-1:]
        return [structure, *_of_stage(before[0], after[0], was, now, last=True)]
    changes: dict[str, list[tuple[str, ConfigChange]]] = {}
    for name, old, new in zip(names[0], before, after):
        for change in _of_stage(old, new, was, now, last=name == names[0][-1]):
            changes.setdefault(change.key, []).append((name, change))
    return [change for key in changes for change in _merged(changes[key], len(before))]


def signature(data: Mapping[str, Any]) -> str:
    """16 hex digits over every key, of every stage, that is not safe to change: equal where the same bits come out."""
    values = {
        f"{index}.{path}": value
        for index, stage in enumerate(stages(_config(data)))
        for path, value in _flat(stage.model_dump(mode="json"))
        if _is_table(path) or rule_of(_core(path)).verdict != "safe"
    }
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def refused(changes: Sequence[ConfigChange], forced: Collection[str] = ()) -> list[ConfigChange]:
    """The unsafe ones that no ``--force-key`` names."""
    return [c for c in changes if c.verdict == "unsafe" and not any(c.named_by(force) for force in forced)]


def table(changes: Sequence[ConfigChange]) -> str:
    """Lines ``key  was -> now  verdict: reason``, aligned."""
    rows = [(c.key, f"{shown(c.was)} -> {shown(c.now)}", f"{c.verdict}: {c.reason}") for c in changes]
    widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else [0, 0]
    return "\n".join(f"{key.ljust(widths[0])}  {values.ljust(widths[1])}  {reason}" for key, values, reason in rows)


def shown(value: Any) -> str:
    """A value in few characters."""
    text = json.dumps(value, ensure_ascii=False, default=str) if value is not _ABSENT else "(none)"
    return text if len(text) <= 120 else text[:80] + "..." + text[-37:]


def check(changes: Sequence[ConfigChange], forced: Collection[str], where: str) -> None:
    """Refuse what would make another experiment of the run.

    Raises:
        ConfigError: CFG13 with the whole diff, CFG01 a forced key that does not exist.
    """
    check_forced(forced, changes)
    wrong = refused(changes, forced)
    if wrong:
        flags = " ".join(f"--force-key {change.key}" for change in wrong)
        raise ConfigError(
            f"{len(wrong)} key(s) of the saved run changed in a way that makes it another experiment",
            code="CFG13",
            where=where,
            why="\n    " + table(changes).replace("\n", "\n    "),
            fix=f"put them back, start another run, or go on all the same: {flags}",
        )


def check_forced(forced: Collection[str], changes: Sequence[ConfigChange] = ()) -> None:
    """Every ``--force-key`` is a key; it need not have changed.

    Raises:
        ConfigError: CFG01.
    """
    keys = core_keys()
    names = {key.path for key in keys.values()} | set(keys) | {PLUGINS, STAGE}
    for force in forced:
        plain = force.replace("-", "_")
        if plain in names or _is_table(plain) or any(c.named_by(force) for c in changes):
            continue
        raise ConfigError(
            f"--force-key {force} names no key",
            code="CFG01",
            where=f"command line: --force-key {force}",
            fix="\n".join(filter(None, [nearest(plain, names), "all keys: slime config keys"])),
        )


class _Absent:
    """No value: a plugin's table that one side does not have."""

    def __repr__(self) -> str:
        return "(none)"


_ABSENT = _Absent()


def _config(data: Mapping[str, Any]) -> Config:
    config = check_model(Config, data)
    if isinstance(config, list):
        raise error_of(config)
    return config


def _of_stage(
    old: Config, new: Config, was: Mapping[str, Any], now: Mapping[str, Any], *, last: bool
) -> Iterator[ConfigChange]:
    """Changes of one resolved stage. A key that only follows from another (``auto``) is left out."""
    before, after = dict(_flat(old.model_dump(mode="json"))), dict(_flat(new.model_dump(mode="json")))
    written = _written(was, old), _written(now, new)
    for path in dict.fromkeys((*before, *after)):
        one, two = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if one == two or _core(path) in _settled(written, path):
            continue
        rule = _rule_at(path, old, new, last)
        yield ConfigChange(key=path, was=one, now=two, verdict=rule.verdict, reason=rule.reason)


def _written(data: Mapping[str, Any], stage: Config) -> dict[str, Any]:
    """[train] as written for a stage, before ``auto`` was resolved."""
    train = dict(data.get("train", {}))
    for entry in data.get("stage", ()):
        if entry.get("name") == stage_name(stage):
            train |= {key: value for key, value in entry.items() if key in train}
            train |= entry.get("train", {})
    return train


def _settled(written: tuple[dict[str, Any], dict[str, Any]], path: str) -> tuple[str, ...]:
    name = _core(path)
    same = path.startswith("train.") and written[0].get(name, _ABSENT) == written[1].get(name, _ABSENT)
    return (name,) if same and name in written[0] else ()


def _core(path: str) -> str:
    """The bare name of a core key: ``tasks`` of ``data.tasks[0].weight``."""
    head, _, rest = path.partition(".")
    return (rest if head in SECTIONS else head).split(".")[0].split("[")[0]


def _is_table(path: str) -> bool:
    """Whether a key is of a plugin's or a backend's table."""
    head, dot, _ = path.partition(".")
    return bool(dot) and head not in SECTIONS and "[" not in head


def _rule_at(path: str, old: Config, new: Config, last: bool) -> Rule:
    if _is_table(path):
        head, _, name = path.replace("-", "_").partition(".")
        return LAYOUT if any(name in b.resumable for b in brought_by(head)) else TABLE
    if path == "rollout.num_rollout":
        trains = old.train, new.train
        if not last:
            return EARLIER
        if any(t.lr_decay_style != "constant" and not t.lr_decay_iters for t in trains):
            return SCHEDULE
    return rule_of(_core(path))


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; arrays of tables by index, other arrays whole; stage tables are resolved already."""
    if isinstance(data, Mapping) and (data or not path):
        for key, value in data.items():
            if path or key != STAGE:
                yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, (list, tuple)) and data and all(isinstance(item, Mapping) for item in data):
        for index, item in enumerate(data):
            yield from _flat(item, f"{path}[{index}]")
    elif data or path in core_keys() or "." in path:
        yield path, list(data) if isinstance(data, tuple) else data


def _merged(changes: list[tuple[str, ConfigChange]], count: int) -> list[ConfigChange]:
    """One row where all stages changed alike, else a row a stage."""
    same = len(changes) == count and len({(shown(c.was), shown(c.now), c.verdict) for _, c in changes}) == 1
    if count == 1 or same:
        return [changes[-1][1]]
    return [
        ConfigChange(key=f"{STAGE}.{name}.{c.key}", was=c.was, now=c.now, verdict=c.verdict, reason=c.reason)
        for name, c in changes
    ]
