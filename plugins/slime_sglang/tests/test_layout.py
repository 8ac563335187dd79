"""Names of an engine's tensors and a config in, pieces of Hugging Face tensors out: against loaders written apart."""

import re
from types import SimpleNamespace

import pytest
import torch
from small_engine import Rank, hf_tensors, small_config

from slime_core.errors import EngineError
from slime_core.types import Piece, RankTensor
from slime_sglang.hashing import checksum, expected
from slime_sglang.layout import layout, uncovered
from slime_sglang.server_sizes import ServerSizes, unknown
from slime_sglang.towers import TowerSizes

pytestmark = pytest.mark.unit

MOE = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
       "mlp_only_layers": []}  # fmt: skip


def served(config, tp, ep=1, **more):
    """Ranks that have loaded a model, its tensors, and the names that a rank tells."""
    tensors = hf_tensors(config)
    ranks = [Rank(config, n, tp, ep, **more) for n in range(tp)]
    for rank in ranks:
        for name, tensor in tensors.items():
            rank.take(name, tensor)
    return ranks, tensors, list(ranks[0].tensors)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"vocab_size": 64},
        {"vocab_size": 33},
        {"model_type": "qwen2"},
        {"model_type": "llama"},
        {"model_type": "mistral"},
        {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen3", "num_key_value_heads": 1},
        {"model_type": "qwen3", "num_key_value_heads": 4},
        MOE,
    ],
    ids=str,
)
def test_ranks_hold_the_bytes_that_the_layout_says(changes, tp):
    """Every byte of every rank, with more and with fewer ranks than key and value heads."""
    config = small_config(**changes)
    ranks, tensors, names = served(config, tp)
    rows = layout(names, config, tp)
    found = expected(tensors, rows, torch.float32, "sha256")
    assert [row.name for row in rows] == [name for name in names for _ in range(tp)]
    for row in rows:
        assert found[row.key] == checksum(ranks[row.rank].tensors[row.name], "sha256"), row


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_experts_may_be_shared_out_in_groups(tp, ep):
    config = small_config(**MOE)
    ranks, tensors, names = served(config, tp, ep)
    rows = layout(names, config, tp, ep=ep)
    found = expected(tensors, rows, torch.float32, "sha256")
    assert all(found[row.key] == checksum(ranks[row.rank].tensors[row.name], "sha256") for row in rows)


def test_shared_experts_may_lie_behind_the_others_and_then_groups_are_refused():
    """As on GPUs, where a token's shared expert is one more of its experts."""
    routed = {"n_routed_experts": 2, "n_shared_experts": 1, "moe_intermediate_size": 8, "use_qk_norm": False}
    config = small_config(model_type="glm4_moe", num_hidden_layers=1, first_k_dense_replace=0, **routed)
    parts = (
        *("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.weight"),
        *("self_attn.o_proj.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
        *("mlp.experts.w13_weight", "mlp.experts.w2_weight"),
    )
    names = [f"model.layers.0.{part}" for part in parts]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    rows = {row.key: row for row in layout(names, config, 2)}
    mlp = "model.layers.0.mlp."
    assert rows[f"{mlp}experts.w13_weight@1"].pieces == tuple(
        Piece(name=f"{mlp}{of}.{part}_proj.weight", start=4, stop=8)
        for of in ("experts.0", "experts.1", "shared_experts")
        for part in ("gate", "up")
    )
    assert [row.wide for row in rows.values() if row.name.startswith(f"{mlp}gate")] == [True] * 4
    with pytest.raises(EngineError, match="which of 2 groups has the shared experts is not known"):
        layout(names, config, 2, ep=2)


def test_an_engine_of_one_rank_holds_whole_tensors():
    names = served(small_config(), 1)[2]
    rows = {row.name: row for row in layout(names, small_config(), 1)}
    prefix = "model.layers.1.self_attn."
    parts = tuple(Piece(name=f"{prefix}{which}_proj.weight") for which in "qkv")
    assert rows[prefix + "qkv_proj.weight"] == RankTensor(name=prefix + "qkv_proj.weight", pieces=parts)
    embed = "model.embed_tokens.weight"
    assert rows[embed].pieces == (Piece(name=embed), Piece(name="", stop=58))  # 70 rows, padded to 128
    assert rows["model.norm.weight"].pieces == (Piece(name="model.norm.weight"),)


def test_ranks_beyond_the_key_heads_share_them():
    """2 heads on 4 ranks: ranks 0 and 1 hold the first, 2 and 3 the second."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    rows = [row for row in layout(served(small_config(), 4)[2], small_config(), 4) if row.name == name]
    keys = [(row.pieces[1].start, row.pieces[1].stop) for row in rows]
    assert keys == [(0, 6), (0, 6), (6, 12), (6, 12)]
    assert [(row.pieces[0].start, row.pieces[0].stop) for row in rows] == [(0, 6), (6, 12), (12, 18), (18, 24)]


def test_a_tied_output_embedding_that_an_engine_keeps_must_be_the_input_embedding():
    config = small_config(tie_word_embeddings=True)
    ranks, tensors, names = served(config, 2, keeps_head=True)
    assert "lm_head.weight" in names
    rows = layout(names, config, 2)
    found = expected(tensors, rows, torch.float32, "sha256")
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"]
    assert found["lm_head.weight@1"] == checksum(ranks[1].tensors["lm_head.weight"], "sha256")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.attn.k_scale",
        "model.layers.0.mlp.shared_expert.gate_up_proj.weight",
        "model.rotary.cos",
        "visual.patch_embed.weight",
        "model.layers.0.mlp.gate_up_proj.qweight",
    ],
)
def test_a_name_that_is_not_known_is_an_error_that_names_it(name):
    """Nothing is skipped silently: it might be a weight that training changes."""
    names = [*served(small_config(), 1)[2], name]
    with pytest.raises(EngineError, match=name) as error:
        layout(names, small_config(), 1)
    assert error.value.code == "ENG86"


@pytest.mark.parametrize("lost", ["model.layers.2.mlp.gate_up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_tensor_that_no_name_holds_is_an_error_that_names_it(lost):
    names = [name for name in served(small_config(), 1)[2] if name != lost]
    with pytest.raises(EngineError, match="in none that the engine holds") as error:
        layout(names, small_config(), 1)
    assert lost.replace("gate_up", "gate") in str(error.value)


def test_a_layer_that_the_engine_does_not_have_is_named():
    """A pipeline stage, or a folder of another depth."""
    names = [name for name in served(small_config(), 1)[2] if ".layers.1." not in name]
    with pytest.raises(EngineError, match=r"tensors of the model .* model\.layers\.1\.input_layernorm\.weight"):
        layout(names, small_config(), 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"model_type": "mistral"}, ""),
        (
            {"model_type": "mamba"},
            "of type mamba .* log-probs alone .* qwen2, mimo, qwen3, llama, mistral, glm4, qwen3_moe",
        ),
        ({"model_type": "llama", "mlp_bias": True}, "biases in its MLPs"),
    ],
)
def test_a_family_whose_layout_is_not_known_says_which_are(changes, reason):
    assert re.search(reason, unknown(small_config(**changes)))
    assert bool(unknown(small_config(**changes))) == bool(reason)


@pytest.mark.parametrize(
    "changes", [{"num_attention_heads": 3}, {"num_key_value_heads": 3}, {"intermediate_size": 11}]
)
def test_sizes_that_ranks_do_not_divide_are_refused(changes):
    names = served(small_config(), 1)[2]
    with pytest.raises(EngineError, match=r"do not divide by|cannot be spread over") as error:
        layout(names, small_config(**changes), 2 if "num_key_value_heads" not in changes else 4)
    assert error.value.code == "ENG86"


def test_tensors_that_are_not_covered_are_listed():
    rows = [RankTensor(name="a", pieces=(Piece(name="x"), Piece(name="", stop=3)))]
    assert uncovered(rows, ["y", "x", "z"]) == ["y", "z"]


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Qwen3Moe"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_tensors_of_a_config_are_those_of_transformers_model(family, bias):
    """A tensor that transformers' model has and the layout forgets would never be compared."""
    import transformers

    small = {"vocab_size": 70, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 12, "tie_word_embeddings": bias}  # fmt: skip
    moe = {"num_experts": 2, "moe_intermediate_size": 4, "num_experts_per_tok": 1} if family == "Qwen3Moe" else {}
    attention = {"attention_bias": bias} if family != "Qwen2" else {}
    config = getattr(transformers, f"{family}Config")(**small, **moe, **attention)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = []
    for name in dict(model.named_parameters()):
        stacked = {"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)}
        for end, parts in stacked.items():
            if name.endswith(end):
                prefix = name.removesuffix(end)
                names += [f"{prefix}experts.{e}.{part}_proj.weight" for e in range(2) for part in parts]
                break
        else:
            names.append(name)
    assert sorted(ServerSizes.of(config, 1, 1).names()) == sorted(names)


def test_the_width_of_a_published_tower_is_filled_up_with_zeros():
    vision = SimpleNamespace(depth=1, hidden_size=1280, num_heads=16, intermediate_size=3420, spatial_merge_size=2)
    config = SimpleNamespace(model_type="qwen2_5_vl", vision_config=vision)  # of Qwen2.5-VL-3B
    tower = TowerSizes.of(config, 2, tp=2, cpu=False)
    mlp = "visual.blocks.0.mlp."
    down = tower.pieces(f"{mlp}down_proj.weight", 1)
    assert [(piece.name, piece.dim, piece.start, piece.stop) for piece in down] == [
        (f"{mlp}down_proj.weight", 1, 1712, 3420),
        ("", 1, 0, 4),
    ]
    first, second = (tower.pieces(f"{mlp}gate_up_proj.weight", rank) for rank in range(2))
    assert [(piece.name, piece.start, piece.stop) for piece in second] == [
        (f"{mlp}gate_proj.weight", 1712, 3420),
        ("", 0, 4),
        (f"{mlp}up_proj.weight", 1712, 3420),
        ("", 0, 4),
    ]
    assert [piece.stop - piece.start for piece in first] == [1712, 1712]
