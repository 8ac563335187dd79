"""How families write a picture as tokens and as arrays: by the image processors of transformers, with Pillow alone.

The processors that need torchvision resize in other steps, with other pixels; engines are told to use these too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slime_core.data.chat import encode
from slime_core.media.positions import GRIDS, PIXELS, SECONDS, MediaLayout

if TYPE_CHECKING:
    from PIL.Image import Image

Arrays = dict[str, NDArray[Any]]
Size = tuple[int, int]  # width and height, pixels

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
CROP_FAMILIES = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}
FAMILIES = (*GRID_FAMILIES, *CROP_FAMILIES)
FRAMES_PER_SECOND = 2.0  # of a video that is a list of pictures, as Qwen's own tools count


class PictureFamily(Protocol):
    """Of one model folder."""

    processor: Any  # of transformers
    marks: dict[str, str]  # kind -> text that a prompt without a chat template has for one of it

    def image_tokens(self, size: Size) -> list[int]:
        """What stands for a picture in place of its placeholder."""

    def images(self, images: Sequence[Image]) -> Arrays:
        """The arrays of pictures, end to end, by argument of the model's forward."""

    def video_tokens(self, count: int, size: Size) -> list[int]:
        """What stands for a video of ``count`` frames in place of its placeholder."""

    def video(self, frames: Sequence[Image]) -> Arrays:
        """The arrays of a video."""


class GridFamily(PictureFamily):
    """Qwen-VL: a picture is a grid of patches, of which ``merge`` by ``merge`` become one token."""

    def __init__(self, folder: Path, layout: MediaLayout, tokenizer: Any) -> None:
        module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        self.processor = module.Qwen2VLImageProcessorPil.from_pretrained(str(folder))
        self._layout, self._tokenizer = layout, tokenizer
        self._stamped = not layout.seconds  # Qwen3-VL writes the time before every row of frames
        self._video_pixels = _video_pixels(folder, self.processor.size)
        self.marks = {
            kind: f"<|vision_start|><|{name}_pad|><|vision_end|>"
            for kind, name in (("images", "image"), ("videos", "video"))
        }

    def image_tokens(self, size: Size) -> list[int]:
        """See `PictureFamily`."""
        width, height = size
        patches = self.processor.get_number_of_image_patches(height, width, {})
        return [self._layout.placeholders["images"]] * (patches // self._layout.merge**2)

    def images(self, images: Sequence[Image]) -> Arrays:
        """See `PictureFamily`."""
        return _numpy(self.processor(images=list(images), return_tensors="np"))

    def video_tokens(self, count: int, size: Size) -> list[int]:
        """See `PictureFamily`; Qwen3-VL writes the seconds at the middle of every pair of frames before it."""
        rows = -(-count // self._pair)
        limits = self._frame_size(count)
        options = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
        patches = self.processor.get_number_of_image_patches(size[1], size[0], options)
        row = [self._layout.placeholders["videos"]] * (patches // self._layout.merge**2)
        if not self._stamped:
            return row * rows
        start, end = encode(self._tokenizer, "<|vision_start|>"), encode(self._tokenizer, "<|vision_end|>")
        tokens: list[int] = []
        for number in range(rows):
            first, last = number * self._pair, min((number + 1) * self._pair, count) - 1
            middle = (first + last) / 2 / FRAMES_PER_SECOND
            tokens += [*encode(self._tokenizer, f"<{middle:.1f} seconds>"), *start, *row, *end]
        return tokens

    def video(self, frames: Sequence[Image]) -> Arrays:
        """See `PictureFamily`: two frames lie in one patch; the last of an odd number is repeated."""
        pair = self._pair
        padded = [*frames, *[frames[-1]] * (-len(frames) % pair)]
        single = self.processor(images=padded, return_tensors="np", size=self._frame_size(len(frames)))
        grid = single["image_grid_thw"][0].tolist()
        patches = np.asarray(single["pixel_values"])  # of a picture, which is its own second frame
        side = self.processor.patch_size
        first = patches.reshape(len(padded) // pair, pair, grid[1] * grid[2], -1, pair, side, side)[:, :, :, :, 0]
        pixels = first.transpose(0, 2, 3, 1, 4, 5).reshape(len(patches) // pair, -1)
        arrays = {PIXELS["videos"]: pixels, GRIDS["videos"]: np.array([[len(padded) // pair, *grid[1:]]])}
        return arrays if self._stamped else arrays | {SECONDS: np.array([pair / FRAMES_PER_SECOND])}

    @property
    def _pair(self) -> int:
        return int(self.processor.temporal_patch_size)

    def _frame_size(self, count: int) -> dict[str, int]:
        """Limits of a frame's pixels: Qwen3-VL's are of a whole video."""
        return {name: pixels // (count if self._stamped else 1) for name, pixels in self._video_pixels.items()}


class CropFamily(PictureFamily):
    """SmolVLM and Idefics3: a picture is cut into crops, named by row and column, and the whole one follows."""

    def __init__(self, folder: Path, layout: MediaLayout, tokenizer: Any, model_type: str) -> None:
        module = import_module(f"transformers.models.{model_type}.image_processing_pil_{model_type}")
        self.processor = getattr(module, CROP_FAMILIES[model_type]).from_pretrained(str(folder))
        self._crop_tokens, self._tokenizer = layout.crop_tokens, tokenizer
        self.marks = {"images": "<image>"}

    def image_tokens(self, size: Size) -> list[int]:
        """See `PictureFamily`."""
        rows, columns = self._grid(size)
        crop, around = "<image>" * self._crop_tokens, "<fake_token_around_image>"
        names = [[f"{around}<row_{r + 1}_col_{c + 1}>{crop}" for c in range(columns)] for r in range(rows)]
        crops = "".join("".join(row) + "\n" for row in names) + ("\n" if rows else "")
        return encode(self._tokenizer, f"{crops}{around}<global-img>{crop}{around}")

    def images(self, images: Sequence[Image]) -> Arrays:
        """See `PictureFamily`."""
        arrays = _numpy(self.processor(images=[list(images)], return_tensors="np"))
        return {name: values[0] for name, values in arrays.items()}

    def video_tokens(self, count: int, size: Size) -> list[int]:
        """Not reached: ``marks`` has no videos."""
        raise NotImplementedError

    def video(self, frames: Sequence[Image]) -> Arrays:
        """Not reached: ``marks`` has no videos."""
        raise NotImplementedError

    def _grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of crops, 0 of a picture that stays whole."""
        from PIL import Image

        if not self.processor.do_image_splitting:
            return 0, 0
        blank = self.processor(images=[[Image.new("RGB", size)]], return_tensors="np", return_row_col_info=True)
        return int(blank["rows"][0][0]), int(blank["cols"][0][0])


def family_of(folder: Path, model_type: str, layout: MediaLayout, tokenizer: Any) -> PictureFamily:
    """The family of a model folder; ``model_type`` is one of `FAMILIES`."""
    if model_type in GRID_FAMILIES:
        return GridFamily(folder, layout, tokenizer)
    return CropFamily(folder, layout, tokenizer, model_type)


def _video_pixels(folder: Path, default: Any) -> dict[str, int]:
    """Fewest and most pixels of a video's frame, as the folder states them; a picture's, where it states none."""
    stated = _json(folder / "processor_config.json").get("video_processor")  # which transformers reads first
    stated = _json(folder / "video_preprocessor_config.json") if stated is None else stated
    size = stated.get("size") or {}
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    return {edge: int(size.get(edge) or stated.get(name) or default[edge]) for edge, name in names.items()}


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _numpy(arrays: Any) -> Arrays:
    """The arrays of a processor's output."""
    return {name: np.asarray(values) for name, values in arrays.items()}
