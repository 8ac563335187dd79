"""`slime.utils.misc`."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from slime_compat.served.http import is_port_available
from slime_core.plugins.locate import locate


def load_function(path: str) -> Any:
    """The function or class at a dotted path (or ``file.py:name``)."""
    return locate(path, "load_function")


class SingletonMeta(type):
    """A class whose calls all give one instance."""

    _instance: Any = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_instance") is None:
            cls._instance = super().__call__(*args, **kwargs)
        return cls._instance

    def clear_instances(cls) -> None:
        """Let the next call make another instance."""
        cls._instance = None


def group_by(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Items by their key (by themselves without one), in the order in which keys and items come."""
    groups = defaultdict(list)
    for item in iterable:
        groups[item if key is None else key(item)].append(item)
    return dict(groups)


def decode_int32_meta_array(meta_info: Mapping[str, Any], keys: str | Iterable[str]) -> Any:
    """The int32 tensor of the first of these keys that is there: of base64, bytes, numbers or a tensor; else None."""
    import torch

    names = (keys,) if isinstance(keys, str) else keys
    value = next((meta_info[name] for name in names if name in meta_info), None)
    match value:
        case None:
            return None
        case str():
            value = np.frombuffer(base64.b64decode(value), np.int32)
        case bytes() | bytearray() | memoryview():
            value = np.frombuffer(value, np.int32)
        case torch.Tensor():
            value = value.detach().cpu().numpy()
    return torch.from_numpy(np.array(value, dtype=np.int32)).ravel()


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """The first port from ``start_port`` on that is free together with the ``consecutive`` - 1 after it."""
    port = start_port
    while not all(is_port_available(port + number) for number in range(consecutive)):
        port += 1
    return port


def get_current_node_ip() -> str:
    """127.0.0.1: what functions start is reached on the loopback."""
    return "127.0.0.1"


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Whether what happens every ``interval`` rollouts is due after this one; also after epochs and the run."""
    if interval is None:
        return False
    step = rollout_id + 1
    epoch = num_rollout_per_epoch is not None and step % num_rollout_per_epoch == 0
    return step == num_rollout or step % interval == 0 or epoch


__all__ = [
    "SingletonMeta",
    "decode_int32_meta_array",
    "get_current_node_ip",
    "get_free_port",
    "group_by",
    "load_function",
    "should_run_periodic_action",
]
