"""Serves `slime.utils...` and `slime.rollout...` to functions written for THUDM/slime, backed by small modules here.

The finder is in `sys.meta_path` only during a run with such functions, and never if a real slime is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Self

from slime_core.errors import PluginError

HERE = "slime_compat.served"
SERVED = {  # slime's module -> ours; empty: a package without content
    "slime": "",
    "slime.utils": "",
    "slime.utils.types": f"{HERE}.samples",
    "slime.utils.http_utils": f"{HERE}.http",
    "slime.utils.processing_utils": f"{HERE}.processing",
    "slime.utils.async_utils": f"{HERE}.asynchronous",
    "slime.utils.misc": f"{HERE}.loading",
    "slime.utils.mask_utils": f"{HERE}.masks",
    "slime.utils.eval_config": f"{HERE}.evaluation",
    "slime.utils.data": f"{HERE}.datasets",
    "slime.utils.ppo_utils": f"{HERE}.objectives",
    "slime.agent": "",
    "slime.agent.adapters": "slime_chat.adapters",
    "slime.agent.adapters.common": "slime_chat.adapters",
    "slime.agent.aiohttp_threaded": "slime_chat.adapters",
    "slime.agent.harness": f"{HERE}.harnesses",
    "slime.agent.harness.claude_code": f"{HERE}.harnesses",
    "slime.agent.harness.codex": f"{HERE}.harnesses",
    "slime.agent.harness.common": f"{HERE}.harnesses",
    "slime.agent.sandbox": f"{HERE}.sandboxes",
    "slime.observability": "",
    "slime.observability.logging_utils": f"{HERE}.tracking",
    "slime.observability.metric_utils": f"{HERE}.measures",
    "slime.observability.rollout_data_utils": f"{HERE}.rollout_checks",
    "slime.observability.rollout_metrics": f"{HERE}.rollout_measures",
    "slime.observability.timer": f"{HERE}.timers",
    "slime.observability.trace_utils": f"{HERE}.traces",
    "slime.backends": "",
    "slime.backends.sglang_utils": "",
    "slime.backends.sglang_utils.server_control": f"{HERE}.servers",
    "slime.backends.megatron_utils": "",
    "slime.backends.megatron_utils.cp_utils": f"{HERE}.context_parallel",
    "slime.backends.megatron_utils.loss": f"{HERE}.corrections",
    "slime.rollout": "",
    "slime.rollout.base_types": f"{HERE}.rollouts",
    "slime.rollout.sglang_rollout": f"{HERE}.collection",
    "slime.rollout.sglang_streaming_rollout": f"{HERE}.streaming",
    "slime.rollout.fully_async_rollout": f"{HERE}.fully_async",
    "slime.rollout.sft_rollout": f"{HERE}.supervised",
    "slime.rollout.on_policy_distillation": f"{HERE}.distillation",
    "slime.rollout.data_source": f"{HERE}.sources",
    "slime.rollout.sample_hooks": f"{HERE}.sample_hooks",
    "slime.rollout.rm_hub": f"{HERE}.rewards",
    "slime.rollout.rm_hub.math_utils": f"{HERE}.grading_mathematics",
    "slime.rollout.rm_hub.deepscaler": f"{HERE}.grading_deepscaler",
    "slime.rollout.rm_hub.math_dapo_utils": f"{HERE}.grading_dapo",
    "slime.rollout.rm_hub.f1": f"{HERE}.grading_f1",
    "slime.rollout.rm_hub.gpqa": f"{HERE}.grading_gpqa",
    "slime.rollout.rm_hub.ifbench": f"{HERE}.grading_ifbench",
    "slime.rollout.filter_hub": f"{HERE}.filters",
    "slime.rollout.filter_hub.base_types": f"{HERE}.filters",
    "slime.rollout.filter_hub.dynamic_sampling_filters": f"{HERE}.filters",
}
ONE_RANK = {  # of Megatron, where it does not train
    "megatron": "",
    "megatron.core": "",
    "megatron.core.mpu": f"{HERE}.one_rank",
    "megatron.core.parallel_state": f"{HERE}.one_rank",
}
REPLACEMENTS = {  # a module of slime that is not served -> what there is in its place
    "slime.agent.trajectory": "slime_chat, whose sessions are trees of answers: docs/chat.md",
    "slime.backends.megatron_utils.actor": "--train-backend megatron, and the --custom-megatron-*-path hooks",
    "slime.backends.megatron_utils.arguments": "the [megatron] section: docs/megatron.md",
    "slime.backends.megatron_utils.checkpoint": "slime convert",
    "slime.backends.megatron_utils.model": "--train-backend megatron, and the --custom-megatron-*-path hooks",
    "slime.backends.megatron_utils.model_provider": "a bridge: docs/models.md",
    "slime.backends.sglang_utils.sglang_engine": "the engine at args.sglang_router_ip and args.sglang_router_port",
    "slime.observability.profile_utils": "--profile",
    "slime.observability.tensorboard_utils": "--plugin trackers",
    "slime.observability.train_metric_utils": "the run's own metrics.jsonl",
    "slime.observability.wandb_utils": "--plugin trackers",
    "slime.ray": "--cluster-backend ray",
    "slime.rollout.forge_load": "--load-debug-rollout-data",
    "slime.utils.distributed_utils": "torch.distributed",
    "slime.utils.seqlen_balancing": "data-parallel ranks, which the trainer balances itself",
    "slime.utils.arguments": "slime config keys, and --custom-config-path for keys of your own",
}
ALL = SERVED | ONE_RANK
PACKAGES = {name for name in ALL if any(other.startswith(name + ".") for other in ALL)}


class Finder(MetaPathFinder, Loader):
    """One a run; the modules it made leave with the last of them."""

    def __init__(self, *, megatron: bool = False) -> None:
        self._megatron = megatron

    @classmethod
    def install(cls, *, megatron: bool = False) -> Self:
        """Put a finder first, so that a folder named slime in the current folder is no obstacle.

        Args:
            megatron: whether Megatron trains; where it does not, ``megatron.core.mpu`` has the facts of one rank.
        """
        finder = cls(megatron=megatron)
        if real_slime() is None:
            sys.meta_path.insert(0, finder)
        return finder

    def remove(self) -> None:
        """Take it away; without any finder left, the served modules go too."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if not any(isinstance(other, Finder) for other in sys.meta_path):
            for name in [n for n, m in sys.modules.items() if n in ALL and _is_served(m)]:
                del sys.modules[name]

    def check(self, key: str, path: str) -> None:
        """Refuse a function that imported a real slime: its Sample is not the one that such functions are handed.

        Raises:
            PluginError: PLG50.
        """
        module = sys.modules.get("slime")
        if self not in sys.meta_path and module is not None and not _is_served(module):
            raise PluginError(
                f"{key} = '{path}' imported the package slime that is installed at {module.__file__}",
                code="PLG50",
                where=key,
                why="slime_compat provides slime.utils and slime.rollout itself, so the real package cannot be used",
                fix="pip uninstall slime   (or take its folder off PYTHONPATH)",
            )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a served module; a message that lists them for any other module of slime.

        The error has its module as ``path``: Python hides one with that ``name`` in ``from slime import x``.
        """
        if fullname in SERVED or (fullname in ONE_RANK and self._serves_one_rank()):
            return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)
        if fullname.startswith("slime."):
            raise ModuleNotFoundError(_missing(fullname), path=fullname)
        if fullname.startswith("megatron.") and self._serves_one_rank():
            text = f"{fullname} is not served where Megatron does not train; use --train-backend megatron"
            raise ModuleNotFoundError(text, path=fullname)
        return None

    def _serves_one_rank(self) -> bool:
        module = sys.modules.get("megatron")
        return not self._megatron and (module is None or _is_served(module))

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The usual empty module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill it with the public names of the module behind it."""
        behind = ALL[module.__name__]
        module.__doc__ = f"Served by slime_compat in place of THUDM/slime's {module.__name__}."
        if behind:
            source = importlib.import_module(behind)
            module.__all__ = list(source.__all__)  # type: ignore[attr-defined]
            vars(module).update({name: getattr(source, name) for name in source.__all__})


def _missing(name: str) -> str:
    """What replaces a module that is not served, and the served ones of the package that would have it."""
    package = name.rpartition(".")[0]
    served = [other.rpartition(".")[2] for other in SERVED if other.rpartition(".")[0] == package]
    served += getattr(sys.modules.get(package), "__all__", ())
    replacement = REPLACEMENTS.get(name)
    instead = f"use {replacement}; " if replacement else ""
    return f"{name} of THUDM/slime is not served here; {instead}of {package} are served: {', '.join(served)}"


def _is_served(module: ModuleType | None) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), Finder)


def real_slime() -> str | None:
    """Location of an importable package ``slime`` that is not ours; None without one."""
    if (module := sys.modules.get("slime")) is not None and not _is_served(module):
        return str(module.__file__)
    spec = PathFinder.find_spec("slime")
    return spec.origin if spec is not None and spec.origin else None  # a bare folder has no origin
