"""Trial of a chat template, which is foreign code: rendered once in a process with bounded time and memory.

Jinja's sandbox keeps a template from reaching anything; it bounds neither loops nor the sizes of what they make.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from slime_core.errors import DataError

SECONDS = 10  # of processor time
WALL = 60.0  # seconds, for a process that only waits
MEMORY = 2 << 30  # bytes of address space
TRIAL = [{"role": "user", "content": "What is 2 + 3?"}]
FULL = 3  # exit code of a trial that ran out of memory


def try_template(tokenizer: Any, kwargs: Mapping[str, Any], *, seconds: int = SECONDS, memory: int = MEMORY) -> None:
    """Render one message in a separate process. A template that raises passes: the error of the first row names it.

    Raises:
        DataError: TOK50 it takes more than ``seconds`` of processor time or ``memory`` bytes.
    """
    named = tokenizer.chat_template
    task = {
        "templates": list(named.values()) if isinstance(named, dict) else [named],
        "words": {**tokenizer.special_tokens_map, "add_generation_prompt": True, **kwargs, "messages": TRIAL},
        "limits": [seconds, memory],
    }
    code = trial(json.dumps(task, default=str))
    if code >= 0 and code != FULL:
        return
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        reason = f"does not end: it took {seconds} s of processor time"
    else:
        reason = f"takes over {memory >> 20} MiB of memory"
    raise DataError(
        f"the chat template of the model folder {reason}",
        code="TOK50",
        where="data.apply_chat_template",
        why="one message of five words was rendered",
        fix="use the template of the published model (chat_template.jinja), or data.apply_chat_template=false",
    )


@lru_cache(maxsize=64)
def trial(task: str) -> int:
    """The exit code of a task's process: a template is tried once, however many sessions use it."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        return subprocess.run(command, input=task.encode(), timeout=WALL).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def render(template: str, words: Mapping[str, Any]) -> str:
    """The text of a template, with what transformers lets one use that affects its time or memory."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(words)


def main() -> int:
    """The trial's exit code: 0 also where a template raised."""
    task = json.load(sys.stdin)
    seconds, memory = task["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for template in task["templates"]:
        try:
            render(template, task["words"])
        except MemoryError:
            return FULL
        except Exception:
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
