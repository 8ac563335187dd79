"""Keys of [train] about adapters, with their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from slime_core.config.problems import Problem, conflict
from slime_core.config.sections import FIGURES, KIND, MACHINE, MODEL, Section, key
from slime_core.config.values import show

of_lora = partial(key, once=True)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
OF_RANKS = re.compile(r".*-[0-9]+-of-[0-9]+")
TAKEN = (
    *("advantages", "async", "canary", "data", "dropped", "eval", "extra", "ledger", "moe", "prompt_len"),
    *("raw_reward", "response_len", "reward", "role", "rollout", "skipped_steps", "staleness", "stale", "swap"),
    *("task", "time", "tokens", "train", "verify"),
)
"""First words of metrics' names, before which an adapter's metrics have its name."""

Export = Annotated[
    Literal["auto", "merged", "adapter"],
    BeforeValidator(lambda value: "auto" if value == "both" else value),  # as config.toml of older runs has it
]


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
    base_weights: Literal["auto", "fp8", "nf4"] = of_lora(
        "auto", "The frozen base of adapters: in the dtype of compute, in fp8 blocks, or in 4 bits (QLoRA).", KIND
    )
    lora_load: str = of_lora("", "Adapter folder to start from, in peft's format.", MODEL, path="start")
    lora_sync: Literal["merged", "adapter"] = of_lora(
        "merged", "What engines get: whole weights with adapters merged, or adapters alone.", MACHINE
    )
    lora_export: Export = of_lora(
        "auto", "What final/ has: a model with the adapter merged, adapter folders, or, of one adapter, both.", FIGURES
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
    yield from _names(train)
    yield from _targets(train)
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
    if train.base_weights != "auto" and train.ref_load:
        yield conflict(
            f"base_weights = {train.base_weights} with ref_load",
            ["train.base_weights", "train.ref_load"],
            why="the reference takes the base's place for its passes, and its weights are not those numbers",
            fix="leave ref_load out: the reference is the base without adapters   or --base-weights auto",
        )
    if train.base_weights != "auto" and train.compile == "on":
        yield conflict(
            f"base_weights = {train.base_weights} with compile = on",
            ["train.base_weights", "train.compile"],
            why="layers whose weights are quantised are not compiled",
            fix="leave compile out",
        )
    if train.tensor_parallel_size > 1:
        yield conflict(
            f"tensor_parallel_size = {train.tensor_parallel_size} with lora_rank",
            ["train.tensor_parallel_size", "train.lora_rank"],
            why="with FSDP adapters are on whole layers",
            fix="set tensor_parallel_size = 1, or train_backend = megatron; context_parallel_size shares sequences",
        )


def _targets(train: Any) -> Iterator[Problem]:
    """Targets that are none, a regex that is none, and names that are one string."""
    if not train.lora_target_modules and not train.lora_target_parameters:
        yield conflict(
            "lora_target_modules is empty",
            ["train.lora_target_modules", "train.lora_rank"],
            why="no layer would have an adapter",
            fix="leave it out: all-linear",
        )
    for name in ("lora_target_modules", "lora_exclude_modules"):
        patterns = getattr(train, name)
        if len(patterns) != 1:
            continue
        problem, reason = f"{name} = {show(patterns)}", ""
        try:
            re.compile(patterns[0])
        except re.error as error:
            reason = f"one string with other characters than a name has is a regex, and this is none: {error}"
        if re.fullmatch(r"[\w.-]+(, *[\w.-]+)+", patterns[0]):
            reason = "one string is one name, or a regex over full names"
        if reason:
            names = re.findall(r"[\w.-]+", patterns[0])
            fix = f"names are values of their own: --{name.replace('_', '-')} {' '.join(names)}"
            yield conflict(problem, [f"train.{name}"], why=reason, fix=fix)


def _names(train: Any) -> Iterator[Problem]:
    """What is wrong with the names of adapters, or with several of them."""
    names = train.lora_adapters
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield conflict(f"two adapters are named '{name}'", ["train.lora_adapters"], fix="rename one of them")
    for name in names:
        if not NAME.fullmatch(name):
            reason = "a name is 1 to 64 letters, digits, _ and -"
            fix = f"--lora-adapters {name.replace(',', ' ')}" if "," in name else "rename it"
            yield conflict(f"lora_adapters names '{name}'", ["train.lora_adapters"], why=reason, fix=fix)
        elif name == "base":
            reason = "engines compute without any adapter under this name"
            yield conflict("lora_adapters names 'base'", ["train.lora_adapters"], why=reason, fix="rename it")
        elif name in TAKEN:
            reason = f"its metrics would be named {name}/..., as others of a run are"
            fix = f"rename it, to {name}-1 say"
            yield conflict(f"lora_adapters names '{name}'", ["train.lora_adapters"], why=reason, fix=fix)
    for name in names:
        if OF_RANKS.fullmatch(name):
            reason = "files of checkpoints have such an end where several ranks wrote them"
            yield conflict(f"lora_adapters names '{name}'", ["train.lora_adapters"], why=reason, fix="rename it")
    if len(names) < 2:
        return
    several = f"{len(names)} adapters in lora_adapters"
    if train.lora_sync == "merged":
        yield conflict(
            f"lora_sync = merged with {several}",
            ["train.lora_sync", "train.lora_adapters"],
            why="weights with one adapter merged are not those of another",
            fix="--lora-sync adapter",
        )
    if train.lora_export == "merged":
        yield conflict(
            f"lora_export = merged with {several}",
            ["train.lora_export", "train.lora_adapters"],
            why="a model has one adapter merged, and none of them is the run's own",
            fix="leave lora_export out, and merge one later: slime convert adapter-to-hf RUN/final/adapter/NAME DST",
        )
    if train.algorithm and "values" in train.algorithm.needs:
        yield conflict(
            f"advantage_estimator = {train.advantage_estimator} with {several}",
            ["train.advantage_estimator", "train.lora_adapters"],
            why="one critic would learn from the samples of all",
            fix="--advantage-estimator grpo",
        )
    if train.routing_replay == "policy":
        yield conflict(
            f"routing_replay = policy with {several}",
            ["train.routing_replay", "train.lora_adapters"],
            why="recorded experts are those of one adapter's batch at a time",
            fix="--routing-replay rollout   or   --routing-replay off",
        )
