"""Megatron on GPUs: every family's numbers against transformers', on one and on two; an optimizer in main memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parents[2] / "plugins" / "slime_megatron" / "tests"
sys.path.append(str(HERE))

from megatron_ranks import EVERYTHING, PPO, Ranks, config_of, equal, make_worker, optimizer_states, weights  # noqa: E402
from peak_memory import sizes  # noqa: E402
from test_families import FAMILIES, LAYOUTS, draw  # noqa: E402

from slime_core.testing import tiny_model  # noqa: E402

pytestmark = pytest.mark.gpu

LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.3)}  # of log-probs and of gradients, by a tensor's norm
RECURRENT = ("qwen3_next", "qwen3_5")  # gradients of what fades a state: transformers' own are 0.47 off in bfloat16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What transformers makes of every family, on the CPU in float32."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        draw(name, root)
    return root


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_transformers(models, layout, dtype):
    world, flags, names = LAYOUTS[layout]
    if torch.cuda.device_count() < world:
        pytest.skip(f"not proven: {world} GPUs are needed for the layout {layout}")
    (models / "rendezvous").unlink(missing_ok=True)
    command = [sys.executable, "test_families.py", str(models), str(world), json.dumps(flags), "all", *names]
    environment = {**os.environ, "DEVICE": "cuda", "DTYPE": dtype, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    values, gradients = LIMITS[dtype]
    wrong = []  # of all families: a run on GPUs tells everything at once
    for rank in range(world):
        for name, found in json.loads((models / f"answers-{rank}.json").read_text()).items():
            print(layout, dtype, name, found)
            limit = 2 * gradients if name.startswith(RECURRENT) else gradients
            near = max(found["log_probs"], found["entropy"]) < values and found["gradients"] < limit
            wrong += [] if near and found["gathered"] == [] else [(rank, name, found)]
    assert wrong == []


def test_compiled_layers_give_the_numbers_of_transformers(models):
    """Norms and rotations by the compiler, gradients in bfloat16; of a dense model, of GLM-4's and of latent attention."""
    names = ("qwen3", "glm4", "deepseek_v3")
    (models / "rendezvous").unlink(missing_ok=True)
    command = [sys.executable, "test_families.py", str(models), "1", "{}", "all", *names]
    environment = {**os.environ, "DEVICE": "cuda", "DTYPE": "bfloat16", "COMPILE": "on", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is not compiled" not in done.stderr
    values, gradients = LIMITS["bfloat16"]
    for name, found in json.loads((models / "answers-0.json").read_text()).items():
        print(name, found)
        assert max(found["log_probs"], found["entropy"]) < values
        assert found["gradients"] < gradients


@pytest.mark.parametrize("lengths", [(2048,), (2000, 1100, 3001)])
@pytest.mark.filterwarnings(
    "ignore:Transformer Engine and Apex are not installed", "ignore:The following imports from"
)
def test_attention_by_sequence_is_that_of_all_in_one_call(lengths):
    """Both of a GPU's ways, beside float64 on the same numbers; keys and values are strided as a model has them."""
    from slime_core.trainers.flash import varlen
    from slime_megatron.attention import by_sequence, has_cudnn

    print("cuDNN first:", has_cudnn(torch.device("cuda")))
    torch.manual_seed(0)
    total, scale = sum(lengths), 128**-0.5
    mixed = torch.randn(total, 2, 4 * 128, device="cuda", dtype=torch.bfloat16)  # two groups: two queries, key, value
    back = torch.randn(total, 4, 128, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    ways = {
        "sequence": lambda *x: by_sequence(*x, lengths, scale, fill=True),
        "varlen": lambda *x: varlen(*x, ends, ends, max(lengths), max(lengths), scale=scale),
        "exact": lambda *x: by_sequence(*x, lengths, scale, fill=False),
    }
    found = {}
    for name, way in ways.items():
        given = (mixed.double() if name == "exact" else mixed.clone()).requires_grad_()
        q, k, v = given.split([256, 128, 128], dim=-1)
        out = way(q.reshape(total, 4, 128), k, v)
        out.backward(back.to(out.dtype))
        found[name] = [out.detach().double(), given.grad.double()]
    for name in ("sequence", "varlen"):
        for mine, wanted in zip(found[name], found["exact"], strict=True):
            assert float((mine - wanted).abs().max() / wanted.abs().max()) < 2e-2, name


OFFLOADS = {
    "plain": ({}, ""),
    "all": ({"optimizer_cpu_offload": True}, "plain"),
    "half": (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
        "all",
    ),
    "back": ({}, "all"),
}
ADAM = 12  # bytes a parameter: a master and two moments


@pytest.fixture(scope="module")
def offloads(tmp_path_factory):
    """One rank with each kind of optimizer, one after the other."""
    root = tmp_path_factory.mktemp("offloads")
    tiny_model(root / "model", tied=True)
    found = {}
    for case, (flags, other) in OFFLOADS.items():
        command = [sys.executable, __file__, str(root), case, json.dumps(flags), *filter(None, [other])]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        found[case] = json.loads((root / f"{case}.json").read_text())
        print(case, found[case])
    return root, found


LR = 1e-3  # of the policy and of the critic, in `megatron_ranks.config_of`
LIMIT, APART = 2.02, 0.01


def near(root, one, other, steps):
    """Whether weights are the same but for what rounding can do within ``steps`` steps; what differs is printed.

    A step of Adam moves a weight by lr * m / (sqrt(v) + eps), whose size is at most sqrt(sum a_i^2 / b_i) * lr
    (Cauchy and Schwarz, a_i and b_i the weights of gradient i in m and v): 1.01 lr for the first three. A processor
    and a GPU round differently, so gradients of the next step differ, and one near 0 may have the other sign: no two
    weights are further apart than 2.02 lr a step, and a bfloat16's two roundings. Of all weights, at most one in a
    hundred is apart by more than a hundredth of itself and of lr: gradients agree to about a thousandth.
    """
    far = total = 0
    within, told = True, []
    for number, (a, b) in enumerate(
        zip(torch.load(root / f"{one}.pt"), torch.load(root / f"{other}.pt"), strict=True)
    ):
        difference, size = (a - b).abs(), torch.maximum(a.abs(), b.abs())
        apart = int((difference > 1e-2 * size + 1e-2 * LR).sum())
        inside = bool((difference <= LIMIT * LR * steps + 2**-7 * size).all())
        far, total, within = far + apart, total + a.numel(), within and inside
        if apart or not inside:
            told.append((apart / a.numel(), number, tuple(a.shape), float(difference.max()), float(b.abs().mean())))
    print(f"{one} and {other}: {far} of {total} weights apart, all within {LIMIT} lr a step: {within}")
    for share, number, shape, worst, mean in sorted(told, reverse=True)[:10]:
        print(f"  tensor {number} {shape}: {share:.2%} apart, at most by {worst:.2e}, weights of {mean:.2e}")
    return within and far <= APART * total


def test_an_optimizer_in_main_memory_steps_as_one_on_the_gpu(offloads):
    root, found = offloads
    same = {case: near(root, f"{case}-third", "plain-third", 3) for case in ("all", "half")}
    assert same == {"all": True, "half": True}
    for case in same:
        for mine, theirs in zip(found[case]["metrics"], found["plain"]["metrics"], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
        assert found[case]["locked"]
        assert found[case]["places"] == (["cpu"] if case == "all" else ["cpu", "cuda"])


def test_an_optimizer_in_main_memory_takes_none_of_the_gpus(offloads):
    _, found = offloads
    whole = ADAM * found["plain"]["parameters"]
    assert found["plain"]["memory"] - found["all"]["memory"] > 0.9 * whole
    assert found["plain"]["memory"] > found["half"]["memory"] > found["all"]["memory"]


def test_checkpoints_of_either_kind_go_on_with_the_other_on_gpus(offloads):
    root, found = offloads
    for case in ("all", "half", "back"):
        other = OFFLOADS[case][1]
        assert found[case]["restored"] == [found[other]["fingerprint"], True]
        assert near(root, f"{case}-after-{other}", f"{other}-third", 1)


def test_state_on_the_gpu_is_offloaded_and_comes_back(offloads):
    _, found = offloads
    for case in OFFLOADS:
        free, same = found[case]["parked"]
        assert free > 2 * found[case]["parameters"]
        assert same


@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_two_adapters_learn_over_a_base_in_bfloat16_and_in_4_bits(base, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from test_two_adapters_on_gpu import learn_opposite_jobs  # not of the ranks, which run this file

    learn_opposite_jobs(tmp_path, "--train-backend", "megatron", "--plugin", "models", "--base-weights", base)


def test_a_base_in_4_bits_is_on_the_gpu_a_weight_at_a_time(tmp_path):
    tiny_model(tmp_path / "model", hidden=1024, layers=8)
    command = [sys.executable, __file__, tmp_path, "few bits", "{}"]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    peak, kept, plain, largest = json.loads((tmp_path / "few bits.json").read_text())
    assert peak < kept + 20 * largest < plain, "rounding has float32 copies of a weight or two"


def few_bits_on_gpu(root):
    """The most memory of a worker while it is made."""
    config = config_of(root / "model", dtype="bfloat16", lora_rank=1, base_weights="nf4")
    worker = make_worker(config, 0, 1, root / "meeting", "cuda:0")
    of_base = sizes(worker.policy.stage)
    (root / "few bits.json").write_text(json.dumps([torch.cuda.max_memory_allocated(), *of_base]))


def offload_on_gpu(root, case, flags, other):
    """One rank, its optimizer on the GPU or in main memory: steps, memory, a checkpoint; and ``other``'s checkpoint.

    PPO, whose critic has a float32 head beside other weights.
    """
    train = {"dtype": "bfloat16", "clip_grad": 0.05, "weight_decay": 0.1, **PPO}
    ranks = Ranks(root, "model", flags, 0, 1, device="cuda:0", **train)
    worker = ranks.worker
    metrics = [worker.step(ranks.batch) for _ in range(2)]
    torch.cuda.synchronize()
    found = {
        "memory": torch.cuda.memory_allocated(),
        "parameters": sum(p.numel() for learner in worker.learners() for p in learner.stage.parameters()),
        "metrics": metrics,
        "places": sorted({str(t.device.type) for learner in worker.learners() for t in learner.states()}),
    }
    for learner in worker.learners():
        for one in learner.optimizer.chained_optimizers:
            for inner in getattr(one.optimizer, "cpu_optimizers", ()):
                locked = [p.is_pinned() for group in inner.param_groups for p in group["params"]]
                found["locked"] = found.get("locked", True) and all(locked)
    states = optimizer_states(worker)
    torch.save(states, root / f"{case}-states.pt")
    ranks.save(root / case)
    found["fingerprint"] = worker.fingerprint()
    found["parked"] = parked(worker)
    store_after_step(ranks, root / f"{case}-third.pt")
    if other:
        restored = ranks.restore(root / other)
        found["restored"] = [restored, equal(optimizer_states(worker), torch.load(root / f"{other}-states.pt"))]
        store_after_step(ranks, root / f"{case}-after-{other}.pt")
    (root / f"{case}.json").write_text(json.dumps(found))


def store_after_step(ranks, path):
    """Store every parameter after one more step."""
    ranks.step()
    torch.save([tensor.float() for tensor in weights(ranks.worker)], path)


def parked(worker):
    """Whether memory becomes free when all state goes, and the state is the same when it is back."""
    before, allocated = worker.fingerprint(), torch.cuda.memory_allocated()
    worker.release(EVERYTHING)
    free = allocated - torch.cuda.memory_allocated()
    worker.reacquire(EVERYTHING)
    return [free, worker.fingerprint() == before]


if __name__ == "__main__":
    if sys.argv[2] == "few bits":
        few_bits_on_gpu(Path(sys.argv[1]))
    else:
        offload_on_gpu(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), *(sys.argv[4:] or [""]))
