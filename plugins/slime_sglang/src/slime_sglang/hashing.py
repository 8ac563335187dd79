"""Checksums of tensors as SGLang computes them.

sha256 (its tensors on a CPU): the first 8 bytes of the digest. murmur (on a GPU), of the bytes as 32-bit words w(i),
with zeros up to a multiple of 4, everything modulo 2^32 where nothing else is said:

    mix(x)  = x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16
    a(i)    = (i * 0x27D4EB2D + A) ^ rotl(i, 15)          b(i) = (i * 0x165667B1 + B) ^ rotl(i, 13)
    tile t  = 8192 words:  h = sum mix(w(i) ^ a(i)),  l = sum mix(w(i) ^ b(i))
    tile    = mix(h ^ 4 n) * 2^32 + mix(l ^ 4 n)           n: words of the whole tensor
    answer  = splitmix64's end of the sum of all tiles modulo 2^64;  0 for a tensor without elements

A sum can be taken piece by piece: tensors that are joined are never copied into one. On CUDA with triton the sums are
one kernel a piece, on a CPU numpy on several threads; elsewhere torch, some words at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from slime_core.weights.hashing import Checksums
from slime_sglang.hashing_cpu import MIX, PLACE, TILE

if TYPE_CHECKING:
    import torch

    from slime_core.types import RankTensor

Checksum = Literal["sha256", "murmur"]
AT_ONCE = 1 << 24  # words, a multiple of TILE
ONES = (1 << 64) - 1


def checksum(tensor: torch.Tensor, kind: Checksum) -> str:
    """16 hex digits over the tensor's bytes, row by row."""
    sums = KINDS[kind](tensor.dtype)
    sums.add_row("", [tensor.detach()])
    return sums.finish()[""]


def expected(
    tensors: Mapping[str, torch.Tensor], checks: Sequence[RankTensor], dtype: torch.dtype, kind: Checksum
) -> dict[str, str]:
    """What each row of ``checks`` must have as its checksum, by `RankTensor.key`.

    Args:
        tensors: whole ones by Hugging Face name, on any device; the murmur sums of one call are taken on one.
        checks: what an engine holds, from `layout.layout`.
        dtype: of the engine's tensors; others are cast, a piece at a time.
        kind: of checksum.

    Raises:
        EngineError: ENG83 where a piece's tensor is not among ``tensors`` (named).
    """
    sums = KINDS[kind](dtype)
    sums.add(tensors, checks)
    return sums.finish()


class Murmur(Checksums):
    """Sums of the GPU's kind; a GPU is waited for once, at the end."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._keys: list[str] = []
        self._tiles: list[torch.Tensor] = []  # sums of each row's tiles, [tiles, 2] int32
        self._counts: list[int] = []  # of words

    def add_row(self, key: str, parts: Sequence[torch.Tensor]) -> None:
        """Read one tensor that lies in several, end to end."""
        tiles, count = _tile_sums(parts, self._dtype)
        self._keys.append(key)
        self._tiles.append(tiles)
        self._counts.append(count)

    def _finish(self) -> dict[str, str]:
        if self._keys:
            device = self._tiles[0].device
            sums = [tiles.to(device) for tiles in self._tiles]
            totals = _totals(sums, self._counts)
            self._digests |= {
                key: f"{_splitmix(total) if count else 0:016x}"
                for key, total, count in zip(self._keys, totals, self._counts, strict=True)
            }
            self._keys, self._tiles, self._counts = [], [], []
        return self._digests


KINDS: Mapping[Checksum, Callable[[torch.dtype], Checksums]] = {"sha256": Checksums, "murmur": Murmur}


def _tile_sums(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Sums of the tiles of a row, [tiles, 2] int32, and its words; nothing waits for a GPU."""
    import torch

    device = parts[0].device
    add = _adder(device)
    count = -(-sum(part.numel() for part in parts) * dtype.itemsize // 4)
    sums = torch.zeros(-(-count // TILE), 2, dtype=torch.int32, device=device)
    place = 0
    for words in _words(parts, dtype, device):
        add(words, place, sums)
        place += len(words)
    return sums, count


def _words(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes of parts end to end as int32, [n] each; parts that end inside a word are joined first."""
    import torch

    if any(part.numel() * dtype.itemsize % 4 for part in parts[:-1]):
        parts = [torch.cat([part.to(device=device, dtype=dtype).reshape(-1) for part in parts])]
    for part in _runs(parts):
        flat = part.to(device=device, dtype=dtype).contiguous().reshape(-1).view(torch.uint8)
        if padding := -len(flat) % 4:
            flat = torch.cat([flat, flat.new_zeros(padding)])
        if flat.storage_offset() % 4:
            flat = flat.clone()
        if len(flat):
            yield flat.view(torch.int32)


def _runs(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts that lie one behind another in memory, as experts do where they are sent, as one of them, flat."""
    from slime_core.kernels.linear import adjacent

    runs: list[list[torch.Tensor]] = []
    for part in parts:
        if runs and part.dtype == runs[-1][0].dtype and adjacent((runs[-1][-1], part)):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run[0].as_strided((sum(part.numel() for part in run),), (1,)) if run[1:] else run[0] for run in runs]


def _adder(device: torch.device):  # type: ignore[no-untyped-def]
    """``add(words, place, sums)``: add the words that begin at word ``place`` of a row to the sums of its tiles."""
    if device.type == "cuda":
        try:
            from slime_sglang.hashing_cuda import add
        except ImportError:  # a torch without triton
            return _add
        return add
    if device.type == "cpu":
        from slime_sglang.hashing_cpu import add as add_here

        return add_here
    return _add


def _add(words: torch.Tensor, place: int, sums: torch.Tensor) -> None:
    """In torch: int32 arithmetic wraps around. ``words`` [n] int32, ``sums`` [tiles, 2] int32, in place."""
    import torch

    done, most = 0, AT_ONCE
    while done < len(words):
        inside = (place + done) % TILE
        count = min(len(words) - done, most) if not inside else min(len(words) - done, TILE - inside)
        if count > TILE:
            count -= count % TILE
        at = torch.arange(place + done, place + done + count, dtype=torch.int64, device=words.device)
        at = at.to(torch.int32)
        tile, many = (place + done) // TILE, -(-count // TILE)
        for column, (factor, seed, turn) in enumerate(PLACE):
            mixed = at * _signed(factor)
            mixed += _signed(seed)
            mixed ^= (at << turn) | ((at >> (32 - turn)) & ((1 << turn) - 1))
            mixed ^= words[done : done + count]
            rows = _mix(mixed).view(many, -1).sum(1, dtype=torch.int64)
            sums[tile : tile + many, column] += _wrapped(rows)
        done += count


def _mix(x: torch.Tensor) -> torch.Tensor:
    """mix of int32 words, in place; shifts to the right bring zeros in."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(MIX[0])
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(MIX[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def _totals(tiles: Sequence[torch.Tensor], counts: Sequence[int]) -> list[int]:
    """The sum of each row's tiles, modulo 2^64 but signed; one copy from the device for all rows."""
    import torch

    sums = torch.cat(list(tiles))
    device = sums.device
    sizes = torch.tensor([_signed(4 * count & 0xFFFFFFFF) for count in counts], dtype=torch.int32)
    row = torch.arange(len(tiles)).repeat_interleave(torch.tensor([len(grid) for grid in tiles]))
    sums ^= sizes[row, None].to(device)
    high, low = _mix(sums).to(torch.int64).unbind(1)
    tile = (high << 32) | (low & 0xFFFFFFFF)
    total = torch.zeros(len(tiles), dtype=torch.int64, device=device).index_add_(0, row.to(device), tile)
    totals: list[int] = total.tolist()
    return totals


def _splitmix(x: int) -> int:
    x &= ONES
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ONES
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ONES
    return x ^ x >> 31


def _signed(x: int) -> int:
    """A 32-bit word as int32 has it."""
    return x - (1 << 32) if x >> 31 else x


def _wrapped(x: torch.Tensor) -> torch.Tensor:
    """int64 modulo 2^32, as int32."""
    import torch

    return x.to(torch.int32)  # keeps the low 32 bits
