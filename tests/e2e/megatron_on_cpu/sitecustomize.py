"""For runs of a test: every torch thread of `slime` takes the CPU for the GPU that megatron-core asks for."""

import sys
from pathlib import Path

import slime_core.threads as threads

sys.path.append(str(Path(__file__).parents[2] / "unit" / "trainers" / "megatron"))
plain, entered = threads._set_threads, []


def on_cpu(count: int) -> None:
    """The thread's first act."""
    from cpu import cpu_redirect

    plain(count)
    entered.append(cpu_redirect())
    entered[-1].__enter__()


threads._set_threads = on_cpu
