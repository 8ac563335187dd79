"""Adapters over a base in 4 or 8 bits: float64 gradients, what engines get, folders in fp8, and two ranks."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import splits
import torch
import trainer_bench as made
from safetensors.torch import load_file, save_file

from slime_convert.adapter_to_hf import adapter_to_hf
from slime_convert.folder_writing import How
from slime_convert.fsdp_to_hf import fsdp_to_adapter, fsdp_to_hf
from slime_core.checkpoint.manifest import MANIFEST
from slime_core.clusters.local import local_serving
from slime_core.config.sections.cluster import ClusterSection
from slime_core.engines.local.joined import JoinedLinear
from slime_core.engines.local.served import ServedModel
from slime_core.engines.local.twin import Twin
from slime_core.errors import ConfigError, TrainerError
from slime_core.kernels.quantised import QuantisedWeight, dense, stored_parts
from slime_core.lora.layers import merged
from slime_core.planning.fsdp import gathered_layer
from slime_core.planning.sizes import ModelSizes
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.families import family_model
from slime_core.testing.models import fp8_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.blocks import layers
from slime_core.trainers.fsdp.state_files import STATE
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

LORA = {"lora_rank": 4, "kl_loss_coef": 0.05, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", hidden=128, tied=True)


def quantised(worker):
    """The base's weights in fewer bits by name."""
    base = worker.policy.base()
    return {name: weight.detach() for name, weight in base.items() if isinstance(weight.detach(), QuantisedWeight)}


@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_gradients_and_engines_are_of_the_base_as_it_computes(folder, form, tmp_path):
    one = made.Bench(folder, **LORA, base_weights=form)
    base = quantised(one.worker)
    assert len(base) == 2 * 7
    stored = sum(weight.stored_bytes for weight in base.values())
    assert stored == sum(weight.numel() for weight in base.values()) * {"nf4": 9 / 16, "fp8": 33 / 32}[form]
    served = one.call("publish", 0).tensors
    assert all(torch.equal(served[name], weight.dense()) for name, weight in base.items())  # B is 0
    splits.fill_adapters(one.worker)
    error = one.call("verify", splits.with_roles(made.batch_of()))
    assert error["float64"] == 1
    assert max(error["gradient_error"], error["loss_error"]) < 3e-5

    served, adapters = one.call("publish", 1).tensors, one.worker.policy.adapters
    one.call("export", tmp_path / "final")
    exported = load_file(tmp_path / "final" / "model.safetensors")
    for name, weight in base.items():
        module, _ = adapters.weights()[name]
        factors = module.lora_A["default"].detach(), module.lora_B["default"].detach()
        expected = merged(weight.dense(), *factors, adapters.spec.scaling)
        assert torch.equal(served[name], expected)
        assert torch.equal(exported[name], expected)
    one.thread.close()


def test_weights_without_adapters_reach_engines_as_floats_and_state_is_offloaded_by_its_parts(folder):
    one = made.Bench(folder, **LORA, base_weights="nf4", lora_target_modules=["q_proj"], dtype="bfloat16")
    base = quantised(one.worker)
    tensors = one.call("publish", 0).tensors
    assert {type(tensor) for tensor in tensors.values()} == {torch.Tensor}
    assert all(torch.equal(tensors[name], weight.dense()) for name, weight in base.items())
    assert all(weight.stored_bytes == weight.numel() * 17 // 32 for weight in base.values())
    parts = {part.data_ptr() for part in one.worker._state("parameters")}
    assert all({weight.numbers.data_ptr(), weight.scales.data_ptr()} <= parts for weight in base.values())
    one.thread.close()


def test_an_engine_serves_the_numbers_and_keeps_no_floats_of_them(folder):
    one = made.Bench(folder, **LORA, base_weights="nf4", lora_sync="adapter")
    base, update = quantised(one.worker), one.call("publish", 0)
    twin = Twin(one.folder.config, torch.float32, "cpu", False, joined=True)
    for _ in range(2):
        twin.load(update)
        served = dict(twin.model.named_parameters())
        assert all(served[name].numbers.data_ptr() == weight.numbers.data_ptr() for name, weight in base.items())
        twin.release()
    twin.load(update)
    layers = twin.model.model.layers[0].self_attn
    both = JoinedLinear(layers.q_proj, layers.k_proj)
    both.refresh()
    x = torch.randn(3, 128)
    expected = torch.cat([dense(layer.weight) for layer in (layers.q_proj, layers.k_proj)])
    assert torch.equal(both.product(torch.nn.functional.linear, x), torch.nn.functional.linear(x, expected))
    assert not both.weight.numel()
    model = ServedModel(one.folder, context_len=16, dtype="float32", device="cpu", share=0.1, paged=True)
    model.load(update)
    assert not model.moved()
    numbers = next(iter(base.values())).numbers
    numbers.set_(numbers.clone())
    assert model.moved(), "a captured step would read what is no longer there"
    one.thread.close()


def test_a_folder_in_fp8_keeps_its_numbers(folder, tmp_path):
    published = ModelFolder.open(fp8_model(tmp_path / "fp8", folder))
    tensors = {name: tensor.clone() for name, tensor in published.tensors().items()}
    one = made.Bench(published.path, **LORA, base_weights="fp8", dtype="bfloat16")
    base = quantised(one.worker)
    assert base.keys() == {name for name, info in published.tensors().infos.items() if info.stored}
    assert all(torch.equal(weight.dense(), tensors[name]) for name, weight in base.items())
    one.thread.close()


@pytest.mark.parametrize(
    ("family", "form", "dtype"),
    [
        ("dense", "nf4", "bfloat16"),
        ("dense", "fp8", "float32"),
        ("experts", "nf4", "float32"),
        ("dense", "auto", "bfloat16"),
    ],
    ids=["nf4", "fp8", "experts", "bfloat16"],
)
def test_conversions_merge_into_the_base_that_the_run_trained_on(folder, family, form, dtype, tmp_path):
    base = folder if family == "dense" else family_model(tmp_path / "moe", "qwen3-moe")
    one = made.Bench(base, lora_rank=4, base_weights=form, dtype=dtype)
    splits.fill_adapters(one.worker)
    one.call("save", tmp_path / "state")
    one.call("export", tmp_path / "final")
    one.thread.close()
    final = load_file(tmp_path / "final" / "model.safetensors")
    fsdp_to_hf(tmp_path / "state", tmp_path / "saved", base, How(verify=True))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == final.keys()
    assert all(torch.equal(tensor, final[name]) for name, tensor in saved.items())
    fsdp_to_adapter(tmp_path / "state", tmp_path / "taken", base, How())
    if form == "auto":
        notes = []
        adapter_to_hf(tmp_path / "taken", tmp_path / "merged", base, How(note=notes.append))
        assert not notes
        return
    for adapter in ("taken", "final/adapter"):
        adapter_to_hf(tmp_path / adapter, tmp_path / "merged", base, How(force=True, dtype=dtype))
        merged_folder = load_file(tmp_path / "merged" / "model.safetensors")
        assert all(torch.equal(tensor, final[name]) for name, tensor in merged_folder.items())
    state = json.loads((tmp_path / "state" / STATE).read_text())
    assert state.pop("base_weights") == form
    (tmp_path / "state" / STATE).write_text(json.dumps(state))  # as older checkpoints are
    (tmp_path / "state" / MANIFEST).write_text(json.dumps({"config": {"train": {"base_weights": form}}}))
    fsdp_to_hf(tmp_path / "state", tmp_path / "floats", base, How(), form="auto")
    floats = load_file(tmp_path / "floats" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(floats[name], final[name])
    tensors = load_file(base / "model.safetensors")
    tensors[name][3, 5] += 1
    other = shutil.copytree(base, tmp_path / "other")
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainerError, match=r"1 of \d+ tensors") as raised:
        fsdp_to_hf(tmp_path / "state", tmp_path / "no", other, How())
    assert (raised.value.code, name in raised.value.why, "--origin-hf-dir" in raised.value.fix) == (
        "TRN116",
        True,
        True,
    )
    other = tiny_model(tmp_path / "deeper", hidden=128, layers=3)
    with pytest.raises(TrainerError, match="are not what the run started with"):
        fsdp_to_hf(tmp_path / "state", tmp_path / "no", other, How())


def test_adapters_are_evaluated_on_the_base_that_they_were_trained_on(folder, tmp_path):
    one = made.Bench(folder, lora_rank=4, base_weights="nf4")
    splits.fill_adapters(one.worker)
    one.call("export", tmp_path / "final")
    one.thread.close()

    async def scores(path, **train):
        config = made.config_of(path, **train, rollout={"rollout_max_context_len": 64})
        async with local_serving(
            config.model_copy(update={"cluster": ClusterSection(device="cpu", cpu_threads=1)})
        ) as serving:
            return await serving.engines.score(list(range(3, 40)), 1)

    load = {"lora_rank": 4, "lora_sync": "adapter", "lora_load": str(tmp_path / "final" / "adapter")}
    expected = asyncio.run(scores(tmp_path / "final"))
    assert np.abs(asyncio.run(scores(folder, **load)) - expected).max() < 1e-4
    file = tmp_path / "final" / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file)  # it no longer says what it was trained on
    assert np.abs(asyncio.run(scores(folder, **load)) - expected).max() > 1e-2
    assert np.abs(asyncio.run(scores(folder, **load, base_weights="nf4")) - expected).max() < 1e-4


def test_a_model_of_other_sizes_is_refused(tmp_path):
    small = tiny_model(tmp_path / "small", hidden=32)
    with pytest.raises(ConfigError, match="no weight of Qwen3ForCausalLM can be held in fp8"):
        made.Bench(small, **LORA, base_weights="fp8")


def watch_gathered(worker) -> list[int]:
    """Bytes of each layer's weights whenever it computes."""
    sizes: list[int] = []

    def count(layer, _):
        sizes.append(sum(part.nbytes for p in layer.parameters() for part in stored_parts(p.detach())))

    for layer in layers(worker.policy.hf):
        layer.register_forward_pre_hook(count)
    return sizes


def train_rank(folder: Path, out: Path, rank: int, world: int) -> None:
    """Verify a step, make it, and write what the ranks hold together."""
    thread = TorchThread(1)
    config = made.config_of(folder, **LORA, base_weights="nf4", max_tokens_per_gpu=60)
    trainer = FsdpTrainer(
        config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
        rendezvous=out / "meet" if world > 1 else None,
    )  # fmt: skip
    worker = trainer._worker
    thread.call(worker.begin, config)
    splits.fill_adapters(worker)
    batch = splits.with_roles(made.batch_of(groups=2))
    sizes = watch_gathered(worker)
    error = thread.call(worker.verify, batch)
    assert max(error["gradient_error"], error["loss_error"]) < 3e-5
    thread.call(worker.step, batch)
    if world > 1:
        assert set(sizes) == {gathered_layer(ModelSizes.of(folder), config.train, 4)}
    whole = thread.call(worker.whole)
    if rank == 0:
        rows = {name: dense(tensor) for name, tensor in whole.items() if name != "lm_head.weight"}
        save_file(rows, str(out / f"whole-{world}.safetensors"))
    thread.call(worker.barrier)
    thread.close()


def test_two_ranks_hold_and_train_what_one_does(folder, zygote, tmp_path):
    train_rank(folder, tmp_path, 0, 1)
    zygote.together(tmp_path, [[__file__, folder, tmp_path, rank, 2] for rank in range(2)])
    one, both = (load_file(tmp_path / f"whole-{world}.safetensors") for world in (1, 2))
    for name, tensor in one.items():
        torch.testing.assert_close(both[name], tensor, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    *places, number, count = sys.argv[1:]
    train_rank(*map(Path, places), int(number), int(count))
