"""Rules about which samples train: what cannot work is refused with the keys it is about."""

import pytest

from slime_core.config import rules
from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit

BASE = ["--rollout-batch-size=4", "--n-samples-per-prompt=2", "--rollout-max-response-len=64"]


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (["--over-sampling-batch-size=3"], "is below rollout_batch_size = 4", "above 4"),
        (
            ["--over-sampling-batch-size=8", "--max-staleness=1", "--no-colocate"],
            "with max_staleness = 1",
            "--max-staleness 0",
        ),
        (["--over-sampling-batch-size=8", "--rollout-function-path=a:b"], "with rollout_function_path", "remove one"),
        (["--partial-rollout"], "partial_rollout without over-sampling", "above rollout_batch_size = 4"),
        (["--partial-rollout", "--over-sampling-batch-size=4"], "partial_rollout without over-sampling", "above"),
        (["--mask-offpolicy-in-partial-rollout"], "without partial_rollout", "--partial-rollout"),
        (
            ["--dynamic-sampling=equal_rewards", "--n-samples-per-prompt=1"],
            "equal_rewards with n_samples",
            "2 or more",
        ),
        (["--dynamic-sampling=equal_rewards", "--rollout-function-path=a:b"], "dynamic_sampling with", "remove one"),
        (["--overlong-buffer-len=65"], "is more than rollout_max_response_len = 64", "at most 64"),
        (["--reward-terms-normalize"], "without reward_weights", "reward_weights = {"),
    ],
)
def test_what_cannot_work_is_refused(flags, what, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--hf-checkpoint=.", "--prompt-data=x.jsonl", *BASE, *flags])
    assert what in str(caught.value)
    assert fix in caught.value.fix


def _config(**rollout):
    config = Config()
    base = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=base | rollout)})


def test_what_works_together_is_let_through():
    config = _config(
        over_sampling_batch_size=8,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        dynamic_sampling="equal_rewards",
        max_dropped_groups=5,
    )
    assert rules.conflicts(config) == []


def test_a_supervised_stage_of_a_run_with_over_sampling_is_left_alone():
    config = _config(over_sampling_batch_size=3, partial_rollout=True)
    assert len(rules.conflicts(config)) == 2
    supervised = config.model_copy(update={"train": config.train.model_copy(update={"loss_type": "sft_loss"})})
    assert rules.conflicts(supervised) == []


def test_off_policy_tokens_that_nothing_corrects_are_spoken_of():
    partial = _config(over_sampling_batch_size=8, partial_rollout=True)
    masked = _config(over_sampling_batch_size=8, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    assert any("partial_rollout trains on tokens of older weights" in text for text in rules.notices(partial))
    assert not any("partial_rollout" in text for text in rules.notices(masked))
