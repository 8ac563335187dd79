"""Inputs of recomputed layers, in host memory from a layer's forward pass to its backward pass.

    forward of layer n -> input to the host, beside layer n + 1
    backward of layer n -> its input is back; that of layer n - 1 comes back beside it

The copies have a stream of their own. What else autograd saves stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks

BLOCK = 32 << 20  # bytes of page-locked memory asked for at once: a power of two, which torch does not round up


class HostInput:
    """One layer's input: its bytes in host memory, and on the device once it is on its way back."""

    def __init__(self, like: torch.Tensor, blocks: list[torch.Tensor], before: ref[HostInput] | None) -> None:
        self.like = torch.empty_like(like, device="meta")
        self.blocks = blocks
        self.before = before  # that of the layer before, which the backward pass asks for next
        self.tensor: torch.Tensor | None = None
        self.arrival: torch.cuda.Event | None = None


class HostInputs:
    """Where layers' inputs wait.

    Example:
        with inputs.of(x):
            out = checkpoint(layer, x)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: ref[HostInput] | None = None

    @contextmanager
    def of(self, *inputs: torch.Tensor | None) -> Iterator[None]:
        """What autograd saves of ``inputs`` inside the block goes to the host."""
        places = {(x.data_ptr(), x.numel()) for x in inputs if x is not None}

        def pack(tensor: torch.Tensor) -> Any:
            return self._save(tensor) if (tensor.data_ptr(), tensor.numel()) in places else tensor

        with saved_tensors_hooks(pack, self._restore):
            yield

    def _save(self, tensor: torch.Tensor) -> HostInput:
        flat = tensor.detach().reshape(-1)
        pieces = flat.split(BLOCK // flat.element_size())
        pinned = self._stream is not None
        saved = HostInput(tensor, [torch.empty_like(x, device="cpu", pin_memory=pinned) for x in pieces], self._last)
        with self._beside():
            for block, piece in zip(saved.blocks, pieces):
                block.copy_(piece, non_blocking=True)
        if self._stream is not None:
            flat.record_stream(self._stream)
        self._last = ref(saved)
        return saved

    def _restore(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = self._fetch(saved)
        if saved.arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(saved.arrival)
        before = saved.before() if saved.before is not None else None
        if before is not None:
            self._fetch(before)
        return tensor

    def _fetch(self, saved: HostInput) -> torch.Tensor:
        if saved.tensor is None:
            saved.tensor = torch.empty_like(saved.like, device=self.device)
            flat = saved.tensor.view(-1)
            with self._beside():
                for block, piece in zip(saved.blocks, flat.split(BLOCK // flat.element_size())):
                    piece.copy_(block, non_blocking=True)
            if self._stream is not None:
                saved.arrival = self._stream.record_event()
        return saved.tensor

    def _beside(self) -> AbstractContextManager[Any]:
        """The stream of copies, behind what the device was told to do so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)
