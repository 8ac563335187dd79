"""A module of our own by a Hugging Face config; its parameters are the served tensors.

transport    float32 compute, same device   else
shared       parameters are the tensors      a cast copy, refreshed at every load
tensors      a copy                          a cast copy
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_core.types import WeightUpdate

TRANSPORTS = ("shared", "tensors")


class Twin:
    """The module, what it serves, and whether its storage is the trainer's."""

    def __init__(self, config: Any, dtype: torch.dtype, device: str, trust_remote_code: bool) -> None:
        from slime_core.weights.build import allocate

        self.dtype, self.device = dtype, device
        name = str(dtype).removeprefix("torch.")
        self.model = allocate(config, name, device, None, trust_remote_code).requires_grad_(False)
        self.ready = False
        self._writable: set[str] = set()  # parameters whose storage is ours and may be overwritten
        self._ties = self._tied_names()

    def _tied_names(self) -> dict[str, list[str]]:
        """State-dict name -> all names of the same storage."""
        by_storage: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            by_storage.setdefault(id(tensor), []).append(name)
        return {name: names for names in by_storage.values() for name in names}

    @torch.no_grad()
    def load(self, update: WeightUpdate) -> None:
        """Take every tensor of an update.

        Raises:
            EngineError: ENG86, an unknown transport, or tensors that do not fit the model (named). What was served
                before is then no longer served.
        """
        if update.transport not in TRANSPORTS:
            raise EngineError(
                f"the embedded engine cannot take weights by transport {update.transport!r}",
                code="ENG86",
                why=f"it knows {', '.join(TRANSPORTS)}",
            )
        tensors = self._matched(update)
        self.ready = False
        for name, tensor in tensors.items():
            self._take(name, tensor.detach(), alias=update.transport == "shared")
        self.ready = True

    def _matched(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        state = self.model.state_dict(keep_vars=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in update.tensors.items():
            if name in state:
                tensors.setdefault(self._ties[name][0], tensor)
        unknown = sorted(set(update.tensors) - set(state))
        missing = sorted(name for name, names in self._ties.items() if names[0] == name and name not in tensors)
        shapes = [
            f"{name} is {list(t.shape)}, not {list(state[name].shape)}"
            for name, t in tensors.items()
            if t.shape != state[name].shape
        ]
        if unknown or missing or shapes:
            parts = (("not in the model", unknown), ("missing", missing), ("mis-shaped", shapes))
            raise EngineError(
                f"the weights of version {update.version} do not fit the engine's model",
                code="ENG86",
                why="; ".join(f"{len(names)} {kind}: {', '.join(names[:5])}" for kind, names in parts if names),
                fix="trainer and engine must be built from the same rollout.hf_checkpoint",
            )
        return tensors

    def _take(self, name: str, tensor: torch.Tensor, *, alias: bool) -> None:
        old = self._tensor(name)
        same = tensor.dtype == old.dtype and tensor.device.type == torch.device(self.device).type
        if alias and same:
            self._writable.discard(name)
            self._place(name, tensor)
        elif name in self._writable:
            old.copy_(tensor)
        else:
            self._writable.add(name)
            self._place(name, tensor.to(device=self.device, dtype=old.dtype, copy=True))

    def _tensor(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        tensor: torch.Tensor | None = module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
        assert tensor is not None
        return tensor

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor where this name and those tied to it are."""
        for tied in self._ties[name]:
            owner, _, leaf = tied.rpartition(".")
            module = self.model.get_submodule(owner)
            if leaf in module._parameters:
                module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[leaf] = tensor

    def release(self) -> None:
        """Release the weights' memory; the next load must bring all of them."""
        for name in {names[0] for names in self._ties.values()}:
            self._writable.discard(name)
            self._place(name, torch.empty_like(self._tensor(name), device="meta"))
        self.ready = False

    def fingerprints(self) -> dict[str, str]:
        """crc32 of every served tensor's bytes, by state-dict name."""
        return {name: fingerprint(tensor) for name, tensor in self.model.state_dict().items()}


def fingerprint(tensor: torch.Tensor) -> str:
    """crc32 of a tensor's bytes in its own dtype, in hex."""
    return f"{zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data):08x}"
