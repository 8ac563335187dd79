"""Folders of models that see pictures: opened, loaded as transformers loads them."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from slime_core.testing.vision import tiny_vision_model
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_vision_model_is_loaded_as_transformers_loads_it(tmp_path, family, tied):
    path = tiny_vision_model(tmp_path / "model", family, tied=tied)
    folder = ModelFolder.open(path)
    state = folder.build_model().state_dict()
    reference = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).state_dict()
    assert state.keys() == reference.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.items())
    assert sum(tensor.numel() for tensor in state.values()) < 300_000
    assert folder.eos_token_ids == (1,)
    assert folder.config.image_token_id < folder.vocab_size == len(folder.tokenizer())
