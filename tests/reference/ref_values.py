"""The critic of PPO by its papers, in float64, one token at a time; imports nothing of slime.

Value of a token: a scalar head on the hidden state of the position before it (Ziegler et al. 2019). Loss: squared error
to the return, the larger of plain and clipped, halved (Dhariwal et al. 2017, PPO2; Schulman et al. 2017 for L^VF).
"""

import ref_model
import torch


def values(p, config, tokens, response_length, weight, bias=0.0):
    """[R] of one sequence: a head of one row in place of the output matrix."""
    headed = {**p, "lm_head.weight": weight}
    rows = ref_model.logits(headed, config, tokens)[-response_length - 1 : -1, 0]
    return rows + bias


def value_loss(value, old, target, clip):
    """One token's loss; ``clip`` 0 is off."""
    plain = (value - target) ** 2
    if clip:
        near = old + torch.clamp(value - old, -clip, clip)
        plain = torch.maximum(plain, (near - target) ** 2)
    return plain / 2


def explained_variance(given, targets):
    """Of lists: 1 - Var(target - value) / Var(target)."""

    def variance(numbers):
        mean = sum(numbers) / len(numbers)
        return sum((x - mean) ** 2 for x in numbers) / len(numbers)

    return 1 - variance([t - v for v, t in zip(given, targets)]) / variance(targets)
