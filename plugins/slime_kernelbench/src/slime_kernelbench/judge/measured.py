"""A candidate's process on a GPU: compiles and times its model, and sends what it made when it is asked for it.

load -> build -> compile (no kernel is launched) -> ready -> measure (the GPU is its own) -> check -> fetch (parts of
what it made). One candidate measures at a time, so what need not be done there is done before or after.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from slime_kernelbench.judge import prepared
from slime_kernelbench.judge.attributes import Attributes
from slime_kernelbench.judge.meter import Inputs, Meter, stopwatch
from slime_kernelbench.judge.module import error_tree, imported
from slime_kernelbench.judge.samples import Pattern, forms, sampled
from slime_kernelbench.judge.tensors import of_wire, to_wire
from slime_kernelbench.judge.watch import OperatorCounter, fingerprint, without_dynamo
from slime_kernelbench.judge.weights import give
from slime_kernelbench.judge.wire import Tree, pack, unpack
from slime_sandbox import CandidateChannel

without_dynamo()
if not triton.knobs.runtime.interpret:
    prepared.warm()


def main(channel: CandidateChannel) -> None:
    """Answer requests until the judge has no more."""
    torch.set_grad_enabled(False)
    session: MeasuredSession | None = None
    while True:
        request = unpack(channel.receive())
        try:
            session = session or MeasuredSession(request["device"])
            reply: Tree = getattr(session, "do_" + request["do"])(request)
        except MemoryError:
            raise
        except BaseException as error:
            reply = {"error": error_tree(error)}
        channel.send(pack(reply))


class Launches:
    """Counts launches; while ``skip`` is set, kernels are compiled, loaded and not launched."""

    def __init__(self) -> None:
        self.count, self.skip = 0, False
        kernel: Any = InterpretedFunction if triton.knobs.runtime.interpret else JITFunction
        run, tune = kernel.run, Autotuner.run

        def counted(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            self.count += not warmup
            launch = run(function, *args, grid=grid, warmup=warmup or self.skip, **kwargs)
            if self.skip and hasattr(launch, "_init_handles"):
                launch._init_handles()  # a C compiler makes what launches it, which its first launch would wait for
            return launch

        def tuned(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.skip:
                return tune(tuner, *args, **kwargs)
            tuner.nargs = dict(zip(tuner.arg_names, args))
            for config in tuner.prune_configs(kwargs):
                try:
                    tuner.fn.run(*args, **kwargs, **config.all_kwargs())
                except Exception:  # a configuration that does not compile is one that tuning would not choose
                    continue
            tuner.nargs = None
            return None

        kernel.run, Autotuner.run = counted, tuned


class MeasuredSession:
    """One candidate on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cpu":
            from slime_kernelbench.judge import shim

            shim.install()
        self.launches, self.watch = Launches(), OperatorCounter()
        self.untouched = fingerprint()
        self.module: ModuleType | None = None
        self.outputs: dict[str, Any] = {}

    def do_load(self, request: Mapping[str, Any]) -> Tree:
        """Import the module."""
        prepared.put(request["prepared"])
        self.module = imported(request["source"])
        return {"loaded": True}

    def do_build(self, request: Mapping[str, Any]) -> Tree:
        """Make the model with the reference's weights, and its first inputs."""
        torch.manual_seed(request["weights_seed"])
        model = getattr(self.module, "ModelNew")(*of_wire(request["init"]))  # noqa: B009
        give(model, of_wire(request["state"]), {})
        self.model = model.to(self.device)
        base = of_wire(request["inputs"], self.device)
        self.inputs = Inputs(base, request["which"], self.device)
        self.inputs.renew(request["first"])
        return {"built": True}

    def do_compile(self, request: Mapping[str, Any]) -> Tree:
        """Call it with kernels that are compiled and not launched; the answer must not be right."""
        self.launches.skip, before = True, Attributes(self.model)
        try:
            with self.watch, self.watch.answer(ablate=False):
                self.outputs["without"] = self.model(*self.inputs.now)
        finally:
            self.launches.skip = False
            before.restore(None)  # what kernels would have made for later calls is not there
        return {"computed": dict(self.watch.computed)}

    def do_ready(self, request: Mapping[str, Any]) -> Tree:
        """Have the memory and what torch itself loads at first use."""
        self.meter = Meter(self.model, self.inputs, stopwatch(self.device))
        self.meter.make_room(self.outputs["without"], request["calls"])
        return {"mutated": self.inputs.changed()}

    def do_measure(self, request: Mapping[str, Any]) -> Tree:
        """Call it watched, then time it, and call it watched between timed calls: it cannot tell which are."""
        computed: dict[str, int] = {}

        def watched() -> Any:
            count = self.launches.count
            with self.watch, self.watch.answer(ablate=False):
                output = self.model(*self.inputs.now)
            computed.update(self.watch.computed)
            self.launches.count = count
            return output

        self.outputs["watched"] = watched()
        self.launches.count = 0
        times = self.meter.measure(request["order"], request["host_order"], request["warm"], watched)
        self.outputs |= {str(number): output for number, output in enumerate(self.meter.outputs)}
        return {**times, "calls": len(self.meter.outputs), "launches": self.launches.count, "computed": computed}

    def do_check(self, request: Mapping[str, Any]) -> Tree:
        """What it has changed."""
        changed = [name for name, value in fingerprint().items() if self.untouched[name] != value]
        return {"changed": changed, "mutated": self.meter.mutated, "state": sorted(self.meter.changed)}

    def do_fetch(self, request: Mapping[str, Any]) -> Tree:
        """A part of one kept output."""
        pattern = Pattern(offset=request["offset"], step=request["step"])
        with torch._C.DisableTorchFunction():
            whole = to_wire(self.outputs[request["call"]])
        return {"output": sampled(whole, pattern), "forms": forms(whole)}
