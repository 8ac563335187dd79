"""How many finished samples a second the collector sustains, from engines in this process that answer at once.

    python tools/bench/bench_collector.py                    # a ledger that keeps nothing, 10, 100 and 1,000 engines
    python tools/bench/bench_collector.py --ledger durable   # the ledger of a run, in a temporary folder of --folder
    python tools/bench/bench_collector.py --reward function  # a function by path, which slime's users bring

Everything between a prompt and a group that can be trained on is the product's own: data positions, admission, the
choice of an engine, generation, checks, a plugin's reward (a thread a group; by path a thread a sample), order. What
an engine answers was made before; each answer comes after one pass of the event loop. A sample has 32 tokens. The
median of --rounds. "us of CPU" is the whole process's time a sample, which other work on the machine lengthens little.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.clusters.engine_set import EngineSet
from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import Plugins, load_plugins
from slime_core.rollout.collector import Collector
from slime_core.rollout.groups import Source, training_params
from slime_core.testing.fakes import CharTokenizer
from slime_core.types import Completion, GenerateRequest, Prompt

VOCAB, TOKENS, GROUPS, SAMPLES = 1000, 32, 512, 8
REWARD = "def reward(args, sample, **kwargs):\n    return float(sample.response_length % 3)\n"
TARGET = 5000.0
DRAWN = [17 + n for n in range(TOKENS)]


class QuickEngine:
    """Answers each request with the same tokens, after one pass of the event loop."""

    abilities = frozenset({"per_sample_seed"})
    version, epoch = 0, 1

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        await asyncio.sleep(0)
        return Completion(
            id=request.id,
            tokens=list(DRAWN),
            log_probs=[-1.0] * TOKENS,
            plain_log_probs=[-1.0] * TOKENS,
            finish="stop",
            versions=[0] * TOKENS,
            epoch=1,
        )


class NoLedger:
    """A ledger that keeps nothing and knows of nothing."""

    def __getattr__(self, name: str) -> Any:
        async def nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {}

        return nothing


class Prompts(Source):
    """Four tokens each, without end."""

    position = 0

    def state(self) -> dict[str, int]:
        """See `rollout.groups.Source`."""
        return {"position": self.position}

    def next(self, count: int) -> list[Prompt]:
        """See `rollout.groups.Source`."""
        first, self.position = self.position, self.position + count
        tokens = [2, 11, 3, 13]
        return [
            Prompt(id=f"main/{p}", position=p, prompt="1+2=", label="3", tokens=list(tokens))
            for p in range(first, first + count)
        ]


async def collect(engines: int, steps: int, ledger: Any, plugins: Plugins, config: Any) -> tuple[float, float]:
    """Samples a second, and CPU seconds a sample, over steps of GROUPS groups after one that does not count."""
    engine: Any = EngineSet([QuickEngine() for _ in range(engines)])  # type: ignore[misc]
    ctx = Context(config=config, engine=engine, tokenizer=CharTokenizer(), sampling=training_params(config))
    source: Any = Prompts()
    collector = Collector(source=source, ledger=ledger, plugins=plugins, ctx=ctx, vocab_size=VOCAB, steps=steps + 1)
    start = cpu = 0.0
    async with collector:
        for number in range(steps + 1):
            if number == 1:
                start, cpu = time.perf_counter(), time.process_time()
            groups = await collector.take(GROUPS)
            assert sum(len(group.samples) for group in groups) == GROUPS * SAMPLES
            collector.pop_counts()
            collector.admit(0)
    samples = GROUPS * SAMPLES * steps
    return samples / (time.perf_counter() - start), (time.process_time() - cpu) / samples


async def row(args: argparse.Namespace, engines: int, plugins: Plugins, config: Any) -> list[tuple[float, float]]:
    """One measurement a round."""
    found = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
            if args.ledger == "none":
                found.append(await collect(engines, args.steps, NoLedger(), plugins, config))
                continue
            ledger = SqliteLedger(Path(folder))
            try:
                found.append(await collect(engines, args.steps, ledger, plugins, config))
            finally:
                await ledger.close()
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=4, help=f"of {GROUPS} groups of {SAMPLES} samples")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ledger", choices=("none", "durable"), default="none")
    parser.add_argument("--reward", choices=("hook", "function"), default="hook", help="rm_math's, or one by path")
    parser.add_argument("--folder", default="", help="of the durable ledger; default: a temporary one")
    return parser.parse_args(words)


def tell(args: argparse.Namespace, plugins: Plugins, config: Any) -> bool:
    """Print the rows; the answer is whether one misses its target."""
    late = False
    print(f"| engines | samples/s, ledger: {args.ledger} | from | to | us of CPU | target |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for engines in args.engines:
        found, cpu = zip(*asyncio.run(row(args, engines, plugins, config)))
        middle = statistics.median(found)
        late |= args.ledger == "none" and middle < TARGET
        target = f"{TARGET:,.0f}" if args.ledger == "none" else "reported"
        each = f"{1e6 * statistics.median(cpu):.0f}"
        print(f"| {engines} | {middle:,.0f} | {min(found):,.0f} | {max(found):,.0f} | {each} | {target} |", flush=True)
    return late


def main() -> int:
    """Print the table; exit code 1 where a row without a ledger misses its target."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "quick.py").write_text(REWARD)
        sizes = ["--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(SAMPLES), "--hf-checkpoint", "."]
        by_path = ["--custom-rm-path", f"{folder}/quick.py:reward"]
        reward = by_path if args.reward == "function" else ["--plugin", "rm_math"]
        config = load_config(None, [*sizes, *reward, "--rollout-max-response-len", str(TOKENS)])
        plugins = load_plugins(config)
        try:
            late = tell(args, plugins, config)
        finally:
            plugins.close()
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
