"""What leaves a trainer: saved state comes back bit for bit, final folders load, published tensors are the weights."""

import json

import pytest
import torch
import trainer_bench as made
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_core.errors import StorageError, TrainerError
from slime_core.testing import tiny_model

pytestmark = pytest.mark.unit


def test_training_goes_on_bit_for_bit_after_a_restore(bench, tmp_path):
    settings = {"kl_loss_coef": 0.1, "lr_warmup_iters": 3, "lr_decay_style": "cosine", "weight_decay": 0.1}
    one, batch = bench(**settings), made.batch_of()
    batch.columns["reference"] = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    one.call("step", batch)
    one.call("save", tmp_path / "saved")
    want = [one.call("step", batch) for _ in range(2)]
    other = bench(folder=tiny_model(tmp_path / "other", seed=5), **settings)
    other.call("restore", tmp_path / "saved")
    assert [other.call("step", batch) for _ in range(2)] == want
    mine, theirs = one.parameters(), other.parameters()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    reference = [b.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"] for b in (one, other)]
    assert (reference[0] == reference[1]).all()


def test_saved_files_are_safetensors_and_json(bench, tmp_path):
    one = bench()
    one.call("step", made.batch_of())
    one.call("save", tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "generators.json",
        "moments.safetensors",
        "parameters.safetensors",
        "trainer.json",
    ]
    assert json.loads((tmp_path / "saved" / "trainer.json").read_text())["optimizer_steps"] == 1


def test_a_checkpoint_of_another_model_is_refused(bench, tmp_path):
    one = bench()
    one.call("save", tmp_path / "saved")
    other = bench(folder=tiny_model(tmp_path / "other", hidden=32))
    with pytest.raises(TrainerError, match="TRN108"):
        other.call("restore", tmp_path / "saved")


@pytest.mark.parametrize("name", ["parameters.safetensors", "moments.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_checkpoint_is_refused(bench, tmp_path, name, damage):
    one = bench()
    one.call("step", made.batch_of())
    one.call("save", tmp_path / "saved")
    file = tmp_path / "saved" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(data[: len(data) // 2])
    before = one.parameters()
    with pytest.raises(StorageError, match=name.replace(".", r"\.")):
        one.call("restore", tmp_path / "saved")
    assert all(torch.equal(before[n], t) for n, t in one.parameters().items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_an_exported_folder_loads_with_transformers(bench, tmp_path, family, tied, capfd):
    one, batch = bench(family, tied), made.batch_of()
    one.call("step", batch)
    capfd.readouterr()
    one.call("export", tmp_path / "final")
    assert capfd.readouterr() == ("", "")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "final"))
    assert type(model).__name__ == {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[family] + "ForCausalLM"
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    parameters = dict(model.named_parameters())
    assert parameters.keys() == one.parameters().keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in one.parameters().items())
    assert AutoTokenizer.from_pretrained(str(tmp_path / "final")).encode("1+1") == one.folder.tokenizer().encode("1+1")
    found = bench(folder=tmp_path / "final").call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    assert (found == one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_shares_the_live_storage_it_computes_with_tied_names_too(bench, dtype):
    one, batch = bench(tied=True, dtype=dtype), made.batch_of()
    update = one.call("publish", 4)
    assert (update.version, update.transport) == (4, "shared")
    before = {name: tensor.clone() for name, tensor in update.tensors.items()}
    assert update.tensors["lm_head.weight"].data_ptr() == update.tensors["model.embed_tokens.weight"].data_ptr()
    one.call("step", batch)
    assert not torch.equal(before["lm_head.weight"], update.tensors["lm_head.weight"])
    assert not any(tensor.requires_grad for tensor in update.tensors.values())
    for name, master in one.parameters().items():
        assert master.dtype == torch.float32
        assert torch.equal(update.tensors[name], master.to(getattr(torch, dtype)))


def test_a_reference_in_bfloat16_is_computed_with_and_leaves_no_trace(bench):
    one, batch = bench(dtype="bfloat16", kl_loss_coef=0.1), made.batch_of()
    first = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    batch.columns["reference"] = first
    one.call("step", batch)
    now = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    again = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    assert (again == first).all()
    assert (now != first).any()
    assert (one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"] == now).all()
