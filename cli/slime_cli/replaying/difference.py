"""Compare two folders of safetensors bit for bit; adapters within too, one tensor of each at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slime_core.errors import StorageError


@dataclass(slots=True, kw_only=True)
class TensorDifferences:
    """What :func:`compare_folders` found."""

    tensors: int = 0  # that both have
    differ: dict[str, float] = field(default_factory=dict)  # name -> largest absolute difference, largest first
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    shapes: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> dtype and shape in each

    @property
    def equal(self) -> bool:
        """Every bit of every tensor."""
        return not (self.differ or self.only[0] or self.only[1] or self.shapes)


def compare_folders(one: Path, other: Path) -> TensorDifferences:
    """Compare all tensors of two folders, bit for bit.

    Raises:
        StorageError: STO111 a folder without safetensors, STO112 a file that cannot be read.
    """
    files = _files(one), _files(other)
    differences = TensorDifferences(
        only=(sorted(files[0].keys() - files[1].keys()), sorted(files[1].keys() - files[0].keys()))
    )
    for name in sorted(files[0].keys() & files[1].keys()):
        a, b = (_tensor(*side[name]) for side in files)
        differences.tensors += 1
        if a.dtype != b.dtype or a.shape != b.shape:
            differences.shapes[name] = _form(a), _form(b)
        elif not torch.equal(_bits(a), _bits(b)):
            differences.differ[name] = float((a.double() - b.double()).abs().max())
    differences.differ = dict(sorted(differences.differ.items(), key=lambda item: -item[1]))
    return differences


def _files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name, of an adapter behind its folder's -> its file, and its name there."""
    files: dict[str, tuple[Path, str]] = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("adapter/**/*.safetensors")]):
        inside = "" if path.parent == folder else f"{path.parent.relative_to(folder).as_posix()}/"
        try:
            with safe_open(str(path), framework="pt") as file:
                names = list(file.keys())
            files |= {inside + name: (path, name) for name in names}
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{path.name} cannot be read", code="STO112", where=str(path), why=str(error)
            ) from error
    if not files:
        raise StorageError("the folder holds no weights", code="STO111", where=str(folder))
    return files


def _tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(str(path), framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, so that NaN equals itself and 0.0 is not -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
