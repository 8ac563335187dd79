"""`slime.rollout.sft_rollout`: conversations of the data as samples to imitate.

As the value of ``--rollout-function-path`` of a supervised stage it means the core's own encoder of conversations.
"""

from __future__ import annotations

from typing import Any

from slime_compat.served.generation import GenerateState
from slime_compat.served.masks import MultiTurnLossMaskGenerator


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> list[list[Any]]:
    """``rollout_batch_size`` groups of one sample, whose prompt is a list of messages, with tokens and loss mask.

    Raises:
        ValueError: in an evaluation.
    """
    if evaluation:
        raise ValueError("sft_rollout does not evaluate; set eval_function_path to another function")
    generator = MultiTurnLossMaskGenerator(GenerateState(args).tokenizer, tokenizer_type=args.loss_mask_type)
    groups: list[list[Any]] = data_buffer.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        token_ids, loss_mask = generator.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
        sample.tokens, sample.reward = token_ids, 0
        sample.response_length = generator.get_response_lengths([loss_mask])[0]
        sample.loss_mask = loss_mask[len(loss_mask) - sample.response_length :]
    return groups


generate_rollout.core_makes = lambda config: config.train.offline  # type: ignore[attr-defined]
__all__ = ["generate_rollout"]
