"""Batches with pictures through workers of Megatron, all roles of a step, against the other backend's numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_ranks import TENSOR, answer, config_of, make_worker, run_ranks
from pictures import picture_batch
from safetensors.torch import load_file
from trainer_bench import Bench

from slime_core.testing import tiny_vision_model

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-families")]

ROLES = frozenset({"policy", "reference", "teacher", "values"})
TRAIN = {
    "advantage_estimator": "ppo",
    "critic_lr": 1e-3,
    "kl_loss_coef": 0.05,
    "opd_kl_coef": 0.1,
    "lr_decay_style": "constant",
    "max_tokens_per_gpu": 64,
    "adam_eps": 1e-3,
}
UNEVEN = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
CASES = {  # family, flags, whether the tower keeps its weights
    "learning, pipeline": ("qwen3_vl", UNEVEN, False),
    "frozen, tensor": ("qwen2_5_vl", TENSOR, True),
    "frozen, data": ("qwen3_vl", {}, True),
}
DAY, *NIGHT = CASES


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy and the teacher of each family."""
    root = tmp_path_factory.mktemp("pictures")
    for family in ("qwen2_5_vl", "qwen3_vl"):
        tiny_vision_model(root / family, family)
        tiny_vision_model(root / f"{family}-teacher", family, seed=5)
    return root


@pytest.mark.parametrize("case", [DAY, *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHT)])
def test_all_roles_score_and_learn_as_those_of_the_other_backend(folders, zygote, tmp_path, case):
    family, megatron, frozen = CASES[case]
    bench = Bench(folders / family, **train_of(folders, family, frozen))
    metrics, columns, fingerprint = through(bench.call, family, bench.folder.config)
    bench.thread.close()
    rank, _ = run_ranks(zygote, tmp_path, learn, 2, tmp_path, str(folders), family, megatron, frozen)
    for name, column in np.load(tmp_path / "columns.npz").items():
        np.testing.assert_allclose(column, columns[name], atol=5e-5, err_msg=name)
    assert rank["fingerprint"] == fingerprint
    for ours, theirs in zip(rank["metrics"], metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-6)
    assert 0 < rank["verify"]["gradient_error"] < rank["verify"]["limit"]
    assert rank["verify"]["loss_error"] < 1e-5
    assert any("visual." in name for name in rank["verify"]) is not frozen
    stored, written = load_file(folders / family / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert stored.keys() == written.keys()
    same = {name for name in stored if torch.equal(stored[name], written[name])}
    tower = {name for name in stored if "visual." in name}
    assert same == tower if frozen else len(same & tower) < len(tower) / 4
    assert {file.name for file in (folders / family).iterdir()} <= {file.name for file in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_folder_becomes_a_checkpoint_of_megatron_and_comes_back_bit_for_bit(folders, tmp_path, family):
    from slime_convert.folder_writing import How
    from slime_megatron.convert.conversion import dist_to_hf, hf_to_dist
    from slime_models.families import BRIDGES

    source = folders / family

    def bridge(config):
        return BRIDGES[config.model_type]

    hf_to_dist(source, tmp_path / "dist", bridge, How())
    dist_to_hf(tmp_path / "dist", tmp_path / "hf", source, bridge, How(), trusted=True)
    stored, written = load_file(source / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert stored.keys() == written.keys()
    assert [name for name in stored if not torch.equal(stored[name], written[name])] == []
    assert {file.name for file in source.iterdir()} == {file.name for file in (tmp_path / "hf").iterdir()}


def train_of(folders, family, frozen):
    """The [train] section; a new critic copies the policy."""
    return TRAIN | {"teacher_load": str(folders / f"{family}-teacher"), "freeze_vision_tower": frozen}


def through(call, family, config):
    """Metrics of two steps, columns of all roles before them, and the fingerprint of the weights as they were."""
    from slime_core.algorithms.shared.terms import role_columns

    fingerprint = call("fingerprint")
    batch = picture_batch(family, config)
    columns = role_columns(call("score", batch, ROLES))
    draw = np.random.default_rng(6).normal(size=len(batch.loss_mask)).astype(np.float32)
    batch.columns |= columns | {"returns": draw, "values": columns["values"] + 0.3 * draw}
    metrics = [call("step", batch) for _ in range(2)]
    for one in metrics:
        del one["value_clip_fraction"]  # inside the bounds both losses are equal, and rounding says which is larger
    return metrics, columns, fingerprint


def learn(rank, root, folders, family, megatron, frozen):
    """What a rank finds on its way through."""
    folders = Path(folders)
    config = config_of(folders / family, megatron, **train_of(folders, family, frozen))
    worker = make_worker(config, rank, 2, root / "meeting")
    worker.begin(config)

    def call(method, *args):
        return getattr(worker, method)(*args)

    metrics, columns, fingerprint = through(call, family, worker.folder.config)
    if rank == 0:
        np.savez(root / "columns.npz", **columns)
    worker.export(root / "hf")
    batch = picture_batch(family, worker.folder.config)
    extra = {name: np.zeros_like(batch.columns["advantages"]) for name in (*columns, "returns")}
    verify = call("verify", replace(batch, columns=batch.columns | extra))
    return {"metrics": metrics, "fingerprint": fingerprint, "verify": verify}


if __name__ == "__main__":
    answer(learn)
