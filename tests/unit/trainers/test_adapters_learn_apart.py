"""Several adapters in one trainer learn, bit for bit, what a run of each learns from the same samples."""

import asyncio

import pytest
from trainer_bench import groups_of, subset

from slime_core.plugins import load_plugins
from slime_core.trainers.adapters import AdapterTrainer, estimated
from slime_core.trainers.batch import make_batch

pytestmark = pytest.mark.unit
NAMES = ["solver", "critic"]
LORA = {
    "lora_rank": 4, "lora_sync": "adapter", "lr": 5e-3, "clip_grad": 0.1, "num_steps_per_rollout": 2,
    "kl_loss_coef": 0.1, "normalize_advantages": True, "lr_warmup_iters": 3,
}  # fmt: skip


def groups(step, models):
    """The step's groups, whose samples are by turns of two adapters, and in its second step of one alone: only those
    of ``models``."""
    made = []
    for group in groups_of(seed=step, groups=4, rollouts=6):
        for place, sample in enumerate(group.samples):
            sample.model = "solver" if step == 1 else NAMES[place % 2]
        part = subset(group, [place for place, sample in enumerate(group.samples) if sample.model in models])
        made += [part] if part.samples else []
    return made


def train(bench, trainer, steps, models):
    """Steps as the loop makes them; the metrics of each."""
    plugins, section = load_plugins(bench.config), bench.worker.train

    async def run():
        metrics = []
        for step in steps:
            batch = make_batch(step, "main", groups(step, models)) if groups(step, models) else None
            if batch is not None:
                columns = await trainer.score(batch, frozenset({"policy", "reference"}))
                metrics.append(await trainer.step(estimated(batch, columns, plugins, section)))
        return metrics

    return asyncio.run(run())


def weights(bench):
    """Parameters of all adapters by name."""
    return {name: p.detach().clone() for name, p in bench.worker.policy.adapters.parameters().items()}


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("more", [{"lora_dropout": 0.2}, {"lora_use_dora": True}], ids=["dropout", "dora"])
def test_two_adapters_in_a_run_are_those_of_two_runs(bench, more):
    both = bench(lora_adapters=NAMES, **LORA, **more)
    start = weights(both)
    found = train(both, AdapterTrainer(both.trainer, NAMES), range(3), NAMES)
    learnt = weights(both)
    for name in NAMES:
        alone = bench(lora_adapters=[name], **LORA, **more)
        metrics = train(alone, alone.trainer, range(3), [name])
        own = {key: value for key, value in learnt.items() if key.endswith(f".{name}")}
        assert same(own, weights(alone))
        assert not any((own[key] == start[key]).all() for key in own)
        of_name = [
            {key.removeprefix(f"{name}/"): value for key, value in one.items() if key.startswith(f"{name}/")}
            for one in found
        ]
        assert [one for one in of_name if one] == metrics
    assert not any(key.startswith("critic/") for key in found[1]), "without samples an adapter stays as it is"
    assert both.worker.actors["critic"].optimizer.steps == 4
    assert both.worker.actors["solver"].optimizer.steps == 6


def test_what_was_saved_between_steps_goes_on_with_every_adapter(bench, tmp_path):
    whole = bench(lora_adapters=NAMES, **LORA)
    trainer = AdapterTrainer(whole.trainer, NAMES)
    train(whole, trainer, range(2), NAMES)
    whole.call("save", tmp_path / "state")
    again = bench(lora_adapters=NAMES, **LORA)
    again.call("restore", tmp_path / "state")
    assert again.call("fingerprint") == whole.call("fingerprint")
    last = train(whole, trainer, [2], NAMES)
    assert train(again, AdapterTrainer(again.trainer, NAMES), [2], NAMES) == last
    assert same(weights(again), weights(whole))


def test_the_gradient_of_each_adapter_is_verified(bench):
    one = bench(lora_adapters=NAMES, **LORA)
    trainer = AdapterTrainer(one.trainer, NAMES)
    train(one, trainer, [0], NAMES)
    before = weights(one)
    batch = make_batch(2, "main", groups(2, NAMES))
    columns = asyncio.run(trainer.score(batch, frozenset({"policy", "reference"})))
    errors = asyncio.run(trainer.verify(estimated(batch, columns, load_plugins(one.config), one.worker.train)))
    assert max(errors["gradient_error"], errors["loss_error"]) < errors["limit"] == 1e-3
    checked = {name.split("/")[1] for name in errors if name.startswith("gradient_error/")}
    assert checked == set(NAMES)
    assert same(before, weights(one))
