"""The cards of what algorithms share: corrections, KL, aggregation, sampling control. Pure data."""

from __future__ import annotations

from slime_core.algorithms.shared.card import Card

PART_CARDS: tuple[Card, ...] = (
    Card(
        name="corrections",
        title="Corrections for the gap between engine and trainer: TIS, MIS, IcePop, OPSM",
        formula={
            "ratio": "of a token exp(g), with g = log pi_trainer - log pi_engine of the same weights; of a sequence "
            "exp(sum of g); geometric exp(mean of g); over trainable tokens",
            "TIS": "use_tis: the policy term times min(ratio, tis_clip), and at least tis_clip_low where it is set",
            "IcePop": "use_tis, tis_mode = mask: times the ratio inside [tis_clip_low, tis_clip], times 0 outside",
            "MIS": "use_rs: tokens or sequences whose ratio leaves [rs_lower_bound, rs_upper_bound] are rejected and "
            "lose all their terms; rs_veto_threshold, also without use_rs: so are sequences with a token below it",
            "OPSM": "use_opsm: the policy term is 0 where A < 0 and the sequence's mean of log pi_old - log pi "
            "exceeds opsm_delta",
            "normalise": "tis_batch_normalize: weights divided by their mean over the optimizer step's trainable "
            "tokens",
        },
        source=(
            "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (TIS)",
            "Liu, Li et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference "
            "Mismatch (MIS)",
            "Ling Team 2025, Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!",
            "DeepSeek-AI 2025, DeepSeek-V3.2, equation 9 (off-policy sequence masking)",
        ),
        differs={
            "slime": "TIS is built in, IcePop and MIS are functions by path; rejection does nothing unless TIS is on. "
            "Rejected tokens leave the numerator alone, as here.",
            "verl": "One helper with weights of token or sequence and rejection by twelve divergences; rejection "
            "changes the response mask. Log-ratios are held within [-20, 20]; here only the upper side is cut, and "
            "counted.",
            "TRL": "On by default with vLLM, as sequence_mask at 3.0. Off-policy masking compares with the engine's "
            "log-probs; here with the old ones, which are the engine's with use_rollout_logprobs.",
        },
        options=(
            "use_tis",
            "tis_level",
            "tis_mode",
            "tis_clip",
            "tis_clip_low",
            "tis_batch_normalize",
            "use_rs",
            "rs_level",
            "rs_lower_bound",
            "rs_upper_bound",
            "rs_veto_threshold",
            "use_opsm",
            "opsm_delta",
            "use_rollout_logprobs",
            "custom_tis_function_path",
        ),
        advice="Watch train_rollout_logprob_abs_diff: with the embedded engine in float32 it is rounding, and nothing "
        "here is needed. With another engine, low precision or experts start with use_tis at token level; add use_rs "
        "with a geometric bound near 1 where single sequences drift.",
        functions=(
            "shared.corrections.importance_weights",
            "shared.corrections.rejected",
            "shared.corrections.vetoed",
            "shared.corrections.off_policy",
        ),
        related=("kl", "aggregation"),
    ),
    Card(
        name="kl",
        title="KL to the reference model: estimators, in the loss or in the reward",
        formula={
            "k1": "d = log pi - log pi_ref",
            "k2": "d^2 / 2",
            "k3": "exp(-d) - 1 + d; low_var_kl: the same within [-10, 10]",
            "unbiased": "use_unbiased_kl: times rho_t = pi / pi_old, through which the gradient flows",
            "in the loss": "kl_loss_coef times the mean of the estimator, weighted as the policy term is",
            "in the reward": "kl_coef times kl_reward_type, taken from each token's reward",
        },
        source=(
            "Schulman 2020, Approximating KL Divergence",
            "DeepSeek-AI 2025, DeepSeek-V3.2, unbiased KL estimate",
            "Shao et al. 2024, DeepSeekMath, equation 4 (k3 in the loss)",
        ),
        differs={
            "slime": "The same estimators; kl_loss_type is k1 by default, which in the loss has no gradient towards "
            "the reference. With grpo, kl_coef is accepted and does not reach the advantage.",
            "verl": "k3 and low_var_kl are both cut to [-10, 10]; a trailing + (k3+) takes the value of one and the "
            "gradient of k2. The reward's coefficient may adapt.",
            "TRL": "k3 alone, times the ratio by default since version 1.16's use_bias_correction_kl; beta is 0.",
        },
        options=("kl_loss_coef", "kl_loss_type", "use_unbiased_kl", "kl_coef", "kl_reward_type", "ref_load"),
        advice="None is the usual start for verifiable rewards. In the loss use k3 or k2; on stale samples add "
        "use_unbiased_kl. In the reward use k1, with estimators that take token rewards.",
        functions=("shared.kl.kl", "shared.kl.reward_kl"),
        related=("corrections", "aggregation"),
    ),
    Card(
        name="aggregation",
        title="Aggregation: from a loss a token to the loss of an optimizer step",
        formula={
            "rollout_mean": "a token weighs 1 / (rollouts * trainable tokens of its rollout); fan-out siblings share "
            "one rollout",
            "token_mean": "1 / trainable tokens of the optimizer step",
            "rollout_sum": "1 / rollouts",
            "constant": "1 / (rollouts * loss_divisor); 0 means rollout_max_response_len",
        },
        source=(
            "Shao et al. 2024, DeepSeekMath, equation 3 (mean of sequence means)",
            "Yu et al. 2025, DAPO, equation 12 (token mean)",
            "Liu et al. 2025, Understanding R1-Zero-Like Training (constant divisor)",
        ),
        differs={
            "slime": "Two modes: the mean of rollout means, whose denominators are those of the whole step as here, "
            "and the token mean. Others need a reducer of your own.",
            "verl": "Denominators are the whole step's where the trainer hands its token and sequence counts over, "
            "else the micro-batch's; the constant is the padded width unless loss_scale_factor is set.",
            "TRL": "loss_type = grpo, bnpo and dr_grpo average a micro-batch and divide by the accumulation steps, so "
            "the split changes the gradient; dapo and cispo divide by the step's tokens.",
        },
        options=("loss_aggregation", "loss_divisor", "num_steps_per_rollout", "global_batch_size"),
        advice="Leave it to the algorithm. token_mean lets long responses weigh more; rollout_mean gives each "
        "response the same weight, so its tokens less the longer it is; rollout_sum and constant are the policy "
        "gradient itself.",
        functions=("shared.aggregate.token_weights",),
        related=("grpo", "dr_grpo"),
    ),
    Card(
        name="sampling_control",
        title="Sampling control: which samples train, and how rewards are shaped",
        formula={
            "dynamic": "equal_rewards: a group whose rewards are all equal is dropped and the next prompt is taken; "
            "over_sampling_batch_size prompts are in flight, and the step takes the first that finish",
            "partial": "partial_rollout: the surplus keeps its tokens and log-probs and is continued in a later step; "
            "mask_offpolicy_in_partial_rollout sets the mask of the older tokens to 0",
            "overlong": "penalty = overlong_penalty_factor * clip((length - (limit - overlong_buffer_len)) / "
            "overlong_buffer_len, 0, 1), taken from the reward; mask_truncated: cut samples do not train",
            "terms": "reward = sum of weight times term; reward_terms_normalize: each term is normalised in its group "
            "first",
        },
        source=(
            "Yu et al. 2025, DAPO: An Open-Source LLM Reinforcement Learning System at Scale, equations 11 and 13, "
            "section 3.3 (overlong filtering)",
            "Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization (reward terms)",
        ),
        differs={
            "slime": "A filter by path; finished groups beyond the batch are thrown away. No overlong shaping, no "
            "reward terms. Its mask of off-policy tokens reads response_length, which a list of samples breaks.",
            "verl": "Dynamic sampling and the overlong buffer are DAPO's recipe and reward manager; GDPO is an "
            "estimator with its own keys.",
            "TRL": "mask_truncated_completions; several reward functions with weights, normalised before or after "
            "they are added. No dynamic sampling: groups of equal rewards stay in the batch.",
        },
        options=(
            "dynamic_sampling",
            "over_sampling_batch_size",
            "max_dropped_groups",
            "dynamic_sampling_filter_path",
            "partial_rollout",
            "mask_offpolicy_in_partial_rollout",
            "overlong_buffer_len",
            "overlong_penalty_factor",
            "mask_truncated",
            "reward_weights",
            "reward_terms_normalize",
        ),
        advice="Switch dynamic_sampling on where reward/equal_groups is high, and partial_rollout where a few long "
        "responses hold a step. Watch the tokens that drops cost: rollout/issued_groups against rollout/groups.",
        functions=("shared.shaping.soft_overlong", "shared.shaping.group_normalised"),
        related=("grpo", "aggregation"),
    ),
)
