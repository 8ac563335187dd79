"""The trainer that a config names. The only place, with `clusters.local`, that knows there are several."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.trainers.fsdp import FsdpTrainer
    from slime_core.trainers.megatron.trainer import MegatronTrainer


def trainer_class(config: Config) -> type[FsdpTrainer] | type[MegatronTrainer]:
    """What ``train.train_backend`` names; both take the same arguments and keep the same promises."""
    if config.train.train_backend == "megatron":
        from slime_core.trainers.megatron.trainer import MegatronTrainer

        return MegatronTrainer
    from slime_core.trainers.fsdp import FsdpTrainer

    return FsdpTrainer
