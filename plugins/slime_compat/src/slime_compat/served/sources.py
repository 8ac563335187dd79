"""`slime.rollout.data_source`: the base class of data sources, slime's own two, and the default buffer filter."""

from __future__ import annotations

import abc
import copy
import json
from pathlib import Path
from typing import Any

from slime_core.compat.sample import Sample
from slime_core.plugins.locate import locate

Groups = list[list[Sample]]
PLACES = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")


class AbstractDataSource(abc.ABC):
    """What ``--data-source-path`` names: a class with these methods and ``__init__(args)``."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> Groups:
        """The next ``num_samples`` groups."""

    @abc.abstractmethod
    def add_samples(self, samples: Groups) -> None:
        """Put groups into the source."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the source's place."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Continue from a place that :meth:`save` wrote."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Rows."""


DataSource = AbstractDataSource


class RolloutDataSource(AbstractDataSource):
    """The rows of ``args.prompt_data``, shuffled each epoch with ``rollout_shuffle``, as groups of pending samples.

    Without ``rollout_global_dataset`` or ``prompt_data`` its groups hold empty samples.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = _dataset(args) if args.rollout_global_dataset and args.prompt_data else None
        self._shuffle()

    def _shuffle(self) -> None:
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> Groups:
        """The next ``num_samples`` groups; after the last row, the next epoch's."""
        return [self._group(row) for row in self._rows(num_samples)]

    def _rows(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        rows: list[Sample] = []
        while len(rows) < count:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                self._shuffle()
            end = self.sample_offset + count - len(rows)
            rows += self.dataset.samples[self.sample_offset : end]
            self.sample_offset = min(end, len(self.dataset))
        return rows

    def _group(self, row: Sample) -> list[Sample]:
        group = [copy.deepcopy(row) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: Groups) -> None:
        """Refuse them: this source is read-only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self).__name__} is read-only; groups go into a RolloutDataSourceWithBuffer")

    def save(self, rollout_id: int) -> None:
        """Write the place in the data below ``args.save``; nothing where that is empty."""
        if self.dataset is not None and self.args.save:
            file = _place_file(self.args.save, rollout_id)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({name: getattr(self, name) for name in PLACES}))

    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the place below ``args.load``, if there is one."""
        if self.dataset is None or not self.args.load:
            return
        file = _place_file(self.args.load, rollout_id)
        if file.exists():
            for name, value in json.loads(file.read_text()).items():
                setattr(self, name, value)
            self._shuffle()

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A source that hands out what was put into it first, as ``buffer_filter_path`` chooses."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: Groups = []
        path = args.buffer_filter_path
        self.buffer_filter = locate(path, "buffer_filter_path") if path else pop_first

    def get_samples(self, num_samples: int) -> Groups:
        """Groups of the buffer, then of the data."""
        groups: Groups = []
        if self.buffer and num_samples:
            groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: Groups) -> None:
        """Put groups into the buffer.

        Raises:
            ValueError: a group that is no list of ``n_samples_per_prompt`` samples.
        """
        for group in samples:
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                size = f"{len(group)} samples" if isinstance(group, list) else f"a {type(group).__name__}"
                raise ValueError(f"a group is a list of {self.args.n_samples_per_prompt} samples, not {size}")
        self.buffer += samples

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add to what is saved beside the place."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What is saved beside the place."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)


def pop_first(args: Any, rollout_id: int | None, buffer: Groups, num_samples: int) -> Groups:
    """Take the first ``num_samples`` groups out of the buffer, fewer where it has fewer: the default filter."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def _dataset(args: Any) -> Any:
    from slime_compat.served.datasets import Dataset
    from slime_compat.served.processing import load_processor, load_tokenizer

    return Dataset(
        args.prompt_data,
        tokenizer=load_tokenizer(args.hf_checkpoint),
        processor=load_processor(args.hf_checkpoint),
        max_length=args.rollout_max_prompt_len,
        prompt_key=args.input_key,
        multimodal_keys=args.multimodal_keys,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        seed=args.rollout_seed,
    )


def _place_file(folder: str, rollout_id: int | None) -> Path:
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
