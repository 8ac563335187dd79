"""Several adapters in one trainer learn, bit for bit, what a run of each learns from the same samples."""

import asyncio

import pytest
from trainer_bench import ADAPTERS, groups_of_adapters, of_adapter, train_adapters

from slime_core.plugins import load_plugins
from slime_core.trainers.adapters import AdapterTrainer, estimated
from slime_core.trainers.batch import make_batch

pytestmark = pytest.mark.unit
LORA = {
    "lora_rank": 4, "lora_sync": "adapter", "lr": 5e-3, "clip_grad": 0.1, "num_steps_per_rollout": 2,
    "kl_loss_coef": 0.1, "normalize_advantages": True, "lr_warmup_iters": 3,
}  # fmt: skip


def weights(bench):
    """Parameters of all adapters by name."""
    return {name: p.detach().clone() for name, p in bench.worker.policy.adapters.parameters().items()}


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("more", [{"lora_dropout": 0.2}, {"lora_use_dora": True}], ids=["dropout", "dora"])
def test_two_adapters_in_a_run_are_those_of_two_runs(bench, more):
    both = bench(lora_adapters=ADAPTERS, **LORA, **more)
    start = weights(both)
    metrics_of_both = train_adapters(AdapterTrainer(both.trainer, ADAPTERS), both.worker, range(3), ADAPTERS)
    trained = weights(both)
    for name in ADAPTERS:
        alone = bench(lora_adapters=[name], **LORA, **more)
        metrics = train_adapters(alone.trainer, alone.worker, range(3), [name])
        own = {key: value for key, value in trained.items() if key.endswith(f".{name}")}
        assert same(own, weights(alone))
        assert not any((own[key] == start[key]).all() for key in own)
        assert of_adapter(name, metrics_of_both) == metrics
    assert not any(key.startswith("critic/") for key in metrics_of_both[1]), (
        "without samples an adapter stays as it is"
    )
    assert both.worker.actors["critic"].optimizer.steps == 4
    assert both.worker.actors["solver"].optimizer.steps == 6


def test_what_was_saved_between_steps_goes_on_with_every_adapter(bench, tmp_path):
    whole = bench(lora_adapters=ADAPTERS, **LORA)
    trainer = AdapterTrainer(whole.trainer, ADAPTERS)
    train_adapters(trainer, whole.worker, range(2), ADAPTERS)
    whole.call("save", tmp_path / "state")
    again = bench(lora_adapters=ADAPTERS, **LORA)
    again.call("restore", tmp_path / "state")
    assert again.call("fingerprint") == whole.call("fingerprint")
    last = train_adapters(trainer, whole.worker, [2], ADAPTERS)
    assert train_adapters(AdapterTrainer(again.trainer, ADAPTERS), again.worker, [2], ADAPTERS) == last
    assert same(weights(again), weights(whole))


def test_the_gradient_of_each_adapter_is_verified(bench):
    one = bench(lora_adapters=ADAPTERS, **LORA)
    trainer = AdapterTrainer(one.trainer, ADAPTERS)
    train_adapters(trainer, one.worker, [0], ADAPTERS)
    before = weights(one)
    batch = make_batch(2, "main", groups_of_adapters(2, ADAPTERS))
    columns = asyncio.run(trainer.score(batch, frozenset({"policy", "reference"})))
    errors = asyncio.run(trainer.verify(estimated(batch, columns, load_plugins(one.config), one.worker.train)))
    assert max(errors["gradient_error"], errors["loss_error"]) < errors["limit"] == 1e-3
    checked = {name.split("/")[1] for name in errors if name.startswith("gradient_error/")}
    assert checked == set(ADAPTERS)
    assert same(before, weights(one))
