"""The critic of PPO: a stage of a value model that learns beside the policy, in the same optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.trainers import roles
from slime_core.trainers.optimizer_step import LossSums
from slime_megatron.learner import MegatronLearner
from slime_megatron.others import settings_of
from slime_megatron.settings import build
from slime_megatron.values import build_values

if TYPE_CHECKING:
    from slime_core.types import MicroBatch
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.model import Model
    from slime_megatron.others import ModelContext
    from slime_megatron.settings import MegatronSettings


class MegatronCritic:
    """A stage of a value model with its optimizer. ``path`` is ``train.critic_load``; empty copies the policy."""

    def __init__(
        self, path: str, policy: ModelFolder, critic: Model, settings: MegatronSettings, run: ModelContext
    ) -> None:
        self.path = path
        self.model, self._folder = build_values(path, policy, critic, settings, run)
        self.learner = MegatronLearner(self.model.stage)
        self.learner.wrap(build(self._settings(settings, run)))
        self.model.learn(self.learner.wrapped)

    def begin(self, train: Any, optimizer_steps: int, settings: MegatronSettings, run: ModelContext) -> None:
        """A stage: a fresh optimizer; warms up to ``critic_lr`` and decays as the policy's rate does."""
        self.value_clip = float(train.value_clip)
        self.learner.begin(train, roles.critic_schedule(train, optimizer_steps), build(self._settings(settings, run)))

    def _settings(self, settings: MegatronSettings, run: ModelContext) -> MegatronSettings:
        """Its own, or the policy's where it has the policy's layers."""
        return settings_of(self._folder, run.bridge(self._folder.config), run) if self.path else settings

    def backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        """Add one optimizer step's gradients, and its sums."""
        self.model.passes.backward_values(micros, self.value_clip, sums)
