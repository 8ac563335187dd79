"""THUDM/slime's Sample: ours, with its methods and room for the attributes that its functions add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from slime_core.types import Sample as CoreSample, Status

FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_FIELDS = tuple(item.name for item in fields(CoreSample))


class Sample(CoreSample):
    """What slime's functions know as ``slime.utils.types.Sample``; it is a :class:`slime_core.types.Sample`.

    Attributes that are no fields (``sample.tool_call_count = 2``) stay with it from generate to reward, and are not
    written to the ledger.

    Example:
        sample = Sample(prompt="1+1=", label="2", tool_call_count=0)
        sample.status = Sample.Status.COMPLETED
    """

    Status = Status

    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    non_generation_time: float = 0.0

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: value for name, value in values.items() if name in _FIELDS})
        for name, value in values.items():
            if name not in _FIELDS:
                setattr(self, name, value)

    @classmethod
    def of(cls, sample: CoreSample) -> Sample:
        """``sample`` as slime's: itself where it is one already, else a new one that shares its fields."""
        if isinstance(sample, cls):
            return sample
        return cls(**{name: getattr(sample, name) for name in _FIELDS})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The sample of :meth:`to_dict`; unknown keys become attributes."""
        extra = {name: value for name, value in data.items() if name not in _FIELDS}
        sample = cls.of(CoreSample.from_dict({name: data[name] for name in data if name in _FIELDS}))
        for name, value in extra.items():
            setattr(sample, name, value)
        return sample

    def get_reward_value(self, args: Any) -> float:
        """The number that trains: ``reward``, or its entry ``args.reward_key`` while it is a dict."""
        reward: Any = self.reward
        return float(reward[args.reward_key] if isinstance(reward, Mapping) else reward)

    @property
    def effective_response_length(self) -> int:
        """Response tokens that train."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Add one turn's tokens: trainable ones with their log-probs, others with mask 0.

        Raises:
            ValueError: trainable tokens without log-probs, or lists that differ in length.
        """
        meta = meta_info or {}
        version = str(meta.get("weight_version", ""))
        self.append_response(
            tokens,
            log_probs if trainable else None,
            mask=int(trainable),
            text=text,
            version=int(version) if trainable and version.isdigit() else -1,
        )
        reason = (meta.get("finish_reason") or {}).get("type") if update_terminal_info else None
        if reason in FINISH:
            self.status = FINISH[reason]


def plain(sample: CoreSample, version: int) -> CoreSample:
    """``sample`` with what slime leaves open settled: Python numbers, a Status, one weight version a token.

    Args:
        sample: as a function left it.
        version: the oldest weights that can have made its tokens.
    """
    sample.tokens = [int(token) for token in sample.tokens]
    sample.response_length = int(sample.response_length)
    if sample.loss_mask is not None:
        sample.loss_mask = [int(mask) for mask in sample.loss_mask]
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = [float(value) for value in sample.rollout_log_probs]
    sample.status = Status(getattr(sample.status, "value", sample.status))
    if sample.status is Status.PENDING and sample.response_length:
        sample.status = Status.COMPLETED
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    versions = [v for v in sample.weight_versions if isinstance(v, int)]
    if len(versions) != sample.response_length and len(mask) == sample.response_length:
        sample.weight_versions = [version if trains else -1 for trains in mask]
    return sample


def copy_fields(source: CoreSample, target: CoreSample) -> None:
    """Give ``target`` every field of ``source``."""
    if source is not target:
        for name in _FIELDS:
            setattr(target, name, getattr(source, name))
