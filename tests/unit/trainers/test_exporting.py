"""Checkpoints of the FSDP trainer as model folders: what its own export writes, and experts' stacks cut apart."""

import json

import pytest
import torch
import trainer_bench as made
from safetensors.torch import load_file, save_file

from slime_convert.folder_writing import How
from slime_convert.fsdp_to_hf import fsdp_to_hf
from slime_core.trainers.fsdp.slices import slices_metadata
from slime_core.weights.shards import Shards

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_trainer_gives_the_folder_that_it_would_export(bench, tmp_path, tied):
    one = bench(tied=tied, lr=1e-2)
    one.call("step", made.batch_of())
    (tmp_path / "step-1").mkdir()
    one.thread.call(one.worker.save, tmp_path / "step-1" / "trainer")
    one.worker.staging.wait()
    one.thread.call(one.worker.export, tmp_path / "final")
    folder = next(path for path in tmp_path.iterdir() if path.name.startswith("model-"))
    fsdp_to_hf(tmp_path / "step-1", tmp_path / "hf", folder, How(verify=True))
    ours, theirs = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        load_file(tmp_path / "final" / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].to(tensor.dtype), tensor), name


def save_in_slices(tensors, folder):
    """Two files, with the first third of each tensor's rows and the rest: stacks are cut between matrices."""
    for rank in range(2):
        third = {name: -(-len(tensor) // 3) for name, tensor in tensors.items()}
        parts = {name: tensor[third[name] :] if rank else tensor[: third[name]] for name, tensor in tensors.items()}
        starts = {n: ((third[n] * rank, *[0] * (t.ndim - 1)), t.shape) for n, t in tensors.items()}
        file = folder / f"parameters-{rank + 1}-of-2.safetensors"
        save_file({name: part.contiguous() for name, part in parts.items()}, file, slices_metadata(starts))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_stacks_of_experts_become_the_matrices_of_a_model_folder(tmp_path, family):
    """Buffers that no trainer changes (a router's bias) come from the folder of origin."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 99,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "pad_token_id": 0}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "head_dim": 4}
    else:
        sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12}
        sizes |= {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.normal_() if tensor.is_floating_point() else None
    model.save_pretrained(tmp_path / "origin")
    step = tmp_path / "step-3" / "trainer"
    step.mkdir(parents=True)
    save_in_slices({name: tensor.detach() for name, tensor in model.named_parameters()}, step)
    assert any(tensor.ndim == 3 for tensor in model.parameters())
    fsdp_to_hf(tmp_path / "step-3", tmp_path / "hf", tmp_path / "origin", How(verify=True, shard=20000))
    ours, theirs = Shards.open(tmp_path / "hf"), Shards.open(tmp_path / "origin")
    assert set(ours) == set(theirs)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    assert json.loads((tmp_path / "hf" / "config.json").read_bytes())["dtype"] == "float32"
