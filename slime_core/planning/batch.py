"""The arithmetic of a step's batch: samples, tokens, optimizer steps, micro-batches, staleness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.planning.footprint import Lengths

if TYPE_CHECKING:
    from slime_core.config.schema import Config


@dataclass(slots=True, frozen=True)
class PackSize:
    """Tokens of a micro-batch, and those of responses, which predict."""

    tokens: int
    rows: int


@dataclass(slots=True, frozen=True, kw_only=True)
class BatchPlan:
    """One stage's step.

    Example: BatchPlan.of(config, lengths).samples == config.rollout.rollout_batch_size * n_samples_per_prompt
    """

    samples: int
    optimizer_steps: int  # a rollout
    effective_batch: int  # rollouts of an optimizer step
    tokens: float  # of all sequences, prompts as often as they are there
    computed: float  # tokens that training computes: a prompt once for the samples of a pack
    response_tokens: float
    stale_steps: int  # how many versions may lie between drawing and training
    off_policy_steps: int  # optimizer steps between the weights that drew a sample and those it is trained on, at most

    @classmethod
    def of(cls, config: Config, lengths: Lengths) -> BatchPlan:
        """Of a resolved stage."""
        rollout, train = config.rollout, config.train
        prompts, n = rollout.rollout_batch_size, rollout.n_samples_per_prompt
        samples = prompts * n
        size = train.global_batch_size
        steps = math.ceil(samples / size) if size else min(train.num_steps_per_rollout, samples)
        stale = rollout.max_staleness
        return cls(
            samples=samples,
            optimizer_steps=steps,
            effective_batch=size or math.ceil(samples / steps),
            tokens=samples * lengths.mean,
            computed=samples * lengths.response + prompts * lengths.prompt,
            response_tokens=samples * lengths.response,
            stale_steps=stale,
            off_policy_steps=(stale + 1) * steps - 1,
        )

    def micro_batches(self, tokens: int, data: int) -> int:
        """Of an optimizer step on one data-parallel rank.

        Args:
            tokens: of a micro-batch, over the GPUs that share a sequence
            data: data-parallel ranks
        """
        return max(1, math.ceil(self.computed / self.optimizer_steps / data / tokens))

    def pack(self, tokens: int, data: int, lengths: Lengths, prompts: int) -> PackSize:
        """The largest micro-batch: of responses of one length it is known, of others it may be as full as it may be.

        Args:
            tokens, data: as :meth:`micro_batches` has them
            prompts: samples of a prompt
        """
        samples = math.ceil(self.samples / self.optimizer_steps / data)
        size = min(samples, math.ceil(samples / self.micro_batches(tokens, data)))
        responses, alike = size * lengths.response, lengths.p95 <= lengths.response
        packed = responses + math.ceil(size / prompts) * lengths.prompt
        longest = samples * (lengths.longest - lengths.prompt) + math.ceil(samples / prompts) * lengths.prompt
        most = min(tokens, math.ceil(longest))
        if alike and packed <= tokens:
            return PackSize(math.ceil(packed), math.ceil(responses))
        return PackSize(most, math.ceil(most * lengths.response / max(1.0, lengths.mean)))
