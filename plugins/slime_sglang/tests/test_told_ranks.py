"""Whose checksums a server's answer has: every rank of every copy, or, before 0.5.23, the first rank of each."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime_sglang.hashing import expected
from slime_sglang.layout import layout
from slime_sglang.router import Lane
from slime_sglang.weights import Ways, WeightRoutes, by_key

pytestmark = pytest.mark.unit

CONFIG = SimpleNamespace(
    model_type="llama", num_hidden_layers=1, vocab_size=64, hidden_size=8, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=12, tie_word_embeddings=True,
)  # fmt: skip
PARTS = ("input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_up_proj",
         "mlp.down_proj")  # fmt: skip
NAMES = ["model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.0.{part}.weight" for part in PARTS)]


def lane(tp, copies=1, client=None):
    return Lane(client=client, number=3, room=8, ranks=copies, facts={"tp_size": tp})


@pytest.mark.parametrize(
    ("tp", "copies", "answers", "labels"),
    [
        (1, 1, 1, {"server 3": ["a"]}),
        (2, 1, 2, {"server 3": ["a", "a@1"]}),
        (1, 2, 2, {"server 3 copy 0": ["a"], "server 3 copy 1": ["a"]}),
        (2, 2, 4, {"server 3 copy 0": ["a", "a@1"], "server 3 copy 1": ["a", "a@1"]}),
        (2, 1, 1, {"server 3": ["a"]}),
        (2, 2, 2, {"server 3 copy 0": ["a"], "server 3 copy 1": ["a"]}),
    ],
)
def test_answers_go_to_their_copy_and_rank(tp, copies, answers, labels):
    found = by_key(lane(tp, copies), [{"a": str(n)} for n in range(answers)])
    assert {label: list(sums) for label, sums in found.items()} == labels
    assert sorted(value for sums in found.values() for value in sums.values()) == [str(n) for n in range(answers)]


@pytest.mark.parametrize(("answers", "ranks", "said"), [(2, {0, 1}, 0), (1, {0}, 1)])
def test_ranks_that_a_server_does_not_tell_of_are_not_waited_for(answers, ranks, said):
    class Client:
        async def checksums(self):
            return [dict.fromkeys(NAMES, "0")] * answers

    notes = []
    features = frozenset({"weights_checker", "disk_update"})
    ways = Ways(model=CONFIG, dtype="float32", features=features, folder=Path("unused"))
    weights = WeightRoutes(ways, notes.append)
    route = asyncio.run(weights.route("all", [lane(2, client=Client())]))
    assert {row.rank for row in route.checks} == ranks
    assert len(notes) == said


@pytest.mark.parametrize("scales", [False, True])
def test_quantised_weights_are_compared_where_a_server_tells_checksums_of_their_values(scales):
    names = [*NAMES, f"{NAMES[3]}_scale_inv"] if scales else NAMES

    class Client:
        async def checksums(self):
            return [dict.fromkeys(names, "0")]

    notes = []
    features = frozenset({"weights_checker", "disk_update"})
    ways = Ways(model=CONFIG, dtype="bfloat16", features=features, folder=Path("unused"), fp8=True)
    served = Lane(client=Client(), number=0, room=8, facts={"tp_size": 1, "quantization": "fp8"})
    route = asyncio.run(WeightRoutes(ways, notes.append).route("all", [served]))
    assert bool(route.checks) is not scales
    assert [("checksums of values" in note) for note in notes] == [True] * scales


def test_a_folder_with_layers_for_pictures_has_the_checksums_of_its_text_model(tmp_path):
    class Client:
        async def checksums(self):
            return [dict.fromkeys(NAMES, "0")]

    pieces = {piece.name for row in layout(NAMES, CONFIG, 1) for piece in row.pieces if piece.name}
    tensors = {name: torch.full((64, 8), float(number)) for number, name in enumerate(sorted(pieces))}
    stored = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file(stored | {"model.visual.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    features = frozenset({"weights_checker", "disk_update"})
    weights = WeightRoutes(Ways(model=CONFIG, dtype="float32", features=features, folder=tmp_path))
    asyncio.run(weights.route("all", [lane(1, client=Client())]))
    assert weights.expected(tmp_path) == expected(tensors, weights.all_checks(), torch.float32, "sha256")
