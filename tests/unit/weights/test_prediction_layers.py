"""Layers that predict further ahead stay with a folder that is written without them."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime_core.weights.prediction_layers import carry, prefixes
from slime_core.weights.shards import Shards

pytestmark = pytest.mark.unit


def config(model_type, **more):
    return SimpleNamespace(model_type=model_type, num_hidden_layers=2, **more)


@pytest.mark.parametrize(
    ("model", "starts"),
    [
        (config("qwen3"), ()),
        (config("glm4_moe", num_nextn_predict_layers=2), ("model.mtp_layers.", "model.layers.2.", "model.layers.3.")),
        (config("qwen3_next"), ("mtp.",)),
        (config("qwen3_5"), ("mtp.", "model.visual.")),
    ],
    ids=["none", "after the model's", "beside it", "and layers for pictures"],
)
def test_their_tensors_are_known_by_their_names(model, starts):
    assert prefixes(model) == starts


def test_a_folder_that_was_written_without_them_has_them_again(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    weight, ahead = torch.ones(2, 3), torch.arange(6.0)
    for folder, tensors in (
        (old, {"model.norm.weight": weight, "mtp.fc.weight": ahead}),
        (new, {"model.norm.weight": weight * 2}),
    ):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    carry(old, new, config("qwen3_next"))
    stored = Shards.open(new)
    assert set(stored) == {"model.norm.weight", "mtp.fc.weight"}
    assert torch.equal(stored["mtp.fc.weight"], ahead)
    assert torch.equal(stored["model.norm.weight"], weight * 2)
    assert not (new / "model.safetensors").exists()  # transformers would read it alone


def test_a_model_of_pictures_and_text_has_its_whole_config_again(tmp_path):
    """The folder was written by its text part, in another dtype."""
    old, new = tmp_path / "old", tmp_path / "new"
    folders = {
        old: ({"model.visual.weight": torch.ones(1)}, {"model_type": "qwen3_5", "text_config": {"dtype": "bfloat16"}}),
        new: ({"lm_head.weight": torch.ones(2)}, {"model_type": "qwen3_5_text", "dtype": "float32"}),
    }
    for folder, (tensors, table) in folders.items():
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(table))
    carry(old, new, config("qwen3_5", text_config=object()))
    assert set(Shards.open(new)) == {"lm_head.weight", "model.visual.weight"}
    whole = {"model_type": "qwen3_5", "text_config": {"dtype": "float32"}, "dtype": "float32"}
    assert json.loads((new / "config.json").read_text()) == whole


def test_stacked_experts_of_a_published_folder_are_read_one_by_one(tmp_path):
    """Two experts of inner size 3 and width 2: gate over up, and down."""
    name = "model.language_model.layers.0.mlp.experts"
    both, down = torch.arange(24.0).view(2, 6, 2), torch.arange(12.0).view(2, 2, 3) + 100
    save_file({f"{name}.gate_up_proj": both, f"{name}.down_proj": down}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_moe"}')
    shards = Shards.open(tmp_path)
    assert len(shards) == 6
    assert torch.equal(shards[f"{name}.1.gate_proj.weight"], both[1, :3])
    assert torch.equal(shards[f"{name}.1.up_proj.weight"], both[1, 3:])
    assert torch.equal(shards[f"{name}.0.down_proj.weight"], down[0])
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')  # stacks of another layout
    assert set(Shards.open(tmp_path)) == {f"{name}.gate_up_proj", f"{name}.down_proj"}
