"""What a server that runs says of itself: which SGLang it is, and what that one can do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_sglang.server import Server

OLDEST, SPANS = (0, 5, 12), (0, 5, 23)
CONTROL = ("pause_modes", "memory_tags", "sampling_seed", "weights_checker", "abort")
OLD = frozenset((*CONTROL, "disk_update", "tensor_update", "nccl_update"))
NEW = OLD | {"version_spans", "routed_dp_rank", "update_brackets", "adapters"}


def features(version: str) -> frozenset[str]:
    """What a server of that version can do, where its installation cannot be looked at.

    Raises:
        EngineError: ENG71 it is too old, or names none.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in match.groups()) if match else ()
    if numbers < OLDEST:
        raise EngineError(
            f"the external server is SGLang {version or '(it names no version)'}",
            code="ENG71",
            where="rollout.rollout_external_engine_addrs",
            why=f"slime knows SGLang from {'.'.join(map(str, OLDEST))} on",
            fix="update it",
        )
    return NEW if numbers >= SPANS else OLD


def common_features(servers: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """What all servers can do, by what each said of itself. Raises as :func:`features`."""
    return frozenset.intersection(*(features(str(facts.get("version", ""))) for facts in servers))


def common_dtype(servers: Sequence[Server], default: str, model: Any) -> Literal["float32", "bfloat16"]:
    """Of all servers' tensors.

    Raises:
        EngineError: ENG86 as :func:`dtype`, or where they differ.
    """
    dtypes = {server.address.url: dtype(server.facts, default, model) for server in servers}
    if len(set(dtypes.values())) > 1:
        raise EngineError(
            "the servers hold their weights in different dtypes",
            code="ENG86",
            where=", ".join(f"{url}: {name}" for url, name in dtypes.items()),
            why="one update is made for all of them",
            fix="start them with the same --dtype",
        )
    return next(iter(dtypes.values()))


def dtype(facts: Mapping[str, Any], default: str, model: Any) -> Literal["float32", "bfloat16"]:
    """Of a server's tensors: what it was started with, for ``auto`` what the model's config names.

    Raises:
        EngineError: ENG86 another one than float32 and bfloat16.
    """
    name = str(facts.get("dtype") or default)
    if name == "auto":
        name = str(getattr(model, "dtype", None) or default).removeprefix("torch.")
        name = "bfloat16" if name == "float32" and facts.get("device") != "cpu" else name
    name = {"float": "float32"}.get(name, name)
    if name == "float32":
        return "float32"
    if name == "bfloat16":
        return "bfloat16"
    raise EngineError(
        f"the servers hold their weights as {name}",
        code="ENG86",
        where="sglang.dtype",
        why="the trainer sends float32 and bfloat16",
        fix="--dtype bfloat16",
    )
