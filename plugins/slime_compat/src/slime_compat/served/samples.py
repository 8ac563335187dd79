"""`slime.utils.types`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_core.compat.sample import Sample

RolloutBatch = dict[str, Any]


@dataclass
class MultimodalType:
    """A kind of media, and what stands for one of it in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """Images, videos and audio."""

    IMAGE, VIDEO, AUDIO = (MultimodalType(name, f"<{name}>") for name in ("image", "video", "audio"))

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Every kind."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind of a name."""
        return next((kind for kind in cls.all() if kind.name == name), None)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter and the rank that has it; ``size`` in bytes."""

    name: str
    dtype: Any
    shape: Any
    attrs: dict[str, Any]
    size: int
    src_rank: int


__all__ = ["MultimodalType", "MultimodalTypes", "ParamInfo", "RolloutBatch", "Sample"]
