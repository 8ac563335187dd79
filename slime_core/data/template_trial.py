"""A chat template is code that a model folder brings: it is tried once, in a child with bounded time and memory.

Jinja's sandbox keeps a template from reaching anything; it bounds neither loops nor the sizes of what they make.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import DataError

SECONDS = 10  # of processor time
WALL = 60.0  # seconds, for a child that only waits
MEMORY = 2 << 30  # bytes beside what the process has
TRIAL = [{"role": "user", "content": "What is 2 + 3?"}]
FULL = 3  # exit code of a child that ran out of memory


def try_template(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Render one message in a child; a template that raises is left to the rows, whose error names them.

    Raises:
        DataError: TOK50 it takes more than `SECONDS` of processor time or `MEMORY` bytes.
    """
    words = {"add_generation_prompt": True, **kwargs}
    reason = bounded(lambda: tokenizer.apply_chat_template(list(TRIAL), tokenize=False, **words))
    if reason:
        raise DataError(
            f"the chat template of the model folder {reason}",
            code="TOK50",
            where="data.apply_chat_template",
            why="one message of five words was rendered",
            fix="use the template of the published model (chat_template.jinja), or data.apply_chat_template=false",
        )


def bounded(work: Callable[[], Any], *, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    """What bound ``work`` broke in a forked child; empty where none. Its answer and its exceptions are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child only renders
        child = os.fork()
    if not child:
        os._exit(_limited(work, seconds, memory))
    descriptor = os.pidfd_open(child)
    try:
        ended = select.select([descriptor], [], [], WALL)[0]
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(descriptor)
    if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return f"does not end: it took more than {seconds} s of processor time"
    full = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == FULL
    return f"takes more than {memory >> 20} MiB of memory" if full else ""


def _limited(work: Callable[[], Any], seconds: int, memory: int) -> int:
    """The child's exit code."""
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        work()
    except MemoryError:
        return FULL
    except BaseException:
        return 0
    return 0
