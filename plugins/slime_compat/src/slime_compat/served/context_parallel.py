"""`slime.backends.megatron_utils.cp_utils` of one rank: functions here see whole sequences, with any trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Span = tuple[int, int]


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """The one rank's chunk, and the spans of its logits and of the tokens that they predict; second spans are empty.

    Example: 10 tokens of which 4 are the response: (10, ((0, 10), (0, 0)), ((5, 9), (0, 0)), ((6, 10), (0, 0)))
    """
    prompt, empty = total_length - response_length, (0, 0)
    logits, tokens = (prompt - 1, total_length - 1), (prompt, total_length)
    return total_length, ((0, total_length), empty), (logits, empty), (tokens, empty)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of values [R] to the sum over samples of their masked mean, or of their masked sum.

    Args:
        total_lengths: tokens of each sample
        response_lengths: response tokens of each, which add up to R
        loss_masks: 0 or 1 a response token
        sample_denoms: what each sample's sum is divided by (at least 1); None is its trainable tokens
        calculate_per_token_loss: divide by nothing
    """
    masks = torch.cat(list(loss_masks))
    denominators = [mask.sum() for mask in loss_masks] if sample_denoms is None else list(sample_denoms)
    shares = torch.stack([torch.as_tensor(denominator) for denominator in denominators]).clamp(min=1).reciprocal()
    weights = masks * shares.to(masks.device).repeat_interleave(
        torch.as_tensor(list(response_lengths), device=masks.device)
    )

    def reduce(values: torch.Tensor) -> torch.Tensor:
        return (values * (masks if calculate_per_token_loss else weights)).sum()

    return reduce


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The tensor itself: this rank has the whole response."""
    return tensor


def slice_with_cp(tokens: torch.Tensor, pad_value: Any) -> torch.Tensor:
    """The tokens themselves."""
    return tokens


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int) -> Any:
    """The values themselves, one a response token.

    Raises:
        ValueError: another number of them.
    """
    if len(log_prob) != response_length:
        raise ValueError(f"{len(log_prob)} values of a response of {response_length} tokens")
    return log_prob


__all__ = [
    "all_gather_with_cp",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "slice_log_prob_with_cp",
    "slice_with_cp",
]
