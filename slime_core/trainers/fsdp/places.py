"""Where float32 masters and moments lie, and how an optimizer step reaches them.

`DevicePlace` is the device itself. In `HostPlace` (`train.fsdp_cpu_offload`) they lie in host memory, and pass through
the device a window at a time; the device computes what it would compute without, so every bit is the same.

    host -> a window on the device: norm, clip, AdamW, copy in the compute dtype -> host, while the next one works
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch

Tensors = dict[str, torch.Tensor]
Named = Mapping[str, torch.Tensor]
Window = tuple[list[str], list[list[torch.Tensor]]]

BLOCK = 256 << 20  # bytes of page-locked memory asked for at once; larger tensors have a block of their own size
WINDOW = 256 << 20  # bytes of masters on the device at once, or one tensor
AHEAD = 2  # windows whose way back may be under way
LINE = 64  # bytes from the start of one tensor to that of the next, or a multiple


class DevicePlace:
    """State lies on the device that computes."""

    def zeros_like(self, tensors: Named) -> Tensors:
        """State of these shapes."""
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def keep(self, tensors: Tensors) -> Tensors:
        """The same state, where it is to lie."""
        return tensors

    def windows(self, names: Sequence[str], changed: Sequence[Named], read: Sequence[Named] = ()) -> Iterator[Window]:
        """Runs of names, with the tensors of each of ``changed`` and ``read`` on the device.

        What the caller does to those of ``changed`` before it takes the next window is kept.
        """
        if names:
            yield list(names), [[tensors[name] for name in names] for tensors in (*changed, *read)]


class OtherPlace(DevicePlace):
    """State lies in memory that :meth:`_empty_like` takes."""

    def zeros_like(self, tensors: Named) -> Tensors:
        return {name: tensor.zero_() for name, tensor in self._empty_like(tensors).items()}

    def keep(self, tensors: Tensors) -> Tensors:
        copies = self._empty_like(tensors)
        for name, copy in copies.items():
            copy.copy_(tensors[name])
        return copies

    def _empty_like(self, tensors: Named) -> Tensors:
        raise NotImplementedError


class HostPlace(OtherPlace):
    """State lies in host memory, page-locked where the device is a GPU; gradients lie where they were added up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._back = torch.cuda.Stream(device) if self._cuda else None

    def _empty_like(self, tensors: Named) -> Tensors:
        """First fit into blocks: torch rounds each request for page-locked memory up to a power of two."""
        blocks: list[list[str]] = []
        used: list[int] = []
        for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
            size = -(-tensors[name].nbytes // LINE) * LINE
            place = next((i for i, full in enumerate(used) if full + size <= BLOCK), len(used))
            if place == len(used):
                blocks.append([])
                used.append(0)
            blocks[place].append(name)
            used[place] += size
        empty: Tensors = {}
        for block, size in zip(blocks, used):
            memory, begin = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda), 0
            for name in block:
                part = memory[begin : begin + tensors[name].nbytes]
                empty[name] = part.view(tensors[name].dtype).view(tensors[name].shape)
                begin += -(-part.nbytes // LINE) * LINE
        return {name: empty[name] for name in tensors}

    def windows(self, names: Sequence[str], changed: Sequence[Named], read: Sequence[Named] = ()) -> Iterator[Window]:
        returns: deque[torch.cuda.Event] = deque()
        for part in _runs(names, (*changed, *read)[0]):
            if len(returns) == AHEAD:
                returns.popleft().synchronize()
            homes = [[tensors[name] for name in part] for tensors in (*changed, *read)]
            tensors = [[self._on_device(home) for home in kind] for kind in homes]
            yield part, tensors
            pairs = [pair for kind in range(len(changed)) for pair in zip(homes[kind], tensors[kind])]
            self._write_back([(home, tensor) for home, tensor in pairs if home is not tensor], returns)
        for event in returns:
            event.synchronize()

    def _on_device(self, home: torch.Tensor) -> torch.Tensor:
        if home.device.type != "cpu":
            return home
        return torch.empty_like(home, device=self.device).copy_(home, non_blocking=True)

    def _write_back(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], returns: deque[torch.cuda.Event]) -> None:
        if self._back is not None:
            self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back) if self._back is not None else nullcontext():
            for home, tensor in pairs:
                home.copy_(tensor, non_blocking=True)
                if self._back is not None:
                    tensor.record_stream(self._back)
        if self._back is not None:
            returns.append(self._back.record_event())


def _runs(names: Sequence[str], tensors: Named) -> Iterator[list[str]]:
    """Names whose tensors have :data:`WINDOW` bytes together, or one of more."""
    run: list[str] = []
    size = 0
    for name in names:
        if run and size + tensors[name].nbytes > WINDOW:
            yield run
            run, size = [], 0
        run.append(name)
        size += tensors[name].nbytes
    if run:
        yield run
