"""Checksums of tensors, and of the tensors that an engine joins out of the trainer's: 8 bytes of sha256.

Tensors that are joined are never copied into one. An engine may bring another kind (`EngineBackend.checksums`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_core.errors import EngineError

if TYPE_CHECKING:
    import torch

    from slime_core.types import Piece, RankTensor

CHUNK = 1 << 22  # elements that are cast at once
EITHER = " or "  # between the checksums of a row that an engine may keep in float32
LANGUAGE, VISION = "model.language_model.", "model.visual."
"""Before the names of a text model's tensors, and of those for pictures, in a folder that has both."""


def text_name(name: str) -> str:
    """A tensor's name in a folder of the text model alone."""
    return name.replace(LANGUAGE, "model.", 1)


def layout_name(name: str) -> str:
    """A tensor's name in layouts: of the text model alone, and without ``model.`` where it is for pictures."""
    return text_name(name).replace(VISION, "visual.", 1)


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits over the tensor's bytes, row by row."""
    sums = Checksums(tensor.dtype)
    sums.add_row("", [tensor.detach()])
    return sums.finish()[""]


def expected(tensors: Mapping[str, torch.Tensor], checks: Sequence[RankTensor], dtype: torch.dtype) -> dict[str, str]:
    """What each row of ``checks`` must have as its checksum, by `RankTensor.key`; as :class:`Checksums`."""
    sums = Checksums(dtype)
    sums.add(tensors, checks)
    return sums.finish()


class Checksums:
    """Checksums of rows of an engine, from the trainer's tensors, which come one after another.

    Args:
        dtype: of the engine's tensors; others are cast, a piece at a time.

    Example:
        sums = Sums(torch.bfloat16)
        sums.add({"model.norm.weight": tensor}, checks)
        update.fingerprints = sums.finish()
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._digests: dict[str, str] = {}
        self._wide: Checksums | None = None

    def add(self, tensors: Mapping[str, torch.Tensor], checks: Sequence[RankTensor]) -> None:
        """Read the pieces of some rows; afterwards the tensors may go or change.

        Args:
            tensors: whole ones by Hugging Face name, on any device.

        Raises:
            EngineError: ENG83 a piece's tensor is not among ``tensors`` (named), ENG86 it ends before the piece does.
        """
        import torch

        for check in checks:
            parts = _parts(tensors, check)
            self.add_row(check.key, parts)
            if check.wide and self._dtype != torch.float32:
                self._wide = self._wide or type(self)(torch.float32)
                self._wide.add_row(check.key, parts)

    def add_row(self, key: str, parts: Sequence[torch.Tensor]) -> None:
        """Read one tensor that lies in several, end to end."""
        import torch

        digest = hashlib.sha256()
        for part in parts:
            for block in _blocks(part):
                data = block.to(device="cpu", dtype=self._dtype).contiguous().reshape(-1)
                digest.update(data.view(torch.uint8).numpy().data)
        self._digests[key] = digest.digest()[:8].hex()

    def finish(self) -> dict[str, str]:
        """Checksum of every row, by key; of a wide one ``CHECKSUM or CHECKSUM``, its own dtype's and float32's."""
        wide = self._wide.finish() if self._wide is not None else {}
        return {key: EITHER.join(filter(None, (one, wide.get(key)))) for key, one in self._finish().items()}

    def _finish(self) -> dict[str, str]:
        return self._digests


def _parts(tensors: Mapping[str, torch.Tensor], check: RankTensor) -> list[torch.Tensor]:
    """Views of the pieces of a row, zeros included, in order."""
    parts: list[torch.Tensor] = []
    for piece in check.pieces:
        parts.append(_view(tensors, piece, check) if piece.name else _zeros(parts[-1], piece))
    if check.dim == 0 or len(parts) == 1:
        return parts
    import torch

    return [torch.cat(parts, dim=check.dim)]


def _view(tensors: Mapping[str, torch.Tensor], piece: Piece, check: RankTensor) -> torch.Tensor:
    whole = tensors.get(piece.name)
    if whole is None:
        raise EngineError(
            f"the trainer has no tensor {piece.name}, of which the engine's {check.name} is made",
            code="ENG83",
            where=check.key,
            fix="serve the model that is trained; its config.json must be the same",
        )
    whole = whole.detach()
    end = whole.shape[piece.dim] if piece.stop < 0 else piece.stop
    if end > whole.shape[piece.dim]:
        raise EngineError(
            f"{check.name} of the engine ends at row {end} of {piece.name}, which has {whole.shape[piece.dim]}",
            code="ENG86",
            where=check.key,
        )
    return whole.narrow(piece.dim, piece.start, end - piece.start)


def _zeros(before: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Rows (or columns) of zeros that take no memory."""
    shape = [piece.stop if dim == piece.dim else size for dim, size in enumerate(before.shape)]
    return before.new_zeros(()).expand(shape)


def _blocks(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's rows, as many at a time as CHUNK elements hold."""
    if part.ndim < 2 or part.numel() <= CHUNK:
        yield part
        return
    many = max(1, CHUNK // max(1, part[0].numel()))
    for start in range(0, part.shape[0], many):
        yield part[start : start + many]
