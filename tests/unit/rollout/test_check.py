"""What comes back from a generate function is checked before anything trains on it, and siblings get their names."""

import dataclasses
import math

import pytest

from slime_core.config.schema import Config
from slime_core.errors import EngineError
from slime_core.rollout.groups import check_group, issued_ids, pending_group
from slime_core.types import Group, Prompt, Sample, Status

pytestmark = pytest.mark.unit

VOCAB = 10


def _issued(n=2):
    return pending_group(Prompt(id="main/4", position=4, tokens=[1, 2], prompt="x"), Config(), count=n)


def _filled(n=2):
    group = _issued(n)
    for sample in group.samples:
        sample.append_response([3, 4], log_probs=[-0.5, 0.0], version=1)
        sample.status = Status.COMPLETED
    return group


def test_pending_samples_have_ids_that_follow_from_the_position_alone():
    group = _issued()
    assert [s.id for s in group.samples] == ["main/4-0", "main/4-1"]
    assert group.rollouts == {32: [0], 33: [1]}  # position 4 of prompts with n_samples_per_prompt 8
    assert [s.index for s in group.samples] == [32, 33]


def test_a_good_group_passes_and_gets_its_defaults():
    group = _filled()
    group.samples[0].loss_mask, group.samples[0].weight_versions = None, []
    check_group(group, issued_ids(_issued()), VOCAB)
    assert group.samples[0].loss_mask == [1, 1]
    assert group.samples[0].weight_versions == [-1, -1]


def test_fan_out_siblings_are_named_after_the_sample_issued_for_their_rollout():
    group = _filled()
    twin = dataclasses.replace(group.samples[1], id="whatever")
    group = Group(prompt=group.prompt, samples=[twin, *group.samples], rollouts={32: [1], 33: [2, 0]})
    check_group(group, issued_ids(_issued()), VOCAB)
    assert [s.id for s in group.samples] == ["main/4-1.1", "main/4-0", "main/4-1"]
    assert [s.rollout_id for s in group.samples] == [33, 32, 33]


def test_names_survive_a_plugin_that_replaces_samples_in_place():
    group = _issued()
    ids = issued_ids(group)
    group.samples[0] = dataclasses.replace(_filled().samples[0], id="mine", group_index=9)
    group.samples[1] = dataclasses.replace(_filled().samples[1], id="")
    check_group(group, ids, VOCAB)
    assert [s.id for s in group.samples] == ["main/4-0", "main/4-1"]
    assert group.samples[0].group_index == 4


def _set(name, value):
    return lambda sample: setattr(sample, name, value)


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (_set("tokens", [1, 2, 3, 10]), "TOK44", "token id 10, outside the vocabulary of 10"),
        (_set("tokens", [1, 2, 3, -1]), "TOK44", "token id -1"),
        (_set("loss_mask", [1]), "ENG79", "'loss_mask': 1"),
        (_set("rollout_log_probs", [-0.5]), "ENG79", "'rollout_log_probs': 1"),
        (_set("weight_versions", [1, 1, 1]), "ENG79", "'weight_versions': 3"),
        (_set("response_length", 7), "ENG79", "response_length 7"),
        (_set("rollout_log_probs", [-0.5, math.nan]), "ENG80", "log-prob nan at response token 1"),
        (_set("rollout_log_probs", [-math.inf, -0.1]), "ENG80", "log-prob -inf at response token 0"),
        (_set("rollout_log_probs", [0.5, -0.1]), "ENG80", "log-prob 0.5"),
        (_set("loss_mask", [1, 2]), "ENG79", "other than 0 and 1"),
    ],
    ids=[
        "id too large",
        "negative id",
        "mask short",
        "log-probs short",
        "versions long",
        "length",
        "nan",
        "inf",
        "positive",
        "mask 2",
    ],
)
def test_a_spoilt_sample_is_named(spoil, code, words):
    group = _filled()
    spoil(group.samples[1])
    with pytest.raises(EngineError) as caught:
        check_group(group, issued_ids(_issued()), VOCAB)
    assert caught.value.code == code
    assert words in caught.value.what
    assert "main/4-1" in caught.value.what


@pytest.mark.parametrize(
    "rollouts", [{32: [0]}, {32: [0], 33: [0]}, {32: [0], 34: [1]}], ids=["missing", "twice", "unknown rollout"]
)
def test_a_rollout_table_that_does_not_fit_is_refused(rollouts):
    group = _filled()
    group.rollouts = rollouts
    with pytest.raises(EngineError) as caught:
        check_group(group, issued_ids(_issued()), VOCAB)
    assert caught.value.code == "ENG82"
    assert "main/4" in caught.value.where


def test_trainable_tokens_need_log_probs():
    with pytest.raises(ValueError, match="came without log-probs"):
        Sample(id="a").append_response([1])


def test_lists_of_other_lengths_are_not_appended():
    with pytest.raises(ValueError, match="lengths differ"):
        Sample(id="a").append_response([1, 2], log_probs=[-1.0])
