"""One rank of the tests of roles: every model beside the policy, verification, memory and hooks, over one layout.

    python roles_main.py RANK WORLD FOLDERS.json OUT '{"tensor_model_parallel_size": 2}' main

Rank 0 writes what it found to OUT.json, and columns to OUT.npz.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slime_core.errors import SlimeError

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]

ROLES = frozenset({"policy", "reference", "teacher", "values"})
FIRST = {
    "advantage_estimator": "ppo",
    "critic_lr": 1e-3,
    "opd_kl_coef": 0.1,
    "kl_loss_coef": 0.05,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "adam_eps": 1e-3,  # with its usual epsilon, rounding of a gradient near 0 would be compared
    "max_tokens_per_gpu": 80,
    "num_steps_per_rollout": 2,
    "num_critic_only_steps": 1,
    "loss_aggregation": "token_mean",
}
"""A critic and a teacher of other architectures; the reference is the policy."""
SECOND = FIRST | {"num_critic_only_steps": 0, "num_steps_per_rollout": 1}
"""A critic that copies the policy; a reference that is named."""


class Here:
    """The torch thread is this one: what stands in for devices holds for the thread that enters it."""

    def call(self, fn, *args, **kwargs):
        """As `TorchThread.call`."""
        return fn(*args, **kwargs)

    async def run(self, fn, *args, **kwargs):
        """As `TorchThread.run`."""
        return fn(*args, **kwargs)


def config_of(folders, plugins=("models",), megatron=None, **train):
    """A stage's config, the same for both backends."""
    from slime_core.config.schema import Config

    given = {"rollout": {"hf_checkpoint": folders["policy"]}, "seed": 3, "plugins": plugins}
    given["train"] = {"dtype": "float32", "teacher_load": folders["teacher"], **train}
    return Config.model_validate(given | ({"megatron": megatron} if megatron else {}))


def batch_of():
    """A batch with returns, and a temperature other than 1."""
    import trainer_bench as made

    batch = made.batch_of(temperature=0.8)
    batch.columns["returns"] = np.random.default_rng(4).normal(size=len(batch.loss_mask)).astype(np.float32)
    return batch


def call(trainer, method, *args):
    """One call of a trainer."""
    return asyncio.run(getattr(trainer, method)(*args))


def scored(trainer, batch, name, arrays):
    """The batch with the columns of all roles, which are noted under a name."""
    from slime_core.plugins.result_checks import role_columns

    columns = role_columns(call(trainer, "score", batch, ROLES))
    arrays |= {f"{name}.{role}": values for role, values in columns.items()}
    old = columns["values"] + 0.3 * batch.columns["returns"]
    return replace(batch, columns={**batch.columns, **columns, "values": old})


def learn(trainer, folders, stage_of):
    """Two stages of steps: metrics, columns, and the last batch."""
    arrays = {}
    call(trainer, "begin", stage_of(critic_load=folders["critic"], **FIRST))
    batch = scored(trainer, batch_of(), "first", arrays)
    metrics = [call(trainer, "step", batch) for _ in range(2)]
    call(trainer, "begin", stage_of(ref_load=folders["reference"], **SECOND))
    batch = scored(trainer, batch_of(), "second", arrays)
    metrics.append(call(trainer, "step", batch))
    batch = scored(trainer, batch, "last", arrays)
    return metrics, arrays, batch


def main(rank, world, folders, out, megatron):
    """Everything on this rank."""
    from slime_core.plugins import load_plugins
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.trainer import MegatronTrainer

    def stage_of(**train):
        return config_of(folders, ("models", "watch"), megatron, **train)

    config = stage_of(critic_load=folders["critic"], **FIRST)
    trainer = MegatronTrainer(
        config, load_plugins(config), ModelFolder.open(folders["policy"]), thread=Here(),
        rank=rank, world=world, rendezvous=f"{out}.meet",
    )  # fmt: skip
    metrics, arrays, batch = learn(trainer, folders, stage_of)
    found = {"metrics": metrics, "hooks": hooks(), "verify": call(trainer, "verify", batch)}
    found["rounding"] = rounding(trainer, batch)
    found["unchanged"] = same(trainer, batch, arrays["last.policy"])
    found["parked"] = parked(trainer, stage_of, batch, arrays)
    found["guards"] = guards(trainer, batch)
    found["frozen"] = frozen(trainer, batch)
    found["refused"] = refused(trainer, folders, stage_of)
    if world == 1:
        found["short"] = short(trainer, stage_of)
    if rank == 0:
        np.savez(f"{out}.npz", **arrays)
        Path(f"{out}.json").write_text(json.dumps(found))


def larger(rank, world, folders, out, megatron):
    """What is learnt, verification, and memory that goes and comes back: of more ranks, or of experts.

    The reference comes from a Megatron checkpoint.
    """
    from slime_core.plugins import load_plugins
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.trainer import MegatronTrainer

    def stage_of(**train):
        return config_of(folders, ("models",), megatron, **train)

    config = stage_of(critic_load=folders["critic"], **FIRST)
    trainer = MegatronTrainer(
        config, load_plugins(config), ModelFolder.open(folders["policy"]), thread=Here(),
        rank=rank, world=world, rendezvous=f"{out}.meet",
    )  # fmt: skip
    metrics, arrays, batch = learn(trainer, folders | {"reference": folders["reference_dist"]}, stage_of)
    found = {"metrics": metrics, "verify": call(trainer, "verify", batch)}
    found["rounding"] = rounding(trainer, batch)
    found["unchanged"] = same(trainer, batch, arrays["last.policy"])
    worker, everything = trainer._worker, {"parameters", "optimizer", "gradients"}
    states = [tensor.detach().clone() for tensor in worker._tensors("optimizer")]
    worker.offload.leave(everything)
    worker.offload.back(everything)
    found["states"] = all(torch.equal(a, b) for a, b in zip(states, worker._tensors("optimizer"), strict=True))
    if rank == 0:
        np.savez(f"{out}.npz", **arrays)
        Path(f"{out}.json").write_text(json.dumps(found))


def same(trainer, batch, before):
    """Whether the policy gives the very same log-probs as before."""
    found = call(trainer, "score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    return bool(np.array_equal(found, before))


def rounding(trainer, batch):
    """How far log-probs in both dtypes are from the policy's."""
    scores = call(trainer, "score", batch, frozenset({"policy", "float32", "bfloat16"}))
    own = scores.pop("policy")["log_probs"]
    return {dtype: float(abs(columns["log_probs"] - own).max()) for dtype, columns in scores.items()}


def parked(trainer, stage_of, batch, arrays):
    """All state goes and comes back; a stage begins meanwhile."""
    worker = trainer._worker
    states = [tensor.detach().clone() for tensor in worker._tensors("optimizer")]
    everything = {"parameters", "optimizer", "gradients"}
    worker.offload.leave({"gradients", "optimizer"})
    worker.offload.leave({"parameters"})
    left = sum(t.untyped_storage().nbytes() for what in everything for t in worker._tensors(what))
    worker.offload.back(everything)
    found = {
        "left": left,
        "states": all(torch.equal(a, b) for a, b in zip(states, worker._tensors("optimizer"), strict=True)),
        "moments": any(bool(tensor.any()) for tensor in states),
        "gradients": any(bool(tensor.any()) for tensor in worker._tensors("gradients")),
        "scores": same(trainer, batch, arrays["last.policy"]),
    }
    worker.offload.leave(everything)
    call(trainer, "begin", stage_of(ref_load="", **SECOND))
    found["still"] = sorted(worker.offload.away)
    worker.offload.back(everything)
    return found | {"begun": same(trainer, batch, arrays["last.policy"])}


def guards(trainer, batch):
    """What is said where state was released."""
    found = []
    call(trainer, "release", {"optimizer"})
    for ask in (("step", batch), ("verify", batch), ("release", {"weights"})):
        try:
            call(trainer, *ask)
        except SlimeError as error:
            found.append(str(error))
    call(trainer, "reacquire", {"optimizer"})
    return found


def hooks():
    """Calls that the plugin saw."""
    import watch_plugin_module

    return list(watch_plugin_module.CALLS)


def frozen(trainer, batch):
    """A step whose rate a hook sets to 0, and one after it: whether each moves the policy."""
    import watch_plugin_module

    def weights():
        return {name: held.tensor.detach().clone() for name, held in trainer._worker.policy.tensors.held.items()}

    moved = []
    for rate in (0.0, None):
        watch_plugin_module.RATE = rate
        before = weights()
        call(trainer, "step", batch)
        moved.append(any(not torch.equal(before[name], tensor) for name, tensor in weights().items()))
    return moved


def refused(trainer, folders, stage_of):
    """Codes and messages of models that do not fit."""
    found = {}
    for name, train in {
        "reference": {"ref_load": folders["teacher"]},
        "untied": {"ref_load": folders["untied"]},
        "checkpoint": {"ref_load": folders["untied_dist"]},
        "teacher": {"teacher_load": folders["letters"]},
        "critic": {"critic_load": folders["wide"]},
    }.items():
        try:
            call(trainer, "begin", stage_of(**{**SECOND, **train}))
        except SlimeError as error:
            found[name] = [error.code, str(error)]
    return found


def short(trainer, stage_of):
    """Memory that really runs out, in a step and in scoring; then the same step in smaller passes."""
    import resource

    import trainer_bench as made

    big = made.batch_of(groups=12, rollouts=8, longest=300, fan_out=False)
    answers = []
    for tokens in (1 << 20, 600):
        train = {"lr": 1e-3, "max_tokens_per_gpu": tokens, "gradient_checkpointing": False}
        call(trainer, "begin", stage_of(**train))
        for ask in (("step", big), ("score", big, frozenset({"policy"}))):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + (24 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            try:
                call(trainer, *ask)
                answers.append(None)
            except SlimeError as error:
                answers.append(error.as_dict())
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"answers": answers, "left": any(bool(t.any()) for t in trainer._worker._tensors("gradients"))}


if __name__ == "__main__":
    from cpu import cpu_redirect

    torch.set_num_threads(1)
    own, ranks, given, where, table, what = sys.argv[1:]
    models, settings = json.loads(Path(given).read_text()), json.loads(table)
    with cpu_redirect():
        {"main": main, "larger": larger}[what](int(own), int(ranks), models, where, settings)
