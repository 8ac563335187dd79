"""Memory that a rank gives away and takes back: storages are emptied and filled again, every view of them stays.

Parameters, their shards and buffers of megatron-core's or FSDP2's are views of each other, so no tensor is moved: its
bytes go to page-locked memory of the host, its storage becomes empty, and later both come back. That memory is kept,
and what is away can be read there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager

import torch

from slime_core.errors import TrainerError

KEPT = ("parameters", "optimizer")  # gradients come back as zeros


class Parking:
    """``tensors`` answers what a name stands for: ``parameters``, ``optimizer`` or ``gradients``.

    Example:
        parking = Parking(tensors)
        parking.leave({"gradients", "optimizer"})
        parking.back({"gradients", "optimizer"})
    """

    def __init__(self, tensors: Callable[[str], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._away: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[str, list[torch.Tensor]] = {}
        self._known: dict[int, torch.Tensor] = {}  # of a storage that is away: its bytes

    @property
    def away(self) -> set[str]:
        """What has left."""
        return set(self._away)

    def leave(self, what: set[str]) -> None:
        """Copy to the host and empty; what left before stays away."""
        for name in sorted(what - self.away):
            others = {id_ for other in KEPT if other != name for id_ in self._pointers(other)}
            found = self._storages(name, others if name == "optimizer" else set())
            if name in KEPT:
                kept = self._room(name, found)
                for storage, host in zip(found, kept):
                    host.copy_(_bytes(storage), non_blocking=True)
                    self._known[storage._cdata] = host
                if found and found[0].device.type == "cuda":
                    torch.cuda.synchronize()
            self._away[name] = [(storage, storage.nbytes()) for storage in found]
            for storage in found:
                storage.resize_(0)

    def back(self, what: set[str]) -> None:
        """Fill again."""
        for name in sorted(what & self.away):
            for number, (storage, size) in enumerate(self._away.pop(name)):
                storage.resize_(size)
                self._known.pop(storage._cdata, None)
                if name in KEPT:
                    _bytes(storage).copy_(self._host[name][number], non_blocking=True)
                else:
                    _bytes(storage).zero_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor to be read: itself, or where its storage is away the same view of its bytes on the host."""
        host = self._known.get(tensor.untyped_storage()._cdata)
        if host is None:
            return tensor
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), *place)  # type: ignore[call-overload,no-any-return]

    @contextmanager
    def present(self, what: Iterable[str] | None = None) -> Iterator[None]:
        """Everything, or ``what``, is here inside the block, and what had left leaves again."""
        gone = self.away if what is None else self.away & set(what)
        self.back(gone)
        try:
            yield
        finally:
            self.leave(gone)

    def _pointers(self, name: str) -> set[int]:
        return {storage.data_ptr() for storage in self._storages(name, set())}

    def _storages(self, name: str, others: set[int]) -> list[torch.UntypedStorage]:
        """The storages behind a name, each once, without those of ``others`` and those that are empty."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors(name):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in others:
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def _room(self, name: str, storages: list[torch.UntypedStorage]) -> list[torch.Tensor]:
        """Buffers on the host, those of the last time where they fit: pinned memory is slow to get."""
        sizes = [storage.nbytes() for storage in storages]
        if name not in self._host or [host.nbytes for host in self._host[name]] != sizes:
            pinned = bool(storages) and storages[0].device.type == "cuda"
            self._host[name] = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes]
        return self._host[name]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


HOLDS = frozenset({"gradients", "optimizer", "parameters"})


class Holding:
    """Starts with everything.

    Example:
        holding = Holding()
        holding.need({"parameters"}, "score")
        holding.now -= holding.known({"optimizer"})
    """

    def __init__(self) -> None:
        self.now = set(HOLDS)

    def known(self, what: Set[str]) -> set[str]:
        """The same names.

        Raises:
            TrainerError: a name that no trainer holds.
        """
        if unknown := what - HOLDS:
            raise TrainerError(f"a trainer holds {sorted(HOLDS)}, not {sorted(unknown)}")
        return set(what)

    def need(self, what: Set[str], call: str) -> None:
        """Refuse a call whose state was released.

        Raises:
            TrainerError: with what to reacquire.
        """
        if missing := sorted(what - self.now):
            raise TrainerError(f"{call} was called while {missing} were released", fix=f"reacquire({missing}) first")
