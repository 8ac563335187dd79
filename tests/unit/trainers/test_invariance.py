"""One step's loss and gradients are the same for any split of it: micro-batches, packs, padding, order, ranks."""

import sys
from pathlib import Path

import numpy as np
import pytest
import splits
import torch
import trainer_bench as made
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import Batch
from slime_core.weights.folder import ModelFolder

OF_RANKS = ("clip", "tis", "lora_dropout")


def verify_rank(folder, out, rank, world):
    """Write ``SETTING.safetensors`` into ``out``; every rank fails where the slow way finds another gradient."""
    thread, trainer = TorchThread(1), None
    for case in OF_RANKS:
        train = splits.SETTINGS[case]
        shared = {"context_parallel_size": 2} if case == "lora_dropout" and world > 1 else {}
        config = made.config_of(folder, max_tokens_per_gpu=40, **train, **shared)
        if trainer is None or case.startswith("lora"):
            trainer = FsdpTrainer(
                config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
                rendezvous=Path(out) / "meet" if world > 1 else None,
            )  # fmt: skip
        worker = trainer._worker
        thread.call(worker.begin, config)
        thread.call(splits.fill_adapters, worker)
        batch = splits.with_roles(made.batch_of(groups=2, rollouts=3))
        found = thread.call(worker.verify, batch)
        assert found["float64"] == 1
        assert worker.policy.fused == (case != "lora_dropout"), case
        assert max(found["gradient_error"], found["loss_error"]) < 1e-5, (case, found)
        totals, grads = thread.call(splits.step_of, worker, batch)
        if worker.policy.adapters is not None:
            tensors = thread.call(worker.publish, 1).tensors
            grads |= {f"served.{name}": tensor.double().clone() for name, tensor in tensors.items()}
        if rank == 0:
            rows = grads | {f"total.{name}": torch.tensor(value).double() for name, value in totals.items()}
            save_file({name: row.contiguous() for name, row in rows.items()}, str(Path(out) / f"{case}.safetensors"))
    thread.close()


TOLERANCE = 3e-5  # float32, of the largest entry of each gradient
drawn = settings(deadline=None, derandomize=True, max_examples=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.fixture(scope="module", params=splits.SETTINGS)
def one(request, folder):
    found = made.Bench(folder, **splits.SETTINGS[request.param], max_tokens_per_gpu=10_000)
    splits.fill_adapters(found.worker)
    yield found
    found.thread.close()


def reordered(batch, order):
    """The batch with its samples in another order; rollout and group ids stay."""

    def rows(values, offsets):
        return np.concatenate([values[offsets[i] : offsets[i + 1]] for i in order])

    def ends(offsets):
        return np.concatenate([[0], np.cumsum(np.diff(offsets)[order])]).astype(np.int64)

    return Batch(
        version=batch.version,
        sample_ids=[batch.sample_ids[i] for i in order],
        tasks=[batch.tasks[i] for i in order],
        group=batch.group[order],
        rollout=batch.rollout[order],
        reward=batch.reward[order],
        tokens=rows(batch.tokens, batch.offsets),
        offsets=ends(batch.offsets),
        loss_mask=rows(batch.loss_mask, batch.response_offsets),
        response_offsets=ends(batch.response_offsets),
        columns={name: rows(values, batch.response_offsets) for name, values in batch.columns.items()},
        temperature=batch.temperature[order],
    )


def step(one, batch, max_tokens=10_000, packs=True):
    """The step with packs of ``max_tokens``, or one sequence a row."""
    worker = one.worker
    worker.stage = worker.stage.model_copy(
        update={"train": worker.stage.train.model_copy(update={"max_tokens_per_gpu": max_tokens})}
    )
    policy = worker.policy
    own = policy.packs, policy.fused, policy.hf.config._attn_implementation
    if not packs:  # as for a model that cannot be packed
        policy.packs = policy.fused = False
        policy.hf.set_attn_implementation("sdpa")
    try:
        return one.thread.call(splits.step_of, worker, batch)
    finally:
        policy.packs, policy.fused = own[:2]
        policy.hf.set_attn_implementation(own[2])


@pytest.mark.unit
@drawn
@given(
    seed=st.integers(0, 999), groups=st.integers(1, 3), rollouts=st.integers(1, 4), longest=st.integers(1, 9),
    max_tokens=st.integers(1, 80), masked=st.sampled_from([0.0, 0.3, 0.9]), shuffle=st.integers(0, 99),
)  # fmt: skip
def test_packs_accumulation_and_order_change_nothing(
    one, seed, groups, rollouts, longest, max_tokens, masked, shuffle
):
    batch = splits.with_roles(made.batch_of(seed=seed, groups=groups, rollouts=rollouts, longest=longest), seed)
    draw = np.random.default_rng(seed + shuffle)
    batch.loss_mask *= (draw.random(len(batch.loss_mask)) >= masked).astype(np.float32)
    want = step(one, batch)
    other = reordered(batch, draw.permutation(len(batch)))
    error, where = splits.difference(step(one, other, max_tokens), want)
    assert error < TOLERANCE, where


@pytest.mark.unit
def test_one_sequence_a_row_changes_nothing(one):
    batch = splits.with_roles(made.batch_of())
    error, where = splits.difference(step(one, batch, packs=False), step(one, batch, 50))
    assert error < TOLERANCE, where


@pytest.mark.unit
def test_all_masked_but_one_token_is_the_same_in_any_split(one):
    batch = splits.with_roles(made.batch_of())
    batch.loss_mask[1:] = 0
    error, where = splits.difference(step(one, batch, 1), step(one, batch))
    assert error < TOLERANCE, where


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    verify_rank(folder, out, 0, 1)
    return out


@pytest.mark.integration
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_change_nothing_and_each_step_agrees_with_the_slow_way(
    folder, alone, zygote, tmp_path, tmp_path_factory, world
):
    ranks = [[__file__, folder, tmp_path, rank, world] for rank in range(world)]
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    for case in OF_RANKS:
        want, got = (load_file(str(out / f"{case}.safetensors")) for out in (alone, tmp_path))
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            scale = max(float(tensor.abs().max()), 1e-6 if tensor.ndim else 1e-2)
            assert float((got[name] - tensor).abs().max()) / scale < TOLERANCE, (case, name)


if __name__ == "__main__":
    verify_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
