"""What `compare_losses` compares: settings of ours beside settings of another framework, and where they differ, why.

A term that is not named in ``differs`` must agree; one that is must differ, so that no reason outlives its cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import published_losses as published
import torch
from published_losses import Inputs, Side, openrlhf, slime, trl, trl_correction, verl

from slime_core.algorithms.dr_grpo import dr_grpo
from slime_core.algorithms.grpo import grpo
from slime_core.algorithms.shared.losses import value_loss

SAMPLES = 8
WHOLE = ("aggregation", "ratio", "clip", "total", "gradient")
SUMS = ("total", "gradient")
KL = {"kl_loss_coef": 0.1}
TOKENS: dict[str, Any] = {"loss_aggregation": "token_mean"}
CISPO: dict[str, Any] = {"policy_objective": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.28} | TOKENS
GSPO: dict[str, Any] = {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.08}
TIS: dict[str, Any] = {"use_tis": True, "tis_clip": 1.15, "tis_clip_low": 0.9} | TOKENS

SIBLINGS = "fan-out is unknown there: each sibling counts as a rollout of its own; ours share their rollout's weight"
LEFT_OUT = "a fully masked sample is left out of the mean, so the others weigh more; ours keeps the step's denominator"
MICRO = "each micro-batch has its own token mean and these are averaged; ours has the step's denominator"
SEQUENCE_KL = "TRL multiplies the KL by the sequence's ratio; ours by the token's own at every level"


@dataclass(slots=True, frozen=True)
class Comparison:
    """One loss of a framework beside ours."""

    framework: str
    variant: str
    keys: dict[str, Any]  # ours, [train]
    theirs: Side
    terms: tuple[str, ...] = WHOLE
    differs: dict[str, str] = field(default_factory=dict)  # term to the reason
    batch: str = "plain"  # "masked": a sample is all masked; "siblings": two samples share a rollout


def differ(why: str, *terms: str) -> dict[str, str]:
    """The same reason for several terms."""
    return dict.fromkeys(terms, why)


def _correction(mode: str) -> Comparison:
    """TRL's importance sampling from vLLM to the trainer, and ours."""
    level, what = mode.split("_")
    keys = TIS | {"tis_level": level, "tis_mode": "clip" if what == "truncate" else "mask"}
    theirs = trl("dapo", correction=trl_correction(mode, 0.9, 1.15))
    return Comparison("trl", f"dapo with vllm_importance_sampling_mode={mode}", keys, theirs, ("clip", *SUMS))


def _dense(**more: Any) -> dict[str, Any]:
    return {"loss_aggregation": "constant"} | more


TRL = (
    Comparison("trl", "grpo", {}, trl("grpo")),
    Comparison("trl", "grpo, a masked sample", {}, trl("grpo"), batch="masked"),
    Comparison(
        "trl", "grpo, siblings", {}, trl("grpo"), ("aggregation",), differ(SIBLINGS, "aggregation"), "siblings"
    ),
    Comparison("trl", "grpo, clip-higher", {"eps_clip_high": 0.28}, trl("grpo", high=0.28)),
    Comparison("trl", "grpo with KL (beta)", KL, trl("grpo", beta=0.1), ("kl", *SUMS)),
    Comparison(
        "trl",
        "grpo with use_bias_correction_kl",
        KL | {"use_unbiased_kl": True},
        trl("grpo", beta=0.1, bias_correction=True),
        ("kl", *SUMS),
    ),
    Comparison("trl", "grpo, two-sided (delta) as eps_clip_c", {"eps_clip_c": 1.5}, trl("grpo", delta=1.5)),
    Comparison(
        "trl",
        "grpo with off_policy_mask_threshold",
        {"use_opsm": True, "opsm_delta": 0.02},
        trl("grpo", off_policy=0.02),
        ("clip", *SUMS),
    ),
    Comparison("trl", "bnpo", TOKENS, trl("bnpo")),
    Comparison(
        "trl", "bnpo in 2 micro-batches", TOKENS, trl("bnpo", micro_batches=2), SUMS, differ(MICRO, *SUMS), "masked"
    ),
    Comparison("trl", "dapo", TOKENS, trl("dapo")),
    Comparison("trl", "dapo in 2 micro-batches", TOKENS, trl("dapo", micro_batches=2)),
    Comparison(
        "trl",
        "dapo with entropy_coef",
        TOKENS | {"entropy_coef": 0.1},
        trl("dapo", entropy_coef=0.1),
        ("entropy", "total"),
    ),
    Comparison(
        "trl",
        "grpo with entropy_coef",
        {"entropy_coef": 0.1},
        trl("grpo", entropy_coef=0.1),
        ("entropy", "total"),
        differ(
            "TRL's bonus is a mean over tokens under every loss type; ours is aggregated as the loss is",
            "entropy",
            "total",
        ),
    ),
    Comparison("trl", "dr_grpo", _dense(), trl("dr_grpo")),
    Comparison("trl", "luspo as rollout_sum", {"loss_aggregation": "rollout_sum"}, trl("luspo")),
    Comparison("trl", "cispo, bound 1.28", CISPO, trl("cispo", high=1.28)),
    Comparison(
        "trl",
        "cispo, epsilon_high=0.28",
        CISPO,
        trl("cispo", high=0.28),
        ("clip", *SUMS),
        differ("TRL's epsilon_high is the bound itself; ours, and MiniMax's, is 1 + eps_clip_high", "clip", *SUMS),
    ),
    Comparison(
        "trl", "gspo (importance_sampling_level=sequence)", GSPO, trl("grpo", level="sequence", low=0.05, high=0.08)
    ),
    Comparison(
        "trl",
        "gspo with use_bias_correction_kl",
        GSPO | KL | {"use_unbiased_kl": True},
        trl("grpo", level="sequence", low=0.05, high=0.08, beta=0.1, bias_correction=True),
        ("kl", *SUMS),
        differ(SEQUENCE_KL, "kl", *SUMS),
    ),
    *(_correction(f"{level}_{what}") for level in ("token", "sequence") for what in ("truncate", "mask")),
)

SLIME = (
    Comparison("slime", "grpo", {}, slime()),
    Comparison("slime", "grpo, siblings", {}, slime(), batch="siblings"),
    Comparison("slime", "grpo, a masked sample", {}, slime(), batch="masked"),
    Comparison("slime", "grpo, dual clip", {"eps_clip_c": 3.0}, slime(dual=3.0)),
    Comparison("slime", "calculate_per_token_loss", TOKENS, slime(per_token=True)),
    Comparison(
        "slime",
        "calculate_per_token_loss, a masked sample",
        TOKENS,
        slime(per_token=True),
        ("aggregation", "total"),
        differ(
            "a fully masked sample counts as one token in the denominator; ours counts none", "aggregation", "total"
        ),
        "masked",
    ),
    Comparison("slime", "gspo", GSPO, slime("gspo", low=0.05, high=0.08)),
    Comparison("slime", "cispo", CISPO, slime("cispo", low=1.0, high=0.28, per_token=True)),
    *(
        Comparison(
            "slime",
            f"KL {kind}{', use_unbiased_kl' * unbiased}",
            KL | {"kl_loss_type": kind, "use_unbiased_kl": unbiased},
            slime(kl=kind, unbiased=unbiased),
            ("kl", *SUMS),
        )
        for kind in ("k1", "k2", "k3", "low_var_kl")
        for unbiased in (False, True)
    ),
    Comparison("slime", "entropy_coef", {"entropy_coef": 0.1}, slime(entropy_coef=0.1), ("entropy", *SUMS)),
    Comparison("slime", "use_opsm", {"use_opsm": True, "opsm_delta": 0.02}, slime(opsm=0.02), ("clip", *SUMS)),
    Comparison(
        "slime",
        "use_tis (clamped on both sides) as tis_mode=clip",
        TIS | {"tis_mode": "clip"},
        slime(per_token=True, weights=lambda x: (x.old - x.engine).exp().clamp(0.9, 1.15)),
        ("clip", *SUMS),
    ),
    Comparison(
        "slime",
        "icepop_function as tis_mode=mask",
        TIS | {"tis_mode": "mask"},
        slime(
            per_token=True, weights=lambda x: (x.old - x.engine).exp() * (1 - published.outside(x, "token", 0.9, 1.15))
        ),
        ("clip", *SUMS),
    ),
    Comparison(
        "slime",
        "MIS rejection, geometric",
        {"use_rs": True, "rs_upper_bound": 1.02} | TOKENS,
        slime(per_token=True, weights=lambda x: 1 - published.outside(x, "geometric", 1 / 1.02, 1.02)),
        ("clip", *SUMS),
    ),
)

REJECT: dict[str, Any] = {"use_rs": True, "rs_level": "token", "rs_upper_bound": 1.15} | TOKENS
VERL = (
    Comparison("verl", "vanilla, token-mean, as eps_clip_c=3", TOKENS | {"eps_clip_c": 3.0}, verl()),
    Comparison(
        "verl",
        "vanilla, token-mean, defaults of both",
        TOKENS,
        verl(),
        ("clip", "total", "gradient"),
        differ("verl's dual clip is on, at 3, unless it is set; ours is off", "clip", "total", "gradient"),
    ),
    Comparison("verl", "seq-mean-token-mean", {"eps_clip_c": 3.0}, verl(agg="seq-mean-token-mean")),
    Comparison(
        "verl",
        "seq-mean-token-mean, a masked sample",
        {"eps_clip_c": 3.0},
        verl(agg="seq-mean-token-mean"),
        ("aggregation", "total"),
        differ(LEFT_OUT, "aggregation", "total"),
        "masked",
    ),
    Comparison(
        "verl",
        "seq-mean-token-mean, siblings",
        {},
        verl(agg="seq-mean-token-mean"),
        ("aggregation",),
        differ(SIBLINGS, "aggregation"),
        "siblings",
    ),
    Comparison(
        "verl",
        "seq-mean-token-sum as rollout_sum",
        {"loss_aggregation": "rollout_sum", "eps_clip_c": 3.0},
        verl(agg="seq-mean-token-sum"),
    ),
    Comparison(
        "verl",
        "seq-mean-token-sum-norm as constant",
        _dense(loss_divisor=9),
        verl(agg="seq-mean-token-sum-norm"),
        ("aggregation",),
        differ(
            "the sum over sequences is divided by the padded length alone, not by the number of sequences too",
            "aggregation",
        ),
    ),
    Comparison(
        "verl",
        "gspo as sequence_token",
        GSPO | {"importance_level": "sequence_token"},
        verl("gspo", low=0.05, high=0.08, agg="seq-mean-token-mean"),
    ),
    Comparison(
        "verl",
        "gspo, one advantage a sequence, as sequence",
        GSPO,
        verl("gspo", low=0.05, high=0.08, agg="seq-mean-token-mean"),
    ),
    Comparison(
        "verl",
        "use_kl_loss (low_var_kl)",
        KL | TOKENS | {"kl_loss_type": "low_var_kl", "eps_clip_c": 3.0},
        verl(kl=True),
        ("kl", *SUMS),
    ),
    Comparison("verl", "entropy_coeff", TOKENS | {"entropy_coef": 0.1}, verl(entropy_coef=0.1), ("entropy",)),
    Comparison(
        "verl",
        "rollout_is=token as tis_mode=truncate",
        TIS | {"eps_clip_c": 3.0, "tis_clip_low": 0.0},
        verl(weights=lambda x: (x.old - x.engine).clamp(-20, 20).exp().clamp(max=1.15)),
        ("clip", *SUMS),
    ),
    Comparison(
        "verl",
        "rejection of tokens",
        REJECT | {"eps_clip_c": 3.0},
        verl(reject=lambda x: published.outside(x, "token", 1 / 1.15, 1.15)),
        SUMS,
        differ("rejected tokens leave the denominator too, so the rest weighs more; ours keeps the step's", *SUMS),
    ),
)

OPENRLHF = (
    Comparison("openrlhf", "ppo", TOKENS, openrlhf()),
    Comparison("openrlhf", "ppo, dual clip", TOKENS | {"eps_clip_c": 3.0}, openrlhf(dual=3.0)),
    Comparison(
        "openrlhf", "ppo in 2 micro-batches", TOKENS, openrlhf(micro_batches=2), SUMS, differ(MICRO, *SUMS), "masked"
    ),
    Comparison("openrlhf", "gspo", GSPO, openrlhf("gspo", low=0.05, high=0.08)),
    Comparison(
        "openrlhf",
        "KL k3 as low_var_kl",
        KL | TOKENS | {"kl_loss_type": "low_var_kl"},
        openrlhf(kl=True),
        ("kl", *SUMS),
    ),
    Comparison(
        "openrlhf",
        "KL k3 as k3",
        KL | TOKENS,
        openrlhf(kl=True),
        ("kl", *SUMS),
        differ("its estimators are all cut to [-10, 10]; ours only in low_var_kl", "kl", *SUMS),
    ),
    Comparison(
        "openrlhf",
        "vLLM correction tis as clip",
        TIS | {"tis_mode": "clip"},
        openrlhf(correction="tis", bounds=(0.9, 1.15)),
        ("clip", *SUMS),
    ),
    Comparison(
        "openrlhf",
        "vLLM correction icepop as mask",
        TIS | {"tis_mode": "mask"},
        openrlhf(correction="icepop", bounds=(0.9, 1.15)),
        ("clip", *SUMS),
    ),
    Comparison(
        "openrlhf",
        "vLLM correction seq-mask-tis as geometric rejection and unbounded weights",
        {"use_tis": True, "tis_clip": 1e6, "use_rs": True, "rs_upper_bound": 1.05, "rs_lower_bound": 0.97} | TOKENS,
        openrlhf(correction="seq-mask-tis", bounds=(0.97, 1.05)),
        ("clip", *SUMS),
    ),
)

COMPARISONS: tuple[Comparison, ...] = TRL + SLIME + VERL + OPENRLHF

Direct = tuple[str, str, str, torch.Tensor, torch.Tensor, str]


def direct(x: Inputs) -> Iterator[Direct]:
    """(framework, variant, term, ours, theirs, why they differ) of what is no loss of a token: advantages, values."""
    place, every = x.group.numpy(), torch.arange(len(x.reward)).numpy()

    def advantages(keep: slice, std: bool) -> torch.Tensor:
        given = (x.reward[keep].numpy(), place[keep], x.rollout[keep].numpy(), every[: len(x.reward[keep])])
        return torch.from_numpy(grpo(*given, std=True) if std else dr_grpo(*given)).double()

    whole, size = slice(None), len(x.reward) // len(x.group.unique())
    mine = advantages(whole, True)
    for framework, epsilon, why in (
        ("trl", 1e-4, "TRL adds 1e-4 to the standard deviation, ours 1e-6"),
        ("slime", 1e-6, ""),
        ("verl", 1e-6, ""),
        ("openrlhf", 1e-9, "OpenRLHF (group_norm) adds 1e-9 to the standard deviation, ours 1e-6"),
    ):
        yield framework, "advantages", "grpo", mine, published.positional(x.reward, size, epsilon), why
        plain = published.positional(x.reward, size, 0.0, std=False)
        yield framework, "advantages", "without std", advantages(whole, False), plain, ""
    fewer = slice(0, len(x.reward) - 1)
    yield (
        "slime",
        "advantages, one sample of a group missing",
        "grpo",
        advantages(fewer, True),
        published.positional(x.reward[fewer], len(x.reward) - 1, 1e-6),
        "groups are rows of a full batch; once a sample is missing the whole batch is one group. Ours go by id",
    )
    value, old, target = x.new, x.old, x.ref
    half, _ = value_loss(value, old, target, 0.2)
    for framework, factor, why in (
        ("slime", 1.0, "slime's value loss has no factor 1/2"),
        ("verl", 0.5, ""),
        ("openrlhf", 0.5, ""),
    ):
        yield framework, "value loss", "clipped", half, published.squared(value, old, target, 0.2, factor), why
