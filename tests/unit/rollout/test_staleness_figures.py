"""Figures of age: shares that add up, the bound that is seen, and which lengths are given up."""

import pytest

from slime_core.rollout.staleness import bucket, stale_metrics, staleness_metrics, trained_versions
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit


def _group(*versions, masks=()):
    samples = []
    for made in versions:
        sample = Sample(id=f"main/0-{len(samples)}", tokens=[1])
        sample.append_response([5] * len(made), log_probs=[-1.0] * len(made), version=list(made))
        samples.append(sample)
    for sample, mask in zip(samples, masks):
        sample.loss_mask = mask
    return Group(prompt=Prompt(id="main/0"), samples=samples, rollouts={i: [i] for i in range(len(samples))})


def test_shares_of_groups_and_of_tokens_by_age_add_up_to_one():
    groups = [_group([3, 3, 4], [5]), _group([5, 5]), _group([4])]
    metrics = staleness_metrics(groups, 5, 3)
    assert [metrics[f"staleness/{age}"] for age in range(4)] == [1 / 3, 1 / 3, 1 / 3, 0.0]
    assert [metrics[f"staleness/tokens/{age}"] for age in range(4)] == [3 / 7, 2 / 7, 2 / 7, 0.0]
    assert (metrics["staleness/mean"], metrics["staleness/min"], metrics["staleness/max"]) == (1.0, 0.0, 2.0)


def test_masked_tokens_and_tokens_that_no_model_made_have_no_age():
    group = _group([1, 2, 5], masks=[[0, 1, 1]])
    assert trained_versions(group.samples[0]) == {2, 5}
    assert staleness_metrics([group], 5, 3)["staleness/max"] == 3.0
    supervised = Group(
        prompt=Prompt(id="a"), samples=[Sample(id="a-0", tokens=[1, 2], response_length=1)], rollouts={}
    )
    metrics = staleness_metrics([supervised], 5, 1)
    assert (metrics["staleness/max"], metrics["staleness/tokens/0"]) == (0.0, 0.0)
    group.samples[0].remove_sample = True
    assert trained_versions(group.samples[0]) == set()


def test_an_age_above_the_bound_is_shown_and_not_cut():
    metrics = staleness_metrics([_group([1])], 5, 2)
    assert metrics["staleness/max"] == 4.0
    assert metrics["staleness/4"] == 1.0


def test_lengths_fall_into_buckets_that_double():
    assert [bucket(n) for n in (0, 63, 64, 127, 128, 300)] == [
        *("len_0_64", "len_0_64", "len_64_128", "len_64_128", "len_128_256", "len_256_512")
    ]


def test_what_was_given_up_is_counted_and_put_in_proportion_by_length():
    metrics = stale_metrics({"dropped": [10, 100, 100], "masked": [200]}, [10, 20, 30, 100, 200])
    assert metrics["stale/dropped"] == 3.0
    assert metrics["stale/dropped_rate"] == 3 / 8
    assert metrics["stale/dropped/len_64_128"] == 2.0
    assert metrics["stale/dropped_rate/len_0_64"] == 1 / 4
    assert metrics["stale/dropped_rate/len_64_128"] == 2 / 3
    assert metrics["stale/masked_rate/len_128_256"] == 1.0
    assert not any(name.startswith("stale/restarted") for name in metrics)
    assert stale_metrics({}, [3]) == {}
