"""What a trainer publishes by a route: names, dtypes and bytes of the model folder, from one rank and from two."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
import trainer_bench as made
import transformers
from safetensors.torch import load_file, save_file

from slime_core.errors import SlimeError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.families import FAMILIES, family_config, family_model
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.adapters import MergedWeights
from slime_core.trainers.fsdp.publishing import check_names, sources_of, stored_buffers
from slime_core.types import Piece, RankTensor, WeightRoute
from slime_core.weights import hashing
from slime_core.weights.build import skeleton
from slime_core.weights.folder import ModelFolder
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import stream

pytestmark = pytest.mark.unit

SERVED = {"rollout_engine": "sglang"}


def route(folder, **more):
    return WeightRoute(**{"transport": "disk", "dtype": "bfloat16", "folder": str(folder), **more})


def publish_rank(folder, out, thread, rank, world):
    """Publish by every route as one rank of two; write what came of it."""
    config = made.config_of(folder, rollout=SERVED)
    trainer = FsdpTrainer(
        config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
        rendezvous=out / "meet",
    )  # fmt: skip
    worker = trainer._worker
    update = thread.call(worker.publish, 4, route(out / "weights"))
    (out / "blocked").write_text("no folder")
    error = ""
    try:
        thread.call(worker.publish, 5, route(out / "blocked"))
    except SlimeError as raised:
        error = f"{raised.code} {raised.where}"
    staged = thread.call(worker.publish, 6, WeightRoute(transport="tensor", dtype="bfloat16"))
    if rank == 0:
        views = worker.senders.by_transport["tensor"]._staging.views
        save_file({name: view.clone() for name, view in views.items()}, str(out / "staged.safetensors"))
    spread = WeightRoute(transport="tensor", dtype="bfloat16", copies=tuple(range(1, world)))
    copies = [(thread.call(worker.publish, version, spread).handle or {}).get("copies") for version in (7, 8)]
    views = worker.senders.by_transport["tensor"]._staging.views
    save_file({name: view.clone() for name, view in views.items()}, str(out / f"copy-{rank}.safetensors"))
    answers = {
        "copies": copies,
        "disk": update.handle,
        "error": error,
        "tensor": staged.handle and len(staged.handle["buckets"]),
    }
    (out / f"answers-{rank}.json").write_text(json.dumps(answers))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_has_the_names_of_the_model_folder_and_the_trained_values_cast(bench, tmp_path, tied, dtype):
    one = bench(tied=tied)
    with torch.no_grad():
        for parameter in one.worker.actor.locals().values():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    update = asyncio.run(one.trainer.publish(3, route(tmp_path / "w", dtype=dtype)))
    assert (update.version, update.transport, dict(update.tensors)) == (3, "disk", {})
    folder = Path(update.handle["folder"])
    stored = load_file(str(folder / "model.safetensors"))
    original = load_file(str(one.folder.path / "model.safetensors"))
    assert stored.keys() == original.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in one.worker.actor.locals().items():
        assert torch.equal(stored[name], tensor.to(getattr(torch, dtype)))
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["model_type"], config["tie_word_embeddings"]) == (dtype, "qwen3", tied)


def test_an_update_carries_the_checksums_of_what_it_sent(bench, tmp_path):
    one = bench(rollout=SERVED)
    q, k, v = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkv")
    held = RankTensor(name="model.layers.0.self_attn.qkv_proj.weight", pieces=tuple(Piece(name=n) for n in (q, k, v)))
    for transport in ("disk", "tensor"):
        update = asyncio.run(one.trainer.publish(3, route(tmp_path, transport=transport, checks=(held,))))
        tensors = one.worker.actor.locals()
        fused = torch.cat([tensors[name].bfloat16() for name in (q, k, v)])
        assert update.fingerprints == {held.key: hashing.checksum(fused)}


def test_without_a_route_the_engine_reads_the_live_tensors(bench):
    update = asyncio.run(bench().trainer.publish(3))
    assert (update.transport, update.handle, update.fingerprints) == ("shared", None, {})


def test_memory_of_a_transport_is_given_back_with_the_parameters_and_taken_again(bench, tmp_path):
    one = bench(rollout=SERVED)
    first = asyncio.run(one.trainer.publish(3, route("", transport="tensor"))).handle
    asyncio.run(one.trainer.release({"gradients", "optimizer"}))
    assert asyncio.run(one.trainer.publish(3, route("", transport="tensor"))).handle == first
    asyncio.run(one.trainer.release({"parameters"}))
    assert one.worker.senders.by_transport["tensor"]._staging is None
    asyncio.run(one.trainer.reacquire({"parameters"}))
    again = asyncio.run(one.trainer.publish(3, route("", transport="tensor"))).handle
    assert [bucket["names"] for bucket in again["buckets"]] == [bucket["names"] for bucket in first["buckets"]]


def sources_in(folder):
    """Sources of a folder's model, and the layout that they have."""
    hf = folder.build_model()
    layout = FolderLayout(hf)
    weights = MergedWeights(None, dict(hf.named_parameters()) | stored_buffers(hf))
    return sources_of(weights, torch.device("cpu"), layout.parts), layout


@pytest.mark.parametrize(
    ("family", "init_weights"), [*((family, "load") for family in FAMILIES), ("qwen3-moe", "random")]
)
def test_every_family_leaves_in_names_and_values_of_its_folder(tmp_path, family, init_weights):
    path = family_model(tmp_path / "m", family)
    sources, _ = sources_in(ModelFolder.open(path, init_weights=init_weights))
    stored = Shards.open(path)
    sent = {part.name: (part, tensor) for parts, tensor in stream(sources) for part in parts}
    assert sent.keys() == stored.keys()
    for name, (part, tensor) in sent.items():
        assert part.shape == stored[name].shape
        assert torch.equal(part.cut(tensor), stored[name])


def test_of_a_model_of_pictures_the_text_part_leaves_in_the_folders_names(tmp_path):
    """As Qwen3.5 is published: names of the whole model, and the experts of a layer in two tensors."""
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    text = family_config("qwen3-next", len(tokenizer)).to_dict()
    pictures = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=pictures)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = ModelFolder.open(tmp_path)
    sources, layout = sources_in(folder)
    check_names(layout, sources, folder)
    stored = {name: tensor for name, tensor in folder.tensors().items() if ".visual." not in name}
    sent = {part.name: part.cut(tensor) for parts, tensor in stream(sources) for part in parts}
    assert sent.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in sent.items())
    assert "model.language_model.layers.1.mlp.experts.3.up_proj.weight" in sent


def test_names_that_the_folder_does_not_have_are_refused(tmp_path):
    """As an older transformers saved GPT-NeoX: an engine would keep its output matrix for ever."""
    folder = ModelFolder.open(family_model(tmp_path / "m", "neox"))
    sources, layout = sources_in(folder)
    check_names(layout, sources, folder)
    file = folder.path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    folder = ModelFolder.open(folder.path)
    sources, layout = sources_in(folder)
    with pytest.raises(TrainerError, match=r"1 tensors .*: embed_out\.weight"):
        check_names(layout, sources, folder)


def test_tensors_of_another_layout_are_refused_by_name():
    """Kimi Linear's convolution is three tensors in its folder."""
    config = transformers.KimiLinearConfig(num_hidden_layers=1)
    layout = FolderLayout(skeleton(config))
    with pytest.raises(TrainerError, match=r"self_attn\.conv1d\.weight of shape \[96, 1, 4\]") as caught:
        layout.parts("model.layers.0.self_attn.conv1d.weight", torch.Size([96, 1, 4]))
    assert "q_conv1d" in caught.value.why


@pytest.fixture(scope="module")
def two(zygote, tmp_path_factory):
    """A model folder, and what two ranks wrote."""
    folder = tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)
    out = tmp_path_factory.mktemp("two")
    ranks = [[__file__, folder, out, rank, 2] for rank in range(2)]
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    return folder, out


@pytest.mark.integration
def test_two_ranks_publish_whole_tensors_and_rank_0_answers(two):
    folder, out = two
    original = load_file(str(folder / "model.safetensors"))
    for file in (out / "weights" / "v-4" / "model.safetensors", out / "staged.safetensors"):
        found = load_file(str(file))
        assert found.keys() == original.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, original[name].bfloat16())
    answers = [json.loads((out / f"answers-{rank}.json").read_text()) for rank in range(2)]
    assert answers[0]["disk"] == {"folder": str(out / "weights" / "v-4")}
    assert answers[0]["tensor"] == 1
    assert not answers[1]["disk"]
    assert not answers[1]["tensor"]


@pytest.mark.integration
def test_every_rank_that_shares_its_gpu_with_a_server_holds_a_copy_and_rank_0_tells_where(two):
    folder, out = two
    original = load_file(str(folder / "model.safetensors"))
    for rank in range(2):
        found = load_file(str(out / f"copy-{rank}.safetensors"))
        assert found.keys() == original.keys()
        assert all(torch.equal(tensor, original[name].bfloat16()) for name, tensor in found.items())
    told, nothing = (json.loads((out / f"answers-{rank}.json").read_text())["copies"] for rank in range(2))
    assert nothing == [None, None]
    assert told[0] == told[1], "the buffers stay where they are"
    (bucket,) = told[0]["1"]
    assert sorted(bucket["names"]) == sorted(original)
    assert bucket["handle"]


@pytest.mark.integration
def test_a_rank_0_that_cannot_write_leaves_no_other_rank_waiting(two):
    _, out = two
    answers = [json.loads((out / f"answers-{rank}.json").read_text()) for rank in range(2)]
    assert answers[0]["error"].startswith("STO00 ")
    assert answers[1]["error"] == ""


if __name__ == "__main__":
    one_thread = TorchThread(1)
    publish_rank(Path(sys.argv[1]), Path(sys.argv[2]), one_thread, int(sys.argv[3]), int(sys.argv[4]))
    one_thread.close()
