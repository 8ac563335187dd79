"""The candidate's process: runs its module on inputs as they come, and sends back what came out, as bytes.

    load (source) -> build (weights) -> call (inputs) -> outputs, inputs as they are now, what was recorded ...

It compares nothing and knows neither seeds nor expected values; whatever it sends is a claim.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from slime_kernelbench.judge import shim
from slime_kernelbench.judge.attributes import Attributes
from slime_kernelbench.judge.branches import Branches
from slime_kernelbench.judge.module import error_tree, imported
from slime_kernelbench.judge.recorder import Recorder
from slime_kernelbench.judge.tensors import of_wire, to_wire
from slime_kernelbench.judge.watch import OperatorCounter, fingerprint, warm
from slime_kernelbench.judge.weights import give
from slime_kernelbench.judge.wire import Leaf, Tree, leaves_of, pack, unpack
from slime_sandbox import CandidateChannel


def main(channel: CandidateChannel) -> None:
    """Answer requests until the judge has no more."""
    gc.set_threshold(100_000, 50, 1000)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    session = InterpreterSession()
    while True:
        channel.send(pack(session.answer(unpack(channel.receive()))))


class InterpreterSession:
    """One candidate on the CPU, in triton's interpreter."""

    def __init__(self) -> None:
        self.watch = OperatorCounter(Recorder())
        shim.install()
        self.watch.install()
        self.untouched = fingerprint()
        self.module: ModuleType | None = None
        self.models: dict[str, Any] = {}
        self.slots: dict[str, list[Any]] = {}
        self.branches = Branches()

    def answer(self, request: Mapping[str, Any]) -> Tree:
        """One request's reply; an error of the candidate's is a reply too."""
        try:
            reply: Tree = getattr(self, "do_" + request["do"])(request)
        except MemoryError:
            raise
        except BaseException as error:
            return {"error": error_tree(error)}
        return reply

    def do_load(self, request: Mapping[str, Any]) -> Tree:
        """Import the module."""
        self.module = imported(request["source"], self.branches)
        return {"loaded": True}

    def do_build(self, request: Mapping[str, Any]) -> Tree:
        """Make a ``ModelNew`` for one set of sizes, with the reference's weights where it has places for them."""
        torch.manual_seed(request["weights_seed"])
        model = getattr(self.module, "ModelNew")(*of_wire(request["init"]))  # noqa: B009
        state = of_wire(request["state"])
        without = give(model, state, request["woken"])
        self.models[request["style"]] = model
        return {"without": without}

    def do_call(self, request: Mapping[str, Any]) -> Tree:
        """Run it on inputs. A ``slot`` that was used before keeps its tensors, with new values in the same memory."""
        inputs = self._placed(request["slot"], request["inputs"])
        watch, model = self.watch, self.models[request["style"]]
        before = Attributes(model)
        self.branches.call += 1
        with watch.answer(ablate=request["ablate"], order=request["order"]):
            output = model(*inputs)
        with torch._C.DisableTorchFunction():
            watch.inside = True
            try:
                return {
                    "kept": before.restore(output),
                    "output": to_wire(output),
                    "inputs": to_wire(inputs),
                    "launches": watch.launches,
                    "stored": watch.stored,
                    "accesses": watch.accesses,
                    "race": watch.races.message,
                    "computed": dict(watch.computed),
                    "signatures": list(watch.signatures.values()),
                    "changed": [
                        name
                        for name, value in fingerprint().items()
                        if self.untouched[name] is not value and self.untouched[name] != value
                    ],
                }
            finally:
                watch.inside = False

    def do_branches(self, request: Mapping[str, Any]) -> Tree:
        """Which of its comparisons have gone one way alone, and what it takes to have them go the other."""
        return {"open": self.branches.open()}

    def _placed(self, slot: str, tree: Tree) -> list[Any]:
        fresh = of_wire(tree)
        values = self.slots.get(slot)
        if values is None or [leaf.shape for leaf in leaves_of(to_wire(values))] != [
            leaf.shape for leaf in leaves_of(tree)
        ]:
            self.slots[slot] = fresh
            return list(fresh)
        for index, (old, new) in enumerate(zip(values, fresh)):
            if isinstance(new, torch.Tensor):
                old.copy_(new)
            else:
                values[index] = new
        return list(values)


def _warm_up() -> None:
    """Before the fork: what every candidate would load and do first, done once with a kernel of ours."""
    warm()
    kernel = imported(_FIRST).__dict__["first"]
    if isinstance(kernel, InterpretedFunction):  # not so where a GPU runs kernels
        source = torch.zeros(16)
        kernel[(1,)](source, torch.empty(16), BLOCK=16)
    del sys.modules["candidate"]


_FIRST = """
import triton
import triton.language as tl

@triton.jit
def first(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < BLOCK, other=0.0)
    tl.store(y + at, tl.exp(value) + tl.sum(value, axis=0), mask=at < BLOCK)
"""
_warm_up()

__all__ = ["InterpreterSession", "Leaf", "main"]
