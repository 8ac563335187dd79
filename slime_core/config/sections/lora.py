"""Keys of [train] about adapters, with their rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from slime_core.config.problems import Problem, conflict
from slime_core.config.sections import KIND, MACHINE, MODEL, Section, key
from slime_core.config.values import show

of_lora = partial(key, once=True)


class LoraKeys(Section):
    """How adapters are trained in place of the whole model."""

    lora_rank: int = of_lora(0, "Rank of adapters, which alone learn (LoRA); 0: the whole model learns.", KIND, ge=0)
    lora_alpha: float = of_lora(32.0, "Adapters count alpha / rank times.", KIND, gt=0)
    lora_dropout: float = of_lora(0.0, "Share of an adapter's inputs that are 0 in training.", KIND, ge=0, lt=1)
    lora_target_modules: tuple[str, ...] = of_lora(
        ("all-linear",), "Names or ends of names of linear layers, one regex, or all-linear: also experts.", KIND
    )
    lora_exclude_modules: tuple[str, ...] = of_lora((), "Names or ends of names, or one regex, without.", KIND)
    lora_target_parameters: tuple[str, ...] = of_lora(
        (), "Stacked weights of experts by ends of names, such as experts.down_proj.", KIND
    )
    lora_use_dora: bool = of_lora(False, "DoRA: each row's size is learned apart from its direction.", KIND)
    lora_use_rslora: bool = of_lora(False, "rsLoRA: alpha / sqrt(rank).", KIND)
    lora_load: str = of_lora("", "Adapter folder to start from, in peft's format.", MODEL, path="input")
    lora_sync: Literal["merged", "adapter"] = of_lora(
        "merged", "What engines get: whole weights with adapters merged, or adapters alone.", MACHINE
    )
    lora_adapters: tuple[str, ...] = of_lora((), "Names of several adapters in one run; empty: one, default.", KIND)


def lora_conflicts(train: Any) -> Iterator[Problem]:
    """What of the [train] section cannot hold together with adapters, or nothing would read."""
    if not train.lora_rank:
        for name in train.changed(LoraKeys.model_fields):
            yield conflict(
                f"{name} = {show(getattr(train, name))} without lora_rank",
                [f"train.{name}", "train.lora_rank"],
                why="lora_rank = 0 trains the whole model, and adapters are not read",
                fix=f"set lora_rank, to 32 say, or leave {name} out",
            )
        return
    if train.lora_target_parameters and (train.lora_use_dora or train.lora_dropout):
        name = "lora_use_dora" if train.lora_use_dora else "lora_dropout"
        yield conflict(
            f"{name} with lora_target_parameters",
            [f"train.{name}", "train.lora_target_parameters"],
            why="experts have plain LoRA, as in peft",
            fix=f"leave {name} or lora_target_parameters out",
        )
    reasons = {
        "true_on_policy_mode": "its arithmetic is written out for layers without adapters",
        "moe_router_bias_update_rate": "router biases are of the base, which does not change",
    }
    for name, reason in reasons.items():
        if getattr(train, name):
            keys = [f"train.{name}", "train.lora_rank"]
            yield conflict(f"{name} with lora_rank", keys, why=reason, fix=f"leave {name} out, or set lora_rank = 0")
    if not train.freeze_vision_tower:
        yield conflict(
            "freeze_vision_tower = false with lora_rank",
            ["train.freeze_vision_tower", "train.lora_rank"],
            why="adapters are on the text model, and the tower is of the base, which does not change",
            fix="leave freeze_vision_tower out, or set lora_rank = 0",
        )
    if train.tensor_parallel_size > 1:
        yield conflict(
            f"tensor_parallel_size = {train.tensor_parallel_size} with lora_rank",
            ["train.tensor_parallel_size", "train.lora_rank"],
            why="with FSDP adapters are on whole layers",
            fix="set tensor_parallel_size = 1, or train_backend = megatron; context_parallel_size shares sequences",
        )
