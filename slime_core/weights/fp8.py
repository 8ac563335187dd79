"""Weights in fp8: float8 e4m3 in blocks with a float32 scale each (DeepSeek V3, arXiv 2412.19437, section 3.3.2).

    NAME.weight            float8_e4m3fn [rows, columns]
    NAME.weight_scale_inv  float32 [ceil(rows / 128), ceil(columns / 128)]        value = weight * scale of its block

Published folders (DeepSeek V3, Qwen3-*-FP8) and SGLang have this layout. The scale of a block is its largest absolute
value over 448, the largest of e4m3; a block that ends at the tensor's edge is smaller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LARGEST = 448.0  # of e4m3
SCALE = "_scale_inv"  # ends the name of a weight's scales
SMALLEST = 1e-12  # largest absolute value that a block counts as having: one of zeros has a scale too
LINEAR = re.compile(r"\.layers\.\d+\..*(_proj(_with_mqa|_qkvz?|_z)?|\.w[123])\.weight$")
FLOAT = re.compile(r"\.(eh_proj|weights_proj)\.weight$")
"""Linear layers that published folders leave in floats: of predicted tokens, of DeepSeek V3.2's indexer."""
FLOAT_MODULES = "in_proj_a", "in_proj_b", "in_proj_ba", "visual", "vision_model"
"""Those that would be in fp8 if they were not named: gates of linear attention, a few rows; towers of pictures."""


@dataclass(slots=True, frozen=True)
class BlockFormat:
    """How a model is held in fp8.

    Example:
        block_format = BlockFormat.of(json.loads((folder / "config.json").read_bytes()))
    """

    block: tuple[int, int] = (128, 128)  # rows, columns
    float_modules: tuple[str, ...] = FLOAT_MODULES
    """Names of modules, or ends of them, that stay in floats with all that is below them."""

    weights: frozenset[str] | None = None  # names of the weights in fp8, of a folder that was read

    form = "fp8 in blocks"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockFormat | None:
        """The format that a config.json states; None where it states none, or one that is not read here."""
        table = config.get("quantization_config")
        if not isinstance(table, dict) or table.get("quant_method") != "fp8":
            return None
        sizes, modules = table.get("weight_block_size"), table.get("modules_to_not_convert") or ()
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            return None
        return cls((sizes[0], sizes[1]), tuple(modules))

    def table(self) -> dict[str, Any]:
        """``quantization_config`` of a config.json, as transformers and SGLang read it."""
        table: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        table["weight_block_size"] = list(self.block)
        if self.float_modules:
            table["modules_to_not_convert"] = list(self.float_modules)
        return table

    def covers(self, name: str) -> bool:
        """Whether a tensor of a model folder is held in fp8: linear layers of attention, MLPs and experts."""
        if self.weights is not None:
            return name in self.weights
        if not LINEAR.search(name) or FLOAT.search(name):
            return False
        module = f".{name.removesuffix('weight')}"
        return not any(f".{one}." in module for one in self.float_modules)

    @property
    def height(self) -> int:
        """Rows that share a scale."""
        return self.block[0]

    def names(self, stored: str) -> tuple[str, str, tuple[str, ...]]:
        """As `int4.PackedFormat.names`."""
        return stored, f"{stored}{SCALE}", ()

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the weight: the stored one's."""
        return stored

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of the scales of a weight of ``shape``, which has two axes."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """The scale of each block of a float weight [rows, columns]; float32."""
        import torch

        rows, columns = self.scale_shape(tuple(weight.shape))
        padding = (0, columns * self.block[1] - weight.shape[1], 0, rows * self.block[0] - weight.shape[0])
        blocks = torch.nn.functional.pad(weight.detach().float(), padding)
        blocks = blocks.view(rows, self.block[0], columns, self.block[1])
        largest = blocks.abs().amax(dim=(1, 3)).clamp(min=SMALLEST)
        return largest / torch.full_like(largest, LARGEST)  # over a plain number a GPU takes its reciprocal

    def quantise(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """A float weight over the scales of its blocks, rounded to nearest even; float8_e4m3fn [rows, columns]."""
        import torch

        values = weight.detach().float() / self._spread(scales, weight)
        return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

    def dequantise(self, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of a float8 weight: products in float32, rounded to ``dtype``."""
        return (weight.float() * self._spread(scales, weight)).to(dtype)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """What an engine computes with where it is sent this float weight in fp8; in the weight's dtype."""
        scales = self.scales(weight)
        return self.dequantise(self.quantise(weight, scales), scales, weight.dtype)

    def _spread(self, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The scale of each element."""
        rows, columns = weight.shape
        by_row = scales.float().repeat_interleave(self.block[0], 0)[:rows]
        return by_row.repeat_interleave(self.block[1], 1)[:, :columns]


def rollout_form(kind: str, stored: object) -> BlockFormat | None:
    """The format of ``rollout_quantization`` = ``kind``: the folder's where that is fp8 too; None where it is none."""
    if kind != "fp8":
        return None
    return stored if isinstance(stored, BlockFormat) else BlockFormat()
