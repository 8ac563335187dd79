"""The released megatron-core on CPU ranks over gloo: whatever asks for a CUDA device gets the CPU. For tests alone.

Enter it once a process, on the thread that computes, before megatron.core is used.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


def _is_cuda(device) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _Redirect(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # the optimizer compares names of types
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _with_lists(all_to_all):
    """Counts of rows that never left the "device" are tensors, which gloo does not take."""

    def call(output, given, **kwargs):
        for name in ("input_split_sizes", "output_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all(output, given, **kwargs)

    return call


def _of_any_sizes(all_gather):
    """Gloo gathers tensors of one size."""

    def call(outputs, given, group=None, **kwargs):
        if len({output.shape for output in outputs}) == 1:
            return all_gather(outputs, given, group=group, **kwargs)
        for rank, output in enumerate(outputs):
            if rank == group.rank():
                output.copy_(given)
            torch.distributed.broadcast(output, group=group, group_src=rank)
        return None

    return call


def _summed(output, given, group=None, **kwargs):
    """The same of what is summed and dealt."""
    for rank, tensor in enumerate(given):
        whole = tensor.clone()
        torch.distributed.all_reduce(whole, group=group)
        if rank == group.rank():
            output.copy_(whole)


class _Stream:
    """Everything is done in the order in which it is asked for: there is nothing to wait for."""

    def wait_stream(self, *_, **__):
        """Done already."""
        return self

    wait_event = synchronize = record_event = wait = wait_stream


@contextmanager
def cpu_redirect() -> Iterator[None]:
    """CUDA devices are the CPU inside; generators of CUDA are nothing, so dropout must be 0."""
    nothing = {
        "torch.cuda.current_device": lambda: torch.device("cpu"),
        "torch.cuda.synchronize": lambda *_, **__: None,
        "torch.distributed.all_to_all_single": _with_lists(torch.distributed.all_to_all_single),
        "torch.distributed.all_gather": _of_any_sizes(torch.distributed.all_gather),
        "torch.distributed.reduce_scatter": _summed,
        "torch.cuda.Stream": _Stream,
        "torch.cuda.current_stream": lambda *_: _Stream(),
        "torch.cuda.stream": lambda *_: nullcontext(),
    }
    with ExitStack() as stack:
        for name, value in nothing.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(_Redirect())
        random = "megatron.core.tensor_parallel.random"
        stack.enter_context(patch(f"{random}._get_cuda_rng_state", lambda *_, **__: torch.zeros(1)))
        stack.enter_context(patch(f"{random}._set_cuda_rng_state", lambda *_, **__: None))
        yield
