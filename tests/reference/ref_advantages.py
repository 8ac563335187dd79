"""Advantage estimators by their papers: plain Python floats, one sample and one token at a time; imports nothing of slime.

Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO), Ahmadian et al. 2024 (RLOO), Hu et al. 2025 (REINFORCE++),
Schulman et al. 2016 (GAE), Chen et al. 2025 (pass@k), Schulman 2020 (KL). A step is a list of dicts with ``reward``,
``group``, ``rollout``, ``mask`` and lists over the response's tokens: ``policy``, ``reference``, ``teacher``, ``values``.
"""

import itertools
import math


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values, ddof):
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - ddof))


def tied(values):
    return max(values) - min(values) <= 1e-12 * max(abs(v) for v in values)


def rollout_scores(values, groups, rollouts, group):
    """Rollout to the mean of its values, for one group."""
    members = {}
    for value, g, rollout in zip(values, groups, rollouts):
        if g == group:
            members.setdefault(rollout, []).append(value)
    return {rollout: mean(mine) for rollout, mine in members.items()}


def baseline_and_scale(values, groups, rollouts, *, others=False, std="none"):
    """What each value is compared with."""
    everyone = [s for g in sorted(set(groups)) for s in rollout_scores(values, groups, rollouts, g).values()]
    out = []
    for group, rollout in zip(groups, rollouts):
        scores = rollout_scores(values, groups, rollouts, group)
        against = [s for r, s in scores.items() if r != rollout] if others and len(scores) > 1 else [*scores.values()]
        spread = {"none": [0.0], "group": [*scores.values()], "batch": everyone}[std]
        out.append((mean(against), 1.0 if tied(spread) else deviation(spread, 1) + 1e-6))
    return out


def grouped(values, groups, rollouts, *, others=False, std="none"):
    """(value - baseline) / scale a sample."""
    compared = baseline_and_scale(values, groups, rollouts, others=others, std=std)
    return [(v - b) / s for v, (b, s) in zip(values, compared)]


def pass_at_k(values, groups, rollouts, k, std=True):
    """Every k-subset of the group's rollouts, its reward the best of theirs."""
    out = []
    for group, rollout in zip(groups, rollouts):
        scores = rollout_scores(values, groups, rollouts, group)
        subsets = list(itertools.combinations(scores, k))
        best = [max(scores[r] for r in subset) for subset in subsets]
        mine = [b for b, subset in zip(best, subsets) if rollout in subset]
        value = mean(mine) - mean(best)
        out.append(0.0 if tied(best) else value / (deviation(best, 0) + 1e-6) if std else value)
    return out


def pass_at_k_binary(successes, n, k):
    """The paper's closed form for 0/1 rewards: the advantages of a success and of a failure."""
    failures = n - successes
    r = 1 - math.comb(failures, k) / math.comb(n, k)
    s = math.sqrt(r * (1 - r)) + 1e-6
    miss = math.comb(failures - 1, k - 1) / math.comb(n - 1, k - 1) if failures else math.nan
    return (1 - r) / s, (1 - r - miss) / s


def kl(log_prob, ref, kind):
    d = log_prob - ref
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(max(k3, -10.0), 10.0)}[kind]


def turns(mask):
    """The turn of each token, -1 where masked."""
    out, number, before = [], -1, 0
    for m in mask:
        number += 1 if m and not before else 0
        out.append(number if m else -1)
        before = m
    return out


def token_rewards(sample):
    """Where one sample's rewards lie."""
    mask = sample["mask"]
    out = [0.0] * len(mask)
    trained = [t for t, m in enumerate(mask) if m]
    if not trained:
        return out
    if sample.get("by_token") is not None:
        for t, given in enumerate(sample["by_token"]):
            causes = [s for s in trained if s <= t]
            if causes:
                out[causes[-1]] += given
    elif sample.get("by_turn") is not None:
        for number, given in enumerate(sample["by_turn"]):
            out[[t for t, turn in enumerate(turns(mask)) if turn == number][-1]] = given
    else:
        out[trained[-1]] = sample["reward"]
    return out


def total_reward(sample):
    for name in ("by_token", "by_turn"):
        if sample.get(name) is not None:
            return math.fsum(sample[name])
    return sample["reward"]


def steps_between(mask, s, t, level):
    """Discounts between trainable tokens s < t: trainable tokens, or turns."""
    if level == "turn":
        return turns(mask)[t] - turns(mask)[s]
    return sum(mask[s:t])


def rewards_to_go(rewards, mask, gamma, level):
    out = [0.0] * len(mask)
    trained = [t for t, m in enumerate(mask) if m]
    for s in trained:
        out[s] = math.fsum(gamma ** steps_between(mask, s, t, level) * rewards[t] for t in trained if t >= s)
    return out


def gae(rewards, values, mask, gamma, lam, level):
    """Equation 16 as a sum over what follows; advantages and returns."""
    trained = [t for t, m in enumerate(mask) if m]
    deltas = {}
    for number, t in enumerate(trained):
        after = trained[number + 1] if number + 1 < len(trained) else None
        ahead = 0.0 if after is None else gamma ** steps_between(mask, t, after, level) * values[after]
        deltas[t] = rewards[t] + ahead - values[t]
    advantages = [0.0] * len(mask)
    for s in trained:
        advantages[s] = math.fsum(
            (gamma * lam) ** steps_between(mask, s, t, level) * deltas[t] for t in trained if t >= s
        )
    return advantages, [a + v for a, v in zip(advantages, values)]


def whiten(rows, masks):
    values = [v for row, mask in zip(rows, masks) for v, m in zip(row, mask) if m]
    if not values or tied(values) or len(values) == 1:
        return [[0.0] * len(row) for row in rows]
    m, s = mean(values), math.sqrt(deviation(values, 1) ** 2 + 1e-8)
    return [[(v - m) / s if keep else 0.0 for v, keep in zip(row, mask)] for row, mask in zip(rows, masks)]


def group_credit(step, level, gamma, *, others=False, std="none"):
    """Turns or tokens against the same turn of the group's other rollouts."""
    togo = []
    for sample in step:
        found = rewards_to_go(token_rewards(sample), sample["mask"], gamma, level)
        number = turns(sample["mask"])
        if level == "turn":
            found = [found[number.index(n)] if n >= 0 else 0.0 for n in number]
        togo.append(found)
    units, values, groups, rollouts = [], [], [], []
    for i, sample in enumerate(step):
        number = turns(sample["mask"])
        for n in sorted(set(number) - {-1}) or [0]:
            mine = [g for g, t in zip(togo[i], number) if t == n]
            units.append((i, n))
            values.append(mean(mine) if mine else total_reward(sample))
            groups.append((sample["group"], n))
            rollouts.append((sample["rollout"], n))
    compared = dict(zip(units, baseline_and_scale(values, groups, rollouts, others=others, std=std)))
    out = []
    for i, sample in enumerate(step):
        row = []
        for g, n in zip(togo[i], turns(sample["mask"])):
            b, s = compared[i, n] if n >= 0 else (0.0, 1.0)
            row.append((g - b) / s if n >= 0 else 0.0)
        out.append(row)
    return out


def advantages(name, step, train):
    """The whole estimator ``name``: a row a sample, and returns for ppo. ``train`` has the keys of [train]."""
    level, gamma = train.get("credit_level", "trajectory"), train.get("gae_gamma", 1.0)
    rewards, masks = [s["reward"] for s in step], [s["mask"] for s in step]
    ids = [s["group"] for s in step], [s["rollout"] for s in step]
    divides = name in ("grpo", "gspo", "cispo") and not train.get("disable_grpo_std_normalization")
    how = {"others": name == "rloo", "std": train.get("grpo_std_scope", "group") if divides else "none"}
    penalty = [
        [
            train["kl_coef"] * kl(p, r, train.get("kl_reward_type", "k1")) if m else 0.0
            for p, r, m in zip(s["policy"], s["reference"], s["mask"])
        ]
        if train.get("kl_coef")
        else [0.0] * len(s["mask"])
        for s in step
    ]
    with_kl = [[r - p for r, p in zip(token_rewards(s), row)] for s, row in zip(step, penalty)]
    returns = None
    if name == "ppo":
        lam = train.get("gae_lambda", 1.0)
        both = [gae(w, s["values"], s["mask"], gamma, lam, level) for w, s in zip(with_kl, step)]
        out, returns = [a for a, _ in both], [r for _, r in both]
    elif name == "reinforce_plus_plus":
        out = [rewards_to_go(w, m, gamma, level) for w, m in zip(with_kl, masks)]
    else:
        if name == "on_policy_distillation":
            out = [[-(p - t) for p, t in zip(s["policy"], s["teacher"])] for s in step]
        elif name == "pass_at_k":
            found = pass_at_k(rewards, *ids, train.get("pass_k", 4), not train.get("disable_grpo_std_normalization"))
            out = [[a] * len(m) for a, m in zip(found, masks)]
        elif level != "trajectory":
            out = group_credit(step, level, gamma, **how)
        else:
            out = [[a] * len(m) for a, m in zip(grouped(rewards, *ids, **how), masks)]
        out = [[a - p for a, p in zip(row, cost)] for row, cost in zip(out, penalty)]
    coef = train.get("opd_kl_coef", 0.0)
    out = [[a - coef * (p - t) for a, p, t in zip(row, s["policy"], s["teacher"])] for row, s in zip(out, step)]
    if train.get("normalize_advantages") or name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        out = whiten(out, masks)
    return out, returns
