"""A workload of long tails: prompts of one length, responses of log-normal lengths, and a real run of it.

plugin(folder, values) -> a folder for the path, in which slime finds the plugin `long_tail`
run(args, ...)         -> `slime run` on this machine's GPUs: taking turns, or ahead on GPUs apart
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODES = {"sync": "lockstep", "lockstep": "lockstep", "free": "free"}
"""Kinds of runs, and their `async_schedule`."""

PLUGIN = '''
"""Prompts of one length, responses of log-normal lengths, a reward that says nothing but is not constant."""
import asyncio
import dataclasses
import math
import random

import slime_core
from slime_core import Prompt, Reward
from slime_core.seeds import seed_of


class Rows:
    def __len__(self):
        return 4096

    def at(self, position):
        return Prompt(id="", task="default", position=position, prompt="1+2=" * (PROMPT // 4), label="3")

    def state(self):
        return {}


@slime_core.hookimpl
def slime_prompts(task, ctx):
    return Rows()


@slime_core.hookimpl
async def slime_generate(group, ctx):
    async def one(sample):
        drawn = random.Random(seed_of(ctx.config.seed, "length", sample.id)).gauss(0.0, SIGMA)
        length = max(1, round(min(LIMIT, MEDIAN * math.exp(drawn))))
        await ctx.generate(sample, dataclasses.replace(ctx.sampling, max_new_tokens=length))

    await asyncio.gather(*(one(sample) for sample in group.samples))
    return group


@slime_core.hookimpl
async def slime_reward(group, ctx):
    return [Reward(value=float(sum(sample.response_tokens) % 7)) for sample in group.samples]
'''


def plugin(folder: Path, values: Mapping[str, object]) -> Path:
    """A folder for the path, with the plugin of a workload in it."""
    site = folder / "site"
    info = site / "slime_long_tail-1.0.dist-info"
    info.mkdir(parents=True)
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    (site / "slime_long_tail.py").write_text(head + PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slime-long-tail\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime.plugins]\nlong_tail = slime_long_tail\n")
    return site


def run(args: argparse.Namespace, folder: Path, site: Path, mode: str, ahead: int, place: Any) -> int:
    """One `slime run`, cut off at --limit; its exit code, 124 where it was."""
    name = f"{mode}-{ahead}"
    (folder / f"{name}.toml").write_text(recipe(args, mode, ahead, place))
    command = [sys.executable, "-m", "slime_cli.main", "run", f"{name}.toml", "--run-dir", name]
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    env = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}
    with (folder / f"{name}.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            return process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()  # its children end with it
                process.wait()
            return 124


def recipe(args: argparse.Namespace, mode: str, ahead: int, place: Any) -> str:
    """The recipe's text: the same GPUs in all modes."""
    from sglang_place import GPU_OPTIONS, _toml

    shared = mode == "sync"
    ranks = args.gpus if shared else args.trainers
    tables: dict[str, dict[str, Any]] = {
        "cluster": {"actor_num_gpus_per_node": 1 if args.smoke else ranks, "colocate": shared},
        "rollout": {
            "hf_checkpoint": "model",
            "rollout_engine": "local" if args.smoke else "sglang",
            "num_rollout": args.steps + args.skip + 1 + ahead,
            "rollout_batch_size": args.batch,
            "n_samples_per_prompt": args.samples,
            "rollout_max_response_len": args.limit_tokens,
            "max_staleness": ahead,
            "async_schedule": MODES[mode],
        },
        "train": {"lr": 1e-6, "dtype": "float32" if args.smoke else "bfloat16", "train_backend": args.backend},
        "report": {"save_interval": 0, "export_final": False},
    }
    tables["cluster"] |= {"device": "cpu", "cpu_threads": 1} if args.smoke else {"device": "cuda", "cpu_threads": 8}
    if not args.smoke and not shared:
        tables["rollout"]["rollout_num_gpus"] = args.gpus - args.trainers
    if place is not None:
        graphs = {"cuda_graph_bs": [8, 32, 64, 128, 256], "max_running_requests": 256}
        graphs |= {"mem_fraction_static": args.mem_fraction, "disable_piecewise_cuda_graph": True}
        options = {**GPU_OPTIONS, **graphs}
        tables["sglang"] = {"python": place.python, "env": dict(place.env), **options}
    lines = ['name = "async"', f"plugins = {_toml(['models', 'long_tail'])}"]
    for name, keys in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    return "\n".join([*lines, ""])
