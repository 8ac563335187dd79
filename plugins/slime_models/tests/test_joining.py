"""Joins worked out by hand, on tensors small enough to read."""

import pytest
import torch

from slime_convert.bridge import Entry, Sizes, join, part, shard, unshard, whole_shape

pytestmark = pytest.mark.unit

SIZES = Sizes(layers=1, hidden=2, heads=4, groups=2, head_dim=1, vocab=3, padded_vocab=4, rope=6)


def rows(*names):
    """A matrix whose rows are the letters' numbers, so that a row can be followed."""
    return torch.tensor([[float(ord(name)), -float(ord(name))] for name in names])


def letters(tensor):
    return "".join(chr(int(value)) for value in tensor.reshape(len(tensor), -1)[:, 0])


def test_qkv_stands_group_by_group_each_with_its_queries_its_key_and_its_value():
    entry = Entry("linear_qkv", ("q", "k", "v"), "qkv")
    q, k, v = rows(*"abcd"), rows(*"KL"), rows(*"VW")
    whole = join(entry, [q, k, v], SIZES)
    assert letters(whole) == "abKV" + "cdLW"
    assert letters(shard(entry, whole, 1, 2)) == "cdLW"
    assert [letters(piece) for piece in part(entry, whole, SIZES)] == ["abcd", "KL", "VW"]


def test_a_bias_of_qkv_is_joined_as_its_weight_is():
    entry = Entry("linear_qkv.bias", ("q", "k", "v"), "qkv")
    biases = [rows(*names)[:, 0] for names in ("abcd", "KL", "VW")]
    assert letters(join(entry, biases, SIZES)) == "abKVcdLW"
    assert [letters(piece) for piece in part(entry, join(entry, biases, SIZES), SIZES)] == ["abcd", "KL", "VW"]


def test_heads_of_several_rows_stay_together():
    wide = Sizes(layers=1, hidden=2, heads=2, groups=1, head_dim=2, vocab=3, padded_vocab=4)
    entry = Entry("linear_qkv", ("q", "k", "v"), "qkv")
    whole = join(entry, [rows(*"abcd"), rows(*"KL"), rows(*"VW")], wide)
    assert letters(whole) == "abcdKLVW"
    assert [letters(piece) for piece in part(entry, whole, wide)] == ["abcd", "KL", "VW"]


@pytest.mark.parametrize("stored", [("abcd", "ABCD"), ("abcdABCD",)], ids=["two tensors", "one"])
def test_a_rank_has_its_rows_of_gate_over_its_rows_of_up(stored):
    entry = Entry("linear_fc1", tuple("gu"[: len(stored)]), "gate_up", shapes=((8 // len(stored), 2),) * len(stored))
    whole = join(entry, [rows(*names) for names in stored], SIZES)
    assert letters(whole) == "abcdABCD"
    shards = [shard(entry, whole, rank, 2) for rank in range(2)]
    assert [letters(piece) for piece in shards] == ["abAB", "cdCD"]
    assert letters(unshard(entry, shards)) == "abcdABCD"
    assert [letters(piece) for piece in part(entry, whole, SIZES)] == list(stored)


def test_the_vocabulary_is_filled_with_zeros_and_cut_again():
    entry = Entry("embedding", ("embed",), "vocabulary", shapes=((3, 2),))
    whole = join(entry, [rows(*"abc")], SIZES)
    assert whole.tolist() == [*rows(*"abc").tolist(), [0.0, 0.0]]
    assert whole_shape(entry, SIZES) == (4, 2)
    assert letters(part(entry, whole, SIZES)[0]) == "abc"


def test_columns_are_dealt_to_ranks():
    entry = Entry("linear_fc2", ("down",), "columns", shapes=((1, 4),))
    whole = join(entry, [torch.tensor([[1.0, 2.0, 3.0, 4.0]])], SIZES)
    assert [shard(entry, whole, rank, 2).tolist() for rank in range(2)] == [[[1.0, 2.0]], [[3.0, 4.0]]]


def test_halves_at_the_end_of_each_head_become_pairs():
    heads = Sizes(layers=1, hidden=2, heads=2, groups=2, head_dim=8, vocab=3, padded_vocab=4, rope=6)
    entry = Entry("linear_q_up_proj", ("q",), "rope_heads")
    stored = "mnabcABC" + "opdefDEF"  # two plain rows a head, then two halves
    whole = join(entry, [rows(*stored)], heads)
    assert letters(whole) == "mnaAbBcC" + "opdDeEfF"
    assert letters(part(entry, whole, heads)[0]) == stored
    assert letters(shard(entry, whole, 1, 2)) == "opdDeEfF"


def test_halves_at_the_end_of_a_tensor_become_pairs():
    entry = Entry("linear_kv_down_proj", ("kv",), "rope_tail", shapes=((9, 2),))
    whole = join(entry, [rows(*"mnoabcABC")], SIZES)
    assert letters(whole) == "mnoaAbBcC"
    assert letters(part(entry, whole, SIZES)[0]) == "mnoabcABC"
