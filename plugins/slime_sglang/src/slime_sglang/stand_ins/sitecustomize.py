"""Stands in for what SGLang imports and what has no build for a bare CPU: the operations of `sgl_kernel`, and those of
`torchvision` where it was built for CUDA, or the whole of it where it is not installed.

The folder is on PYTHONPATH of a server on a CPU, and of no other process. Importing a package of the two that is not
installed, or anything below it, succeeds. What it has can be imported, subclassed and compared; calling it
raises. The plain torch paths that a server on a CPU takes (`--attention-backend torch_native`) call none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import slime_operations  # noqa: F401 beside this file; declares operations

PACKAGES = frozenset({"sgl_kernel", "torchvision"})


class Absence(type):
    """Classes that have every public attribute, each such a class again, and no instance."""

    def __getattr__(cls, name: str) -> Any:
        return absent(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *_args: object, **_named: object) -> Any:
        raise NotImplementedError(f"{cls.__qualname__} has no build for this machine, and a stand-in cannot compute")


def absent(path: str, name: str) -> Any:
    """What stands for the attribute at ``path``; special names are no attributes, as of any module."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return Absence(name, (), {"__qualname__": path, "__module__": __name__})


class Hollow(ModuleType):
    """A package without files."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        return absent(f"{self.__name__}.{name}", name)


class StandInFinder(MetaPathFinder, Loader):
    """Answers for the packages and for everything below them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        return ModuleSpec(fullname, self, is_package=True) if root in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(StandInFinder())  # behind what is installed
