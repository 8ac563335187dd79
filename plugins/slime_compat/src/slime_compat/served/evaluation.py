"""`slime.utils.eval_config`: the data sets of slime's ``--eval-config``, with their fallbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SAMPLING = ("temperature", "top_p", "top_k", "max_response_len", "min_new_tokens", "stop", "stop_token_ids")
KEYS = ("input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys")
READING = (*KEYS, "apply_chat_template", "apply_chat_template_kwargs", "custom_rm_path")
COUNT = "n_samples_per_eval_prompt"


def _attributes() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields that follow ``args`` where neither the set nor the defaults have them, and the attributes to look at."""
    yield COUNT, (COUNT, "n_samples_per_prompt")
    yield from ((name, (f"eval_{name}", f"rollout_{name}")) for name in SAMPLING)
    yield from ((name, (f"eval_{name}", name)) for name in READING)


@dataclass
class EvalDatasetConfig:
    """One evaluation set: what it reads, how it samples, and how it is judged; None is not set.

    Raises:
        TypeError: ``metadata_overrides`` that are no mapping.
        ValueError: ``min_eval_samples`` below 1.
    """

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    app_service: str | None = None
    eval_task_timeout: int | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    remote_environment: dict[str, Any] | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        overrides: Any = self.metadata_overrides
        self.metadata_overrides = {} if overrides is None else overrides
        if not isinstance(self.metadata_overrides, dict):
            raise TypeError(f"metadata_overrides of evaluation set {self.name!r} must be a mapping")
        if self.min_eval_samples is not None and self.min_eval_samples <= 0:
            raise ValueError(f"min_eval_samples of evaluation set {self.name!r} must be positive")

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What tells two readings of rows apart."""
        return self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """A row's metadata with this set's ``rm_type`` and overrides; what is no mapping counts as empty."""
        metadata = dict(sample_metadata) if isinstance(sample_metadata, dict) else {}
        return metadata | ({} if self.rm_type is None else {"rm_type": self.rm_type}) | self.metadata_overrides


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """The sets of ``eval.datasets`` as dicts with a name, from a list of them or a mapping by name.

    Raises:
        TypeError: another type.
        ValueError: an entry of a list without ``name``.
    """
    if config is None:
        return []
    if isinstance(config, Mapping):
        return [{"name": name, **(entry or {})} for name, entry in config.items()]
    if not isinstance(config, (list, tuple)):
        raise TypeError(f"eval.datasets is a {type(config).__name__}; write a list or a mapping by name")
    entries = [dict(entry or {}) for entry in config]
    if any("name" not in entry for entry in entries):
        raise ValueError("each entry of eval.datasets needs a `name`")
    return entries


def pick_from_args(args: Any, attrs: Iterable[str]) -> Any:
    """The first of these attributes that is set and not None."""
    return next((value for attr in attrs if (value := getattr(args, attr, None)) is not None), None)


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any] | None
) -> list[EvalDatasetConfig]:
    """Evaluation sets: a set's own value, else that of ``eval.defaults``, else that of ``args``.

    Raises:
        TypeError: a set's key that is no field.
        ValueError: a key of ``defaults`` that is no field.
    """
    defaults = defaults or {}
    names = {item.name for item in fields(EvalDatasetConfig)}
    if unknown := sorted(set(defaults) - names):
        raise ValueError(f"unknown keys in eval.defaults: {', '.join(unknown)}; keys are {', '.join(sorted(names))}")
    from_args = {name: pick_from_args(args, attrs) for name, attrs in _attributes()}
    return [EvalDatasetConfig(**(from_args | dict(defaults) | dict(entry or {}))) for entry in raw_config]


__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list", "pick_from_args"]
