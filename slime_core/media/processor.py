"""What a model sees of pictures: the tokens that stand for them, and the arrays that its tower reads.

    references -> decoded pictures -> sizes -> expanded placeholders -> tokens of a prompt       (when a row is read)
                        `-> arrays by argument of the model's forward -> sample, request         (when it is issued)

A chat template writes one placeholder a picture; `expand` puts in its place what the family writes for a picture of
that size. No array is made for that, so a prompt stays as light as its references.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import DataError
from slime_core.media.families import FAMILIES, Arrays, PictureFamily, Size, family_of
from slime_core.media.positions import MediaLayout
from slime_core.media.references import (
    NO_ADDRESS,
    MediaLimits,
    data_uri,
    flat,
    inputs_of,
    is_address,
    picture,
    plain_sample,
    read,
    shown,
    with_reference,
)
from slime_core.types import Media, MediaInputs, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = 1 << 14  # of references whose sizes are kept


class MediaProcessor:
    """The processor of one model folder; safe to call from several threads.

    Example:
        media = MediaProcessor.of(tokenizer)
        tokens = media.expand(encode(tokenizer, text), {"images": ["a.png"]})
        arrays = media.arrays({"images": ["a.png"]})
    """

    def __init__(self, family: PictureFamily, layout: MediaLayout, limits: MediaLimits) -> None:
        self.layout, self.limits, self._family = layout, limits, family
        self._sizes: OrderedDict[str, list[Size]] = OrderedDict()
        self._fetched: dict[str, str] = {}  # address -> data URI, until :meth:`fetch` hands it over
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Any, limits: MediaLimits = NO_ADDRESS) -> MediaProcessor | None:
        """The processor of the folder that a tokenizer was read from; None of a model of text alone."""
        folder = Path(getattr(tokenizer, "name_or_path", "") or "")
        if not (folder / "preprocessor_config.json").is_file() and not (folder / "processor_config.json").is_file():
            return None
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(folder))
        layout = MediaLayout.of(config) if config.model_type in FAMILIES else None
        return None if layout is None else cls(family_of(folder, config.model_type, layout, tokenizer), layout, limits)

    @property
    def image_processor(self) -> Any:
        """The image processor of transformers."""
        return self._family.processor

    @property
    def marks(self) -> dict[str, str]:
        """Kind of media that the model takes to the text that stands for one in a prompt without a chat template."""
        return self._family.marks

    def expand(self, tokens: Sequence[int], inputs: Mapping[str, Sequence[Any]], where: str = "") -> list[int]:
        """``tokens`` with each placeholder replaced by what the family writes for its picture or video.

        Raises:
            DataError: as :meth:`runs`.
        """
        return [*chain(*self.runs(tokens, inputs, where))]

    def runs(self, tokens: Sequence[int], inputs: Mapping[str, Sequence[Any]], where: str = "") -> list[list[int]]:
        """What stands for each of ``tokens``: itself, or a picture's run.

        Raises:
            DataError: DAT38 another number of placeholders, DAT39, DAT40, DAT41 a kind that the model does not take.
        """
        kinds: dict[int, str] = {placeholder: kind for kind, placeholder in self.layout.placeholders.items()}
        runs = {kind: self._runs(kind, inputs[kind], where) for kind in self._kinds(inputs, where)}
        counts = Counter(kinds[token] for token in tokens if token in kinds)
        for kind in counts | dict.fromkeys(runs, 0):
            if counts[kind] != len(runs.get(kind, ())):
                raise mismatch(kind, len(runs.get(kind, ())), counts[kind], where)
        following = {kind: iter(of_kind) for kind, of_kind in runs.items()}
        return [next(following[kinds[token]]) if token in kinds else [token] for token in tokens]

    def arrays(self, inputs: Mapping[str, Sequence[Any]], where: str = "") -> Arrays:
        """The arrays of all media, each kind in its order, by argument of the model's forward.

        Raises:
            DataError: DAT39, DAT40, DAT41.
        """
        arrays: Arrays = {}
        for kind in self._kinds(inputs, where):
            if kind == "images":
                arrays |= self._family.images([self._picture(item, where) for item in inputs[kind]])
                continue
            for video in inputs[kind]:
                frames = [self._picture(frame, where) for frame in _frames(video, where)]
                arrays = joined(arrays, self._family.video(frames))
        return arrays

    def open(self, inputs: Mapping[str, Sequence[Any]], where: str = "") -> None:
        """Decode every picture once, so that :meth:`expand` knows its size.

        Raises:
            DataError: as :meth:`arrays`.
        """
        for kind in self._kinds(inputs, where):
            for item in inputs[kind]:
                self._size(item if kind == "images" else _frames(item, where), where)

    def fetch(self, inputs: MediaInputs, where: str = "") -> MediaInputs:
        """The references, with data URIs in place of addresses: a ledger can read them again.

        Raises:
            DataError: DAT33, DAT39, DAT40.
        """

        def resolve(item: Any) -> Any:
            return [resolve(frame) for frame in item] if isinstance(item, list) else self._fetch(item, where)

        references = {kind: [resolve(item) for item in items] for kind, items in inputs.items()}
        for address in [*flat([*chain(*inputs.values())])]:
            self._fetched.pop(address, None)
        return references

    def check(self, sample: Sample) -> None:
        """Compare the placeholders of a sample's tokens with its arrays.

        Raises:
            DataError: DAT38.
        """
        items = self.layout.items(sample.multimodal_train_inputs or {})  # type: ignore[arg-type]
        self.layout.starts(np.asarray(sample.tokens), items, f"sample {sample.id}")

    async def prepare(self, samples: Iterable[Sample]) -> None:
        """Make the arrays of samples that have references alone; equal references have one set of arrays.

        Raises:
            DataError: as :meth:`arrays`.
        """
        arrays_of: dict[str, Arrays] = {}
        for sample in samples:
            plain_sample(sample)
            if not sample.multimodal_inputs or sample.multimodal_train_inputs:
                continue
            key = json.dumps(sample.multimodal_inputs)
            if key not in arrays_of:
                arrays_of[key] = await asyncio.to_thread(self.arrays, sample.multimodal_inputs, f"sample {sample.id}")
            sample.multimodal_train_inputs = dict(arrays_of[key])

    async def request(self, sample: Sample) -> Media | None:
        """What a request of a sample brings to the engine; None of text alone.

        Raises:
            DataError: as :meth:`arrays`.
        """
        await self.prepare([sample])
        if not sample.multimodal_inputs:
            return None
        return await asyncio.to_thread(self._request, sample)

    def pictures(self, inputs: MediaInputs, where: str = "") -> dict[str, Any]:
        """Decoded pictures in place of references, for functions that read them; what is not changed stays that file.

        Raises:
            DataError: DAT39, DAT40.
        """

        def decode(item: Any) -> Any:
            if isinstance(item, list):
                return [decode(frame) for frame in item]
            return with_reference(self._picture(item, where), item)

        return {kind: [decode(item) for item in items] for kind, items in inputs.items()}

    async def append(self, sample: Sample, messages: Any) -> None:
        """Add the pictures of messages, such as a tool's result, to a sample whose tokens have their placeholders.

        Raises:
            DataError: DAT24 no picture, or as :meth:`arrays`.
        """
        where = f"sample {sample.id}"
        inputs = inputs_of(messages, where)
        if not inputs:
            return
        await self.prepare([sample])
        arrays = await asyncio.to_thread(self.arrays, inputs, where)
        before = sample.multimodal_inputs or {}
        sample.multimodal_inputs = {kind: [*before.get(kind, []), *inputs.get(kind, [])] for kind in before | inputs}
        sample.multimodal_train_inputs = dict(joined(sample.multimodal_train_inputs or {}, arrays))

    def _request(self, sample: Sample) -> Media:
        inputs, where = sample.multimodal_inputs or {}, f"sample {sample.id}"
        files = {kind: tuple(self._read(item, where) for item in flat(items)) for kind, items in inputs.items()}
        arrays = (sample.multimodal_train_inputs or {}).items()
        return Media(arrays={name: one for name, one in arrays if isinstance(one, np.ndarray)}, **files)

    def _kinds(self, inputs: Mapping[str, Sequence[Any]], where: str) -> list[str]:
        kinds = [kind for kind, items in inputs.items() if items]
        for kind in kinds:
            if kind not in self.marks:
                raise not_taken(kind, where, f"it takes {' and '.join(self.marks)}")
        return kinds

    def _runs(self, kind: str, items: Sequence[Any], where: str) -> list[list[int]]:
        if kind == "images":
            return [self._family.image_tokens(self._size(item, where)[0]) for item in items]
        videos = [_frames(item, where) for item in items]
        return [self._family.video_tokens(len(video), self._size(video, where)[0]) for video in videos]

    def _size(self, item: Any, where: str) -> list[Size]:
        """Sizes of a picture, or of a video's frames, which are equal."""
        references = list(flat([item]))
        sizes = []
        for reference in references:
            if not isinstance(reference, str):
                sizes.append(reference.size)
                continue
            key = reference if len(reference) < 256 else f"{len(reference)}:{hash(reference)}"
            with self._lock:
                size = self._sizes.get(key)
            if size is None:
                size = [self._picture(reference, where).size]
                with self._lock:
                    self._sizes[key] = size
                    while len(self._sizes) > SIZES:
                        self._sizes.popitem(last=False)
            sizes += size
        if len(set(sizes)) > 1:
            raise DataError(
                "the frames of a video differ in size",
                code="DAT39",
                where=where,
                why=", ".join(f"{width} x {height}" for width, height in sorted(set(sizes))),
                fix="make all frames of a video as large as its first",
            )
        return sizes

    def _picture(self, reference: Any, where: str) -> Image:
        if not isinstance(reference, str):  # a picture of a user's function
            return reference.convert("RGB")  # type: ignore[no-any-return]
        return picture(self._read(reference, where), shown(reference), where, self.limits)

    def _read(self, reference: str, where: str) -> bytes:
        return read(self._fetch(reference, where), where, self.limits)

    def _fetch(self, reference: str, where: str) -> str:
        """The reference, or the data URI of an address, which is fetched once."""
        if not is_address(reference):
            return reference
        if reference not in self._fetched:
            self._fetched[reference] = data_uri(read(reference, where, self.limits))
        return self._fetched[reference]


def joined(arrays: Mapping[str, Any], more: Arrays) -> Arrays:
    """Arrays of media, then those of more media, end to end."""
    both = {name: np.concatenate([arrays[name], more[name]]) for name in more if name in arrays}
    return {**arrays, **more, **both}


def mismatch(kind: str, count: int, placeholders: int, where: str) -> DataError:
    """DAT38, of a text before its placeholders are expanded."""
    return DataError(
        f"there are {count} {kind} for {placeholders} placeholders",
        code="DAT38",
        where=where,
        why="each placeholder takes the next one, and none is left over",
        fix=f"write one <{kind.removesuffix('s')}> for each into the prompt\nor skip such rows: data.max_bad_rows",
    )


def not_taken(kind: str, where: str, why: str) -> DataError:
    """DAT41."""
    return DataError(
        f"the model takes no {kind}",
        code="DAT41",
        where=where,
        why=why,
        fix=f"set rollout.hf_checkpoint to a model of {kind} (families of pictures: {', '.join(FAMILIES)})\n"
        "or train on text: leave them out of data.multimodal_keys and the messages",
    )


def _frames(video: Any, where: str) -> list[str]:
    if isinstance(video, list) and video:
        return video
    raise DataError(
        "a video is a file, which nothing here decodes",
        code="DAT41",
        where=where,
        why=f"it is {shown(str(video))!r}; frames are chosen by whoever makes the data",
        fix="give its frames as a list of pictures, such as two for each second: ffmpeg -i FILE -vf fps=2 %04d.png",
    )
