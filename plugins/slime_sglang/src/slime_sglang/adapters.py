"""Adapters that SGLang's servers compute beside the base (``lora_sync = adapter``): what a run asks of the servers,
and what of it they cannot do.

SGLang (0.5.23) knows plain LoRA of attention and MLP layers; of experts it has kernels for some GPUs, in other names
than peft's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime_core.config.problems import Problem, conflict
from slime_core.errors import ConfigError
from slime_core.lora.spec import DEFAULT, PLAIN, LoraSpec
from slime_core.weights.fp8 import rollout_form
from slime_core.weights.stored_forms import storage_form
from slime_sglang.model_config import raw_config

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SYNC = "train.lora_sync"
MERGED = "--lora-sync merged"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "gate_up_proj")  # of families whose model folders have these as one
SERVED = (*ATTENTION, *MLP, *FUSED)
"""Last parts of names of layers that SGLang's adapters reach."""
COMPANIONS = {"k_proj": ("q_proj",), "q_proj": ("v_proj",), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}
"""SGLang joins the factors of these layers; one alone it refuses, or it ends at the first request."""
OPTIONS = ("enable_lora", "lora_paths", "max_lora_rank", "lora_target_modules", "max_loaded_loras")
"""SGLang's, which follow from the keys of [train]."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def adapter_names(config: Config) -> tuple[str, ...]:
    """Adapters that servers have beside the base, the one in training first; none where whole weights are sent."""
    train = config.train
    if not train.lora_rank or train.lora_sync != "adapter" or config.rollout.debug_rollout_only:
        return ()
    return train.lora_adapters or (DEFAULT,)


def options(config: Config, model: str) -> dict[str, Any]:
    """SGLang's options for the adapters of a run; a place more than adapters, for the base or a new version."""
    names = adapter_names(config)
    if not names:
        return {}
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": config.train.lora_rank,
        "lora_target_modules": sorted(served_targets(config, experts=_experts(model))),
        "max_loras_per_batch": len(names) + 1,
        "max_loaded_loras": len(names) + 1,
    }
    return settings | ({"lora_backend": "torch_native"} if config.cluster.device == "cpu" else {})


def served_targets(config: Config, *, experts: bool) -> set[str]:
    """Last parts of names of the layers that have adapters; of a model with ``experts`` those of attention."""
    targets = {name.rpartition(".")[2] for name in config.train.lora_target_modules}
    if targets <= set(SERVED):
        return targets
    return {*ATTENTION, *(() if experts else MLP)}  # all-linear, or a regex


def conflicts(config: Config) -> Iterator[Problem]:
    """What cannot hold where servers compute with adapters."""
    if not adapter_names(config):
        return
    train = config.train
    reasons = [
        ("train.lora_use_dora", train.lora_use_dora, "SGLang knows no DoRA"),
        ("train.lora_target_parameters", train.lora_target_parameters, "SGLang knows no adapters of experts as here"),
        (
            "rollout.rollout_quantization",
            config.rollout.rollout_quantization == "fp8",
            "SGLang does not find the scales of weights with adapters when weights are sent",
        ),
    ]
    for key, holds, reason in reasons:
        if holds:
            name = key.partition(".")[2]
            yield conflict(f"{name} with lora_sync = adapter", [key, SYNC], why=reason, fix=MERGED)
    yield from _targets(train.lora_target_modules, config.rollout.hf_checkpoint)
    yield from _start(config)
    table = {name.replace("-", "_"): (name, value) for name, value in config.table("sglang").items()}
    for option in OPTIONS:
        if option in table:
            name = f"sglang.{table[option][0]}"
            yield conflict(
                f"{name} with lora_sync = adapter",
                [name, SYNC],
                why="slime sets it from the keys lora_* of [train]",
                fix=f"leave {name} out",
            )
    name, value = table.get("dp_size", ("", 1))
    if value != 1:
        yield conflict(
            f"sglang.{name} = {value} with lora_sync = adapter",
            [f"sglang.{name}", SYNC],
            why="SGLang loads no adapters into data-parallel replicas of one server",
            fix=f"start one server a replica   or   {MERGED}",
        )


def _start(config: Config) -> Iterator[Problem]:
    """Servers that slime starts without their folder's weights, and that so read no adapters from folders either."""
    rollout, cluster = config.rollout, config.cluster
    if rollout.rollout_external_engine_addrs:
        return
    stored = storage_form(raw_config(rollout.hf_checkpoint))
    if rollout.init_weights == "random":
        key, state = "rollout.init_weights", "init_weights = random"
    elif rollout_form(rollout.rollout_quantization, stored) != stored:
        key, state = "rollout.hf_checkpoint", f"a model folder in {stored.form if stored else 'floats'}"
    else:
        return
    by_memory = cluster.device != "cpu" and cluster.colocate
    if not by_memory or rollout.update_weight_transport not in ("auto", "tensor"):
        yield conflict(
            f"{state} with lora_sync = adapter",
            [key, SYNC],
            why="SGLang starts without the folder's weights, and then reads no adapters from folders",
            fix=f"{MERGED}: the trainer sends its base as floats with the adapter in it   or   --rollout-engine local",
        )


def _targets(targets: tuple[str, ...], model: str) -> Iterator[Problem]:
    key = "train.lora_target_modules"
    plain = all(PLAIN.fullmatch(name) for name in targets)
    leaves = [name.rpartition(".")[2] for name in targets]
    reason = ""
    if _experts(model) and not (plain and set(leaves) <= {*ATTENTION, FUSED[0]}):
        reason = f"the model has experts, of which SGLang knows no adapters as here; it serves {', '.join(ATTENTION)}"
    elif plain and targets != ("all-linear",):
        reason = unservable(leaves)
    if reason:
        fix = f"{MERGED}   or other lora_target_modules"
        yield conflict(
            f"lora_target_modules = {', '.join(targets)} with lora_sync = adapter", [key, SYNC], why=reason, fix=fix
        )


def unservable(leaves: Collection[str]) -> str:
    """Why SGLang cannot serve adapters of one layer's modules, by last parts of names; empty where it can."""
    if others := sorted(set(leaves) - set(SERVED)):
        return f"SGLang serves adapters of {', '.join(SERVED)}, and none of {', '.join(others)}"
    for name in leaves:
        if missing := [other for other in COMPANIONS.get(name, ()) if other not in leaves]:
            return f"SGLang serves {name} with {', '.join(missing)} alone"
    return ""


def check_model(config: Config, model: Any) -> None:
    """Refuse adapters of layers that the servers have none of.

    Args:
        model: the policy's config, from transformers

    Raises:
        ConfigError: CFG04, the layers by name.
    """
    from slime_core.lora.layers import attach
    from slime_core.media.features import tower
    from slime_core.media.positions import MediaLayout
    from slime_core.weights.build import skeleton

    spec = LoraSpec.of(config.train)
    if spec is None or not adapter_names(config):
        return
    policy = skeleton(model)
    outside = tower(policy) if MediaLayout.of(model) is not None else ()
    weights = attach(policy, spec, seed=0, outside=outside).weights()
    if reason := unservable_weights(weights):
        raise ConfigError(
            "adapters that SGLang cannot serve",
            code="CFG04",
            where=f"train.lora_target_modules, {SYNC}",
            why=reason,
            fix=f"{MERGED}   or other lora_target_modules",
        )


def unservable_weights(names: Iterable[str]) -> str:
    """As :func:`unservable`, of full names of weights or factors."""
    layers: dict[str, set[str]] = {}
    for name in names:
        parts = name.removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B").split(".")
        layers.setdefault(".".join(parts[:-2]), set()).add(parts[-1])
    return next((reason for reason in map(unservable, layers.values()) if reason), "")


def _experts(model: str) -> bool:
    raw = raw_config(model)
    text = raw.get("text_config") or raw
    return any(text.get(name) for name in EXPERT_COUNTS)


def missing_options(facts: Mapping[str, Any], config: Config) -> str:
    """Options that a server which runs already should have been started with; empty where it has them."""
    needed = options(config, config.rollout.hf_checkpoint)
    if not needed:
        return ""
    targets = set(facts.get("lora_target_modules") or ())
    fits = facts.get("enable_lora") and (facts.get("max_lora_rank") or 0) >= needed["max_lora_rank"]
    fits = fits and (targets >= set(needed["lora_target_modules"]) or "all" in targets)
    loaded = facts.get("max_loaded_loras")
    if fits and (loaded is None or loaded >= needed["max_loaded_loras"]):
        return ""
    words = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in needed.items()}
    flags = {name.replace("_", "-"): "" if value is True else f" {value}" for name, value in words.items()}
    return " ".join(f"--{name}{value}" for name, value in flags.items())
