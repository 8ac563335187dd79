"""Every table against a small random model that transformers saved: names, shapes, and tensors there and back."""

import pytest
import torch

from slime_convert.bridge import check_tensors, join, part, shard, unshard, whole_shape
from slime_core import DataError

pytestmark = pytest.mark.unit


def test_the_entries_name_exactly_the_tensors_of_the_folder(small):
    named = [name for entry in small.entries for name in entry.hf]
    assert sorted(named) == sorted(small.shards)
    assert len({entry.megatron for entry in small.entries}) == len(small.entries)


def test_the_shapes_of_the_entries_are_those_of_the_folder(small):
    shapes = {name: shape for entry in small.entries for name, shape in zip(entry.hf, entry.shapes, strict=True)}
    assert shapes == {name: info.shape for name, info in small.shards.infos.items()}


def test_parting_a_joined_tensor_gives_the_same_bits_back(small):
    for entry in small.entries:
        tensors = [small.shards[name] for name in entry.hf]
        whole = join(entry, tensors, small.sizes)
        assert tuple(whole.shape) == whole_shape(entry, small.sizes), entry
        again = part(entry, whole, small.sizes)
        assert len(again) == len(tensors), entry
        assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True)), entry


@pytest.mark.parametrize("ranks", [2, 4])
def test_collecting_the_shards_gives_the_whole_tensor_bit_for_bit(small, ranks):
    for entry in small.entries:
        whole = join(entry, [small.shards[name] for name in entry.hf], small.sizes)
        shards = [shard(entry, whole, rank, ranks) for rank in range(ranks)]
        assert len({tuple(piece.shape) for piece in shards}) == 1, entry
        assert entry.kind == "whole" or shards[0].numel() * ranks == whole.numel(), entry
        assert torch.equal(unshard(entry, shards), whole), entry


def test_a_folder_that_fits_passes_and_a_stored_copy_of_a_tied_matrix_too(small):
    found = {name: info.shape for name, info in small.shards.infos.items()}
    check_tensors(small.entries, small.sizes, found, small.folder)
    copy = {**found, "lm_head.weight": found["model.embed_tokens.weight"]}
    check_tensors(small.entries, small.sizes, copy, small.folder)


def test_tensors_that_do_not_fit_are_named_with_both_shapes(models):
    small = models["qwen3"]
    found = {name: info.shape for name, info in small.shards.infos.items()}
    norm, q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    del found[norm]
    found |= {"model.layers.0.mlp.surplus": (1,), q: (8, 8), "lm_head.copy": (2, 2)}
    with pytest.raises(DataError, match="1 missing, 2 extra, 1 mis-shaped") as error:
        check_tensors(small.entries, small.sizes, found, small.folder)
    assert error.value.code == "TOK46"
    assert all(text in error.value.why for text in (norm, "mlp.surplus", f"{q} is [8, 8] in the folder, [64, 32]"))
