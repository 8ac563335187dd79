"""`slime.observability.trace_utils`: spans and events of samples, kept in ``sample.trace`` in slime's form."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from uuid import uuid4

from slime_core.types import Sample as CoreSample

META_KEYS = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput")
Attrs = Mapping[str, Any]
_OPEN: ContextVar[dict[str, str]] = ContextVar("open spans by trace", default={})  # noqa: B039 - never changed


@dataclass
class TraceHandle:
    """A sample's trace: ``carrier`` is the dict that ``sample.trace`` holds, with its list of ``events``."""

    trace_id: str
    carrier: dict[str, Any]
    sample_id: Any = None
    group_id: Any = None

    def record(self, kind: str, name: str, attrs: Attrs | None, **ids: str) -> None:
        """Add an event of now."""
        event = {"type": kind, "name": name, "ts": time.time(), "trace_id": self.trace_id, **ids}
        event |= {"sample_id": self.sample_id, "group_id": self.group_id, "attempt": self.carrier["attempt"]}
        self.carrier["events"].append(event | ({"attrs": dict(attrs)} if attrs else {}))


@dataclass
class TraceSpanContext:
    """What ``with trace_span(...) as span`` gives; attributes that are set are those of the span's end."""

    handles: list[TraceHandle]
    end_attrs: dict[str, Any] = field(default_factory=dict)

    def update(self, attrs: Attrs | None) -> TraceSpanContext:
        """Add attributes."""
        self.end_attrs |= attrs or {}
        return self

    def set(self, key: str, value: Any) -> TraceSpanContext:
        """Add one attribute."""
        return self.update({key: value})

    update_attrs, set_attr = update, set


def bind_trace(sample: Any) -> TraceHandle:
    """The sample's trace, begun where it has none."""
    carrier = getattr(sample, "trace", None)
    if carrier is None:
        carrier = sample.trace = {"version": 1, "trace_id": uuid4().hex, "events": [], "attempt": 0}
    carrier |= {"sample_id": sample.index, "group_id": sample.group_index}
    return TraceHandle(carrier["trace_id"], carrier, sample.index, sample.group_index)


def _handles(target: Any) -> list[TraceHandle]:
    """Traces of a sample, a handle or lists of them; none of anything else."""
    if isinstance(target, list):
        return [handle for item in target for handle in _handles(item)]
    if isinstance(target, CoreSample):
        return [bind_trace(target)]
    return [target] if isinstance(target, TraceHandle) else []


def _parent(handle: TraceHandle) -> dict[str, str]:
    parent = _OPEN.get().get(handle.trace_id)
    return {} if parent is None else {"parent_span_id": parent}


def trace_event(target: Any, name: str, *, attrs: Attrs | None = None) -> None:
    """Record that something happened to a sample, a handle, or each of a list."""
    for handle in _handles(target):
        handle.record("event", name, attrs, **_parent(handle))


@contextmanager
def trace_span(
    target: Any, name: str, *, attrs: Attrs | None = None, record_error: bool = True
) -> Iterator[TraceSpanContext]:
    """Record a block's begin and end, and by default the exception that leaves it; spans inside are its children."""
    span = TraceSpanContext(_handles(target))
    ids = {handle.trace_id: uuid4().hex for handle in span.handles}
    for handle in span.handles:
        handle.record("span_start", name, attrs, span_id=ids[handle.trace_id], **_parent(handle))
    token = _OPEN.set({**_OPEN.get(), **ids})
    try:
        yield span
    except Exception as error:
        if record_error:
            span.update({"error_type": type(error).__name__, "error_message": str(error)})
        raise
    finally:
        _OPEN.reset(token)
        for handle in span.handles:
            handle.record("span_end", name, span.end_attrs, span_id=ids[handle.trace_id])


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Attrs | None] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Record each call of a function as a span of its argument ``target``, or of what ``target_getter`` returns.

    With neither, of the first argument that is a sample, a handle or a list of them.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(fn)

        def span(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            if target is not None:
                traced = arguments.get(target)
            elif target_getter is not None:
                traced = target_getter(*args, **kwargs)
            else:
                traced = next((value for value in arguments.values() if _handles(value)), None)
            attrs = attrs_getter(*args, **kwargs) if attrs_getter else None
            return trace_span(traced, name, attrs=attrs, record_error=record_error)

        @wraps(fn)
        async def later(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return await fn(*args, **kwargs)

        @wraps(fn)
        def now(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return fn(*args, **kwargs)

        return later if inspect.iscoroutinefunction(fn) else now

    return decorate


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, times and the reason of the end that a ``meta_info`` of /generate has."""
    attrs = {key: meta[key] for key in META_KEYS if meta.get(key) is not None}
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    attrs |= {} if reason is None else {"finish_reason": reason}
    return attrs | ({} if meta.get("id") is None else {"sglang_request_id": meta["id"]})


__all__ = [
    "TraceHandle",
    "TraceSpanContext",
    "bind_trace",
    "build_sglang_meta_trace_attrs",
    "trace_event",
    "trace_function",
    "trace_span",
]
