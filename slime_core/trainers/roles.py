"""Models beside the policy, by role: which may stand there, and the critic's schedule, loss and figures.

reference, teacher: score with the policy's tokens, so their vocabulary is the policy's
critic: score -> ``values`` [R] -> estimator -> ``returns`` [R] -> value loss at the policy's token weights
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import SlimeError, TrainerError
from slime_core.media.positions import MediaLayout
from slime_core.trainers.batch import check_tokens
from slime_core.trainers.data_parallel import CRITIC_COLUMNS
from slime_core.trainers.optimizer_step import LossSums, Schedule, to_device
from slime_core.weights.folder import ModelFolder
from slime_core.weights.shards import Shards

if TYPE_CHECKING:
    from slime_core.types import Batch, MicroBatch

KEY = "train.critic_load"
HEADS = ("score", "value_head", "v_head")  # names of a stored head, the first that is there
Shapes = Mapping[str, tuple[int, ...]]


def open_model(key: str, path: str, policy: ModelFolder, *, weights: bool = True) -> ModelFolder:
    """The model folder that a config key names, whose token ids mean what the policy's do.

    Args:
        key: such as ``train.teacher_load``
        weights: False leaves the weights unread and unchecked, for checkpoints of another kind of model

    Raises:
        TrainerError: TRN104 another vocabulary; both folders are named.
        SlimeError: what `ModelFolder.open` raises, with the key.
    """
    try:
        other = ModelFolder.open(
            path, trust_remote_code=policy.trust_remote_code, init_weights="load" if weights else "random"
        )
    except SlimeError as error:
        error.where = f"{key} = {path}: {error.where}"
        raise
    same_vocabulary(policy, other, key)
    return other


def same_vocabulary(policy: ModelFolder, other: ModelFolder, key: str) -> None:
    """Refuse a model that reads the policy's token ids as other tokens, or has no row for one.

    Raises:
        TrainerError: TRN104.
    """
    vocabulary, other_vocabulary = policy.tokenizer().get_vocab(), other.tokenizer().get_vocab()
    wrong = sorted((i, token) for token, i in vocabulary.items() if other_vocabulary.get(token) != i)
    top = max(vocabulary.values(), default=-1)
    if not wrong and top < other.vocab_size:
        return
    reason = f"its embedding has {other.vocab_size} rows, token ids reach {top}"
    if wrong:
        i, token = wrong[0]
        token_id = other_vocabulary.get(token)
        meaning = f"id {token_id}" if token_id is not None else "no token"
        reason = (
            f"{len(wrong)} of {len(vocabulary)} tokens differ: {token!r} is id {i} for the policy and {meaning} there"
        )
    raise TrainerError(
        f"the model of {key} has another vocabulary than the policy",
        code="TRN104",
        where=f"{key} = {other.path}, rollout.hf_checkpoint = {policy.path}",
        why=reason,
        fix=f"name a model with the policy's tokenizer in {key}",
    )


def same_tensors(
    key: str, other: ModelFolder, policy_shapes: Shapes, other_shapes: Shapes, policy: ModelFolder
) -> None:
    """Refuse a reference of another architecture: the policy computes with its weights.

    Args:
        mine, theirs: shapes of the policy's tensors and the reference's by name

    Raises:
        TrainerError: TRN104.
    """
    wrong = [
        n
        for n in {*policy_shapes, *other_shapes}
        if n not in policy_shapes or n not in other_shapes or policy_shapes[n] != other_shapes[n]
    ]
    if wrong:
        raise TrainerError(
            f"the reference model differs from the policy in {len(wrong)} tensors: {sorted(wrong)[:5]}",
            code="TRN104",
            where=f"{key} = {other.path}, rollout.hf_checkpoint = {policy.path}",
            fix="name a model of the same architecture and vocabulary",
        )


def same_layout(teacher: ModelFolder, policy: ModelFolder) -> None:
    """Refuse a teacher that sees no pictures, or with other placeholders, where the policy sees some.

    Raises:
        TrainerError: TRN104.
    """
    layout, other = MediaLayout.of(policy.config), MediaLayout.of(teacher.config)
    if layout is not None and layout != other:
        raise TrainerError(
            "the teacher does not see pictures as the policy does",
            code="TRN104",
            where=f"train.teacher_load = {teacher.path}, rollout.hf_checkpoint = {policy.path}",
            why="it is a model of text alone" if other is None else f"its layout is {other}, the policy's {layout}",
            fix="name a teacher of the policy's family",
        )


def teacher_of(train: Any) -> str:
    """The folder of the teacher that a stage needs.

    Raises:
        TrainerError: none is named.
    """
    if not train.teacher_load:
        raise TrainerError(
            "a teacher is needed and none is named",
            where="train.teacher_load",
            fix="name the teacher's model folder: --teacher-load DIR",
        )
    return str(train.teacher_load)


def check_teacher(batch: Batch, vocab_size: int, path: str, policy: ModelFolder) -> None:
    """Refuse tokens that the teacher has no row for (padding of the policy's embedding).

    Raises:
        TrainerError: TRN104 with the sample.
    """
    where = f"train.teacher_load = {path}, rollout.hf_checkpoint = {policy.path}"
    check_tokens(batch, vocab_size, whose="teacher's ", code="TRN104", where=where)


WHY = {
    "reference": "a reference is kept where train.kl_loss_coef or train.kl_coef is above 0",
    "teacher": "train.teacher_load names a teacher, and train.teacher_place = trainer keeps it here",
    "values": "a critic is kept where the estimator reads values: train.advantage_estimator = ppo",
}


def missing(role: str) -> TrainerError:
    """A role was asked for that the stage does not hold."""
    return TrainerError(f"this trainer holds no {role} model", why=WHY.get(role, ""))


def open_critic(path: str, policy: ModelFolder) -> tuple[ModelFolder, Shards | None, str]:
    """The folder of ``train.critic_load``, its tensors, the name of its head; the policy's where ``path`` is empty.

    The tensors are None, and the head is empty, where the folder is a causal language model: it has been checked.

    Raises:
        TrainerError: TRN104 another vocabulary.
    """
    if not path:
        return policy, None, ""
    folder = open_model(KEY, path, policy, weights=False)
    stored = Shards.open(folder.path)
    head = next((name for name in HEADS if f"{name}.weight" in stored.infos), "")
    return (folder, stored, head) if head else (open_model(KEY, path, policy), None, "")


def critic_schedule(train: Any, optimizer_steps: int) -> Schedule:
    """Warms up to ``critic_lr`` and decays as the policy's rate does."""
    return Schedule(
        peak=train.critic_lr,
        low=min(train.min_lr, train.critic_lr),
        style=train.lr_decay_style,
        warmup=train.critic_lr_warmup_iters,
        decay=train.lr_decay_iters or optimizer_steps,
    )


def critic_loss(
    values: torch.Tensor, micro: MicroBatch, clip: float, sums: LossSums | None, *, counted: bool = True
) -> torch.Tensor:
    """A micro-batch's share of the value loss; ``sums`` get it, and per-token metrics by weight.

    Args:
        values: [R], what the critic says now
        clip: ``train.value_clip``
        sums: None where another rank has them
        counted: whether this rank counts, of those that compute the same micro-batch
    """
    from slime_core.algorithms.shared.losses import value_loss

    weight = to_device(micro.weight, values.device)
    old, returns = (to_device(micro.columns[name], values.device) for name in CRITIC_COLUMNS)
    losses, metrics = value_loss(values, old, returns, clip, weight)
    counts = weight > 0
    total = torch.where(counts, losses * weight, 0).sum()
    if sums is not None:
        weighted = {name: torch.where(counts, v.detach() * weight, 0).sum() for name, v in metrics.items()}
        token_losses = losses.detach()
        sums.add(
            {"loss": total, **weighted},
            lambda sums: sums.mark_nonfinite(token_losses, counts, micro.response, micro.samples),
            counted=counted,
        )
    return total


def critic_figures(totals: dict[str, float], weight: float, norm: float) -> dict[str, float]:
    """Metrics of the critic's optimizer step, from its sums."""
    named = {"value_loss" if n == "loss" else n: v if n == "loss" else v / weight for n, v in totals.items()}
    return {"critic_grad_norm": norm} | named
