"""Compiles a candidate's kernels ahead of time, to machine code for a GPU that need not be there.

Runs in a sandbox whose fork server has no interpreter: a source and what its launches looked like in; per kernel, a
compiler's error or the resources it takes, out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from slime_kernelbench.judge.module import error_tree, imported
from slime_kernelbench.judge.wire import Tree, pack, unpack
from slime_sandbox import CandidateChannel

SHARED_BYTES = {90: 227 << 10, 100: 227 << 10, 80: 163 << 10, 89: 99 << 10}
"""Bytes of shared memory that a block may ask for, by compute capability (CUDA C++ Programming Guide)."""
triton_key()  # a digest of the compiler's own files, kept for every candidate


def main(channel: CandidateChannel) -> None:
    """Answer one request: ``{"source", "target", "signatures"}``."""
    request = unpack(channel.receive())
    try:
        module = imported(request["source"])
    except Exception as error:
        channel.send(pack({"error": error_tree(error)}))
        return
    kernels = _kernels(vars(module))
    answers = [_compiled(kernels, one, request["target"]) for one in request["signatures"]]
    channel.send(pack({"kernels": answers}))


def _kernels(names: Mapping[str, Any]) -> dict[str, JITFunction[Any]]:
    """Every kernel of a module by its function's name, without its autotuner and heuristics."""
    kernels = {}
    for value in names.values():
        while not isinstance(value, JITFunction) and type(value).__name__ in ("Autotuner", "Heuristics"):
            value = value.fn
        if isinstance(value, JITFunction):
            kernels[value.fn.__name__] = value
    return kernels


def _compiled(kernels: Mapping[str, JITFunction[Any]], launch: Mapping[str, Any], target: str) -> Tree:
    kernel = kernels.get(str(launch["kernel"]))
    if kernel is None:
        return {"kernel": str(launch["kernel"]), "skipped": "it is not at the top of the module"}
    backend, _, arch = target.partition(":")
    constants = dict(launch["constants"])
    for name, parameter in kernel.signature.parameters.items():
        if name not in constants and name not in launch["types"] and parameter.default is not parameter.empty:
            constants[name] = parameter.default
    signature = {name: launch["types"].get(name, "constexpr") for name in kernel.arg_names}
    began = time.perf_counter()
    try:
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget(backend, int(arch), 32), options=dict(launch["options"]))
    except Exception as error:
        return {"kernel": kernel.fn.__name__, "error": error_tree(error)}
    return {
        "kernel": kernel.fn.__name__,
        "shared": int(compiled.metadata.shared),
        "most_shared": SHARED_BYTES.get(int(arch), 227 << 10),
        "ptx_bytes": len(compiled.asm.get("ptx", "")),
        "cubin_bytes": len(compiled.asm.get("cubin", b"")),
        "seconds": time.perf_counter() - began,
    }
