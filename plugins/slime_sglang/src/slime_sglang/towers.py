"""What each of an engine's tensors holds of the layers that turn pixels into features, and those layers' own names.

    SGLang:  attn.qkv_proj = this rank's heads of q, of k and of v of attn.qkv
             mlp.gate_up_proj = gate, zeros, up, zeros

Widths of MLPs are filled up: Qwen2.5-VL's to a multiple of 8, and on a CPU all to a multiple of 32 a rank.

Names are those of a folder without ``model.`` before them (`slime_core.weights.hashing.layout_name`). Like the text
model, a rank holds rows of what widens and columns of what narrows again; with ``mm_enable_dp_encoder`` it holds all.
Read in SGLang 0.5.23 (`srt/models/qwen2_5_vl.py`, `qwen3_vl.py`, `layers/attention/vision.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.types import Piece

TOWER = "visual."
MULTIPLE, CPU_MULTIPLE = 8, 32  # of the width of MLPs
VOCABULARY = 64  # rows of embeddings are filled up to a multiple of it
PART = re.compile(r"visual\.(?:(?:blocks|deepstack_merger_list)\.\d+|\w+)\.(.+)")
WIDENING, NARROWING = ("linear_fc1", "mlp.0"), ("attn.proj", "linear_fc2", "mlp.2")


@dataclass(slots=True, frozen=True, kw_only=True)
class TowerSizes:
    """Of the vision config."""

    family: str
    depth: int
    hidden: int
    heads: int
    inner: int  # of an MLP
    places: int  # learned positions of Qwen3-VL
    deep: int  # mergers whose output goes to later layers
    merged: int  # width of a merger's middle
    ranks: int  # that share each layer
    multiple: int  # of the width of MLPs

    @classmethod
    def of(cls, config: Any, ranks: int, *, tp: int, cpu: bool) -> TowerSizes:
        """Of a transformers config of `server_sizes.TOWERS`."""
        vision, family = config.vision_config, str(config.model_type)
        return cls(
            family=family,
            depth=int(vision.depth),
            hidden=int(vision.hidden_size),
            heads=int(vision.num_heads),
            inner=int(vision.intermediate_size),
            places=int(getattr(vision, "num_position_embeddings", 0)),
            deep=len(getattr(vision, "deepstack_visual_indexes", ())),
            merged=int(vision.hidden_size) * int(vision.spatial_merge_size) ** 2,
            ranks=ranks,
            multiple=CPU_MULTIPLE * tp if cpu else MULTIPLE if family == "qwen2_5_vl" else 1,
        )

    def names(self) -> Iterator[str]:
        """Every tensor of a folder's tower."""
        old = self.family == "qwen2_5_vl"
        yield f"{TOWER}patch_embed.proj.weight"
        layers = ("gate_proj", "up_proj", "down_proj") if old else ("linear_fc1", "linear_fc2")
        linear = ("attn.qkv", "attn.proj", *(f"mlp.{layer}" for layer in layers))
        kinds = ("weight",) if old else ("weight", "bias")
        for number in range(self.depth):
            block = f"{TOWER}blocks.{number}."
            yield from (f"{block}{name}.{kind}" for name in linear for kind in ("weight", "bias"))
            yield from (f"{block}{norm}.{kind}" for norm in ("norm1", "norm2") for kind in kinds)
        if old:
            yield f"{TOWER}merger.ln_q.weight"
            yield from (f"{TOWER}merger.mlp.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias"))
            return
        yield from (f"{TOWER}patch_embed.proj.bias", f"{TOWER}pos_embed.weight")
        for merger in ("merger", *(f"deepstack_merger_list.{n}" for n in range(self.deep))):
            parts = ("norm", "linear_fc1", "linear_fc2")
            yield from (f"{TOWER}{merger}.{part}.{kind}" for part in parts for kind in ("weight", "bias"))

    def pieces(self, name: str, rank: int) -> tuple[Piece, ...]:
        """What a rank holds under an engine's name; a name of no known kind stands for itself, whole."""
        rank %= self.ranks
        owner, _, kind = name.rpartition(".")
        match = PART.fullmatch(owner)
        part = match[1] if match else ""
        if part == "attn.qkv_proj":
            stored = name.replace("qkv_proj", "qkv")
            return tuple(self._rows(stored, n * self.hidden, self.hidden, rank) for n in range(3))
        if part == "mlp.gate_up_proj":
            names = (name.replace("gate_up_proj", f"{which}_proj") for which in ("gate", "up"))
            return tuple(piece for stored in names for piece in self._filled(stored, self.inner, self.multiple, rank))
        if owner == f"{TOWER}pos_embed":
            return self._filled(name, self.places, VOCABULARY, rank)
        if part == "mlp.linear_fc1":
            return self._filled(name, self.inner, self.multiple, rank)
        if part in ("mlp.down_proj", "mlp.linear_fc2") and kind == "weight":
            return self._filled(name, self.inner, self.multiple, rank, dim=1)
        if part in WIDENING:
            return (self._rows(name, 0, self.merged, rank),)
        if part in NARROWING and kind == "weight":
            return (self._rows(name, 0, self.hidden if part == "attn.proj" else self.merged, rank, dim=1),)
        return (Piece(name=name),)

    def _rows(self, name: str, first: int, count: int, rank: int, *, dim: int = 0) -> Piece:
        size = count // self.ranks
        return Piece(name=name, dim=dim, start=first + rank * size, stop=first + (rank + 1) * size)

    def _filled(self, name: str, count: int, multiple: int, rank: int, *, dim: int = 0) -> tuple[Piece, ...]:
        """A rank's share of rows (or columns) that are filled up with zeros."""
        size = -(-count // multiple) * multiple // self.ranks
        start, stop = (min((rank + n) * size, count) for n in (0, 1))
        zeros = size - (stop - start)
        piece = Piece(name=name, dim=dim, start=start, stop=stop)
        return (piece, Piece(name="", dim=dim, stop=zeros)) if zeros else (piece,)
