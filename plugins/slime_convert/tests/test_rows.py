"""Rows of tensors: what `join` and `part` of a bridge do to whole tensors, done a few rows at a time."""

import pytest
import torch

from slime_convert import rows as module
from slime_convert.bridge import Entry, Sizes, join, part
from slime_convert.rows import Cast, Move, Moved, blocks, cast, joined, moves_of, parted

pytestmark = pytest.mark.unit

SIZES = Sizes(layers=1, hidden=6, heads=4, groups=2, head_dim=3, vocab=7, padded_vocab=10, rope=2)
KINDS = {
    "whole": [(5, 6)],
    "rows": [(4, 6)],
    "columns": [(6, 4)],
    "qkv": [(12, 6), (6, 6), (6, 6)],
    "gate_up": [(5, 6), (5, 6)],
    "vocabulary": [(7, 6)],
    "rope_heads": [(20, 6)],
    "rope_tail": [(5, 6)],
}


class Held:
    """A tensor in memory, by rows; remembers how many bytes were asked for at once."""

    def __init__(self, tensor, name="held"):
        self.tensor, self.name, self.shape, self.dtype = tensor, name, tuple(tensor.shape), tensor.dtype
        self.asked = []

    def read(self, first, count, into):
        self.asked.append(len(into))
        into[:] = memoryview(self.tensor[first : first + count].contiguous().view(torch.uint8).numpy()).cast("B")


def tensor_of(rows):
    data = bytearray(b"".join(bytes(block) for block in blocks(rows)))
    return torch.frombuffer(data, dtype=rows.dtype).view(rows.shape)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows: every tensor here takes several."""
    monkeypatch.setattr(module, "BLOCK", 60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flat", [False, True], ids=["matrices", "biases"])
def test_rows_are_joined_and_parted_as_the_bridge_does_with_whole_tensors(kind, flat):
    shapes = [shape[:1] if flat else shape for shape in KINDS[kind]]
    entry = Entry("m", tuple(f"t{n}" for n in range(len(shapes))), kind, shapes=tuple(shapes))
    tensors = [torch.randn(shape) for shape in shapes]
    whole = join(entry, tensors, SIZES)
    assert torch.equal(tensor_of(joined(entry, [Held(t) for t in tensors], SIZES)), whole)
    back = parted(entry, Held(whole), SIZES)
    for rows, tensor, meant in zip(back, tensors, part(entry, whole, SIZES), strict=True):
        assert torch.equal(tensor_of(rows), tensor)
        assert torch.equal(tensor, meant)


def test_no_read_is_larger_than_a_block_or_a_row():
    held = Held(torch.randn(100, 3))
    assert torch.equal(tensor_of(held), held.tensor)
    assert max(held.asked) == 60
    assert len(held.asked) == 20


def test_rows_may_be_read_from_anywhere():
    first, second = Held(torch.arange(12.0).view(4, 3)), Held(-torch.arange(6.0).view(2, 3))
    moved = Moved("m", [first, second], (Move(0, 2, 1, 0), Move(2, 3, 0, 1), Move(5, 2, -1, 0)))
    meant = torch.cat([second.tensor, first.tensor[1:], torch.zeros(2, 3)])
    for begin in range(7):
        for count in range(1, 8 - begin):
            into = bytearray(count * 12)
            moved.read(begin, count, memoryview(into))
            assert torch.equal(
                torch.frombuffer(into, dtype=torch.float32).view(count, 3), meant[begin : begin + count]
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_rounds_as_torch_does(dtype):
    held = Held(torch.randn(9, 4))
    assert torch.equal(tensor_of(cast(held, dtype)), held.tensor.to(dtype))


def test_whole_numbers_are_never_cast():
    held = Held(torch.arange(6).view(3, 2))
    assert cast(held, torch.bfloat16) is held
    assert isinstance(cast(Held(torch.ones(2, 2)), torch.bfloat16), Cast)


def test_rows_of_a_stack_are_found_by_number():
    stack = torch.randn(3, 4, 2)
    numbers = torch.arange(12).view(3, 4, 1)
    moved = Moved("m", [Held(stack.view(12, 2))], moves_of(numbers[1, 2:4]))
    assert torch.equal(tensor_of(moved), stack[1, 2:4])
