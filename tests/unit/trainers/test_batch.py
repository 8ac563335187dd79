"""Groups become columns; what must not train stops here, with the sample's name."""

import math

import pytest

from slime_core.errors import TrainerError
from slime_core.testing.contracts import sample_group
from slime_core.trainers.batch import make_batch
from slime_core.types import Sample

pytestmark = pytest.mark.unit


def test_columns_are_the_samples_end_to_end():
    batch = make_batch(3, "main", [sample_group(0), sample_group(1, fan_out=True)])
    assert batch.version == 3
    assert batch.sample_ids == ["main/0-0", "main/0-1", "main/1-0", "main/1-1", "main/1-1.1"]
    assert batch.group.tolist() == [0, 0, 1, 1, 1]
    assert batch.rollout.tolist() == [0, 1, 2, 3, 3]
    assert batch.reward.tolist() == [0, 1, 0, 1, 1]
    assert batch.offsets.tolist() == [0, 6, 12, 18, 24, 30]
    assert batch.tokens[:6].tolist() == [1, 2, 1, 3, 4, 5]
    assert batch.loss_mask[:3].tolist() == [1, 1, 0]
    assert batch.columns["rollout_log_probs"][:3].tolist() == [-0.5, -0.25, 0]
    assert batch.routed_experts[0].shape == (5, 2)


def test_a_removed_sample_is_masked_and_keeps_its_reward():
    group = sample_group(0)
    group.samples[1].remove_sample = True
    batch = make_batch(0, "main", [group])
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 0, 0]
    assert batch.reward.tolist() == [0, 1]


def test_a_mask_that_is_none_counts_as_all_ones():
    group = sample_group(0)
    group.samples[0].loss_mask = None
    assert make_batch(0, "main", [group]).loss_mask[:3].tolist() == [1, 1, 1]


def test_groups_at_one_position_stay_apart():
    batch = make_batch(0, "main", [sample_group(4), sample_group(4)])
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rollout.tolist() == [0, 1, 2, 3]


def test_no_groups_give_an_empty_batch():
    assert len(make_batch(0, "main", [])) == 0


def test_a_response_of_no_tokens_passes_with_no_row():
    group = sample_group(0)
    group.samples[0] = Sample(id="main/0-0", tokens=[1, 2], reward=0.0)
    assert make_batch(0, "main", [group]).response_offsets.tolist() == [0, 0, 3]


def spoil(**changes):
    def apply(sample):
        for name, value in changes.items():
            setattr(sample, name, value)

    return apply


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (spoil(reward=math.nan), "TRN95", "reward nan"),
        (spoil(reward=math.inf), "TRN95", "reward inf"),
        (spoil(reward=None), "TRN00", "not a number"),
        (spoil(reward={"a": 1.0}), "TRN00", "reward_key"),
        (spoil(rollout_log_probs=[-1.0, math.nan, 0.0]), "TRN95", "response token 1"),
        (spoil(rollout_log_probs=[-1.0]), "TRN102", "1 entries of rollout_log_probs and 3"),
        (spoil(rollout_log_probs=None), "TRN102", "no rollout_log_probs"),
        (spoil(loss_mask=[1, 1]), "TRN102", "2 entries of loss_mask"),
        (spoil(loss_mask=[1, 2, 0]), "TRN00", "loss_mask"),
        (spoil(advantages=[0.0, 0.0]), "TRN102", "advantages"),
        (spoil(tokens=[1, -2, 1, 3, 4, 5]), "TRN00", "-2"),
        (spoil(tokens=[1, 2**31, 1, 3, 4, 5]), "TRN00", str(2**31)),
        (spoil(tokens=[3, 4, 5]), "TRN102", "no prompt token"),
        (spoil(tokens=[4, 5]), "TRN102", "response_length 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_samples_that_cannot_train_are_refused_by_name(change, code, says):
    group = sample_group(7)
    change(group.samples[1])
    with pytest.raises(TrainerError) as caught:
        make_batch(0, "main", [group])
    assert caught.value.code == code
    assert "main/7-1" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("table", [{0: [0]}, {0: [0], 1: [0, 1]}, {0: [0, 5]}], ids=["lost", "doubled", "unknown"])
def test_a_rollout_table_that_does_not_fit_is_refused(table):
    group = sample_group(7)
    group.rollouts = table
    with pytest.raises(TrainerError, match="main/7"):
        make_batch(0, "main", [group])
