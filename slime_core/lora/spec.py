"""What adapters are like and which layers have them, in peft's words; no torch.

LoRA: Hu et al. 2021, arXiv 2106.09685. rsLoRA: Kalajdzievski 2023, 2312.03732. DoRA: Liu et al. 2024, 2402.09353.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_core.errors import DataError

ALL_LINEAR = "all-linear"
DEFAULT = "default"
"""The name of a run's only adapter, as peft calls it."""
PLAIN = re.compile(r"[\w.-]+")
READ = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "target_parameters"),
    *("use_dora", "use_rslora"),
)
WITHOUT_EFFECT = (
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "layers_pattern", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
)
"""Of adapter_config.json: what does not change the numbers of a trained adapter."""


@dataclass(slots=True, frozen=True)
class LoraSpec:
    """The settings of adapters.

    Example:
        spec = LoraSpec(rank=32, target_modules=("q_proj", "v_proj"))
        spec.targets("model.layers.0.self_attn.q_proj", is_linear=True)
    """

    rank: int
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    exclude_modules: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False

    @classmethod
    def of(cls, train: Any) -> LoraSpec | None:
        """From the [train] section; None for full training."""
        if not train.lora_rank:
            return None
        return cls(
            rank=train.lora_rank,
            alpha=train.lora_alpha,
            dropout=train.lora_dropout,
            target_modules=train.lora_target_modules,
            exclude_modules=train.lora_exclude_modules,
            target_parameters=train.lora_target_parameters,
            use_dora=train.lora_use_dora,
            use_rslora=train.lora_use_rslora,
        )

    @property
    def scaling(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def numbers(self, shape: tuple[int, ...], *, linear: bool) -> int:
        """Of one adapter of a weight [..., out, in]: A and B, and the magnitudes of a ``linear`` one's DoRA."""
        rows, columns = shape[-2:]
        return math.prod(shape[:-2]) * self.rank * (rows + columns) + (rows if linear and self.use_dora else 0)

    @property
    def all_linear(self) -> bool:
        """Whether every linear layer and all experts have adapters."""
        return self.target_modules == (ALL_LINEAR,)

    def targets(self, name: str, is_linear: bool) -> bool:
        """Whether the module of a full name has adapters; callers leave out the output head of all linear layers."""
        if _matches(self.exclude_modules, name):
            return False
        return is_linear if self.all_linear else _matches(self.target_modules, name)

    def targets_parameter(self, name: str, is_expert: bool) -> bool:
        """Whether a parameter, such as ``model.layers.0.mlp.experts.down_proj``, has adapters."""
        if _matches(self.exclude_modules, name.rpartition(".")[0]):
            return False
        return (self.all_linear and is_expert) or _ends(self.target_parameters, name)

    def unmatched(self, modules: Iterable[str], parameters: Iterable[str]) -> list[str]:
        """Named targets that are none of these modules and parameters, which have adapters, by full names."""
        patterns = self.target_modules
        named = () if self.all_linear or (len(patterns) == 1 and not PLAIN.fullmatch(patterns[0])) else patterns
        kinds = ((named, list(modules)), (self.target_parameters, list(parameters)))
        return [one for targets, names in kinds for one in targets if not any(_ends((one,), name) for name in names)]

    def unused_exclusions(self, layers: Iterable[str]) -> list[str]:
        """Exclusions that are none of a model's linear layers and experts, by full names."""
        names, patterns = list(layers), self.exclude_modules
        matches = _matches if len(patterns) == 1 else _ends  # one string may be a regex
        return [pattern for pattern in patterns if not any(matches((pattern,), name) for name in names)]

    def resolved(self, modules: Iterable[str], parameters: Iterable[str], others: Iterable[str]) -> LoraSpec:
        """The same with what it means for a model: last parts of names, or full names where those meet more.

        Args:
            modules: full names of the modules that have adapters
            parameters: of parameters
            others: of modules that have none
        """
        modules, parameters = sorted(modules), sorted(parameters)
        leaves = tuple(sorted({name.rpartition(".")[2] for name in modules}))
        if any(_ends(leaves, name) for name in others):
            leaves = tuple(modules)
        experts = tuple(sorted({".".join(name.split(".")[-2:]) for name in parameters}))
        return replace(self, target_modules=leaves, exclude_modules=(), target_parameters=experts)

    def to_peft(self, base: str) -> dict[str, Any]:
        """The content of adapter_config.json; ``base`` is the model folder or hub name."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": _pattern(self.target_modules),
            "exclude_modules": _pattern(self.exclude_modules),
            "target_parameters": list(self.target_parameters) or None,
            "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
            "bias": "none",
            "fan_in_fan_out": False,
        }

    @classmethod
    def from_peft(cls, config: Mapping[str, Any], where: str = "adapter_config.json") -> LoraSpec:
        """From the content of adapter_config.json.

        Raises:
            DataError: TOK46 another method than LoRA, or an option that changes its numbers and is not known here.
        """
        if config.get("peft_type") != "LORA" or not config.get("r"):
            raise _unknown(f"peft_type is {config.get('peft_type')!r}", where)
        neutral = {"bias": "none", "init_lora_weights": True}
        for name, value in config.items():
            if name in (*READ, *WITHOUT_EFFECT) or not value or value == neutral.get(name):
                continue
            if name == "init_lora_weights" and value in ("gaussian", "orthogonal", "eva"):
                continue  # they change where A starts, and nothing of the base
            raise _unknown(f"{name} = {value!r}", where)
        return cls(
            rank=int(config["r"]),
            alpha=float(config.get("lora_alpha", 8)),
            dropout=float(config.get("lora_dropout") or 0.0),
            target_modules=_tuple(config.get("target_modules")),
            exclude_modules=_tuple(config.get("exclude_modules")),
            target_parameters=_tuple(config.get("target_parameters")),
            use_dora=bool(config.get("use_dora")),
            use_rslora=bool(config.get("use_rslora")),
        )


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    """peft's meaning: names or ends of names behind a dot; one string that is not a plain name is a regex."""
    if len(patterns) == 1 and not PLAIN.fullmatch(patterns[0]):
        return re.fullmatch(patterns[0], name) is not None
    return _ends(patterns, name)


def _ends(ends: tuple[str, ...], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _pattern(patterns: tuple[str, ...]) -> str | list[str] | None:
    """As adapter_config.json has it: a regex and ``all-linear`` as one string."""
    if len(patterns) == 1 and (patterns[0] == ALL_LINEAR or not PLAIN.fullmatch(patterns[0])):
        return patterns[0]
    return list(patterns) or None


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(sorted(value or ()))


def _unknown(what: str, where: str) -> DataError:
    return DataError(
        f"an adapter with {what} cannot be read",
        code="TOK46",
        where=where,
        why="adapters are LoRA, rsLoRA or DoRA on linear layers and experts, the same rank and alpha everywhere",
        fix="merge it into its model with peft (merge_and_unload), and start from that folder",
    )
