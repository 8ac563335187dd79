"""Pictures of a request as SGLang's /generate takes them.

    tokens  <start> <pad> <pad> <pad> <pad> <end>  ->  <start> <pad> <end>     the server repeats the id again
    pixel_values, image_grid_thw                   ->  a PNG of the size that the model sees

The PNG is made from the arrays that the sample trains with, so a server's own resizing, whatever its versions of
Pillow and torchvision, has nothing to do: it sees the trainer's pixels. SGLang counts a prompt's tokens after it has
repeated the ids, and every answer is checked against the tokens that were sent.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import zlib
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from slime_core.errors import EngineError
from slime_core.media.positions import GRIDS, PIXELS, MediaLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import GenerateRequest, Media
    from slime_core.weights.folder import ModelFolder

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose pictures SGLang takes beside token ids; of others it decodes the ids, and tokenizes them anew."""
OPTIONS: Mapping[str, Any] = {"mm_preprocess_cache_size_mb": 512, "image_processor_backend": "pil"}
"""SGLang's options for such models: token ids stay what they are, and the pictures of a group are read once."""
UNKEPT: Mapping[str, str] = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""SGLang keeps pictures' features when weights change: where the vision tower is trained, it must keep none."""
KEPT_BYTES = 1 << 28
"""Of PNGs that are kept: the pictures of a dialogue go out again with every turn."""


class PictureFiles:
    """Files of pictures by key, of at most ``limit`` characters together; the least recently used go first.

    Example: PictureFiles(1 << 28).get(key)
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._files: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> str | None:
        """The file, None where there is none (any more)."""
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def add(self, key: bytes, file: str) -> None:
        """Keep a file."""
        with self._lock:
            self._size += len(file) - len(self._files.pop(key, ""))
            self._files[key] = file
            while self._size > self._limit:
                self._size -= len(self._files.popitem(last=False)[1])


@dataclass(slots=True, eq=False)
class PictureCodec:
    """See the module.

    Example: PictureCodec(layout=MediaLayout.of(config), mean=np.full(3, 0.5), std=np.full(3, 0.5), patch=14)
    """

    layout: MediaLayout
    mean: NDArray[np.float64]  # 3, of the model's normalisation
    std: NDArray[np.float64]
    patch: int  # pixels a side
    _files: dict[int, asyncio.Future[list[str]]] = field(default_factory=dict)  # by the id of an array that lives
    _recent: PictureFiles = field(default_factory=lambda: PictureFiles(KEPT_BYTES))

    @classmethod
    def of(cls, folder: ModelFolder) -> PictureCodec | None:
        """Of a model folder; None where SGLang takes no pictures of such a model, or the folder has no processor."""
        layout = MediaLayout.of(folder.config)
        has = any((folder.path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
        if layout is None or not has or folder.config.model_type not in FAMILIES:
            return None
        module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        processor = module.Qwen2VLImageProcessorPil.from_pretrained(str(folder.path))
        mean, std = (np.asarray(values, dtype=np.float64) for values in (processor.image_mean, processor.image_std))
        return cls(layout, mean, std, int(processor.patch_size))

    def ended(self, request: GenerateRequest) -> GenerateRequest:
        """The request, which ends where the model draws a placeholder: there is no picture for it."""
        stops = dict.fromkeys((*request.params.stop_token_ids, *self.layout.ids))
        return replace(request, params=replace(request.params, stop_token_ids=tuple(stops)))

    async def fields(self, tokens: Sequence[int], media: Media, where: str) -> dict[str, Any]:
        """``input_ids`` and ``image_data`` of a request.

        Raises:
            DataError: DAT38 placeholders that do not match its arrays.
            EngineError: ENG03 videos or sounds, ENG08 a placeholder that the model drew.
        """
        if media.videos or media.audios or PIXELS["videos"] in media.arrays:
            raise EngineError(
                "SGLang takes pictures from slime, not videos or sounds",
                code="ENG03",
                where=where,
                why="it chooses the frames of a video by itself, so they would not be those that train",
                fix="--rollout-engine local   or   give the frames as pictures",
            )
        ids = np.asarray(tokens)
        items = self.layout.items(media.arrays)
        if not items:
            return {}
        starts = self.layout.starts(ids, items, where)
        mask = np.ones(len(ids), dtype=bool)
        for start, item in zip(starts, items, strict=True):
            mask[start + 1 : start + item.tokens] = False
        if int(np.isin(ids[mask], self.layout.ids).sum()) != len(items):
            raise EngineError(
                "a placeholder that the model drew lies in the prompt",
                code="ENG08",
                where=where,
                why="SGLang would look for its picture",
                fix="end the dialogue where a response has a placeholder",
            )
        return {"input_ids": ids[mask].tolist(), "image_data": await self._pictures(media.arrays)}

    async def _pictures(self, arrays: Mapping[str, NDArray[Any]]) -> list[str]:
        """Made in a thread, once for an array as long as it lives: the samples of a prompt share theirs."""
        pixels = arrays[PIXELS["images"]]
        if id(pixels) not in self._files:
            grids = np.asarray(arrays[GRIDS["images"]]).tolist()
            self._files[id(pixels)] = asyncio.ensure_future(asyncio.to_thread(self._encode, pixels, grids))
            finalize(pixels, self._files.pop, id(pixels), None)
        return await asyncio.shield(self._files[id(pixels)])  # one of several who wait may be cancelled

    def _encode(self, pixels: NDArray[Any], grids: list[list[int]]) -> list[str]:
        """A file for each grid; those of pictures that were met before, such as in an earlier turn, are kept."""
        files, begin = [], 0
        for grid in grids:
            rows = np.ascontiguousarray(pixels[begin : begin + int(np.prod(grid))])
            key = blake2b(rows.data, digest_size=16).digest() + bytes(str(grid), "ascii")
            if (file := self._recent.get(key)) is None:
                file = f"data:image/png;base64,{b64encode(png(self.picture(rows, grid))).decode()}"
                self._recent.add(key, file)
            files.append(file)
            begin += len(rows)
        return files

    def picture(self, pixels: NDArray[Any], grid: list[int]) -> NDArray[np.uint8]:
        """[height, width, 3] of a picture's patches [n, channels * frames * patch * patch], as Qwen-VL lays them out:
        windows of ``merge`` by ``merge`` patches one after another, each patch with its channels, frames, rows."""
        merge, patch = self.layout.merge, self.patch
        _, rows, columns = (int(n) for n in grid)
        frames = pixels.shape[1] // (3 * patch * patch)
        windows = pixels.reshape(rows // merge, columns // merge, merge, merge, 3, frames, patch, patch)[..., 0, :, :]
        image = windows.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
        return np.rint((image * self.std + self.mean) * 255.0).clip(0, 255).astype(np.uint8)


def png(image: NDArray[np.uint8]) -> bytes:
    """A PNG of [height, width, 3], lightly packed: it goes to the next process."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter, none
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")
    chunks = (struct.pack(">I", len(data)) + name + data + _crc(name + data) for name, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _crc(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))
