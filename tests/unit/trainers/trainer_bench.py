"""A trainer over a small model folder, and batches of odd lengths with masks, fan-out and turns of tools."""

import asyncio

import numpy as np
import torch

from slime_core.config.schema import Config
from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.adapters import estimated
from slime_core.trainers.batch import make_batch
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import Group, Prompt, Sample, Status
from slime_core.weights.folder import ModelFolder

ADAPTERS = ["solver", "critic"]


def groups_of(seed=0, groups=3, rollouts=4, vocab=60, longest=12, fan_out=True, temperature=1.0):
    """Groups with prompts of 2 to 5 and responses of 1 to ``longest`` tokens, some masked inside."""
    draw = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = Prompt(
            id=f"main/{g}", position=g, prompt="?", tokens=draw.integers(3, vocab, draw.integers(2, 6)).tolist()
        )
        samples, table = [], {}
        for k in range(rollouts):
            rollout = g * rollouts + k
            table[rollout] = []
            for sibling in range(2 if fan_out and k == 1 else 1):
                count = int(draw.integers(1, longest + 1))
                s = Sample(
                    id=f"{prompt.id}-{k}" + (f".{sibling}" if sibling else ""),
                    tokens=list(prompt.tokens),
                    temperature=temperature,
                )
                mask = [1] + [int(draw.random() > 0.2) for _ in range(count - 1)]
                s.append_response(
                    draw.integers(3, vocab, count).tolist(), (-draw.random(count) * 4).tolist(), mask, version=0
                )
                s.rollout_id, s.group_index, s.status = rollout, g, Status.COMPLETED
                s.reward = float(draw.integers(0, 3))
                table[rollout].append(len(samples))
                samples.append(s)
        made.append(Group(prompt=prompt, samples=samples, rollouts=table))
    return made


def subset(group, indices):
    """The group with only these samples."""
    table = {r: [indices.index(i) for i in members if i in indices] for r, members in group.rollouts.items()}
    return Group(
        prompt=group.prompt,
        samples=[group.samples[i] for i in indices],
        rollouts={r: members for r, members in table.items() if members},
    )


def groups_of_adapters(step, models):
    """A step's groups, only the samples of ``models``: solver's and critic's by turns, in step 1 the solver's alone."""
    made = []
    for group in groups_of(seed=step, groups=4, rollouts=6):
        for place, sample in enumerate(group.samples):
            sample.model = "solver" if step == 1 else ADAPTERS[place % 2]
        part = subset(group, [place for place, sample in enumerate(group.samples) if sample.model in models])
        made += [part] if part.samples else []
    return made


def train_adapters(trainer, worker, steps, models):
    """Steps of a trainer and its worker as the loop makes them, with the samples of ``models``; metrics of each."""

    async def run():
        metrics = []
        for step in steps:
            if groups := groups_of_adapters(step, models):
                batch = make_batch(step, "main", groups)
                columns = await trainer.score(batch, frozenset({"policy", "reference"}))
                metrics.append(await trainer.step(estimated(batch, columns, worker.plugins, worker.train)))
        return metrics

    return asyncio.run(run())


def of_adapter(name, metrics):
    """Of metrics of steps those of one adapter, without its name; of steps that it has some of."""
    found = [{k.removeprefix(f"{name}/"): v for k, v in one.items() if k.startswith(f"{name}/")} for one in metrics]
    return [one for one in found if one]


def batch_of(**kwargs):
    """The groups' Batch with an ``advantages`` column, and old log-probs near those of an untrained model."""
    batch = make_batch(0, "main", groups_of(**kwargs))
    draw = np.random.default_rng(99)
    batch.columns["advantages"] = draw.normal(size=len(batch.loss_mask)).astype(np.float32)
    return batch


def config_of(folder, **train):
    """A run's config in float32 on the folder; keyword arguments are of the train section, ``rollout`` of its own."""
    rollout = {"hf_checkpoint": str(folder), **train.pop("rollout", {})}
    return Config.model_validate({"rollout": rollout, "train": {"dtype": "float32", "lr": 1e-3, **train}, "seed": 3})


def gradients_of(worker, batch, fused):
    """Loss and gradients of the first optimizer step, which is not made, with the layers written out or the model's own."""
    from slime_core.trainers.optimizer_step import LossSums

    (rank_batch,) = worker.partitioner().partition(batch)
    sums, before = LossSums(rank_batch, worker.device), worker.policy.fused
    worker.policy.fused = fused
    worker.run_backward(worker.packs(rank_batch)[0], sums)
    grads = {name: grad.double().clone() for name, grad in worker.actor.gradients().items()}
    worker.zero_grad()
    worker.policy.fused = before
    return sums.totals, grads


class Bench:
    """A trainer's worker for direct calls: gradients and parameters as plain tensors by name."""

    def __init__(self, folder, **train):
        self.config = config_of(folder, **train)
        self.thread = TorchThread(1)
        self.folder = ModelFolder.open(folder)
        self.trainer = FsdpTrainer(self.config, load_plugins(self.config), self.folder, thread=self.thread)
        self.worker = self.trainer._worker
        self.thread.call(self.worker.begin, self.config)

    def call(self, method, *args):
        found = self.thread.call(getattr(self.worker, method), *args)
        return self.saved() if method == "save" else found

    def saved(self):
        return asyncio.run(self.trainer.saved())

    def parameters(self):
        return {name: tensor.clone() for name, tensor in self.worker.actor.locals().items()}

    def gradient(self, batch, step=0):
        """Loss and gradient of one optimizer step, which is not made."""
        return self.thread.call(self._gradient, batch, step)

    def _gradient(self, batch, step):
        from slime_core.trainers.fsdp.model import backward
        from slime_core.trainers.fsdp.shards import local
        from slime_core.trainers.optimizer_step import LossSums

        (rank_batch,) = self.worker.partitioner().partition(batch)
        sums = LossSums(rank_batch, torch.device("cpu"))
        for micro in self.worker.packs(rank_batch)[step]:
            backward(
                self.worker.policy, self.worker.loss, self.worker.train, micro, self.worker._temperature(micro), sums
            )
        grads = {n: local(grad).clone() for n, grad in self.worker.actor.gradients().items()}
        self.worker.policy.zero_grad()
        return sums.totals["loss"], grads
