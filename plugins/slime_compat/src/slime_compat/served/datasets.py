"""`slime.utils.data`: rows of files, and the prompts that they make, as samples."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from slime_compat.served.processing import process_vision_info
from slime_compat.served.samples import MultimodalTypes
from slime_core.compat.sample import Sample
from slime_core.compat.steps import get_source
from slime_core.data.rows import split_slice

logger = logging.getLogger(__name__)
Row = dict[str, Any]


def read_file(path: str) -> Iterator[Row]:
    """The rows of a ``.jsonl`` or ``.parquet`` file, of ``path@[a:b]`` those of the slice.

    A line that is not JSON is logged and left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another suffix.
    """
    name, part = split_slice(path)
    if not Path(name).exists():
        raise FileNotFoundError(f"no file of prompts at {name}")
    readers = {".jsonl": _lines, ".parquet": _parquet}
    if Path(name).suffix not in readers:
        raise ValueError(f"{name} is none of {', '.join(readers)}")
    rows = readers[Path(name).suffix](name)
    part = part or slice(None)
    if min(part.start or 0, part.stop or 0) < 0:
        yield from list(rows)[part]
    else:
        yield from islice(rows, part.start, part.stop)


def _lines(path: str) -> Iterator[Row]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    logger.warning("%s:%d is not JSON and is left out: %s", path, number, error)


def _parquet(path: str) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def filter_long_prompt(
    origin_samples: Sequence[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompts have at most ``max_length`` tokens, in their order; None keeps all.

    Prompts with media are counted by the processor. Prompts that are messages cannot be counted, and all are kept.
    """
    samples = list(origin_samples)
    if max_length is None or not samples:
        return samples
    if not isinstance(samples[0].prompt, str):
        logger.warning("prompts that are messages are not measured: set apply_chat_template to leave out long ones")
        return samples
    by_text = [sample for sample in samples if not (processor and _has_media(sample))]
    lengths = {
        id(sample): len(processor(text=sample.prompt, **process_vision_info(sample.prompt, processor))["input_ids"][0])
        for sample in samples
        if processor and _has_media(sample)
    }
    if by_text:
        encoded = tokenizer([sample.prompt for sample in by_text], add_special_tokens=False)["input_ids"]
        lengths |= {id(sample): len(ids) for sample, ids in zip(by_text, encoded, strict=True)}
    short = [sample for sample in samples if lengths[id(sample)] <= max_length]
    logger.info("%d of %d prompts are longer than %d tokens", len(samples) - len(short), len(samples), max_length)
    return short


def _has_media(sample: Sample) -> bool:
    return any(value is not None for value in (sample.multimodal_inputs or {}).values())


class Dataset:
    """The prompts of a file as samples, in the file's order until :meth:`shuffle`.

    ``multimodal_keys`` maps ``image``, ``video`` and ``audio`` to columns; each ``<image>`` of a prompt takes the
    next of them.

    Raises:
        ValueError: media and placeholders of a row that differ in number.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        samples = []
        for row in read_file(path):
            prompt: Any = row.get(prompt_key)
            if isinstance(prompt, str) and (apply_chat_template or multimodal_keys is not None):
                prompt = [{"role": "user", "content": prompt}]
            if multimodal_keys:
                prompt = _with_media(prompt, row, multimodal_keys)
            metadata, tools = row.get(metadata_key) or {}, None
            if tool_key in row:
                tools = json.loads(row[tool_key]) if isinstance(row[tool_key], str) else list(row[tool_key])
                metadata["tools"] = tools
            media = process_vision_info(prompt, processor) if processor else None
            if apply_chat_template:
                kwargs = {"add_generation_prompt": True, **(apply_chat_template_kwargs or {})}
                prompt = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, **kwargs)
            label = row[label_key] if label_key is not None else None
            samples.append(Sample(prompt=prompt, label=label, metadata=metadata, multimodal_inputs=media))
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        self.samples = self.origin_samples
        self.seed, self.epoch_id = seed, -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the samples into the order of an epoch, which depends on it and the seed alone."""
        if self.epoch_id != new_epoch_id:
            order = list(range(len(self.origin_samples)))
            random.Random(self.seed + new_epoch_id).shuffle(order)
            self.samples = [self.origin_samples[place] for place in order]
            self.epoch_id = new_epoch_id

    def __getitem__(self, idx: int) -> Sample:
        return self.samples[idx]

    def __len__(self) -> int:
        return len(self.samples)


def _with_media(messages: list[dict[str, Any]], row: Row, keys: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages whose placeholders are parts of their content, each with the next medium of the row."""
    kinds = {kind.placeholder: kind for name in keys if (kind := MultimodalTypes.get(name))}
    media = {mark: list(row[keys[kind.name]]) for mark, kind in kinds.items() if row.get(keys[kind.name]) is not None}
    pattern = "(" + "|".join(map(re.escape, media)) + ")" if media else r"(?!)"

    def part(piece: str) -> dict[str, Any]:
        if piece not in media:
            return {"type": "text", "text": piece}
        name = kinds[piece].name
        if not media[piece]:
            raise ValueError(f"a prompt has more {piece} than its row has of column '{keys[name]}'")
        item = media[piece].pop(0)
        return item if isinstance(item, dict) else {"type": name, name: item}

    parted = [
        {**message, "content": [part(piece) for piece in re.split(pattern, message["content"]) if piece]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    if rest := [mark for mark, items in media.items() if items]:
        raise ValueError(f"a row has more media than its prompt has {', '.join(rest)}")
    return parted


def process_rollout_data(args: Any, rollout_data_ref: Sequence[Any], dp_rank: int, dp_size: int) -> Row:
    """A data-parallel rank's rollout data, from a box for each: ``total_lengths`` of its own samples.

    ``raw_reward`` stays that of the whole step, and ``local_raw_reward`` has this rank's.

    Raises:
        ValueError: another number of boxes than ranks.
    """
    if len(rollout_data_ref) != dp_size:
        raise ValueError(f"{len(rollout_data_ref)} parts of rollout data for {dp_size} ranks")
    data: Row = rollout_data_ref[dp_rank].inner
    data["total_lengths"] = [data["total_lengths"][place] for place in data["partition"]]
    if "raw_reward" in data:
        data["local_raw_reward"] = [data["raw_reward"][place] for place in data["partition"]]
    return data


__all__ = ["Dataset", "filter_long_prompt", "get_source", "process_rollout_data", "read_file"]
