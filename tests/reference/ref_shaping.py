"""Reward shaping by its papers, in plain Python, one sample at a time; imports nothing of slime.

Yu et al. 2025, DAPO, eq. 13 (soft overlong punishment). Liu et al. 2026, GDPO (each reward normalised in its group).
"""

import math


def overlong(length, limit, buffer, factor):
    """The punishment of one response: eq. 13 with L_max = limit and L_cache = buffer, times the factor."""
    if buffer == 0 or length <= limit - buffer:
        return 0.0
    if length <= limit:
        return factor * ((limit - buffer) - length) / buffer
    return -factor


def normalised(values, rollouts):
    """One term of one group: minus the mean, over the standard deviation (ddof 1) plus 1e-6, both over rollouts."""
    of = {}
    for value, rollout in zip(values, rollouts):
        of.setdefault(rollout, []).append(value)
    means = [math.fsum(mine) / len(mine) for mine in of.values()]
    middle = math.fsum(means) / len(means)
    if len(set(values)) == 1:
        return [0.0] * len(values)
    if max(means) - min(means) <= 1e-12 * max(map(abs, means)):  # one rollout, or siblings alone differ
        return [value - middle for value in values]
    deviation = math.sqrt(math.fsum((mean - middle) ** 2 for mean in means) / (len(means) - 1))
    return [(value - middle) / (deviation + 1e-6) for value in values]


def weighed(terms, weights, rollouts, normalize):
    """terms and weights by name; one reward a sample."""
    made = {name: normalised(values, rollouts) if normalize else list(values) for name, values in terms.items()}
    count = len(rollouts)
    return [math.fsum(weights[name] * made[name][i] for name in made) for i in range(count)]
