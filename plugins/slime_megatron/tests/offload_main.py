"""Ranks whose optimizer is in main memory, against the same ranks with it on the "device"; each writes what it found.

    python offload_main.py RANK WORLD ROOT MODEL DTYPES '{"tensor_model_parallel_size": 2}'

megatron-core's hybrid optimizer asks tensors whether they are on a device, once, when it begins; `cpu.main_memory`
answers for them.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]

PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "kl_loss_coef": 0.05}
OFFLOADS = {
    "all": {},
    "half": {
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_torch_optimizer_for_cpu_offload": True,
    },
}


def offload(ranks, **flags):
    """Give both models of a worker fresh optimizers with the settings of a run that offloads on GPUs."""
    from slime_megatron.settings import build, settings

    worker = ranks.worker
    table = {**worker.config.megatron, "optimizer_cpu_offload": True, **flags}
    made = settings(worker.bridge, worker.folder.config, table, worker.train, worker.world, "cuda")
    built = build(replace(made, transformer=worker.settings.transformer))
    with main_memory():
        for learner in worker.learners():
            learner.begin(worker.train, learner.schedule, built)
    return ranks


def same_kernel(ranks):
    """Have torch's fused AdamW, which the hybrid optimizer asks for, on the "device" too."""
    for learner in ranks.worker.learners():
        for group in learner.optimizer.param_groups:
            group["fused"] = True
    return ranks


def kept(ranks):
    """Every master and moment of this rank."""
    from slime_megatron.masters import MOMENTS, masters

    found = []
    for learner in ranks.worker.learners():
        for master in masters(learner.optimizer):
            found.append(master.weights().clone())
            found += [master.moment(name).clone() for name in MOMENTS]
    return found


def weights(ranks):
    """Every parameter of this rank."""
    return [p.detach().clone() for learner in ranks.worker.learners() for p in learner.stage.parameters()]


def equal(mine, theirs):
    """Whether all tensors are the same, to the bit."""
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def furthest(mine, theirs):
    """The largest difference of two elements."""
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(mine, theirs, strict=True))


def placed(ranks):
    """How many elements are stepped in main memory and how many on the device; both of the policy's."""
    found = [0, 0]
    for one in ranks.worker.actor.optimizer.chained_optimizers:
        for inner in one.optimizer.sub_optimizers:
            for group in inner.param_groups:
                for tensor in group["params"]:
                    found[not hasattr(tensor, "moved")] += tensor.numel()
    return found


def go_on(ranks, path, after, states, third):
    """A restore, and a step after it: whether weights and states, and then the weights, are those that were meant."""
    ranks.restore(path)
    found = [equal(weights(ranks), after), equal(kept(ranks), states)]
    ranks.step()
    return [*found, equal(weights(ranks), third)]


def run(root, name, rank, world, megatron, dtype):
    """Steps with and without, and checkpoints of either that the other goes on from."""
    train = {"clip_grad": 0.05, "weight_decay": 0.1, "dtype": dtype} | (PPO if name == "dense" else {})
    plain, moved = (Ranks(root, name, megatron, rank, world, f"meet-{dtype}", **train) for _ in range(2))
    start, first = root / f"start-{dtype}", weights(plain)
    plain.save(start)
    plain.step()
    unlike = weights(plain)
    plain.restore(start)
    same_kernel(plain)
    metrics = [plain.worker.step(plain.batch) for _ in range(2)]
    after, states = weights(plain), kept(plain)
    plain.save(root / f"plain-{dtype}")
    metrics.append(plain.worker.step(plain.batch))
    third, published = weights(plain), plain.worker.publish(1).tensors
    found = {"moved": furthest(first, after), "clipped": [one["grad_norm"] > 0.05 for one in metrics], "cases": {}}
    for case, flags in OFFLOADS.items():
        moved.worker.restore(start)
        offload(moved, **flags)
        mine = [moved.worker.step(moved.batch)]
        seen = found["cases"][case] = {"near": furthest(weights(moved), unlike)}
        mine.append(moved.worker.step(moved.batch))
        seen["placed"] = placed(moved)
        seen["second"] = [equal(weights(moved), after), equal(kept(moved), states)]
        path = root / f"{case}-{dtype}"
        moved.save(path)
        mine.append(moved.worker.step(moved.batch))
        seen["third"] = [mine == metrics, equal(weights(moved), third)]
        given = moved.worker.publish(1).tensors
        seen["published"] = [given.keys() == published.keys()]
        seen["published"] += [torch.equal(given[n], published[n]) for n in published]
        seen["parked"] = parked(moved)
        seen["loads"] = go_on(moved, root / f"plain-{dtype}", after, states, third)
        seen["fresh"] = go_on(offload(moved, **flags), path, after, states, third)
        seen["back"] = go_on(plain, path, after, states, third)
    return found


def parked(ranks):
    """What is left of all state when it is away, and whether it comes back."""
    worker = ranks.worker
    everything = {"parameters", "optimizer", "gradients"}
    before = [tensor.detach().clone() for tensor in worker._tensors("optimizer")]
    worker.offload.leave(everything)
    left = sum(t.untyped_storage().nbytes() for what in everything for t in worker._tensors(what))
    worker.offload.back(everything)
    return [left, equal(before, list(worker._tensors("optimizer")))]


if __name__ == "__main__":
    from cpu import cpu_redirect, main_memory
    from saving_main import Ranks

    torch.set_num_threads(1)
    number, count, where, model = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    dtypes, flags_of_run = sys.argv[5].split(","), json.loads(sys.argv[6])
    with cpu_redirect():
        answers = {dtype: run(where, model, number, count, flags_of_run, dtype) for dtype in dtypes}
    (where / f"found-{number}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
