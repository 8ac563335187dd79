"""On-policy distillation: minus the reverse KL to a teacher, a token each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import CLIPPED, LOSS, PARTS, ROLLOUT_MEAN, TOKEN_RATIO

if TYPE_CHECKING:
    from slime_core.protocols import Role
    from slime_core.types import Batch, Columns


def advantages(batch: Batch, train: Any) -> Columns:
    """Minus the reverse KL to the teacher; the reward does not enter."""
    from slime_core.algorithms.shared.terms import distillation

    return {"advantages": distillation(batch, train)}


def _needs(train: Any) -> frozenset[Role]:
    from slime_core.algorithms.shared.terms import teacher_role

    return teacher_role(train) | {"policy"}


ALGORITHM = Algorithm(
    name="on_policy_distillation",
    title="On-policy distillation: reverse KL to a teacher",
    formula={
        "advantage": "A_t = log pi_teacher(y_t) - log pi(y_t), minus one token's reverse KL; no reward enters",
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": ROLLOUT_MEAN,
    },
    source=(
        "Lu and Thinking Machines Lab 2025, On-Policy Distillation",
        "Agarwal et al. 2024, On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes, "
        "section 3",
        "Gu et al. 2024, MiniLLM: Knowledge Distillation of Large Language Models, equation 2",
    ),
    differs={
        "slime": "A term beside any estimator: A_t - opd_kl_coef (log pi - log pi_teacher), before whitening; the "
        "metric opd_reverse_kl is never reached.",
        "verl": "A loss of its own beside the policy's: top-k forward KL, or a one-sample KL estimator taken as "
        "supervised loss or as minus the advantage; clamped where asked.",
        "TRL": "DistillationTrainer differentiates a generalised Jensen-Shannon divergence over the vocabulary "
        "(beta = 1: reverse KL), not a policy gradient of sampled tokens.",
    },
    options=LOSS,
    advice="Where a better model of the same tokenizer exists: every token is graded, so it learns from far fewer "
    "samples than a reward. With another estimator, opd_kl_coef adds the same term to its advantages.",
    functions=("shared.kl.minus_reverse_kl", "shared.losses.clipped"),
    related=("sft", *PARTS),
    advantages=advantages,
    needs_when=_needs,
    distils=True,
)
