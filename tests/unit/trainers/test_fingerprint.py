"""A fingerprint of parameters: as written in its formula, and changed by anything that changes them."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import trainer_bench as made

from slime_core.testing import tiny_model
from slime_core.trainers import fingerprint as shared
from slime_core.trainers.fsdp import model as room

pytestmark = pytest.mark.unit

MASK = (1 << 64) - 1


def mix(j):
    """t(j), with python's integers."""
    value = (j + 1) * 0x9E3779B97F4A7C15 & MASK
    for odd in (0xBF58476D1CE4E5B9, 0x9E3779B97F4A7C15):
        value = (value ^ value >> 32) * odd & MASK
    return value | 1


def by_hand(tensors):
    """The docstring's formula."""
    lines = []
    for name in sorted(tensors):
        bits = tensors[name].numpy().astype("<f4").reshape(-1).view("<i4").tolist()
        first = sum(bits) & MASK
        second = sum(b * mix(i % 2**16) * (2 * (i >> 16) + 1) for i, b in enumerate(bits)) & MASK
        signed = [value - (1 << 64) if value >> 63 else value for value in (first, second)]
        lines.append(f"{name} {list(tensors[name].shape)} {signed[0]} {signed[1]}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def tensors():
    draw = torch.Generator().manual_seed(0)
    shapes = {"b": (5, 7), "a": (3,), "empty": (0, 4), "scalar": (), "c.d": (2, 3, 4)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_a_fingerprint_follows_the_formula():
    assert room.fingerprint(tensors(), 1) == by_hand(tensors())


def test_the_table_is_the_formula():
    found = shared.table(torch.device("cpu"))
    for j in (0, 1, 2, 1000, 2**16 - 1):
        assert int(found[j]) & MASK == mix(j)
    assert len(torch.unique(found)) == 2**16


def test_a_tensor_of_several_blocks_is_the_formula(monkeypatch):
    whole = torch.randn(3 * 2**16 + 5, generator=torch.Generator().manual_seed(1))
    bits = whole.numpy().view(np.int32).astype(np.int64).astype(np.uint64)
    table = shared.table(torch.device("cpu")).numpy().astype(np.uint64)
    want = [int(bits.sum()), 0]
    for block in range(4):
        part = bits[block << 16 : block + 1 << 16]
        want[1] += int((part * table[: len(part)]).sum()) * (2 * block + 1)
    assert [value & MASK for value in shared.sums(whole, 0).tolist()] == [value & MASK for value in want]


@pytest.mark.parametrize("cut", [1, 7, 2**16 - 1, 2**16, 2**16 + 1, 2 * 2**16 + 3])
def test_shards_add_up_wherever_they_are_cut(cut):
    whole = torch.randn(2 * 2**16 + 9, generator=torch.Generator().manual_seed(2))
    assert torch.equal(shared.sums(whole[:cut], 0) + shared.sums(whole[cut:], cut), shared.sums(whole, 0))


def test_every_single_bit_counts():
    known = tensors()
    before = room.fingerprint(known, 1)
    for bit in range(32):
        changed = {name: tensor.clone() for name, tensor in known.items()}
        changed["b"].view(torch.int32)[3, 2] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert room.fingerprint(changed, 1) != before


def test_swaps_names_and_shapes_count():
    known = tensors()
    known["e"] = torch.randn(5, 7)
    before = room.fingerprint(known, 1)
    swapped = {name: tensor.clone() for name, tensor in known.items()}
    swapped["b"].view(-1)[[0, 9]] = swapped["b"].view(-1)[[9, 0]]
    assert room.fingerprint(swapped, 1) != before
    assert room.fingerprint({**known, "b": known["e"], "e": known["b"]}, 1) != before
    assert room.fingerprint({**known, "b": known["b"].view(7, 5)}, 1) != before
    assert room.fingerprint({**known, "b": known["b"].flip(0)}, 1) != before
    assert room.fingerprint({"x" + name: tensor for name, tensor in known.items()}, 1) != before
    zero = {"z": torch.zeros(4)}
    assert room.fingerprint({"z": -torch.zeros(4)}, 1) != room.fingerprint(zero, 1)


def test_a_trainers_fingerprint_is_that_of_its_parameters_and_follows_each_step(bench):
    one, seen = bench(), set()
    for _ in range(3):
        found = one.call("fingerprint")
        assert found == by_hand(one.parameters())
        seen.add(found)
        one.call("step", made.batch_of())
    assert len(seen) == 3


def test_a_critic_is_part_of_it(bench, tmp_path):
    one = bench(folder=tiny_model(tmp_path / "m"), advantage_estimator="ppo", critic_lr=1e-3)
    before = one.call("fingerprint")
    assert before != by_hand(one.parameters())
    one.worker.critic.learner.locals()["score.weight"].fill_(1)
    assert one.call("fingerprint") != before


RUNS = """
import torch
from slime_core.trainers.fingerprint import ODD, ODD2, all_sums
from slime_core.trainers.fingerprint_cuda import sums

draw = torch.Generator().manual_seed(3)
shapes = (((5, 7), 0), ((0, 3), 0), ((2**14 + 9,), 2**16 - 6), ((), 3), ((2**15,), 1 << 33))
runs = [(torch.randn(shape, generator=draw), start) for shape, start in shapes]
assert torch.equal(sums(runs, ODD, ODD2), all_sums(runs))
"""


def test_the_kernel_sums_as_the_processor_does():
    pytest.importorskip("triton", reason="not proven: no triton; it comes with torch for CUDA")
    subprocess.run([sys.executable, "-c", RUNS], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
