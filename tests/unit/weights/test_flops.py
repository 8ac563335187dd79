"""Operations of a step, counted by hand and against the matrices of real models."""

from types import SimpleNamespace

import pytest

from slime_core.testing import tiny_model
from slime_core.weights.flops import Flops
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
