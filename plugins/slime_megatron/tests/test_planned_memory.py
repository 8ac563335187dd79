"""What a plan says that a Megatron rank holds is what it holds: weights, gradient buffers, masters and moments."""

import json

import pytest
import torch
from megatron_ranks import Ranks, answer, mixture, run_ranks

from slime_core.config.load import stages
from slime_core.errors import ConfigError
from slime_core.planning.footprint import Lengths, Subject
from slime_core.planning.gpus import GIB, gpu_of, processor
from slime_core.planning.memory import fits
from slime_core.planning.sizes import ModelSizes
from slime_core.planning.time import TimePlan
from slime_core.testing import tiny_model, tiny_vision_model
from slime_megatron.memory import footprint

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration
RECOMPUTED = ("--gradient-checkpointing", "--gradient-checkpointing-layers", "4")
LAYOUTS = {
    "data": ("dense", "bfloat16", {}),
    "tensor": ("dense", "bfloat16", {"tensor_model_parallel_size": 2}),
    "stages": ("dense", "float32", {"pipeline_model_parallel_size": 2}),
    "pictures": ("seen", "bfloat16", {}),
    "experts": ("moe", "bfloat16", {"expert_model_parallel_size": 2}),
}


def test_ranks_hold_the_predicted_bytes(zygote, tmp_path):
    tiny_model(tmp_path / "dense")
    tiny_vision_model(tmp_path / "seen")
    mixture(tmp_path / "moe")
    ranks = run_ranks(zygote, tmp_path, planned_beside_held, 2, tmp_path)
    for name in LAYOUTS:  # stages differ: the plan is of the one that needs most, activations included
        planned = ranks[0][name]["planned"]
        optimizer = planned.pop("optimizer")
        shares = [rank[name]["held"].pop("optimizer") for rank in ranks]
        assert planned in [rank[name]["held"] for rank in ranks], name
        assert min(shares) * 0.998 < optimizer < max(shares) * 1.002, name  # ranks have uneven shares


@pytest.mark.parametrize(
    ("length", "sequences", "flags", "gib", "tokens_per_second"),
    [
        pytest.param(8192, 4, (), 103, 15830, id="4 sequences of 8,192"),
        pytest.param(16384, 2, RECOMPUTED, 128, 12417, id="2 of 16,384, 4 layers recomputed"),
        pytest.param(8192, 16, (), 103, 16179, id="16 of 8,192"),
    ],
)
def test_a_policy_step_is_predicted_as_it_was_measured(length, sequences, flags, gib, tokens_per_second):
    from measured import QWEN3_4B, policy_step  # not of the ranks, which run this file

    config, lengths = policy_step(length, sequences, "--train-backend", "megatron", *flags)
    plan = fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths)
    assert plan.devices[0].peak.total / GIB == pytest.approx(gib, rel=0.05)
    assert length * sequences / TimePlan.of(plan).total == pytest.approx(tokens_per_second, rel=0.15)


def test_a_base_in_4_bits_is_planned_as_fsdp_holds_it():
    from measured import QWEN3_4B, policy_step

    def planned(*flags):
        config, lengths = policy_step(8192, 4, "--lora-rank", "32", "--base-weights", "nf4", *flags)
        trainer = fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths).trainer
        return next(moment.bytes["base"] for moment in trainer.moments)

    base = planned("--train-backend", "megatron")
    assert base == pytest.approx(planned(), rel=0.001)
    halves = planned(
        "--train-backend", "megatron", "megatron.tensor_model_parallel_size=2", "--actor-num-gpus-per-node=2"
    )
    assert halves == pytest.approx(base / 2, rel=0.001)


def test_two_adapters_are_planned_with_twice_the_bytes_of_one():
    from measured import QWEN3_4B, policy_step

    def planned(names):
        lora = ["--lora-rank", "32", "--lora-sync", "adapter", f"train.lora_adapters={names}"]
        config, lengths = policy_step(8192, 4, "--train-backend", "megatron", *lora)
        trainer = fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths).trainer
        return {name: size for moment in trainer.moments for name, size in moment.bytes.items()} | {
            "weight update": trainer.publish
        }

    one, two = planned(["solver"]), planned(["solver", "critic"])
    for name in ("adapters", "gradients", "optimizer"):
        assert two[name] == 2 * one[name] > 0
    assert two["base"] == one["base"]
    assert two["weight update"] == two["adapters"]


def test_a_teacher_is_divided_as_the_policy_is(tmp_path):
    from measured import QWEN3_4B, policy_step

    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    flags = ["--train-backend", "megatron", "megatron.tensor_model_parallel_size=2", "--actor-num-gpus-per-node", "2"]
    config, lengths = policy_step(1024, 4, *flags, "--teacher-load", str(tmp_path), "--opd-kl-coef", "0.1")
    (device,) = fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths).devices
    matrices = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728
    rows = 152064  # of the embedding, filled up to a multiple of 2 * 128
    numbers = 36 * (matrices // 2 + 2 * 2560 + 2 * 128) + rows // 2 * 2560 + 2560
    assert {moment.bytes["teacher"] for moment in device.phases.values()} == {2 * numbers}


def test_a_layout_that_does_not_divide_is_refused_with_every_reason():
    from measured import QWEN3_4B, policy_step

    flags = ["--train-backend", "megatron", "megatron.tensor_model_parallel_size=3"]
    config, lengths = policy_step(1024, 1, *flags, "megatron.expert_model_parallel_size=2")
    with pytest.raises(ConfigError) as caught:
        fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths)
    assert caught.value.code == "CFG04"
    text = f"{caught.value.what} {caught.value.why}"
    for reason in ("1 trainer ranks do not divide", "32 attention heads", "8 key-value heads", "has no experts"):
        assert reason in text


def planned_beside_held(rank, root):
    """Bytes of components by layout."""
    return {name: _components(rank, root, name) for name in LAYOUTS}


def _components(rank, root, name):
    folder, dtype, megatron = LAYOUTS[name]
    ranks = Ranks(root, folder, megatron, rank, 2, f"meeting-{name}", dtype=dtype)
    ranks.step()
    worker = ranks.worker
    config = worker.config
    cluster = config.cluster.model_copy(update={"actor_num_gpus_per_node": 2})
    subject = Subject(
        config=stages(config.model_copy(update={"cluster": cluster}))[-1],
        sizes=ModelSizes.of(worker.folder.config),
        gpu=processor(GIB),
        lengths=Lengths(prompt=4, response=4, longest=8, p95=4, source="the test"),
    )
    plan = footprint(subject)
    planned = {name: size for moment in plan.moments for name, size in moment.bytes.items()}
    parameters = list(worker.policy.stage.parameters())
    owned = {tensor.data_ptr() for tensor in parameters}
    states = [t for t in worker.actor.states() if isinstance(t, torch.Tensor) and t.numel() > 1]
    held = {
        "parameters": sum(p.nbytes for p in parameters if p.requires_grad),
        "vision tower": sum(p.nbytes for p in parameters if not p.requires_grad),
        "gradients": sum(p.main_grad.nbytes for p in parameters if p.requires_grad),
        "optimizer": sum(t.nbytes for t in states if t.data_ptr() not in owned),
    }
    return {"held": held, "planned": {name: planned.get(name, 0) for name in held}}


if __name__ == "__main__":
    answer(planned_beside_held)
