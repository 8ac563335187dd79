"""THUDM/slime's Sample: ours, with its methods and room for the attributes that its functions add."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from slime_core.routed_experts import longer_rows, routed_rows
from slime_core.types import ArrayRef, Sample as CoreSample, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_FIELDS = tuple(item.name for item in fields(CoreSample))


class RequestCounts:
    """Counts of a sample's requests, summed; a field's ``meta`` names the count of a response's ``meta_info``."""

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add a request's counts; one that is absent is 0."""
        for item in fields(self):  # type: ignore[arg-type]  # the classes below are dataclasses
            total = getattr(self, item.name) + meta_info.get(item.metadata.get("meta", item.name), 0)
            setattr(self, item.name, total)

    def to_dict(self) -> dict[str, int]:
        """The counts by their names."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        """The counts of :meth:`to_dict`; one that is absent is 0."""
        return cls(**{item.name: data.get(item.name, 0) for item in fields(cls)})  # type: ignore[arg-type]


@dataclass
class SpeculationCounts(RequestCounts):
    """Tokens and verifications of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = field(default=0, metadata={"meta": "completion_tokens"})

    @property
    def spec_accept_rate(self) -> float:
        """Accepted of drafted tokens; 0 without any."""
        return _ratio(self.spec_accept_token_num, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Tokens a verification; 0 without any."""
        return _ratio(self.completion_token_num, self.spec_verify_ct)


@dataclass
class PrefixCacheCounts(RequestCounts):
    """Prompt tokens, and those of them that the engine had in its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = field(default=0, metadata={"meta": "prompt_tokens"})

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached of prompt tokens; 0 without any."""
        return _ratio(self.cached_tokens, self.total_prompt_tokens)


def _ratio(part: int, total: int) -> float:
    return part / total if total else 0.0


INFOS: dict[str, type[SpeculationCounts] | type[PrefixCacheCounts]] = {
    "spec_info": SpeculationCounts,
    "prefix_cache_info": PrefixCacheCounts,
}


@dataclass(init=False, eq=False, repr=False)
class Sample(CoreSample):
    """What slime's functions know as ``slime.utils.types.Sample``; it is a :class:`slime_core.types.Sample`.

    Attributes that are no fields (``sample.tool_call_count = 2``) stay with it from generate to reward, and are not
    written to the ledger.

    Example:
        sample = Sample(prompt="1+1=", label="2", tool_call_count=0)
        sample.status = Sample.Status.COMPLETED
    """

    __slots__ = ("__dict__", "__weakref__", "cut_response", "whole_response")

    Status = Status
    SpecInfo = SpeculationCounts
    PrefixCacheInfo = PrefixCacheCounts

    spec_info: SpeculationCounts = field(default_factory=SpeculationCounts)
    prefix_cache_info: PrefixCacheCounts = field(default_factory=PrefixCacheCounts)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    non_generation_time: float = 0.0
    rollout_top_p_token_offsets: Any = None
    multimodal_train_input_id: str | None = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: value for name, value in values.items() if name in _FIELDS})
        self.cut_response: str | None = None  # ``response`` as the core wrote it: no stop string, no special tokens
        self.whole_response: str | None = None  # the text of all response tokens, once functions have read it
        others = [item for item in fields(self) if item.name not in _FIELDS]
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in others}
        for name, value in (defaults | values).items():
            setattr(self, name, value)

    @classmethod
    def of(cls, sample: CoreSample) -> Sample:
        """``sample`` as slime's: itself where it is one already, else a new one that shares its fields."""
        if isinstance(sample, cls):
            return sample
        view = cls(**{name: getattr(sample, name) for name in _FIELDS})
        view.cut_response = sample.response if sample.response_length else None
        return view

    def to_dict(self) -> dict[str, Any]:
        """The core's fields and, unlike there, all other attributes."""
        return {**vars(self), **super().to_dict(), **{name: asdict(getattr(self, name)) for name in INFOS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The sample of :meth:`to_dict`; unknown keys become attributes."""
        sample = cls.of(CoreSample.from_dict({name: data[name] for name in data if name in _FIELDS}))
        for name, value in data.items():
            if name not in _FIELDS:
                setattr(sample, name, INFOS[name](**value) if name in INFOS else value)
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """``reward`` as it is, or its entry ``args.reward_key`` where it is a dict."""
        reward = self.reward
        return reward[args.reward_key] if isinstance(reward, Mapping) and args.reward_key else reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that train."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Add one turn's tokens: trainable ones with their log-probs, others with mask 0.

        The end of a turn, which has a ``finish_reason``, sets the status and adds to ``prefix_cache_info``. A
        ``weight_version`` that is not a number is kept as slime does, once a turn, until the sample is trained.

        Raises:
            ValueError: trainable tokens without log-probs, or after response tokens that have none; other tokens with
                them; lists that differ in length.
        """
        tokens = () if tokens is None else tokens
        if log_probs is not None and trainable and self.response_length and self.rollout_log_probs is None:
            raise ValueError(
                f"sample {self.id}: trainable tokens follow {self.response_length} response tokens without log-probs; "
                "set sample.rollout_log_probs first, or append those tokens with trainable=False"
            )
        if len(tokens) and not trainable and log_probs is not None:
            raise ValueError("tokens that do not train have no log-probs: pass log_probs=None")
        meta = meta_info or {}
        version = str(meta.get("weight_version", ""))
        if len(tokens) or log_probs is not None:
            number = int(version) if trainable and version.isdigit() else -1
            self.append_response(tokens, log_probs, mask=int(trainable), version=number)
        self.response += text or ""
        if meta.get("routed_experts") is not None:
            self.rollout_routed_experts = _experts(self, args, meta)
        if not update_terminal_info or not meta.get("finish_reason"):
            return
        if version and not version.isdigit():
            self.weight_versions.append(version)  # type: ignore[arg-type]
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        self.status = FINISH.get(meta["finish_reason"]["type"], self.status)


def _experts(sample: CoreSample, args: Any, meta: Mapping[str, Any]) -> NDArray[Any]:
    """The sample's routed experts with those of an answer, base64 of int32 [tokens - 1 - start, layers, k].

    Raises:
        ValueError: another size.
    """
    start, rows = int(meta.get("routed_experts_start_len") or 0), sample.rollout_routed_experts
    shape = meta.get("routed_experts_shape") or (args.num_layers, args.moe_router_topk)
    numbers = np.frombuffer(b64decode(meta["routed_experts"]), dtype="<i4")
    try:
        experts = numbers.reshape(len(sample.tokens) - 1 - start, *shape)
    except ValueError as error:
        size = f"{len(sample.tokens) - 1 - start} x {' x '.join(map(str, shape))}"
        raise ValueError(f"sample {sample.id}: {len(numbers)} routed experts came, not {size}") from error
    experts = routed_rows(experts)
    if not start:
        return longer_rows(rows, experts)  # type: ignore[no-any-return]
    if not isinstance(rows, np.ndarray) or len(rows) < start:
        raise ValueError(f"sample {sample.id}: routed experts came from token {start} on, and it lacks those before")
    return np.concatenate([rows[:start], experts])


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
    if not isinstance(sample.rollout_routed_experts, (ArrayRef, np.ndarray, NoneType)):
        sample.rollout_routed_experts = np.asarray(sample.rollout_routed_experts)
    sample.status = Status(getattr(sample.status, "value", sample.status))
    if sample.status is Status.PENDING and sample.response_length:
        sample.status = Status.COMPLETED
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    numbers = [v for v in sample.weight_versions if isinstance(v, int)]
    one_each = len(numbers) == len(sample.weight_versions) == sample.response_length
    if not one_each and len(mask) == sample.response_length:
        sample.weight_versions = [version if trains else -1 for trains in mask]
    return sample


def copy_fields(source: CoreSample, target: CoreSample) -> None:
    """Give ``target`` every field of ``source``; also the attributes, where both are slime's."""
    if source is not target:
        attributes = vars(source) if isinstance(source, Sample) and isinstance(target, Sample) else ()
        for name in (*_FIELDS, *attributes):
            setattr(target, name, getattr(source, name))
