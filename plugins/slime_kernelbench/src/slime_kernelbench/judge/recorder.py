"""What torch computed, as its profiler heard it: below the dispatch modes, beside which code could compute.

A second witness of the same thing. Operators that are made of others are left out: those others are heard too.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells stderr of every start
_autograd: Any = torch.autograd
_prepare, _enable, _disable = _autograd._prepare_profiler, _autograd._enable_profiler, _autograd._disable_profiler
_config, _kineto = _autograd.ProfilerConfig, _autograd.ProfilerState.KINETO
_activities = {_autograd.ProfilerActivity.CPU}
_empty = torch.empty
SWITCHED_OFF = "profiler switched off"
"""Said in the place of an operator's name."""


class Recorder:
    """Records one stretch of this thread's work after the other.

    Example:
        recorder.begin()
        y = x + 1
        recorder.end()      # {"aten::add"}
    """

    def begin(self) -> None:
        """From here on."""
        config = _config(_kineto, False, False, False, False, False, _ExperimentalConfig())
        _prepare(config, _activities)
        _enable(config, _activities)

    def end(self) -> set[str]:
        """The operators since then, with their namespaces; `SWITCHED_OFF` where one of our own is not heard."""
        _empty(0)
        events = {event.name() for event in _disable().events()}
        if "aten::empty" not in events:
            return {SWITCHED_OFF}
        return {name for name in events if "::" in name and not _is_made_of_others(name)}


@lru_cache(maxsize=4096)
def _is_made_of_others(name: str) -> bool:
    namespace, _, last = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), last, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    kernels = [one.name() for one in overloads if torch._C._dispatch_has_kernel(one.name())]
    return bool(kernels) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(one, "CompositeImplicitAutograd") for one in kernels
    )
