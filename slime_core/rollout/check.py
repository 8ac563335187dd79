"""The first border: a generated group in, the same group out, or an error that names the sample and what is wrong.

What is checked here is what training relies on: lengths that agree, ids inside the vocabulary, finite log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from slime_core.errors import EngineError
from slime_core.types import Group, Sample

SLACK = 1e-4  # a log-prob may exceed 0 by rounding


def issued_ids(group: Group) -> dict[int, str]:
    """Rollout id to sample id of a pending group; taken before plugins may change the group in place."""
    return {rollout: group.samples[indices[0]].id for rollout, indices in group.rollouts.items()}


def check_group(group: Group, issued: Mapping[int, str], vocab_size: int) -> None:
    """Check every sample and the rollout table of a group, and name fan-out siblings after the sample issued for them.

    ``issued`` is :func:`issued_ids` of the group as it was handed out.

    Raises:
        EngineError: ENG79 lengths, TOK44 ids, ENG80 log-probs, ENG82 a rollout table that does not fit.
    """
    members = sorted(i for indices in group.rollouts.values() for i in indices)
    if members != list(range(len(group.samples))):
        raise EngineError(
            f"the rollouts of group {group.id} name samples {members}, the group has {len(group.samples)}",
            code="ENG82",
            where=f"group {group.id}",
            fix="every sample belongs to exactly one rollout id of Group.rollouts",
        )
    if set(group.rollouts) != set(issued):
        raise EngineError(
            f"group {group.id} came back with rollouts {sorted(group.rollouts)}, not {sorted(issued)}",
            code="ENG82",
            where=f"group {group.id}",
            fix="keep every rollout id; a rollout that failed keeps its sample with status FAILED",
        )
    for rollout, indices in group.rollouts.items():
        for k, index in enumerate(indices):
            sample = group.samples[index]
            sample.id = f"{issued[rollout]}.{k}" if k else issued[rollout]
            sample.rollout_id, sample.group_index, sample.task = rollout, group.prompt.position, group.prompt.task
            _check_sample(sample, vocab_size)


def _check_sample(sample: Sample, vocab_size: int) -> None:
    count = sample.response_length
    if sample.loss_mask is None:
        sample.loss_mask = [1] * count
    if not sample.weight_versions:
        sample.weight_versions = [-1] * count
    lengths = {"loss_mask": len(sample.loss_mask), "weight_versions": len(sample.weight_versions)}
    if sample.rollout_log_probs is not None:
        lengths["rollout_log_probs"] = len(sample.rollout_log_probs)
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong or not 0 <= count <= len(sample.tokens):
        raise EngineError(
            f"sample {sample.id} has {len(sample.tokens)} tokens, response_length {count}, and {wrong}",
            code="ENG79",
            where=f"sample {sample.id}",
            why="loss_mask, rollout_log_probs and weight_versions have one entry a response token",
            fix="add turns with sample.append_response(tokens, log_probs, mask)",
        )
    if sample.tokens and not 0 <= min(sample.tokens) <= max(sample.tokens) < vocab_size:
        outside = next(token for token in sample.tokens if not 0 <= token < vocab_size)
        raise EngineError(
            f"sample {sample.id} holds token id {outside}, outside the vocabulary of {vocab_size}",
            code="TOK44",
            where=f"sample {sample.id}",
            fix="use the model's own tokenizer; nothing may be re-encoded",
        )
    log_probs = sample.rollout_log_probs
    if log_probs and (not math.isfinite(sum(log_probs)) or max(log_probs) > SLACK):  # NaN and inf stay in a sum
        for position, value in enumerate(log_probs):
            if not math.isfinite(value) or value > SLACK:
                raise EngineError(
                    f"sample {sample.id} has log-prob {value} at response token {position}",
                    code="ENG80",
                    where=f"sample {sample.id}",
                    why="a log-prob is finite and not above 0",
                )
    if sample.loss_mask.count(0) + sample.loss_mask.count(1) != count:
        raise EngineError(f"sample {sample.id} has a loss_mask entry other than 0 and 1", code="ENG79")
