"""What a candidate's process records while an answer is made: launches, what torch computed, memory that a kernel
touched.

Evidence, not verdict: it goes to the judge as a claim, beside bytes that the claim cannot change.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import mangle_type

from slime_kernelbench.judge.module import FILE
from slime_kernelbench.judge.names import ATEN_PLUMBING
from slime_kernelbench.judge.races import Races
from slime_kernelbench.judge.recorder import Recorder

_EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_POISON = 0x5A
LAUNCHES = 12
"""Different ones that are remembered."""


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no answer holds: NaN, or a pattern of bits."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(_POISON if tensor.element_size() == 1 else 0x5A5A)


class OutOfBounds(Exception):
    """A kernel touched memory that is none of its arguments'."""


class OperatorCounter(TorchDispatchMode):
    """Counts operators of torch while the answer is made, and fills memory that is handed out unwritten."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """``recorder`` is a second witness of what torch computes."""
        super().__init__()
        self._recorder = recorder
        self.computed: Counter[str] = Counter()
        self.launches = 0
        self.stored = 0  # elements that kernels wrote
        self.accesses = 0  # to memory, of a small block each
        self.ablate = False  # kernels do nothing
        self.hot = False  # the answer is being made
        self.inside = False  # a kernel runs
        self.ranges: list[tuple[int, int]] = []
        self.signatures: dict[str, dict[str, Any]] = {}
        self.races = Races()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if self.hot and name.removeprefix("aten::") not in ATEN_PLUMBING:
            self.computed[name.removeprefix("aten::")] += 1
        if self.inside:
            return result
        if name in _EMPTY and isinstance(result, torch.Tensor) and result.numel():
            poison(result)
        return result

    @contextmanager
    def answer(self, ablate: bool, order: int = 0) -> Iterator[None]:
        """While the candidate's forward runs; ``order`` says which programs run when."""
        self.races.order, self.races.message = order, ""
        self.hot, self.ablate, self.launches, self.stored, self.accesses = True, ablate, 0, 0, 0
        self.computed.clear()
        if self._recorder is not None:
            self._recorder.begin()
        try:
            yield
        finally:
            self.hot = self.ablate = False
            for name in self._recorder.end() if self._recorder is not None else ():
                if name.removeprefix("aten::") not in ATEN_PLUMBING:
                    self.computed.setdefault(name.removeprefix("aten::"), 1)

    def install(self) -> None:
        """Watch every launch and every access of the interpreter's; for the rest of this process's life."""
        run = interpreter.InterpretedFunction.run

        def watched(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            self.launches += not warmup
            self._remember(kernel, args, kwargs)
            if self.ablate or warmup:
                return None
            outer, self.inside = self.inside, True
            try:
                with torch._C.DisableTorchFunction():
                    self.ranges = _memory([*args, *kwargs.values()])
                    self.races.launch(kernel.fn.__name__)
                    return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            finally:
                self.inside = outer

        interpreter.InterpretedFunction.run = watched
        interpreter._patch_lang = _patched
        original = GridExecutor.__init__

        def with_texts(executor: Any, fn: Any, arg_names: Any, grid: Any, hooks: Any = ()) -> None:
            original(executor, fn, arg_names, grid, list(hooks))
            texts = {name: str(note) for name, note in fn.__annotations__.items()}  # "tl.constexpr" is one, too
            executor.constexprs = [name for name in arg_names if "constexpr" in texts.get(name, "")]

        GridExecutor.__init__ = with_texts
        interpreter._interpreter = _Guarded(interpreter._interpreter, self)
        self.races.install()
        _refuse_bfloat16()
        self.__enter__()

    def _remember(self, kernel: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """The types of a launch's arguments, for the compiler."""
        if len(self.signatures) >= LAUNCHES or not self.hot:
            return
        arguments = dict(zip(kernel.arg_names, args)) | kwargs
        constexprs = GridExecutor(kernel.fn, kernel.arg_names, None).constexprs
        signature: dict[str, Any] = {"kernel": kernel.fn.__name__, "types": {}, "constants": {}, "options": {}}
        for name, value in arguments.items():
            if name not in kernel.arg_names:
                if isinstance(value, int) and name in ("num_warps", "num_stages", "num_ctas"):
                    signature["options"][name] = value
            elif name in constexprs or value is None:
                if value is not None and not isinstance(value, int | float | str | bool):
                    return  # a dtype or a function: such kernels are compiled where they run
                signature["constants"][name] = value
            else:
                with torch._C.DisableTorchFunction():
                    signature["types"][name] = str(mangle_type(value))
        self.signatures.setdefault(repr(signature), signature)

    def check(self, pointers: Any, mask: Any, size: int) -> tuple[Any, tuple[int, int] | None]:
        """The active ones of the pointers, and the memory that all of them are in; None where they are in several.

        Raises:
            OutOfBounds: one of them is outside of every argument.
        """
        self.accesses += 1 + pointers.size // 512
        active = pointers[mask] if mask.shape == pointers.shape else np.broadcast_to(pointers, mask.shape)[mask]
        if not active.size:
            return active, None
        low, high = int(active.min()), int(active.max()) + size
        for start, end in self.ranges:
            if start <= low and high <= end:
                return active, (start, end)
        inside = np.zeros(active.shape, dtype=bool)
        for start, end in self.ranges:
            inside |= (active >= np.uint64(start)) & (active <= np.uint64(max(end - size, 0)))
        if not inside.all():
            raise OutOfBounds(f"{int((~inside).sum())} elements lie outside of the tensors that the kernel was given")
        return active, None


class _Guarded:
    """The interpreter's access to memory, with bounds."""

    def __init__(self, real: Any, watch: OperatorCounter) -> None:
        self._real, self._watch = real, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        active, span = self._watch.check(pointers, mask, np.dtype(dtype).itemsize)
        if span is not None:
            self._watch.races.load(active, span)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        active, span = self._watch.check(pointers, mask, value.dtype.itemsize)
        self._watch.stored += active.size

        def differs() -> Any:
            old = self._real.load(pointers, mask, np.zeros(pointers.shape, value.dtype), value.dtype)
            bits, chosen = f"u{value.dtype.itemsize}", np.broadcast_to(mask, pointers.shape)
            new = np.ascontiguousarray(np.broadcast_to(value, pointers.shape))
            return old.view(bits)[chosen] != new.view(bits)[chosen]

        if span is not None:
            self._watch.races.store(active, span, differs)
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._watch.stored += self._watch.check(pointers, mask, value.dtype.itemsize)[0].size
        self._watch.races.atomic()
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, compare: Any, value: Any, order: Any) -> Any:
        everywhere = np.ones(np.shape(pointers), dtype=bool)
        self._watch.stored += self._watch.check(pointers, everywhere, value.dtype.itemsize)[0].size
        self._watch.races.atomic()
        return self._real.atomic_cas(pointers, compare, value, order)


class _Kept:
    """Where triton's language stays patched."""

    def restore(self) -> None:
        pass


def _patched(function: Any) -> _Kept:
    return _Kept()


def warm() -> None:
    """What every candidate would do first, once, before the fork: patch triton's language for the interpreter for
    good, and tell torch that two of its functions need not load its compiler."""
    names = {"tl": triton.language, "core": triton.language.core}
    interpreter._patch_lang(FunctionType(warm.__code__, names))
    language = triton.language
    language.tensor.__index__ = lambda self: int(self.handle.data.item())  # any numpy's
    language.tensor.__bool__ = _truth
    real, dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype(kind: Any) -> Any:  # triton makes its table anew in every operation
        if type(kind) is not triton.language.dtype:
            return real(kind)
        if kind.name not in dtypes:
            dtypes[kind.name] = real(kind)
        return dtypes[kind.name]

    interpreter._get_np_dtype = numpy_dtype
    without_dynamo()


def without_dynamo() -> None:
    """Tell torch that two functions need not load its compiler, which takes a second, to be left out of it."""
    for function in (OperatorCounter.__torch_dispatch__, torch.manual_seed):
        plain = getattr(function, "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)


def _truth(tensor: Any) -> bool:
    """As a compiler for a GPU has it: a block is neither true nor false."""
    if tensor.handle.data.size == 1:
        return bool(tensor.handle.data.item())
    if sys._getframe(1).f_code.co_filename == FILE:
        raise ValueError("a block of values has no truth value: use tl.where, or a mask")
    return True  # as triton's own code has it


def _memory(values: list[Any]) -> list[tuple[int, int]]:
    """Where the storages of the tensors among ``values`` begin and end."""
    ranges: list[tuple[int, int]] = []
    for value in values:
        tensor = getattr(value, "base", value)  # of a descriptor
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(value, tuple | list):
            ranges.extend(_memory(list(value)))
    return ranges


def _refuse_bfloat16() -> None:
    """The interpreter would calculate with the bits of bfloat16 as integers: an error is better than a wrong
    number."""
    builder = interpreter.InterpreterBuilder

    def checked(name: str) -> None:
        real = getattr(builder, name)

        def operation(self: Any, first: Any, *rest: Any) -> Any:
            if first.dtype.scalar == triton.language.bfloat16:
                raise NotImplementedError("bfloat16 arithmetic cannot be interpreted: convert to float32 first")
            return real(self, first, *rest)

        setattr(builder, name, operation)

    for name in ("binary_op", "unary_op", "ternary_op", "create_dot", "create_fabs"):
        if hasattr(builder, name):
            checked(name)


# Whether somebody has changed what others call.

_WATCHED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("empty", "empty_like", "zeros", "allclose", "equal", "isclose", "no_grad", "from_numpy")),
    (torch.Tensor, ("__add__", "data_ptr", "copy_", "view", "contiguous", "numpy", "detach")),
    (torch.nn.Module, ("__call__", "__getattr__", "__setattr__", "load_state_dict", "to", "_call_impl")),
    (torch.cuda, ("synchronize", "is_available", "Event", "Stream")),
    (interpreter.InterpretedFunction, ("run", "__call__", "rewrite")),
    (interpreter.GridExecutor, ("__call__",)),
    (triton, ("jit", "autotune", "cdiv", "next_power_of_2")),
    (time, ("perf_counter", "time", "monotonic")),
    (np, ("frombuffer", "allclose", "array_equal")),
)


def fingerprint() -> dict[str, Any]:
    """What a cheat would replace, and the number of threads."""
    fingerprint = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, names in _WATCHED for name in names}
    return fingerprint | {"threads": threading.active_count()}
