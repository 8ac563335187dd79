"""Several adapters in one run: each batch, advantage and figure is of one adapter's samples alone."""

import numpy as np
import pytest

from slime_core.config.schema import Config
from slime_core.config.sections.train import TrainSection
from slime_core.errors import EngineError
from slime_core.plugins import load_plugins
from slime_core.report.metrics import batch_metrics
from slime_core.trainers.adapters import estimated, members, together
from slime_core.trainers.batch import make_batch
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit
NAMES = ("solver", "critic")


def train(**keys):
    return TrainSection(lora_rank=4, lora_adapters=NAMES, **keys)


def sample(group, number, model, reward, tokens=(4, 5)):
    made = Sample(id=f"main/{group}-{number}", model=model, tokens=[1, 2], rollout_id=10 * group + number)
    made.append_response(tokens, [-0.5] * len(tokens), version=0)
    made.reward = reward
    return made


def batch_of(*models, rng=0):
    """Three groups whose samples are of these models, by turns; of others none."""
    draws = np.random.default_rng(rng)
    groups = []
    for position in range(3):
        samples = [
            sample(position, number, name, float(draws.normal()), (4,) * (1 + number))
            for number, name in enumerate(["solver", "critic", "solver", "critic", ""])
        ]
        samples = [one for one in samples if one.model in models]
        rollouts = {one.rollout_id: [place] for place, one in enumerate(samples)}
        groups.append(
            Group(prompt=Prompt(id=f"main/{position}", position=position), samples=samples, rollouts=rollouts)
        )
    return make_batch(0, "main", [group for group in groups if group.samples])


@pytest.mark.parametrize(
    "keys",
    [
        {"advantage_estimator": "grpo", "grpo_std_scope": "batch"},
        {"advantage_estimator": "rloo", "normalize_advantages": True},
        {"advantage_estimator": "reinforce_plus_plus"},
    ],
    ids=["batch std", "whitened", "reinforce++"],
)
def test_an_adapters_advantages_are_those_of_a_step_of_its_samples_alone(keys):
    plugins = load_plugins(Config())
    whole = estimated(batch_of("solver", "critic", ""), {}, plugins, train(**keys)).columns["advantages"]
    both = batch_of("solver", "critic", "")
    parts = dict(members(both, NAMES))
    for name, models in (("solver", ("solver", "")), ("critic", ("critic",))):
        alone = plugins.advantage(batch_of(*models), {}, train(**keys)).columns["advantages"]
        rows = np.isin(both.sample_of_token(), parts[name])
        assert (whole[rows] == alone).all()
        assert len(np.unique(alone)) > 2


def test_a_sample_without_a_model_is_of_the_first_and_a_frozen_one_of_none():
    batch = batch_of("solver", "critic", "")
    first, second = members(batch, NAMES)
    assert [batch.sample_ids[place] for place in first[1][:3]] == ["main/0-0", "main/0-2", "main/0-4"]
    assert {batch.models[place] for place in second[1]} == {"critic"}
    batch.models[1] = "judge"
    with pytest.raises(EngineError, match="no adapter 'judge'"):
        members(batch, NAMES)
    batch.loss_mask[batch.response_offsets[1] : batch.response_offsets[2]] = 0
    assert [len(places) for _, places in members(batch, NAMES)] == [9, 5]
    assert [name for name, _ in members(batch_of("critic"), NAMES)] == ["critic"], "without samples it is left out"


def test_counts_of_adapters_add_up_and_other_figures_are_their_mean():
    one = {"loss": 1.0, "optimizer_steps": 2.0, "skipped_steps": 1.0, "skipped_steps/masked": 1.0, "train_tokens": 5.0}
    other = {"loss": 2.0, "optimizer_steps": 1.0, "skipped_steps": 0.0, "train_tokens": 3.0, "critic_lr": 0.5}
    assert together([one, other]) == {
        "loss": 1.5, "optimizer_steps": 3.0, "skipped_steps": 1.0, "skipped_steps/masked": 1.0, "train_tokens": 8.0,
        "critic_lr": 0.5,
    }  # fmt: skip


def test_figures_of_a_batch_are_of_each_adapter_too():
    batch = estimated(batch_of("solver", "critic"), {}, load_plugins(Config()), train())
    metrics = batch_metrics(batch, NAMES)
    alone = batch_metrics(load_plugins(Config()).advantage(batch_of("critic"), {}, train()))
    assert {f"critic/{name}": value for name, value in alone.items()}.items() <= metrics.items()
    assert not [name for name in batch_metrics(batch, NAMES[:1]) if name.startswith("solver/")]
