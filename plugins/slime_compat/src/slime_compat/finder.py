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
REPLACEMENTS = {  # a module of slime that is not served -> what there is in its place
    "slime.backends.sglang_utils": "the engine at args.sglang_router_ip and args.sglang_router_port",
    "slime.ray": "--cluster-backend ray",
    "slime.rollout.forge_load": "--load-debug-rollout-data",
    "slime.utils.arguments": "slime config keys, and --custom-config-path for keys of your own",
}
PACKAGES = {name for name in SERVED if any(other.startswith(name + ".") for other in SERVED)}


class Finder(MetaPathFinder, Loader):
    """One a run; the modules it made leave with the last of them."""

    @classmethod
    def install(cls) -> Self:
        """Put a finder first, so that a folder named slime in the current folder is no obstacle."""
        finder = cls()
        if real_slime() is None:
            sys.meta_path.insert(0, finder)
        return finder

    def remove(self) -> None:
        """Take it away; without any finder left, the served modules go too."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if not any(isinstance(other, Finder) for other in sys.meta_path):
            for name in [n for n, m in sys.modules.items() if n in SERVED and _is_served(m)]:
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
        """A spec for a served module; a message that lists them for any other module of slime."""
        if fullname in SERVED:
            return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)
        if fullname.startswith("slime."):
            raise ModuleNotFoundError(_missing(fullname), name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The usual empty module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill it with the public names of the module behind it."""
        behind = SERVED[module.__name__]
        module.__doc__ = f"Served by slime_compat in place of THUDM/slime's {module.__name__}."
        if behind:
            source = importlib.import_module(behind)
            module.__all__ = list(source.__all__)  # type: ignore[attr-defined]
            vars(module).update({name: getattr(source, name) for name in source.__all__})


def _missing(name: str) -> str:
    """What replaces a module that is not served, and the served ones of the package that would have it."""
    package = name.rpartition(".")[0]
    served = [other.removeprefix(package + ".") for other in SERVED if other.startswith(package + ".")]
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
