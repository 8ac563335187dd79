"""What an episode through an environment of verifiers costs beside the engine: seconds and processor time.

    python tools/bench/bench_verifiers.py                    # needs `make environments`
    python tools/bench/bench_verifiers.py --episodes 256 --step 12.5

The engine answers at once, so all that is measured is the connector: the worker process, verifiers in it, HTTP
between them, slime's endpoint and its samples. Two environments of the tests: one turn, and three turns. A line says
what share of a step of ``--step`` seconds with so many episodes that is, if nothing of it ran while the engine
generates.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "slime_verifiers"
PYTHON = os.environ.get("SLIME_ENVIRONMENTS_PYTHON") or str(ROOT / ".venv-environments" / "bin" / "python")
sys.path[:0] = [str(ROOT / "plugins" / "slime_chat" / "tests")]


def processor_seconds(pids: list[int]) -> float:
    """User and system time of processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def children(parent: int) -> list[int]:
    """Processes below one, at any depth."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        below.setdefault(int(fields[1]), []).append(int(path.parent.name))
    pids, waiting = [], [parent]
    while waiting:
        pids += (own := below.get(waiting.pop(), []))
        waiting += own
    return pids


async def rounds(name: str, args: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Of each round: seconds, processor seconds here, processor seconds of the workers."""
    from agent_session import LetterTokenizer, LineEngine

    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.types import Group, Sample, SamplingParams
    from slime_verifiers.options import Options
    from slime_verifiers.plugin import Verifiers

    plugin, tokenizer = Verifiers(), LetterTokenizer()
    options = Options(env=name, heldout=0, python=PYTHON, processes=args.processes)
    ctx = Context(
        config=Config(), engine=LineEngine(tokenizer, ["the number is 12|"]), tokenizer=tokenizer, options=options,
        sampling=SamplingParams(max_new_tokens=64),
    )  # fmt: skip
    rows = await asyncio.to_thread(plugin.slime_prompts, "verifiers", ctx)
    prompt = dataclasses.replace(await asyncio.to_thread(rows.at, 1), id="main/0", tokens=[5])
    figures = []
    for number in range(args.rounds + 1):  # the first starts processes
        samples = [Sample(id=f"main/{number}-{j}", tokens=[5], rollout_id=j) for j in range(args.episodes)]
        group = Group(prompt=prompt, samples=samples, rollouts={j: [j] for j in range(args.episodes)})
        workers = children(os.getpid())
        begin, cpu, theirs = time.perf_counter(), time.process_time(), processor_seconds(workers)
        group = await plugin.slime_generate(group, ctx)
        cost = time.perf_counter() - begin, time.process_time() - cpu, processor_seconds(workers) - theirs
        assert not (reasons := {reward.reason for reward in plugin.slime_reward(group, ctx)} - {""}), reasons
        figures.append(cost)
    await plugin.slime_run_done(ctx)
    return figures[1:]


def main() -> None:
    """Print a line an environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="side by side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--step", type=float, default=10.0, help="seconds of a step")
    args = parser.parse_args()
    environments = [str(path) for path in (PLUGIN / "tests" / "environments").iterdir() if path.is_dir()]
    os.environ["PYTHONPATH"] = os.pathsep.join([*environments, os.environ.get("PYTHONPATH", "")])
    for name, turns in (("digit-share", 1), ("number-hunt", 3)):
        figures: list[Any] = asyncio.run(rounds(name, args))
        seconds, here, workers = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{name}: {args.episodes} episodes of {turns} turn(s) in {seconds:.2f} s", end="; ")
        print(f"processor ms an episode: {1000 * here / args.episodes:.1f} here", end=", ")
        print(f"{1000 * workers / args.episodes:.1f} in workers", end="; ")
        print(f"{100 * seconds / (seconds + args.step):.1f} % of a step of {args.step:g} s")


if __name__ == "__main__":
    main()
