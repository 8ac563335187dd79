"""Layers that predict further ahead stay with a folder that is written without them."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

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
    ],
    ids=["none", "after the model's", "beside it"],
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
    assert set(load_file(new / "model.safetensors")) == {"model.norm.weight"}
