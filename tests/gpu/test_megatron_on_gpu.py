"""Megatron on GPUs: every family's numbers against transformers', on one and on two; an optimizer in main memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parents[1] / "unit" / "trainers" / "megatron"
sys.path.append(str(HERE))

from family_models import FAMILIES, LAYOUTS, draw  # noqa: E402

from slime_core.testing import tiny_model  # noqa: E402

pytestmark = pytest.mark.gpu

LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.3)}  # of log-probs and of gradients, by a tensor's norm


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
    command = [sys.executable, "families_main.py", str(models), str(world), json.dumps(flags), "all", *names]
    environment = {**os.environ, "DEVICE": "cuda", "DTYPE": dtype, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    values, gradients = LIMITS[dtype]
    wrong = []  # of all families: a run on GPUs tells everything at once
    for rank in range(world):
        for name, found in json.loads((models / f"answers-{rank}.json").read_text()).items():
            print(layout, dtype, name, found)
            near = max(found["log_probs"], found["entropy"]) < values and found["gradients"] < gradients
            wrong += [] if near and found["gathered"] == [] else [(rank, name, found)]
    assert wrong == []


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
        command = [sys.executable, "offload_on_gpu.py", str(root), case, json.dumps(flags), *filter(None, [other])]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        found[case] = json.loads((root / f"{case}.json").read_text())
        print(case, found[case])
    return root, found


def near(root, one, other):
    """Whether weights are the same but for rounding: bfloat16's where a master lies on its edge."""
    pairs = zip(torch.load(root / f"{one}.pt"), torch.load(root / f"{other}.pt"), strict=True)
    return all(torch.allclose(a, b, rtol=1e-2, atol=1e-5) for a, b in pairs)


def test_an_optimizer_in_main_memory_steps_as_one_on_the_gpu(offloads):
    root, found = offloads
    for case in ("all", "half"):
        assert near(root, f"{case}-third", "plain-third")
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
        assert near(root, f"{case}-after-{other}", f"{other}-third")


def test_what_is_on_the_gpu_goes_away_and_comes_back(offloads):
    _, found = offloads
    for case in OFFLOADS:
        free, same = found[case]["parked"]
        assert free > 2 * found[case]["parameters"]
        assert same
