"""Lets host code written for a GPU run on a machine without one: tensors say that they are on `cuda:0` and are not.

Runs inside a candidate's process, before the candidate; loads torch and triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(  # of an H200
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    total_memory=150_000_000_000,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_GET_DEVICE = torch.Tensor.get_device
_SAME = (torch.Tensor.cuda, torch.Tensor.cpu)


class PretendCuda(TorchFunctionMode):
    """Answers questions about devices with `cuda:0`, and makes everything on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA:
            return True
        if func == _DEVICE:
            return CUDA
        if func is _GET_DEVICE:
            return 0
        if func in _SAME:
            return args[0]
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


class _Nothing:
    """A context manager that does nothing, whatever it is given."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _Driver:
    """What host code asks triton's driver."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "multiprocessor_count": PROPERTIES.multi_processor_count,
                "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
                "max_num_regs": PROPERTIES.regs_per_multiprocessor,
                "warpSize": 32,
            }

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cuda", arch=90, warp_size=32)

    def get_benchmarker(self) -> Callable[..., Any]:
        return lambda call, quantiles: [1.0 for _ in quantiles]


def install() -> None:
    """Put it on, for the rest of this process's life."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_capability = lambda device=None: (PROPERTIES.major, PROPERTIES.minor)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_device_name = lambda device=None: PROPERTIES.name
    cuda.device = _Nothing
    triton.runtime.driver.set_active(_Driver())
    triton.runtime.autotuner.Autotuner._bench = lambda self, *arguments, config, **meta: [1.0, 1.0, 1.0]
    _libdevice()
    PretendCuda().__enter__()


# libdevice, which the interpreter lacks.

_NUMPY: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in ("tanh", "exp", "log", "sqrt", "sin", "cos", "tan", "floor", "ceil", "exp2")
    },
    **{name: getattr(np, name) for name in ("log2", "log10", "log1p", "expm1", "sinh", "cosh", "hypot", "copysign")},
    **{name: getattr(np, name) for name in ("fmod", "fmax", "fmin", "rint", "trunc", "cbrt", "isnan", "isinf")},
    **{"pow": np.power, "fabs": np.abs, "abs": np.abs, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan},
    **{"atan2": np.arctan2, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "nearbyint": np.rint},
    **{"rsqrt": lambda x: 1 / np.sqrt(x), "div_rn": np.divide, "mul_rn": np.multiply, "add_rn": np.add},
    **{"sqrt_rn": np.sqrt, "fast_exp": np.exp, "fast_log": np.log, "fast_sin": np.sin, "fast_cos": np.cos},
    **{"fast_tanh": np.tanh, "fast_div": np.divide, "fast_pow": np.power, "sub_rn": np.subtract},
    **{"round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "rcp_rn": lambda x: 1 / x},
    **{"fma": lambda x, y, z: x * y + z, "finitef": np.isfinite, "isfinited": np.isfinite, "signbit": np.signbit},
}


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _libdevice() -> None:
    from triton.language.extra import cuda, libdevice
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype, interpreter_semantic

    table: dict[str, Callable[..., Any]] = {**_NUMPY, "erf": _erf, "erfc": lambda x: 1 - _erf(x)}

    def on_tensors(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **ignored: Any) -> Any:
            tensors = [interpreter_semantic.to_tensor(argument) for argument in arguments]
            if any(one.dtype.scalar.is_bf16() for one in tensors):
                raise NotImplementedError(f"bfloat16 arithmetic cannot be interpreted: libdevice.{name}")
            value = function(*(one.handle.data for one in tensors))
            kind = triton.language.int32 if value.dtype == bool else tensors[0].dtype.scalar
            handle = TensorHandle(np.asarray(value, dtype=_get_np_dtype(kind)), kind)
            shape = list(tensors[0].shape) if tensors[0].dtype.is_block() else []
            full = triton.language.block_type(kind, shape) if shape else kind
            return triton.language.tensor(handle, full)

        return call

    for module in (libdevice, cuda.libdevice):
        for name, function in table.items():
            setattr(module, name, on_tensors(name, function))
