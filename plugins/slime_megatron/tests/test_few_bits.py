"""A base in 4 or 8 bits under Megatron: FSDP's numbers, and so its gradients, at any layout."""

import json
import shutil

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from megatron_ranks import PIPELINE, TENSOR, Ranks, answer, config_of, make_worker, mixture, run_ranks
from peak_memory import ROUNDING, mixture_folder, peak_of, sizes
from safetensors.torch import load_file, save_file
from splits import fill_adapters, rank_batch_of, with_roles
from trainer_bench import Bench, batch_of

from slime_core.kernels.quantised import QuantisedWeight, dense
from slime_core.testing import tiny_model
from slime_core.testing.models import fp8_model

pytestmark = pytest.mark.integration

LORA = {"lora_rank": 4, "kl_loss_coef": 0.05, "adam_eps": 1e-3, "max_tokens_per_gpu": 40}
EXPERTS = TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
HALVES = TENSOR | {"expert_tensor_parallel_size": 2, "moe_grouped_gemm": True}
CASES = {  # model, flags, keys of [train], bytes a number: halves of blocks of columns have scales of their own
    "tensor, nf4": ("dense", TENSOR | {"sequence_parallel": True}, {"base_weights": "nf4"}, 9 / 16),
    "tensor, fp8": ("dense", TENSOR, {"base_weights": "fp8"}, 1.0346),
    "stages, nf4": ("dense", PIPELINE, {"base_weights": "nf4", "lora_use_dora": True}, 9 / 16),
    "experts, nf4": ("moe", EXPERTS, {"base_weights": "nf4"}, 9 / 16),
    "halves of experts, fp8": ("moe", HALVES, {"base_weights": "fp8"}, 1.0417),
    "a folder in fp8": ("published", TENSOR, {"base_weights": "fp8"}, 1.0346),
    "experts of a folder in nf4": ("packed", EXPERTS, {"base_weights": "nf4"}, 9 / 16),
}


OFTEN = ("tensor, nf4", "halves of experts, fp8")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model and a mixture of experts."""
    folder = tmp_path_factory.mktemp("root")
    tiny_model(folder / "dense", hidden=128, tied=True)
    mixture(folder / "moe", hidden=128, width=128)
    return folder


@pytest.mark.parametrize("case", OFTEN)
def test_base_gradients_and_checkpoints_are_those_of_fsdps_base_in_few_bits(models, zygote, tmp_path, case):
    are_alike(models, zygote, tmp_path, case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in CASES if case not in OFTEN])
def test_they_are_so_at_other_layouts_and_from_folders_in_few_bits(models, zygote, tmp_path, case):
    if not (models / "packed").exists():
        fp8_model(models / "published", models / "dense")
        pack(models / "moe", models / "packed")
    are_alike(models, zygote, tmp_path, case)


def are_alike(models, zygote, root, case):
    """Whether two ranks have and do what FSDP does."""
    model, flags, train, bytes_of_a_number = CASES[case]
    of_fsdp(root, models / model, train)
    pair = run_ranks(zygote, root, two_ranks, 2, root, str(models / model), flags, train)
    for one in pair:
        assert one["worst"] < 1e-4  # 5e-5 without few bits, from sums in another order
        assert one["compared"] > 10
        assert one["loss"] == pytest.approx(one["fsdp loss"], rel=1e-6)
        assert one["other weights"] == []
        assert one["sums"] == one["fsdp sums"]
        assert one["offloaded"]
        assert one["bytes"] == pytest.approx(bytes_of_a_number * one["numbers"], rel=0.004)
        assert one["restored"] == one["saved"]
        assert one["again"] == one["on"] != one["saved"]
    assert sum(one["numbers"] for one in pair) == pair[0]["fsdp numbers"]


def test_the_peak_of_a_stage_in_4_bits_is_what_is_kept_and_one_tensor(zygote, tmp_path):
    mixture_folder(tmp_path / "large")
    mixture_folder(tmp_path / "small", hidden_size=128, num_hidden_layers=1, moe_intermediate_size=128)
    (of_rank,) = run_ranks(zygote, tmp_path, peak, 1, tmp_path)
    peak_bytes, kept, plain, largest = of_rank
    assert plain > 180e6
    assert kept < 0.3 * plain
    assert peak_bytes < kept + 2 * largest + ROUNDING < plain / 2


def peak(rank, root):
    """Peak of a worker, after a small one brought what is imported and kept."""
    from megatron.core import parallel_state

    for name in ("small", "large"):
        parallel_state.destroy_model_parallel()
        config = config_of(root / name, lora_rank=1, base_weights="nf4", dtype="bfloat16")
        peak_bytes, worker = peak_of(lambda of=config: make_worker(of, rank, 1, root / "meeting"))
    return [peak_bytes, *sizes(worker.policy.stage)]


def pack(origin, folder):
    """Write a folder whose experts are in nf4 as bitsandbytes has them, and all else is floats."""
    shutil.copytree(origin, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        numbers, state = quantize_4bit(tensors[name], blocksize=64, quant_type="nf4")
        tensors |= {f"{name}.{key}": one for key, one in state.as_dict(packed=True).items()} | {name: numbers}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    table = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": table}))


def of_fsdp(root, folder, train):
    """Write an adapter that changes the model, and what FSDP makes of it."""
    one = Bench(folder, **LORA, **train)
    fill_adapters(one.worker)
    weights = {name: weight.detach() for name, weight in one.worker.policy.base().items()}
    few = sum(weight.numel() for weight in weights.values() if isinstance(weight, QuantisedWeight))
    base = {name: dense(weight).clone() for name, weight in weights.items()}
    sums = {f"sums.{name}": torch.tensor(pair) for name, pair in one.call("base_sums").items()}
    one.call("export", root / "final")
    loss, gradients = one.call("gradients", *step_of(one.worker))
    gradients = {f"gradient.{name}": grad for name, grad in gradients.items()}
    figures = {"loss": torch.tensor(loss), "numbers": torch.tensor(few)}
    save_file(base | sums | gradients | figures, root / "fsdp.safetensors")
    one.thread.close()


def step_of(worker):
    """A rank's part of a step, and its micro-batches."""
    batch = with_roles(batch_of(groups=2, rollouts=3))
    rank_batch = rank_batch_of(worker, batch)
    return rank_batch, worker.packs(rank_batch)[0]


def two_ranks(rank, root, folder, flags, train):
    """A base beside FSDP's, a step, and a run that goes on from there."""
    keys = LORA | train | {"lora_load": str(root / "final" / "adapter")}
    ranks = Ranks(root, folder, flags, rank, 2, **keys)
    answers = beside_fsdp(ranks.worker, load_file(root / "fsdp.safetensors"))
    ranks.step()
    ranks.save(root / "saved")
    answers["saved"] = ranks.worker.fingerprint()
    answers["on"] = ranks.step()
    again = Ranks(root, folder, flags, rank, 2, **keys)
    return answers | {"restored": again.restore(root / "saved"), "again": again.step()}


def beside_fsdp(worker, of_fsdp):
    """Loss, gradients, and the base, beside FSDP's; how the base is stored."""
    from slime_megatron.verify import _everywhere

    loss, gradients = worker.gradients(*step_of(worker))
    errors = [
        float((grad - (expected := of_fsdp[f"gradient.{name}"])).norm() / expected.norm())
        for name, grad in gradients.items()
    ]
    few = [p for p in worker.policy.stage.parameters() if isinstance(p, QuantisedWeight)]
    base = _everywhere(worker.policy.tensors.of_model(), worker)
    stored = {part.data_ptr() for part in worker._tensors("parameters")}
    return {
        "loss": loss,
        "fsdp loss": float(of_fsdp["loss"]),
        "worst": max(errors),
        "compared": len(errors),
        "other weights": [n for n, tensor in base.items() if n in of_fsdp and not torch.equal(tensor, of_fsdp[n])],
        "sums": worker.base_sums(),
        "fsdp sums": {n.removeprefix("sums."): s.tolist() for n, s in of_fsdp.items() if n.startswith("sums.")},
        "bytes": sum(p.stored_bytes for p in few),
        "numbers": sum(p.numel() for p in few),
        "fsdp numbers": int(of_fsdp["numbers"]),
        "offloaded": all({p.numbers.data_ptr(), p.scales.data_ptr()} <= stored for p in few),
    }


if __name__ == "__main__":
    answer(two_ranks, peak)
