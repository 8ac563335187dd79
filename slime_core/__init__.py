"""slime: post-training of language models with reinforcement learning, extended by plugins.

The public names, loaded when first used, so that `import slime_core` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.context import Context as Context
    from slime_core.errors import (
        ConfigError as ConfigError,
        DataError as DataError,
        EngineError as EngineError,
        PluginError as PluginError,
        SlimeError as SlimeError,
        TrainerError as TrainerError,
    )
    from slime_core.hookspecs import hookimpl as hookimpl
    from slime_core.protocols import (
        Check as Check,
        CheckResult as CheckResult,
        Estimator as Estimator,
        Loss as Loss,
    )
    from slime_core.types import (
        Batch as Batch,
        Drop as Drop,
        Group as Group,
        Prompt as Prompt,
        Reward as Reward,
        Sample as Sample,
        SamplingParams as SamplingParams,
        Status as Status,
        StepReport as StepReport,
    )

_HOMES = {
    "slime_core.context": ("Context",),
    "slime_core.errors": ("ConfigError", "DataError", "EngineError", "PluginError", "SlimeError", "TrainerError"),
    "slime_core.hookspecs": ("hookimpl",),
    "slime_core.protocols": ("Check", "CheckResult", "Estimator", "Loss"),
    "slime_core.types": (
        "Batch",
        "Drop",
        "Group",
        "Prompt",
        "Reward",
        "Sample",
        "SamplingParams",
        "Status",
        "StepReport",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'slime_core' has no attribute '{name}'")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
