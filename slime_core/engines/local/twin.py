"""A module of our own by a Hugging Face config; its parameters are the served tensors.

transport    same dtype, same device         else
shared       parameters are the tensors      a cast copy, refreshed at every load
tensors      a copy                          a cast copy

Weights that a plan multiplies as one (JOINED) are views of one tensor where ``joined``; the tensors of a ``shared``
update are served themselves where they lie one behind another, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import EngineError
from slime_core.kernels.linear import adjacent
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.hashing import text_name
from slime_core.weights.prediction_layers import prefixes

if TYPE_CHECKING:
    from slime_core.types import WeightUpdate

TRANSPORTS = ("shared", "tensors")
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers over the same input."""


class Twin:
    """The module, what it serves, and whether its storage is the trainer's."""

    def __init__(
        self, config: Any, dtype: torch.dtype, device: str, trust_remote_code: bool, *, joined: bool = False
    ) -> None:
        from slime_core.weights.build import allocate

        self.dtype, self.device = dtype, device
        name = str(dtype).removeprefix("torch.")
        self.model = allocate(config, name, device, None, trust_remote_code).requires_grad_(False)
        self._layout = FolderLayout(self.model)
        self.ready = False
        self._writable: set[str] = set()  # parameters whose storage is ours and may be overwritten
        self._ties = self._tied_names()
        self._groups = list(self._joined_names()) if joined else []

    def _joined_names(self) -> Iterator[list[str]]:
        """Names of the tensors that are to be views of one."""
        for owner, module in self.model.named_modules():
            for layers in JOINED:
                parts = [getattr(module, layer, None) for layer in layers]
                if all(isinstance(part, torch.nn.Linear) for part in parts):
                    for leaf in ("weight", "bias"):
                        if all(getattr(part, leaf) is not None for part in parts):
                            yield [f"{owner}.{layer}.{leaf}" for layer in layers]

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
        shared = update.transport == "shared"
        aliases = {name for name, tensor in tensors.items() if shared and self._same(name, tensor)}
        for group in self._groups:
            if not (aliases.issuperset(group) and _are_served([tensors[name] for name in group])):
                aliases -= set(group)
                if not self._writable.issuperset(group):
                    self._join(group)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            if name in aliases:
                self._writable.discard(name)
                if isinstance(tensor, QuantisedWeight) or tensor.data_ptr() != self._tensor(name).data_ptr():
                    self._place(name, tensor.detach())
                continue
            if name not in self._writable:
                self._writable.add(name)
                self._place(name, torch.empty_like(self._tensor(name), device=self.device))
            targets.append(self._tensor(name))
            sources.append(tensor.detach())
        if targets:
            torch._foreach_copy_(targets, sources)
        self.ready = True

    def _same(self, name: str, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self._tensor(name).dtype and tensor.device.type == torch.device(self.device).type

    def _join(self, group: Sequence[str]) -> None:
        """Make the tensors of a group views of one that is ours."""
        before = [self._tensor(name) for name in group]
        sizes = [len(tensor) for tensor in before]
        joined = torch.empty(sum(sizes), *before[0].shape[1:], dtype=before[0].dtype, device=self.device)
        for name, part in zip(group, joined.split(sizes), strict=True):
            self._place(name, part)
            self._writable.add(name)

    def _matched(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        state = self.model.state_dict(keep_vars=True)
        received = {name if name in state else text_name(name): tensor for name, tensor in update.tensors.items()}
        received = self._layout.joined(state, received)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in received.items():
            if name in state:
                tensors.setdefault(self._ties[name][0], tensor)
        ahead = prefixes(self.model.config)
        unknown = sorted(name for name in set(received) - set(state) if not name.startswith(ahead))
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


def _are_served(group: Sequence[torch.Tensor]) -> bool:
    """Whether tensors that are multiplied as one can be served themselves."""
    return any(isinstance(tensor, QuantisedWeight) for tensor in group) or adjacent(group)


def fingerprint(tensor: torch.Tensor) -> str:
    """crc32 of a tensor's bytes in its own dtype, in hex."""
    return f"{zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data):08x}"
