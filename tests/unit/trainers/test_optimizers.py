"""AdamW with moments of 8 bits: bitsandbytes' own steps, states by kind, and where the library is missing."""

import sys

import pytest
import torch
import trainer_bench as made

from slime_core.errors import ConfigError, TrainerError
from slime_core.trainers.fsdp import adamw_8bit
from slime_core.trainers.fsdp.adamw import AdamW
from slime_core.trainers.fsdp.adamw_8bit import AdamW8bit, optimizer_of
from slime_core.trainers.fsdp.places import DevicePlace

pytestmark = pytest.mark.unit


def test_steps_are_those_of_bitsandbytes_and_near_those_of_float_moments():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    draw = torch.Generator().manual_seed(0)
    start = {"matrix": torch.randn(96, 70, generator=draw), "vector": torch.randn(96, generator=draw)}
    ours, wide = ({name: tensor.clone() for name, tensor in start.items()} for _ in range(2))
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    settings = 0.9, 0.98, 1e-8, 0.1
    optimizer, of_floats = AdamW8bit(*settings), AdamW(*settings)
    reference = bitsandbytes.optim.AdamW8bit(
        [theirs["matrix"]], lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1
    )
    copies = {name: tensor.bfloat16() for name, tensor in start.items()}
    for _ in range(4):
        grads = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in start.items()}
        theirs["matrix"].grad = grads["matrix"] * 0.5
        reference.step()
        of_floats.step(wide, {name: grad.clone() for name, grad in grads.items()}, lr=0.01, scale=0.5)
        optimizer.step(ours, grads, lr=0.01, scale=0.5, copies=copies)
    torch.testing.assert_close(ours["matrix"], theirs["matrix"].detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(ours["vector"], wide["vector"])
    moved, by_floats = (one["matrix"] - start["matrix"] for one in (ours, wide))
    assert (moved - by_floats).norm() < 0.05 * by_floats.norm()
    assert all(torch.equal(copies[name], ours[name].bfloat16()) for name in ours)
    numbers = {kind: tensors["matrix"].dtype for kind, tensors in optimizer.states().items()}
    assert numbers == dict.fromkeys(("moment1", "moment2"), torch.uint8) | dict.fromkeys(
        ("scale1", "scale2"), torch.float32
    )
    stored = sum(tensors["matrix"].nbytes for tensors in optimizer.states().values())
    assert stored == optimizer.state_bytes(start["matrix"]) < of_floats.state_bytes(start["matrix"]) / 3.9


def test_states_of_another_optimizer_are_refused(bench, tmp_path):
    for name in ("adamw", "adamw_8bit"):
        one = bench(optimizer=name)
        one.call("step", made.batch_of())
        one.call("save", tmp_path / name)
        one.worker.staging.wait()
    eight, floats = bench(optimizer="adamw_8bit"), bench()
    with pytest.raises(TrainerError, match="saved by another optimizer") as refusal:
        eight.call("restore", tmp_path / "adamw")
    assert refusal.value.code == "TRN108"
    with pytest.raises(TrainerError, match="U8 in the checkpoint and F32"):
        floats.call("restore", tmp_path / "adamw_8bit")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    adamw_8bit.library.cache_clear()
    train = made.config_of("m", optimizer="paged_adamw_8bit").train
    with pytest.raises(ConfigError, match="bitsandbytes") as refusal:
        optimizer_of(train, DevicePlace(), torch.device("cpu"))
    assert "pip install" in refusal.value.fix
    adamw_8bit.library.cache_clear()
