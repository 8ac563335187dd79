"""A process that computes rewards for another one: plugins from the config in the first line, then a question a line.

    python -m slime_core.plugins.worker FD PARENT

It ends with its parent. What it prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.errors import PluginError, SlimeError, text_of
from slime_core.parent import die_with
from slime_core.plugins import Plugins, load_plugins
from slime_core.plugins.isolated import INSIDE
from slime_core.types import Group, Prompt, Reward, Sample


def main() -> None:
    """Serve until the other side closes."""
    die_with(int(sys.argv[2]))
    os.environ[INSIDE] = "1"
    os.dup2(2, 1)
    worker = RewardWorker()
    with socket.socket(fileno=int(sys.argv[1])).makefile("rwb") as file:
        for line in file:
            file.write(json.dumps(response_to(worker.value, json.loads(line))).encode() + b"\n")
            file.flush()
    os._exit(0)


class RewardWorker:
    """The plugins of this process: the first question names them, each later one asks for rewards."""

    plugins: Plugins | None = None
    config: Config

    def value(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """Rewards as dicts; none for the first question."""
        if self.plugins is None:
            sys.path[:] = question["path"]
            self.config = Config.model_validate_json(question["config"])
            self.plugins = load_plugins(self.config)
            return []
        return [asdict(reward) for reward in asyncio.run(self._rewards(question, self.plugins))]

    async def _rewards(self, question: dict[str, Any], plugins: Plugins) -> list[Reward]:
        run_dir = Path(question["run_dir"]) if question["run_dir"] else None
        facts = {name: question[name] for name in ("version", "stage", "evaluation")}
        ctx = Context(config=self.config, run_dir=run_dir, **facts)
        if "type" in question:
            return [await plugins.reward_by_type(question["type"], Sample.from_dict(question["sample"]), ctx)]
        samples = [Sample.from_dict(sample) for sample in question["samples"]]
        rollouts = {int(rollout): list(indices) for rollout, indices in question["rollouts"]}
        group = Group(prompt=Prompt(**question["prompt"]), samples=samples, rollouts=rollouts)
        return await plugins.reward(group, ctx)


def response_to(work: Callable[[dict[str, Any]], Any], question: dict[str, Any]) -> dict[str, Any]:
    """What ``work`` returns or raises."""
    try:
        return {"value": work(question)}
    except BaseException as error:
        if not isinstance(error, SlimeError):
            error = PluginError(text_of(error), why="".join(traceback.format_tb(error.__traceback__, limit=-3)))
        return {"error": error.as_dict(), "kind": type(error).__name__}


if __name__ == "__main__":
    main()
