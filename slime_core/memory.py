"""Whether an exception says that memory ran out, whoever raised it: Python, numpy, torch on a CPU or on a GPU."""

from __future__ import annotations

NAMES = frozenset({"OutOfMemoryError"})  # of torch and torch.cuda, without importing them
SENTENCES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ in NAMES:
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in SENTENCES)


def first_line(error: BaseException) -> str:
    """What it said, without the trace that torch adds."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
