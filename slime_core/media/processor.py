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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
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
    rgb,
    shown,
    with_reference,
)
from slime_core.types import Media, MediaInputs, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = 1 << 14  # of references whose sizes are kept
FETCHED = 1 << 28  # characters of data URIs that are kept of addresses


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
        self._fetched: OrderedDict[str, str] = OrderedDict()  # address -> data URI, until :meth:`fetch` hands it over
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
                images = [self._picture(item, where) for item in inputs[kind]]
                with _accepted(inputs[kind], where):
                    arrays |= self._family.images(images)
                continue
            for video in inputs[kind]:
                frames = [self._picture(frame, where) for frame in _frames(video, where)]
                with _accepted(video, where):
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
        """Compare the references of a sample, its arrays and the placeholders of its tokens.

        A placeholder that the model drew needs no picture: it is trained, or has a version of weights.

        Raises:
            DataError: DAT38; where sizes are no longer known, as :meth:`arrays`.
        """
        arrays, where = sample.multimodal_train_inputs or {}, f"sample {sample.id}"
        for kind, count, of_arrays in self._counts(sample):
            if count != of_arrays:
                raise _blind(f"references to {count} {kind} or their crops, and arrays of {of_arrays}", where)
        items = self.layout.items(arrays)  # type: ignore[arg-type]
        unbound = np.isin(sample.tokens, self.layout.ids)
        for start, item in zip(self.layout.starts(np.asarray(sample.tokens), items, where), items, strict=True):
            unbound[start : start + item.tokens] = False
        length = sample.response_length
        trained, versions = sample.loss_mask or [1] * length, sample.weight_versions or [-1] * length
        draws = [mask == 1 or version >= 0 for mask, version in zip(trained, versions, strict=True)]
        unbound[len(unbound) - length :] &= ~np.array(draws, dtype=bool)
        if unbound.any():
            raise _blind(f"{unbound.sum()} placeholders without a picture, the first at {unbound.argmax()}", where)

    async def prepare(self, samples: Iterable[Sample]) -> None:
        """Make the arrays of samples whose references have none, or others; equal references have one set of arrays.

        Raises:
            DataError: as :meth:`arrays` and :meth:`fetch`.
        """
        by_references: dict[str, tuple[MediaInputs, Arrays]] = {}
        for sample in samples:
            plain_sample(sample)
            if not sample.multimodal_inputs or await asyncio.to_thread(self._has_arrays, sample):
                continue
            key = json.dumps(sample.multimodal_inputs)
            if key not in by_references:
                by_references[key] = await asyncio.to_thread(
                    self._storable, sample.multimodal_inputs, f"sample {sample.id}"
                )
            inputs, arrays = by_references[key]
            sample.multimodal_inputs = deepcopy(inputs)
            sample.multimodal_train_inputs = {**(sample.multimodal_train_inputs or {}), **arrays}

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
        inputs, arrays = await asyncio.to_thread(self._storable, inputs, where)
        before = sample.multimodal_inputs or {}
        sample.multimodal_inputs = {kind: [*before.get(kind, []), *inputs.get(kind, [])] for kind in before | inputs}
        sample.multimodal_train_inputs = dict(joined(sample.multimodal_train_inputs or {}, arrays))

    def _storable(self, inputs: MediaInputs, where: str) -> tuple[MediaInputs, Arrays]:
        """References that can be read again, and their arrays."""
        inputs = self.fetch(inputs, where)
        return inputs, self.arrays(inputs, where)

    def _has_arrays(self, sample: Sample) -> bool:
        return bool(sample.multimodal_train_inputs) and all(
            count == of_arrays for _, count, of_arrays in self._counts(sample)
        )

    def _counts(self, sample: Sample) -> Iterator[tuple[str, int, int]]:
        """Of every kind with references: pictures or videos that they make, and those of the arrays; crops as well."""
        for kind, placeholder in self.layout.placeholders.items():
            items = (sample.multimodal_inputs or {}).get(kind)
            if not items:
                continue
            count = len(items)
            if not self.layout.merge:
                runs = chain(*self._runs(kind, items, f"sample {sample.id}"))
                count = [*runs].count(placeholder) // self.layout.crop_tokens
            yield kind, count, self.layout.count(kind, sample.multimodal_train_inputs or {})

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
        runs = []
        for item in items:
            size = self._size(item if kind == "images" else _frames(item, where), where)[0]
            with _accepted(item, where):
                runs.append(
                    self._family.image_tokens(size) if kind == "images" else self._family.video_tokens(len(item), size)
                )
        return runs

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
            return rgb(reference)
        return picture(self._read(reference, where), shown(reference), where, self.limits)

    def _read(self, reference: str, where: str) -> bytes:
        return read(self._fetch(reference, where), where, self.limits)

    def _fetch(self, reference: str, where: str) -> str:
        """The reference, or the data URI of an address, which is fetched once."""
        if not is_address(reference):
            return reference
        with self._lock:
            data = self._fetched.get(reference)
        if data is None:
            data = data_uri(read(reference, where, self.limits))
            with self._lock:
                self._fetched[reference] = data
                while sum(map(len, self._fetched.values())) > FETCHED:
                    self._fetched.popitem(last=False)
        return data


def blindness(tokenizer: Any) -> str:
    """Why :meth:`MediaProcessor.of` has none of this tokenizer's folder."""
    folder = Path(getattr(tokenizer, "name_or_path", "") or "")
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if config.get("model_type") in FAMILIES:
        return f"{folder} has no preprocessor_config.json, which says how the model sees pictures"
    if "vision_config" in config:
        return f"{config.get('model_type')} is none of the families of pictures: {', '.join(FAMILIES)}"
    return "it is a model of text"


def joined(arrays: Mapping[str, Any], more: Arrays) -> Arrays:
    """Arrays of media, then those of more media, end to end."""
    both = {name: np.concatenate([arrays[name], more[name]]) for name in more if name in arrays}
    return {**arrays, **more, **both}


@contextmanager
def _accepted(item: Any, where: str) -> Iterator[None]:
    """Make a ValueError of transformers' processors DAT39, such as that of a picture of 10 x 3000 pixels."""
    try:
        yield
    except ValueError as error:
        raise DataError(
            f"the model's image processor refuses {shown(str(item))}",
            code="DAT39",
            where=where,
            why=str(error),
            fix="resize or crop the picture, or leave such rows out with data.max_bad_rows",
        ) from error


def _blind(difference: str, where: str) -> DataError:
    """DAT38, of a sample that would train without seeing its pictures."""
    return DataError(
        f"the sample has {difference}",
        code="DAT38",
        where=where,
        why="the model would not see what its tokens stand for",
        fix="add pictures by ctx.append_media, or name them in sample.multimodal_inputs and await ctx.prepare_media",
    )


def mismatch(kind: str, count: int, placeholders: int, where: str) -> DataError:
    """DAT38, of a text before its placeholders are expanded."""
    return DataError(
        f"there are {count} {kind} for {placeholders} placeholders",
        code="DAT38",
        where=where,
        why="each placeholder takes the next one, and none is left over",
        fix=f"write one <{kind.removesuffix('s')}> for each into the prompt\nor skip such rows: data.max_bad_rows",
    )


def refuse_unseen(kinds: Collection[str], where: str, why: str) -> None:
    """Refuse media where nothing would see them, for the reason ``why``, if there is one.

    Raises:
        DataError: DAT41.
    """
    if kinds and why:
        raise not_taken(" and ".join(dict.fromkeys(kinds)), where, why)


def not_taken(kind: str, where: str, why: str) -> DataError:
    """DAT41."""
    return DataError(
        f"the model takes no {kind}",
        code="DAT41",
        where=where,
        why=why,
        fix=f"set rollout.hf_checkpoint to the whole folder of a model of {kind}\n"
        f"(families of pictures: {', '.join(FAMILIES)})\n"
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
