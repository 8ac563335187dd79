"""For runs of a test: every torch thread of `slime` takes the CPU for the GPU that megatron-core asks for.

Nothing is compiled: Megatron's functions take 15 seconds for it, and each test would wait for them.
"""

import os
import sys
from pathlib import Path

os.environ["TORCH_COMPILE_DISABLE"] = "1"

import slime_core.threads as threads

sys.path.append(str(Path(__file__).parents[1]))
plain, entered = threads._set_threads, []


def on_cpu(count: int) -> None:
    """The thread's first act."""
    from cuda_on_cpu import cpu_redirect

    plain(count)
    entered.append(cpu_redirect())
    entered[-1].__enter__()


threads._set_threads = on_cpu
