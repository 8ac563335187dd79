"""The cards of every value of ``train.advantage_estimator``: pure data, read by `slime_cli.cards`.

Notation: i a rollout of a prompt's group, t a token of its response, r_i its reward, A an advantage, m the loss mask,
rho_t = exp(new log-prob - old log-prob), sg[...] a constant to the gradient.
"""

from __future__ import annotations

from slime_cli.card import Card

CLIPPED = "-min(rho_t A_t, clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), at most eps_clip_c |A_t| where A_t < 0"
TOKEN_RATIO = "rho_t = exp(log pi(y_t) - log pi_old(y_t)), a token each"
ROLLOUT_MEAN = "rollout_mean: mean over the step's rollouts of the mean over their trainable tokens"
TOKEN_MEAN = "token_mean: sum over the optimizer step's trainable tokens, divided by their number"
PER_TOKEN = "A_t = A_i for every token of the response"

LOSS = (
    "policy_objective",
    "importance_level",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "loss_aggregation",
    "loss_divisor",
    "kl_loss_coef",
    "kl_loss_type",
    "use_unbiased_kl",
    "entropy_coef",
    "use_rollout_logprobs",
    "kl_coef",
    "kl_reward_type",
    "opd_kl_coef",
    "teacher_load",
    "teacher_place",
    "normalize_advantages",
)
"""Keys that every algorithm but sft reads: of the policy loss, then terms that are added to any advantage."""
GROUP = ("n_samples_per_prompt", "rollout_temperature", "dynamic_sampling")
STD = ("disable_grpo_std_normalization", "grpo_std_scope")
CREDIT = ("credit_level", "gae_gamma")
PARTS = ("aggregation", "kl", "corrections", "sampling_control")

GROUPS_IN_SLIME = (
    "Groups are found by position: rewards are reshaped to rows of n_samples_per_prompt, and where their number does "
    "not fit, the whole batch is one row (issue 2230)."
)

ALGORITHM_CARDS: tuple[Card, ...] = (
    Card(
        name="grpo",
        title="Group relative policy optimization",
        formula={
            "advantage": "A_i = (r_i - mean_group r) / (std_group r + 1e-6), std with ddof 1; " + PER_TOKEN,
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "aggregation": ROLLOUT_MEAN,
        },
        source=(
            "Shao et al. 2024, DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, "
            "equations 3 and 4, section 4.1.2",
            "Yu et al. 2025, DAPO: An Open-Source LLM Reinforcement Learning System at Scale, equation 10 (clip-"
            "higher: eps_clip_high above eps_clip)",
        ),
        differs={
            "slime": GROUPS_IN_SLIME + " With one sample a prompt every advantage is 0 and nothing says so.",
            "verl": "Groups by id; a group of one keeps its raw reward as advantage. The log-ratio is held within "
            "[-20, 20], a dual clip with c = 3 is always on, and the default aggregation is the token mean.",
            "TRL": "Groups by position, divided by std + 1e-4. The default loss_type is dapo, a token mean; grpo "
            "averages the micro-batch's sequences and divides by the accumulation steps.",
        },
        options=(*GROUP, *STD, *CREDIT, *LOSS),
        advice="The first choice where several samples of a prompt can be judged: no critic, few settings. Prompts "
        "that all samples solve, or none, teach nothing; dynamic_sampling replaces them.",
        functions=("algo.estimators.grpo", "algo.losses.clipped"),
        related=("dr_grpo", "gspo", "rloo", *PARTS),
    ),
    Card(
        name="dr_grpo",
        title="GRPO done right: no division by length or standard deviation",
        formula={
            "advantage": "A_i = r_i - mean_group r; " + PER_TOKEN,
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "aggregation": "constant: sum over the step's trainable tokens, divided by rollouts * loss_divisor",
        },
        source=(
            "Liu et al. 2025, Understanding R1-Zero-Like Training: A Critical Perspective, section 3.1 and appendix A",
        ),
        differs={
            "slime": "Not built in: --disable-grpo-std-normalization and a reducer of your own with a constant "
            "divisor.",
            "verl": "norm_adv_by_std_in_grpo = False with loss_agg_mode = seq-mean-token-sum-norm; the divisor is the "
            "padded width of the response tensor unless loss_scale_factor is set.",
            "TRL": "loss_type = dr_grpo divides by batch size times max_completion_length; scale_rewards stays "
            "'group', so the division by the standard deviation has to be switched off as well.",
        },
        options=(*GROUP, *CREDIT, *LOSS),
        advice="Where responses differ much in length: GRPO favours short right answers and long wrong ones, this "
        "does not. Its gradients are smaller by about length / loss_divisor, so raise lr, or set loss_divisor near "
        "the usual length.",
        functions=("algo.estimators.dr_grpo", "algo.losses.clipped"),
        related=("grpo", *PARTS),
    ),
    Card(
        name="gspo",
        title="Group sequence policy optimization",
        formula={
            "advantage": "as grpo",
            "ratio": "s_i = exp(mean over the sequence's trainable tokens of (log pi - log pi_old)); sequence_token: "
            "sg[s_i] * pi(y_t) / sg[pi(y_t)]",
            "objective": "-min(s_i A_i, clip(s_i, 1 - eps_clip, 1 + eps_clip_high) A_i)",
            "aggregation": ROLLOUT_MEAN,
        },
        source=("Zheng et al. 2025, Group Sequence Policy Optimization, equations 5 and 7; GSPO-token 13 and 14",),
        differs={
            "slime": "The same ratio; the clip is whatever eps_clip says, 0.2 by default, which for a sequence ratio "
            "never acts. There is no token variant. " + GROUPS_IN_SLIME,
            "verl": "Always the token variant (stop-gradient), its log capped at 10, and always the mean of sequence "
            "means, whatever loss_agg_mode says.",
            "TRL": "importance_sampling_level = sequence; epsilon stays 0.2 and loss_type stays dapo (with a warning) "
            "unless both are set.",
        },
        options=(*GROUP, *STD, *CREDIT, *LOSS),
        advice="For mixture-of-experts models and several optimizer steps a rollout, where single tokens' ratios are "
        "noise. The ratio is a geometric mean, so the clip is narrow: 3e-4 and 4e-4.",
        functions=("algo.estimators.grpo", "algo.losses.importance_ratio", "algo.losses.clipped"),
        related=("grpo", "cispo", *PARTS),
    ),
    Card(
        name="cispo",
        title="Clipped importance-sampling weights",
        formula={
            "advantage": "as grpo",
            "ratio": TOKEN_RATIO,
            "objective": "-sg[clip(rho_t, 1 - eps_clip, 1 + eps_clip_high)] A_t log pi(y_t)",
            "aggregation": TOKEN_MEAN,
        },
        source=("MiniMax 2025, MiniMax-M1: Scaling Test-Time Compute with Lightning Attention, equations 4 and 5",),
        differs={
            "slime": "The same formula; eps_clip is 0.2 by default, which cuts weights from below too (it warns below "
            "1), and the aggregation is the mean of rollout means.",
            "verl": "Both bounds from clip_ratio, 0.2 by default; token mean.",
            "TRL": "No lower bound; epsilon_high is the bound itself, not its distance from 1, and by default 0.2, so "
            "weights are cut at 0.2 until it is set (ScaleRL: 5.0). Token mean.",
        },
        options=(*GROUP, *STD, *CREDIT, *LOSS),
        advice="Where rare tokens that turn an argument must keep their gradient: a clipped weight still teaches, a "
        "clipped PPO token does not. Suits several optimizer steps a rollout and stale samples.",
        functions=("algo.estimators.grpo", "algo.losses.importance_ratio", "algo.losses.cispo"),
        related=("grpo", "gspo", *PARTS),
    ),
    Card(
        name="rloo",
        title="REINFORCE, leave one out",
        formula={
            "advantage": "A_i = r_i - mean of the group's other rewards = n / (n - 1) (r_i - mean_group r); "
            + PER_TOKEN,
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "aggregation": ROLLOUT_MEAN,
        },
        source=(
            "Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human "
            "Feedback in LLMs, section 2.2",
            "Kool, van Hoof and Welling 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!",
        ),
        differs={
            "slime": "Not built in.",
            "verl": "The same advantage; a group of one keeps its raw reward in rloo and gets 0 in rloo_vectorized.",
            "TRL": "RLOOTrainer takes one ratio of the whole response's summed log-probs, clips that, averages over "
            "responses, and puts KL with beta = 0.05 into the reward.",
        },
        options=(*GROUP, *CREDIT, *LOSS),
        advice="An unbiased baseline and no division by a standard deviation: easy and hard prompts weigh alike. "
        "loss_aggregation = rollout_sum is the paper's gradient, which takes the response for one action.",
        functions=("algo.estimators.rloo", "algo.losses.clipped"),
        related=("grpo", "dr_grpo", *PARTS),
    ),
    Card(
        name="reinforce_plus_plus",
        title="REINFORCE++: discounted returns, whitened over the step",
        formula={
            "reward": "token reward = -kl_coef KL_t, plus r_i at the last trainable token",
            "advantage": "G_t = sum over s >= t of gae_gamma^(s - t) * token reward; A = (G - mean) / std over the "
            "step's trainable tokens",
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "aggregation": TOKEN_MEAN,
        },
        source=(
            "Hu 2025, REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models, "
            "section 3",
        ),
        differs={
            "slime": "The same returns where every token trains; slime discounts over masked tokens (a tool's answer) "
            "too. --normalize-advantages has to be given. Whitening takes E[x^2] - E[x]^2 "
            "in float32, and a sample without trainable tokens is an assertion.",
            "verl": "The same returns; positions behind a masked token start anew, so a reward does not reach tokens "
            "before a tool's answer.",
            "TRL": "Not offered; scale_rewards = 'batch' in GRPOTrainer is nearest.",
        },
        options=("n_samples_per_prompt", *CREDIT, *LOSS),
        advice="One sample a prompt is enough, since the baseline is the step's mean: for many prompts, few samples "
        "each. Wants large steps.",
        functions=("algo.returns.reward_to_go", "algo.returns.whiten", "algo.losses.clipped"),
        related=("reinforce_plus_plus_baseline", "ppo", *PARTS),
    ),
    Card(
        name="reinforce_plus_plus_baseline",
        title="REINFORCE++ with the group's mean as baseline",
        formula={
            "advantage": "r_i - mean_group r - kl_coef KL_t, then whitened over the step's trainable tokens",
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "aggregation": TOKEN_MEAN,
        },
        source=(
            "Hu 2025, REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models, "
            "section 3 (the -baseline variant)",
        ),
        differs={
            "slime": "The same; --normalize-advantages has to be given too. " + GROUPS_IN_SLIME,
            "verl": "The same with no KL term; a group of one keeps its raw reward.",
            "TRL": "GRPOTrainer with scale_rewards = 'batch' divides by the batch's standard deviation over samples, "
            "not over tokens.",
        },
        options=(*GROUP, *CREDIT, *LOSS),
        advice="Like grpo, but one standard deviation for the whole step: a group where one sample of eight is right "
        "does not weigh more than one where half are.",
        functions=("algo.estimators.dr_grpo", "algo.returns.whiten", "algo.losses.clipped"),
        related=("reinforce_plus_plus", "grpo", *PARTS),
    ),
    Card(
        name="ppo",
        title="Proximal policy optimization with a critic",
        formula={
            "reward": "token reward = -kl_coef KL_t, plus r_i at the last trainable token",
            "advantage": "delta_t = reward_t + gae_gamma V_(t+1) - V_t; A_t = sum of (gae_gamma gae_lambda)^l "
            "delta_(t+l) over trainable tokens; masked tokens are stepped over",
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "value": "max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2) / 2, with G = A + V_old",
            "aggregation": TOKEN_MEAN,
        },
        source=(
            "Schulman et al. 2017, Proximal Policy Optimization Algorithms, equation 7",
            "Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation, "
            "equation 16",
        ),
        differs={
            "slime": "The reward lies on the last token, trainable or not, and the recursion ignores the loss mask. "
            "The critic's returns leave kl_coef out where the actor's advantages have it. The value loss has no 1/2.",
            "verl": "Masked tokens are stepped over, advantages are always whitened, the value loss has 1/2.",
            "TRL": "Version 1.16 has no PPO trainer.",
        },
        options=(
            "gae_gamma",
            "gae_lambda",
            "critic_load",
            "critic_lr",
            "critic_lr_warmup_iters",
            "value_clip",
            "num_critic_only_steps",
            "credit_level",
            *LOSS,
        ),
        advice="Where credit differs along the response: long tasks, several turns, rewards on the way. It costs a "
        "second model; let it learn first with num_critic_only_steps.",
        functions=("algo.returns.gae", "algo.losses.clipped", "algo.losses.value_loss"),
        related=("reinforce_plus_plus", *PARTS),
    ),
    Card(
        name="pass_at_k",
        title="Pass@k: train the best of k",
        formula={
            "advantage": "(mean best reward of the k-subsets of the group that hold i - mean over all k-subsets) / "
            "(their standard deviation + 1e-6), k = pass_k",
            "ratio": TOKEN_RATIO,
            "objective": CLIPPED,
            "aggregation": ROLLOUT_MEAN,
        },
        source=(
            "Chen et al. 2025, Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large "
            "Reasoning Models, the analytical derivation",
        ),
        differs={
            "slime": "Not built in.",
            "verl": "grpo_passk (Best-of-n): only the best sample of a group has an advantage, its lead over the "
            "second; all others have 0.",
            "TRL": "Not offered.",
        },
        options=(*GROUP, "pass_k", "disable_grpo_std_normalization", *LOSS),
        advice="For hard problems and for keeping variety: a group with one right answer in k counts as solved, so "
        "easy prompts stop pushing. Train with it first, then with grpo for pass@1.",
        functions=("algo.estimators.pass_at_k", "algo.losses.clipped"),
        related=("grpo", *PARTS),
    ),
    Card(
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
        functions=("algo.estimators.on_policy_distillation", "algo.losses.clipped"),
        related=("sft", *PARTS),
    ),
    Card(
        name="sft",
        title="Supervised: the advantage of every token is 1",
        formula={
            "advantage": "A_t = 1",
            "ratio": "none",
            "objective": "-log pi(y_t), with loss_type = sft_loss",
            "aggregation": ROLLOUT_MEAN,
        },
        source=("Williams and Zipser 1989 (teacher forcing); maximum likelihood",),
        differs={
            "slime": "The same loss; the mean of rollout means unless --calculate-per-token-loss.",
            "verl": "A trainer of its own (fsdp_sft_trainer), token mean.",
            "TRL": "SFTTrainer, token mean over the accumulated batch.",
        },
        options=("loss_type", "loss_aggregation", "loss_divisor"),
        advice="For warm-ups. A stage is supervised by loss_type = sft_loss; labels become the responses, and the "
        "estimator's name does not matter then.",
        functions=("algo.estimators.sft", "algo.losses.sft_loss"),
        related=("on_policy_distillation", "aggregation"),
    ),
)
