"""Checksums: SGLang's two kinds, worked by hand and against a slow reference, whole and piece by piece."""

import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime_core.errors import EngineError
from slime_core.types import Piece, RankTensor
from slime_core.weights import hashing as of_core
from slime_sglang import hashing, hashing_cpu
from slime_sglang.hashing import KINDS, checksum, expected

pytestmark = pytest.mark.unit

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mix(x):
    x ^= x >> 16
    x = x * 0x85EBCA6B & M32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & M32
    return x ^ x >> 16


def turned(x, by):
    return (x << by | x >> (32 - by)) & M32


def reference(data: bytes) -> str:
    """SGLang's hash of a GPU tensor, one word after another, in Python's integers."""
    if not data:
        return "0" * 16
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    seed = 0x243F6A88
    other = (seed * 0x9E3779B1 ^ 0xDEADBEEF) & M32
    total = 0
    for begin in range(0, len(words), 8192):
        high = low = 0
        for i, word in enumerate(words[begin : begin + 8192], begin):
            high += mix(word ^ (i * 0x27D4EB2D + seed & M32) ^ turned(i, 15))
            low += mix(word ^ (i * 0x165667B1 + other & M32) ^ turned(i, 13))
        size = 4 * len(words) & M32
        total += mix(high & M32 ^ size) << 32 | mix(low & M32 ^ size)
    x = total & M64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return f"{x ^ x >> 31:016x}"


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_one_word_is_what_the_definition_gives_by_hand():
    """w = 0 at i = 0 leaves the two seeds: a = 0x243F6A88, and b, the low half of a * 0x9E3779B1 ^ 0xDEADBEEF.

    mix(a): ^ a >> 16 = 0x243F4EB7; * 0x85EBCA6B = 0x6F8F4C7D; ^ >> 13 = 0x6F8C3007; * 0xC2B2AE35 = 0x1388B373;
    ^ >> 16 = 0x1388A0FB. mix(b) = 0x3BBF3A6F in the same way; with 4 n = 4 each is mixed once more.
    """
    a, b = 0x243F6A88, 0x02C74EE7
    assert b == hashing_cpu.SEED2 == (a * 0x9E3779B1 & M32) ^ 0xDEADBEEF
    assert a ^ a >> 16 == 0x243F4EB7
    assert 0x243F4EB7 * 0x85EBCA6B & M32 == 0x6F8F4C7D
    assert (mix(a), mix(b)) == (0x1388A0FB, 0x3BBF3A6F)
    tile = mix(0x1388A0FB ^ 4) << 32 | mix(0x3BBF3A6F ^ 4)
    assert tile == 0x552D3E6715ADB2F9
    assert hashing._splitmix(tile) == 0x3D93A6540B54EF2A
    assert checksum(torch.zeros(1), "murmur") == "3d93a6540b54ef2a"


def test_splitmix_ends_as_its_authors_say():
    """Steele, Lea and Flood 2014; the first output of a generator whose state is 0 is of 0x9E3779B97F4A7C15."""
    assert hashing._splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("count", [0, 1, 2, 8191, 8192, 8193, 3 * 8192, 70_000])
def test_the_gpu_kind_is_the_references_for_any_number_of_words(count):
    tensor = drawn(count)
    assert checksum(tensor, "murmur") == reference(raw(tensor))


@pytest.mark.parametrize(("shape", "dtype"), [((7,), torch.bfloat16), ((3, 33), torch.bfloat16), ((5,), torch.uint8)])
def test_bytes_that_end_inside_a_word_are_filled_up_with_zeros(shape, dtype):
    tensor = drawn(*shape).mul(40).to(dtype)
    assert checksum(tensor, "murmur") == reference(raw(tensor))


def test_the_cpu_kind_is_the_beginning_of_sha256():
    tensor = drawn(300, 7, dtype=torch.bfloat16)
    assert checksum(tensor, "sha256") == hashlib.sha256(raw(tensor)).hexdigest()[:16]
    assert checksum(torch.zeros(3), "sha256") == "15ec7bf0b50732b4"


def test_the_cpu_kind_reads_rows_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(of_core, "CHUNK", 64)
    tensor = drawn(50, 9)
    assert checksum(tensor, "sha256") == hashlib.sha256(raw(tensor)).hexdigest()[:16]


@pytest.mark.parametrize("kind", ["sha256", "murmur"])
def test_a_column_or_a_transposed_tensor_counts_in_its_own_order(kind):
    tensor = drawn(40, 30)
    assert checksum(tensor[:, 3:11], kind) == checksum(tensor[:, 3:11].contiguous(), kind)
    assert checksum(tensor.t(), kind) == checksum(tensor.t().contiguous(), kind)
    assert checksum(tensor.t(), kind) != checksum(tensor, kind)


TENSORS = {"q": drawn(100, 96), "k": drawn(50, 96), "v": drawn(51, 96), "odd": drawn(3, 5)}


class _Shifted:
    """Sums of the tiles from ``first`` on."""

    def __init__(self, sums, first):
        self.sums, self.first = sums, first

    def _here(self, key):
        rows, column = key
        return slice(rows.start - self.first, rows.stop - self.first), column

    def __getitem__(self, key):
        return self.sums[self._here(key)]

    def __setitem__(self, key, value):
        self.sums[self._here(key)] = value


def cut(name, **more):
    return Piece(name=name, **more)


@pytest.mark.parametrize("kind", ["sha256", "murmur"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("held", "whole"),
    [
        (RankTensor(name="one", pieces=(cut("q"),)), lambda t: t["q"]),
        (RankTensor(name="qkv", pieces=(cut("q"), cut("k"), cut("v"))), lambda t: torch.cat([t["q"], t["k"], t["v"]])),
        (RankTensor(name="rows", rank=1, pieces=(cut("q", start=50, stop=100), cut("k", start=25))),
         lambda t: torch.cat([t["q"][50:], t["k"][25:]])),
        (RankTensor(name="columns", pieces=(cut("q", dim=1, start=48, stop=96),)), lambda t: t["q"][:, 48:]),
        (RankTensor(name="padded", pieces=(cut("k"), cut("", stop=14))),
         lambda t: torch.cat([t["k"], torch.zeros(14, 96)])),
        (RankTensor(name="only zeros", pieces=(cut("k", start=50, stop=50), cut("", stop=8))), lambda t: torch.zeros(8, 96)),
        (RankTensor(name="beside", dim=1, pieces=(cut("odd"), cut("odd"))), lambda t: torch.cat([t["odd"], t["odd"]], 1)),
        (RankTensor(name="inside words", pieces=(cut("odd"), cut("odd"))), lambda t: torch.cat([t["odd"], t["odd"]])),
    ],
    ids=lambda value: value.name if isinstance(value, RankTensor) else "",
)  # fmt: skip
def test_joined_pieces_have_the_checksum_of_the_joined_tensor(held, whole, dtype, kind):
    found = expected(TENSORS, [held], dtype, kind)
    assert found == {held.key: checksum(whole(TENSORS).to(dtype), kind)}
    assert not held.rank or list(found) == ["rows@1"]


def test_pieces_that_end_inside_a_tile_are_added_to_it(monkeypatch):
    """The tile of 8192 words that q ends in goes on with k; chunks end inside and at its end."""
    tensors = {"q": drawn(9000), "k": drawn(20_000), "v": drawn(5)}
    held = RankTensor(name="qkv", pieces=(cut("q"), cut("k"), cut("v")))
    want = reference(b"".join(raw(tensors[name]) for name in "qkv"))
    for words in (16384, 32768, 1 << 20):
        monkeypatch.setattr(hashing_cpu, "SPAN", words)
        assert expected(tensors, [held], torch.float32, "murmur") == {"qkv": want}
    monkeypatch.setattr(hashing, "_adder", lambda device: hashing._add)  # as on a GPU without triton
    for words in (8192, 16384, 1 << 20):
        monkeypatch.setattr(hashing, "AT_ONCE", words)
        assert expected(tensors, [held], torch.float32, "murmur") == {"qkv": want}


@pytest.mark.parametrize("cores", [{0}, {0, 1, 2}])
def test_threads_and_the_place_of_a_piece_change_no_sum(monkeypatch, cores):
    """Pieces of many lengths, spans of one block: every word is mixed with its own number."""
    monkeypatch.setattr(hashing_cpu, "SPAN", hashing_cpu.BLOCK)
    monkeypatch.setattr(hashing_cpu.os, "sched_getaffinity", lambda _: cores)
    tensors = {str(count): drawn(count) for count in (1, 8191, 50_000, 16_384, 3, 40_961)}
    held = RankTensor(name="all", pieces=tuple(cut(name) for name in tensors))
    found = expected(tensors, [held], torch.float32, "murmur")
    monkeypatch.setattr(hashing, "_adder", lambda device: hashing._add)
    assert found == expected(tensors, [held], torch.float32, "murmur")
    assert found == {"all": reference(b"".join(map(raw, tensors.values())))}


def test_places_beyond_four_billion_words_wrap_around():
    """A tensor of more than 16 GiB: numbers of words have 32 bits."""
    words = drawn(20_000).view(torch.int32)
    for place in ((1 << 32) - 12_000, (1 << 33) + 5):
        tile = place // hashing.TILE
        sums = [torch.zeros(4, 2, dtype=torch.int32) for _ in range(2)]
        first = place - tile * hashing.TILE
        hashing._add(words, place, _Shifted(sums[0], tile))
        hashing_cpu._span(words.numpy().view("u4"), place, _Shifted(sums[1].numpy().view("u4"), tile))
        assert torch.equal(sums[0], sums[1]), first


def test_rows_may_come_one_after_another_and_their_tensors_change_afterwards():
    """A trainer gathers a tensor, hashes it and lets it go."""
    sums, want = KINDS["murmur"](torch.bfloat16), {}
    for name, tensor in TENSORS.items():
        mine = tensor.clone()
        held = RankTensor(name=name, pieces=(cut(name),))
        want |= expected({name: mine}, [held], torch.bfloat16, "murmur")
        sums.add({name: mine}, [held])
        mine.zero_()
    assert sums.finish() == want
    assert sums.finish() == want  # nothing is counted twice


@pytest.mark.parametrize("kind", ["murmur", "sha256"])
def test_a_row_that_an_engine_may_keep_in_float32_has_two_checksums(kind):
    sent = torch.randn(5, 3)
    half = sent.bfloat16()
    row = RankTensor(name="gate", pieces=(Piece(name="gate"),), wide=True)
    found = expected({"gate": half}, [row], torch.bfloat16, kind)
    assert found == {"gate": f"{checksum(half, kind)} or {checksum(half.float(), kind)}"}
    found = expected({"gate": sent}, [row], torch.bfloat16, kind)  # a router bias travels in float32
    assert found["gate"].endswith(f" or {checksum(sent, kind)}")
    assert expected({"gate": sent}, [row], torch.float32, kind) == {"gate": checksum(sent, kind)}


def test_a_tensor_that_the_trainer_does_not_have_is_named():
    held = RankTensor(name="qkv", pieces=(cut("q"), cut("bias")))
    with pytest.raises(EngineError, match="no tensor bias, of which the engine's qkv is made") as error:
        expected(TENSORS, [held], torch.float32, "sha256")
    assert error.value.code == "ENG83"


def test_a_piece_beyond_the_end_of_its_tensor_is_refused():
    with pytest.raises(EngineError, match="ends at row 101 of q, which has 100"):
        expected(TENSORS, [RankTensor(name="q", pieces=(cut("q", stop=101),))], torch.float32, "sha256")


@pytest.mark.parametrize("gap", [0, 4])
def test_pieces_that_lie_one_behind_another_are_read_as_one(monkeypatch, gap):
    """As experts do in a buffer that is sent; what lies between others is not read."""
    flat, begins, spans = drawn(70_000), (0, 9_000, 20_000), []
    tensors = {
        str(n): flat[begin + n * gap :][:size] for n, (begin, size) in enumerate(zip(begins, (9_000, 11_000, 5)))
    }
    monkeypatch.setattr(hashing, "_adder", lambda device: lambda *run: spans.append(len(run[0])) or hashing._add(*run))
    held = RankTensor(name="all", pieces=tuple(cut(name) for name in tensors))
    found = expected(tensors, [held], torch.float32, "murmur")
    assert found == {"all": reference(b"".join(map(raw, tensors.values())))}
    assert spans == ([9_000, 11_000, 5] if gap else [20_005])


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that operations made, views of ``whole`` aside."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.nbytes = whole.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() != self.whole:
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


@pytest.mark.parametrize(("kind", "dtype"), [("sha256", torch.bfloat16), ("murmur", torch.float32)])
def test_joined_tensors_are_never_copied_into_one(monkeypatch, kind, dtype):
    monkeypatch.setattr(of_core, "CHUNK", 1 << 16)
    half = torch.zeros(1 << 9, 1 << 10)
    both = RankTensor(name="both", pieces=(Piece(name="a"), Piece(name="a")))
    with Largest(half) as largest:
        expected({"a": half}, [both], dtype, kind)
    assert 0 < largest.nbytes <= 1 << 19 < half.nbytes
