"""`slime.utils.misc`."""

from __future__ import annotations

from typing import Any

from slime_core.plugins.locate import locate


def load_function(path: str) -> Any:
    """The function or class at a dotted path (or ``file.py:name``)."""
    return locate(path, "load_function")


class SingletonMeta(type):
    """A class whose calls all give one instance."""

    _instance: Any = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls._instance is None:
            cls._instance = super().__call__(*args, **kwargs)
        return cls._instance


__all__ = ["SingletonMeta", "load_function"]
