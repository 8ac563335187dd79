"""Operations of a step, counted by hand and against the matrices of real models."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from slime_core.testing import tiny_model
from slime_core.testing.vision import tiny_vision_model
from slime_core.weights.flops import Flops, TowerFlops
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

DENSE = {
    "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3,
    "intermediate_size": 10, "vocab_size": 50,
}  # fmt: skip


def test_a_dense_model_by_hand():
    # a layer: q and o 8 x 12 each, k and v 8 x 6 each, the gated MLP 3 x 8 x 10; the output matrix 50 x 8
    weights = 2 * (2 * 96 + 2 * 48 + 240) + 400
    found = Flops.of(SimpleNamespace(**DENSE))
    assert found.token == 6 * weights
    assert found.pair == 6 * 2 * 4 * 3  # layers, heads, width
    assert found.sequence(10.0) == 6 * weights * 10 + 144 * 100
    assert found.sequence(10.0, 4.0) == found.sequence(10.0) - found.sequence(4.0)


def test_of_experts_those_that_a_token_meets_count():
    moe = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [0]}
    found = Flops.of(SimpleNamespace(**DENSE, **moe))
    assert found.token == 6 * (2 * 288 + 240 + (2 * 3 * 8 * 5 + 8 * 16) + 400)


def test_latent_attention_by_hand():
    latent = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    found = Flops.of(SimpleNamespace(**{**DENSE, "head_dim": None}, **latent))
    attention = 6 * 8 + 6 * 24 + 8 * 7 + 5 * 4 * 7 + 4 * 3 * 8
    assert found.token == 6 * (2 * (attention + 240) + 400)
    assert found.pair == 3 * 2 * 4 * (6 + 3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_are_the_models_matrices_but_the_embedding(tmp_path, family, tied):
    folder = ModelFolder.open(tiny_model(tmp_path / "m", family=family, tied=tied))
    model = folder.build_model("float32", 0)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    embedding = 0 if tied else model.get_input_embeddings().weight.numel()
    assert Flops.of(folder.config).token == 6 * (matrices - embedding)


def test_a_vision_tower_by_hand():
    """Two layers of width 8, one of them over windows of 4 patches; four patches stand behind a placeholder."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={**DENSE, "hidden_size": 12, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
        vision_config={
            "depth": 2, "hidden_size": 8, "intermediate_size": 10, "num_heads": 2, "patch_size": 2, "window_size": 4,
            "fullatt_block_indexes": [1], "out_hidden_size": 12, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=48, video_token_id=49,
    )  # fmt: skip
    tower = Flops.of(config).tower
    # a patch: embedding 3 x 2 x 2 x 2 pixels x 8, two layers of q, k, v, o (4 x 8 x 8) and the gated MLP (3 x 8 x 10)
    patch = 24 * 8 + 2 * (256 + 240)
    merger = 32 * 32 + 32 * 12
    assert tower.token == 4 * (6 * patch + 12 * 8 * 4) + 6 * merger
    assert tower.pair == 12 * 8 * 16
    frozen = Flops.of(config, frozen_tower=True).tower
    assert (frozen.token, frozen.pair) == (tower.token / 3, tower.pair / 3)
    begins, operations = tower.pictures(np.array([5, 48, 48, 48, 6, 49, 49]))
    assert begins.tolist() == [1, 5]
    assert operations.tolist() == [tower.token * n + tower.pair * n * n for n in (3, 2)]
    assert Flops.of(SimpleNamespace(**DENSE)).tower is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_towers_operations_are_those_that_torch_counts(tmp_path, family):
    """A picture of whole windows, or one crop, forward: a third of a training pass."""
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 3}
        config = transformers.Qwen2VLConfig(text_config={**DENSE, "hidden_size": 48}, vision_config=vision)
    else:
        config = transformers.AutoConfig.from_pretrained(tiny_vision_model(tmp_path / "m", family, weights=False))
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").model
    tower = TowerFlops.of(config, frozen=True)
    if family == "smolvlm":
        size, tokens = config.vision_config.image_size, 4
        arrays = {"pixel_values": torch.zeros(1, 1, 3, size, size)}
    else:
        vision, tokens = config.vision_config, 16
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        arrays = {"pixel_values": torch.zeros(64, width), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_image_features(**arrays)
    assert counter.get_total_flops() == tower.picture(tokens)
