"""An optimizer in main memory: the same steps to the bit, and states that either kind saves and the other goes on with.

Ranks do all of it, and the tests look at what they found. Both kinds use torch's fused AdamW there: the one on the
device has another kernel by default, whose step is compared as numbers.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from megatron_ranks import PPO, Ranks, answer, equal, mixture, offloaded, optimizer_states, run_ranks, weights
from torch.overrides import TorchFunctionMode

from slime_core.testing import tiny_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

LAYOUTS = {
    "data": ("dense", ["float32", "bfloat16"], {}),
    "tensor": ("dense", ["bfloat16"], {"tensor_model_parallel_size": 2}),
    "experts": ("moe", ["bfloat16"], {"expert_model_parallel_size": 2}),
}
TRAIN = {"clip_grad": 0.05, "weight_decay": 0.1}
OFFLOADS = {
    "all": {},
    "half": {
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_torch_optimizer_for_cpu_offload": True,
    },
}


BY_DAY = [("tensor", ["all"]), ("experts", ["half"])]
NIGHT = [(layout, [*OFFLOADS]) for layout in LAYOUTS]


@pytest.fixture(
    scope="module",
    params=[*BY_DAY, *(pytest.param(one, marks=pytest.mark.nightly) for one in NIGHT)],
    ids=lambda one: "-".join([one[0], *one[1]]),
)
def ranks(request, zygote, tmp_path_factory):
    """What both ranks of a layout found, by dtype."""
    root = tmp_path_factory.mktemp("root")
    layout, cases = request.param
    name, dtypes, flags = LAYOUTS[layout]
    (tiny_model if name == "dense" else mixture)(root / name)
    results = run_ranks(zygote, tmp_path_factory.mktemp("said"), with_and_without, 2, root, name, dtypes, flags, cases)
    shutil.rmtree(root)
    return [one for rank in results for one in rank]


@pytest.fixture
def answers(ranks):
    """What each rank found in each dtype: the name of a case, its answers, and what all cases share."""
    return [(case, one, found) for found in ranks for case, one in found["cases"].items()]


def test_steps_are_those_of_an_optimizer_on_the_device(answers):
    for case, one, found in answers:
        assert found["moved"] > 1e-3
        assert all(found["clipped"])
        assert one["near"] < 1e-6, case
        assert one["second"] == [True, True], case
        assert one["third"] == [True, True], case


def test_published_tensors_are_the_updated_weights(answers):
    for case, one, _ in answers:
        assert all(one["published"]), case
    assert len(answers[0][1]["published"]) > 10


def test_the_share_that_is_asked_for_is_in_main_memory(answers):
    for case, one, _ in answers:
        there, here = one["placed"]
        if case == "half":
            assert 0.4 < there / (there + here) < 0.9
        else:
            assert there
            assert not here


@pytest.mark.parametrize("way", ["loads", "fresh", "back"])
def test_checkpoints_of_either_kind_go_on_with_the_other(answers, way):
    for case, one, _ in answers:
        assert one[way] == [True, True, True], case


def test_all_state_goes_away_and_comes_back(answers):
    for case, one, _ in answers:
        assert one["parked"] == [0, True], case


def with_and_without(rank, root, name, dtypes, flags, cases):
    """What this rank found in each dtype."""
    return [steps_and_checkpoints(root, name, rank, flags, dtype, cases) for dtype in dtypes]


class MainMemory(TorchFunctionMode):
    """Tensors that were moved off the "device" bear a mark, and so does what is made of them.

    megatron-core's hybrid optimizer asks tensors whether they are on a device, once, when it begins.
    """

    KEEPS = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not hasattr(args[0], "moved")
        if func is torch.Tensor.is_pinned:
            return False
        if func is torch.Tensor.cpu:
            found = args[0].clone()
        elif func is torch.Tensor.pin_memory:
            found = args[0].detach()
        else:
            found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu or (func in (*self.KEEPS, torch.Tensor.pin_memory) and hasattr(args[0], "moved")):
            found.moved = True
        return found


def offload(ranks, **flags):
    """Give both models of a worker fresh optimizers with the settings of a run that offloads on GPUs."""
    from slime_megatron.settings import build, settings

    worker = ranks.worker
    table = {**worker.config.megatron, "optimizer_cpu_offload": True, **flags}
    made = settings(worker.bridge, worker.folder.config, table, worker.train, worker.world, "cuda")
    built = build(replace(made, transformer=worker.settings.transformer))
    with MainMemory():
        for learner in worker.learners():
            learner.begin(worker.train, learner.schedule, built)
    return ranks


def same_kernel(ranks):
    """Have torch's fused AdamW, which the hybrid optimizer asks for, on the "device" too."""
    for learner in ranks.worker.learners():
        for group in learner.optimizer.param_groups:
            group["fused"] = True
    return ranks


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
    found = [equal(weights(ranks.worker), after), equal(optimizer_states(ranks.worker), states)]
    ranks.step()
    return [*found, equal(weights(ranks.worker), third)]


def steps_and_checkpoints(root, name, rank, megatron, dtype, cases):
    """Steps with and without, and checkpoints of either that the other goes on from."""
    train = TRAIN | {"dtype": dtype} | (PPO if name == "dense" else {})
    plain, moved = (Ranks(root, name, megatron, rank, 2, f"meet-{dtype}", **train) for _ in range(2))
    start, first = root / f"start-{dtype}", weights(plain.worker)
    plain.save(start)
    plain.step()
    unlike = weights(plain.worker)
    plain.restore(start)
    same_kernel(plain)
    metrics = [plain.worker.step(plain.batch) for _ in range(2)]
    after, states = weights(plain.worker), optimizer_states(plain.worker)
    plain.save(root / f"plain-{dtype}")
    metrics.append(plain.worker.step(plain.batch))
    third, published = weights(plain.worker), plain.worker.publish(1).tensors
    found = {"moved": furthest(first, after), "clipped": [one["grad_norm"] > 0.05 for one in metrics], "cases": {}}
    for case in cases:
        flags = OFFLOADS[case]
        moved.worker.restore(start)
        offload(moved, **flags)
        mine = [moved.worker.step(moved.batch)]
        seen = found["cases"][case] = {"near": furthest(weights(moved.worker), unlike)}
        mine.append(moved.worker.step(moved.batch))
        seen["placed"] = placed(moved)
        seen["second"] = [equal(weights(moved.worker), after), equal(optimizer_states(moved.worker), states)]
        path = root / f"{case}-{dtype}"
        moved.save(path)
        mine.append(moved.worker.step(moved.batch))
        seen["third"] = [mine == metrics, equal(weights(moved.worker), third)]
        given = moved.worker.publish(1).tensors
        seen["published"] = [given.keys() == published.keys()]
        seen["published"] += [torch.equal(given[n], published[n]) for n in published]
        seen["parked"] = offloaded(moved.worker)
        seen["loads"] = go_on(moved, root / f"plain-{dtype}", after, states, third)
        seen["fresh"] = go_on(offload(moved, **flags), path, after, states, third)
        seen["back"] = go_on(plain, path, after, states, third)
    return found


if __name__ == "__main__":
    answer(with_and_without)
