"""slime's ``args`` of a config: flat keys under THUDM/slime's names and with its meanings, read-only."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from slime_core.config.presets import settle
from slime_core.config.schema import SECTIONS
from slime_core.config.sections.train import FEW_TOKENS
from slime_core.config.stages import rollout_slots
from slime_core.config.table_file import read_table
from slime_core.errors import ConfigError, nearest
from slime_core.plugins.backends import COMPAT, TRACKERS, engine_of, is_installed

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context

LOOPBACK = "127.0.0.1"
ADDRESS = ("sglang_router_ip", "sglang_router_port")
_NONE_FOR_ZERO = ("rollout_max_context_len", "rollout_max_prompt_len", "global_batch_size", "lr_decay_iters")
_FOLLOWS = {  # evaluation keys that fall back on training's where they are 0
    "eval_max_response_len": "rollout_max_response_len",
    "over_sampling_batch_size": "rollout_batch_size",
}


def flat(config: Config) -> dict[str, Any]:
    """Every core key by its own name, which is unique over sections; empty values are None, as in slime."""
    config = config.model_copy(update={"train": settle(config.train)})
    values: dict[str, Any] = {}
    for section in SECTIONS:
        model = getattr(config, section)
        values.update({name: getattr(model, name) for name in type(model).model_fields})
    for name, value in values.items():
        if value == "" or (name in _NONE_FOR_ZERO and value == 0):
            values[name] = None
        elif isinstance(value, tuple):
            values[name] = list(value) or None
    for name, source in _FOLLOWS.items():
        values[name] = values[name] or values[source]
    for name in ("rollout_top_k", "eval_top_k"):
        values[name] = values[name] or -1
    values["max_tokens_per_gpu"] = values["max_tokens_per_gpu"] or FEW_TOKENS
    values |= _derived(config, values)
    return {**values, **_more(config.rollout.custom_config_path, values)}


def _more(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``custom_config_path``.

    Raises:
        ConfigError: as :func:`read_table`; CFG07 a key that slime has already.
    """
    if not path:
        return {}
    where = "rollout.custom_config_path"
    more = read_table(Path(path), where)
    twice = sorted(set(more) & set(values))
    if twice:
        raise ConfigError(
            f"{path} sets {', '.join(twice)}, which slime has already",
            code="CFG07",
            where=where,
            fix="set it in the recipe or by its flag: --" + twice[0].replace("_", "-"),
        )
    return more


def _derived(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of slime that a config here holds under another name."""
    return {
        "seed": config.seed,
        "rollout_seed": config.seed,
        **_servers(config),
        "rollout_skip_special_tokens": False,
        **_megatron(config),
        "rm_url": None,
        "eval_reward_key": values["reward_key"],
        "calculate_per_token_loss": config.train.loss_aggregation == "token_mean",
        "grpo_std_normalization": not config.train.disable_grpo_std_normalization,
        "rewards_normalization": True,
        "use_kl_loss": config.train.kl_loss_coef > 0,
        "use_tis": config.train.use_tis or bool(config.train.custom_tis_function_path),
        "fully_async": config.rollout.max_staleness > 0,
        "ci_test": False,
        "use_wandb": False,
        "use_tensorboard": False,
        **config.plugin.get(TRACKERS, {}),
    }


def _megatron(config: Config) -> dict[str, Any]:
    """Sizes of the layout, and every key of the trainer's own table."""
    sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor_model", "pipeline_model", "context", "expert_model")}
    written = config.table(config.train.train_backend)
    return {**sizes, **{name.replace("-", "_"): value for name, value in written.items()}}


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
        "num_gpus_per_node": config.cluster.actor_num_gpus_per_node,
    }


class Loopback(Protocol):
    """What has the loopback `/generate` of a run."""

    def server(self) -> Any:
        """The server; ``port(ctx)`` opens it at its first call."""
        ...


class Args:
    """Reads like slime's argparse namespace and cannot be written; ``copy.copy(args)`` gives one that can.

    ``sglang_router_ip`` and ``sglang_router_port`` lead to a loopback `/generate` before the run's engine, opened when
    they are first read.

    Example:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    """

    __slots__ = ("_ctx", "_session", "_values")

    def __init__(self, values: Mapping[str, Any], session: Loopback, ctx: Context | None) -> None:
        for name, value in (("_values", values), ("_session", session), ("_ctx", ctx)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "sglang_router_ip":
            self._session.server()
            return LOOPBACK
        if name == "sglang_router_port":
            return self._session.server().port(self._ctx)
        if name.startswith("__") or name not in self._values:
            hint = nearest(name, tuple(self._values))
            raise AttributeError(f"args has no '{name}'; {hint + ' ' if hint else ''}all keys: slime config keys")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args is read-only; to change '{name}' work on copy.copy(args)")

    __delattr__ = None  # type: ignore[assignment]

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in ADDRESS

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __copy__(self) -> Changeable:
        address = {name: getattr(self, name) for name in ADDRESS} if is_installed(COMPAT) else {}
        return Changeable(**self._values, **address, _session=self._session, _ctx=self._ctx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Changeable:
        return self.__copy__()


class Changeable(SimpleNamespace):
    """A copy of `Args` that a function may change, and copy again; all copies lead to the same run."""

    def __getattr__(self, name: str) -> Any:
        if name in ADDRESS:  # not in a copy where slime-compat is not installed
            self._session.server()
        raise AttributeError(f"args has no '{name}'")

    def __deepcopy__(self, memo: dict[int, Any]) -> Changeable:
        shared = {id(one): one for one in (self._session, self._ctx)}
        return Changeable(**copy.deepcopy(vars(self), shared))
