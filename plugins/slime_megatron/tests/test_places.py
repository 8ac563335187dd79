"""Boxes of whole tensors and rows of the folder's, against the bridge's own functions on whole tensors."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from slime_convert.bridge import Entry, Sizes, join, shard
from slime_core.errors import PluginError
from slime_megatron.places import BITS, ShardPiece, check_shapes, share

pytestmark = pytest.mark.unit

SIZES = Sizes(layers=1, hidden=6, heads=8, groups=4, head_dim=2, vocab=13, padded_vocab=16, rope=4)
ENTRIES = {
    "whole": (("n",), ((5,),)),
    "rows": (("r",), ((8, 6),)),
    "columns": (("c",), ((6, 8),)),
    "qkv": (("q", "k", "v"), ((16, 6), (8, 6), (8, 6))),
    "qkv bias": (("q", "k", "v"), ((16,), (8,), (8,))),
    "gate_up": (("g", "u"), ((12, 6), (12, 6))),
    "gate_up of one": (("gu",), ((24, 6),)),
    "vocabulary": (("e",), ((13, 6),)),
    "rope_heads": (("h",), ((48, 6),)),
    "rope_tail": (("t",), ((20, 6),)),
    "gated_qkv": (("q", "k", "v"), ((32, 6), (8, 6), (8, 6))),
    "sections": (("s",), ((20, 1, 6),)),
    "whole convolution": (("p",), ((5, 3, 2, 4, 4),)),
}


def made(name):
    """An entry with the folder's tensors, which hold different numbers."""
    hf, shapes = ENTRIES[name]
    sections = (8, 8, 4) if name == "sections" else ()
    entry = Entry("x", hf, name.split()[0], shapes=shapes, sections=sections)
    tensors = []
    for number, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        tensors.append((1000 * (number + 1) + torch.arange(count)).float().view(shape))
    return entry, tensors


def pieces(name, size):
    """Each rank's place and what it holds."""
    entry, tensors = made(name)
    whole = join(entry, tensors, SIZES)
    for rank in range(size):
        mine = shard(entry, whole, rank, size)
        yield ShardPiece(entry, tuple(mine.shape), rank, size), mine.contiguous(), whole, tensors


CASES = [(name, size) for name in ENTRIES for size in (1, 2, 4)]


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("ranges", [1, 3, 7])
def test_boxes_of_all_ranks_and_ranges_are_the_whole_tensor(name, size, ranges):
    found, filled = None, None
    for piece, mine, whole, _ in pieces(name, size):
        if found is None:
            found, filled = torch.full_like(whole, -1), torch.zeros_like(whole)
        assert piece.whole == tuple(whole.shape)
        flat, ends = mine.reshape(-1), [mine.numel() * n // ranges for n in range(ranges + 1)]
        for begin, end in pairwise(ends):
            at = begin
            for box in piece.boxes(begin, end):
                assert box.begin == at
                place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))
                found[place] = flat[box.begin : box.end].view(box.sizes)
                filled[place] += 1
                at = box.end
            assert at == end
    assert torch.equal(found, whole)
    assert (filled == (size if piece.entry.kind == "whole" else 1)).all()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_rows_are_those_of_the_folder(name, size):
    for piece, mine, _, tensors in pieces(name, size):
        rows = piece.source_rows(SIZES)
        assert len(rows) == len(mine)
        for row, source in zip(mine, rows.tolist()):
            if source < 0:
                assert not row.any()  # filling
                continue
            line = tensors[source >> BITS][source & (1 << BITS) - 1].reshape(-1)
            assert torch.equal(row.reshape(-1), line[piece.column : piece.column + piece.width])


@pytest.mark.parametrize(("total", "width", "count"), [(24, 6, 4), (24, 6, 3), (7, 1, 3), (6, 6, 4), (0, 6, 2)])
def test_shares_are_all_once_in_whole_rows(total, width, count):
    found = [share(0, total, width, number, count) for number in range(count)]
    assert [number for begin, end in found for number in range(begin, end)] == list(range(total))
    assert all(begin % width == 0 for begin, _ in found)


def test_sums_of_elements_in_any_order_are_those_of_the_formula():
    pytest.importorskip("megatron.core", reason="not proven: no megatron-core; pip install slime-rl[megatron]")
    from slime_core.trainers.fingerprint import sums
    from slime_megatron.fingerprint import sums_at

    whole = torch.randn(3 * 2**16 + 5, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(2))
    assert torch.equal(sums_at(whole[order], order).sum(1), sums(whole, 0))


@pytest.mark.parametrize("long", [0, 1 << 60], ids=["runs", "elements"])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranges_of_shards_sum_to_the_folders_tensors(name, size, long, monkeypatch):
    pytest.importorskip("megatron.core", reason="not proven: no megatron-core; pip install slime-rl[megatron]")
    from slime_core.trainers.fingerprint import sums
    from slime_megatron import fingerprint

    monkeypatch.setattr(fingerprint, "LONG", long)
    stage = SimpleNamespace(sizes=SIZES, parameter_name=str)
    found, copies = 0, 1
    for piece, mine, _, tensors in pieces(name, size):
        wanted = torch.stack([sums(tensor, 0) for tensor in tensors])
        copies = size if piece.entry.kind == "whole" else 1
        flat, ends = mine.reshape(-1), [mine.numel() * n // 3 for n in range(4)]
        for begin, end in pairwise(ends):
            found += fingerprint._sums(flat[begin:end], begin, begin, end, piece, stage, piece.entry)
    assert torch.equal(found, wanted * copies)


def test_a_bridge_without_shapes_is_refused():
    check_shapes([made("qkv")[0]])
    with pytest.raises(PluginError, match="shape of q, k") as caught:
        check_shapes([made("qkv")[0], Entry("y", ("q", "k"), "gate_up", shapes=((3, 3),))])
    assert caught.value.code == "PLG57"
