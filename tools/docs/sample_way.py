"""Count the files of the core that a sample meets from its prompt to the gradient: those whose functions are called.

    python tools/docs/sample_way.py             # the second step of rm_math's recipe, from prompts to trainer.step
    python tools/docs/sample_way.py --plugin kernelbench --num-rollout 2

prints the files in the order in which they are met, and their number.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import slime_core
from slime_cli.main import main as slime
from slime_core.rollout.collector import Collector
from slime_core.trainers.trainer import WorkerTrainer

CORE = str(Path(slime_core.__file__).parent) + "/"
DEFAULT = ("--plugin", "rm_math", "stage.warmup.num_rollout=0", "--num-rollout", "2", "--skip-eval-before-train")


class Way:
    """Files of the core by first call, while it is open."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.open = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.open and event == "call" and frame.f_code.co_filename.startswith(CORE):
            self.files[frame.f_code.co_filename.removeprefix(CORE)] = None

    def begins(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Open where ``call`` begins; what an earlier step met is forgotten."""

        async def opened(*args: Any, **kwargs: Any) -> Any:
            self.files.clear()
            self.open = True
            return await call(*args, **kwargs)

        return opened

    def ends(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Close where ``call`` has ended."""

        async def closed(*args: Any, **kwargs: Any) -> Any:
            result = await call(*args, **kwargs)
            self.open = False
            return result

        return closed


def main() -> None:
    """Run, and print the way of the last step."""
    way = Way()
    Collector.take = way.begins(Collector.take)  # type: ignore[method-assign]
    WorkerTrainer.step = way.ends(WorkerTrainer.step)  # type: ignore[method-assign]
    threading.setprofile(way)
    sys.setprofile(way)
    with tempfile.TemporaryDirectory() as folder:
        code = slime(["run", *(sys.argv[1:] or DEFAULT), "--run-dir", f"{folder}/run"])
    sys.setprofile(None)
    print(*way.files, f"{len(way.files)} files", sep="\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
