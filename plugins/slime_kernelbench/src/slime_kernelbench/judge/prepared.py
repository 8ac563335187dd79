"""What Triton compiles once for a machine, whatever the kernel: made in one process, handed to those of candidates.

Its bridge to the GPU's driver is C code that a compiler takes 0.2 s for, and every candidate's process, whose cache is
its own and empty, would compile it anew. It travels as files of Triton's cache, by path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import triton

from slime_kernelbench.judge.wire import Leaf, Tree, pack, unpack
from slime_sandbox import CandidateChannel


def warm() -> None:
    """Have what Triton reads, hashes and imports at a process's first kernel: some half a second.

    For the process that candidates' are forked from; nothing of it is a candidate's.
    """
    import triton.compiler.code_generator as imported  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()  # type: ignore[no-untyped-call]


def main(channel: CandidateChannel) -> None:
    """Answer one request with the files; no kernel runs here, and no candidate."""
    channel.receive()
    channel.send(pack(compiled_files()))


def compiled_files() -> dict[str, Leaf]:
    """Compile it; the files of this process's cache."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()  # type: ignore[no-untyped-call]
    root = Path(triton.knobs.cache.dir)
    return {str(path.relative_to(root)): _leaf(path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def put(files: Mapping[str, Leaf]) -> None:
    """Into this process's cache."""
    for name, leaf in files.items():
        path = Path(triton.knobs.cache.dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(leaf.data)


def parse_answer(result: bytes) -> dict[str, Leaf]:
    """The answer of :func:`main`. Raises `ValueError` where it is none."""
    answer: Tree = unpack(result)
    if not isinstance(answer, dict) or not all(isinstance(leaf, Leaf) for leaf in answer.values()):
        raise ValueError("no files")
    return answer


def _leaf(data: bytes) -> Leaf:
    return Leaf(dtype="uint8", shape=(len(data),), data=data)
