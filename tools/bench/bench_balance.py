"""How evenly a step's samples are dealt to data-parallel ranks, and how many bytes each is sent.

    python tools/bench/bench_balance.py                    # 2, 4, 8 and 64 ranks
    python tools/bench/bench_balance.py --sigma 1.5        # a longer tail

Responses are log-normal, cut at --longest; each prompt has --samples of them. A rank's load is the floating-point
operations (`slime_core.weights.flops`) of the micro-batches that it computes, prompts that a pack shares counted once,
for a model of the shape of Qwen3-4B. "dealt in turn" is what the trainer did before: packs of even numbers of tokens,
heaviest first, one rank after another, and the whole batch to every rank. The heaviest sample bounds what any
split can reach: it is shown as the least. The worst of --seeds; times are of the split alone, process time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from slime_core.clusters.channel import Frame, encode
from slime_core.trainers.data_parallel import BatchSplit, pack
from slime_core.trainers.packing import make_packs, micro_batch, prompts_of
from slime_core.types import Batch, MicroBatch
from slime_core.weights.flops import Flops

SHAPE = {
    "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 9728, "vocab_size": 151936,
}  # fmt: skip
FLOPS = Flops.of(SimpleNamespace(**SHAPE))
COLUMNS = ("rollout_log_probs", "policy", "reference", "advantages")


def draw(args: argparse.Namespace, seed: int) -> Batch:
    """One step's batch."""
    rng = np.random.default_rng(seed)
    count = args.prompts * args.samples
    responses = np.clip(rng.lognormal(np.log(args.median), args.sigma, count), 1, args.longest).astype(np.int64)
    prompts = np.repeat(rng.integers(50, 800, args.prompts), args.samples)
    ends, rows = np.cumsum(prompts + responses), int(responses.sum())
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    tokens = rng.integers(0, SHAPE["vocab_size"], int(ends[-1])).astype(np.int32)
    for i in range(count):
        first = i - i % args.samples
        tokens[offsets[i] : offsets[i] + prompts[i]] = tokens[offsets[first] : offsets[first] + prompts[i]]
    return Batch(
        version=0,
        sample_ids=[f"main/{i // args.samples}-{i % args.samples}" for i in range(count)],
        tasks=["main"] * count,
        group=np.repeat(np.arange(args.prompts), args.samples),
        rollout=np.arange(count),
        reward=np.zeros(count),
        tokens=tokens,
        offsets=offsets,
        loss_mask=np.ones(rows, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(responses)]).astype(np.int64),
        columns={name: np.zeros(rows, np.float32) for name in COLUMNS},
        temperature=np.ones(count, np.float32),
    )


def load(micros: Sequence[MicroBatch]) -> float:
    """Operations of a rank's micro-batches."""
    total = 0.0
    for micro in micros:
        lengths = np.diff(micro.cu_seqlens).astype(np.float64)
        before = np.where(micro.prefix >= 0, lengths[micro.prefix], 0.0)
        total += float(FLOPS.sequence(lengths + before, before).sum())
    return total


def in_turn(batch: Batch, ranks: int, most: int) -> list[list[MicroBatch]]:
    """Packs of about equally many tokens, heaviest first, one rank after another."""
    prompt_of, every, lengths = prompts_of(batch), np.arange(len(batch)), batch.lengths
    fewest = len(make_packs(batch, every, prompt_of, most, 1))
    packs = make_packs(batch, every, prompt_of, most, -(-fewest // ranks) * ranks)
    ordered = sorted(packs, key=lambda p: (-int(lengths[p].sum()), -int((lengths[p] ** 2).sum())))
    weights = np.ones(len(batch.loss_mask), np.float32)
    micros = [micro_batch(batch, members, True, prompt_of, weights) for members in ordered]
    return [micros[rank::ranks] for rank in range(ranks)]


def size(frame: Frame) -> int:
    """Bytes that cross."""
    return len(frame.head) + sum(map(len, frame.blobs))


@dataclass(slots=True)
class Row:
    """Figures of one number of ranks: heaviest over mean, bytes of the rank that gets most, seconds."""

    before: float = 0.0
    now: float = 0.0
    least: float = 0.0
    whole: float = 0.0
    part: float = 0.0
    seconds: float = 0.0


def measure(args: argparse.Namespace, ranks: int) -> Row:
    """The worst of the seeds."""
    found = Row()
    split = BatchSplit(flops=FLOPS, ranks=ranks, max_tokens=args.max_tokens)
    for seed in range(args.seeds):
        batch = draw(args, seed)
        start = time.process_time()
        rank_batches = split.partition(batch)
        found.seconds = max(found.seconds, time.process_time() - start)
        old = np.array([load(micros) for micros in in_turn(batch, ranks, args.max_tokens)])
        new = np.array([load(pack(rank_batch, max_tokens=args.max_tokens)[0]) for rank_batch in rank_batches])
        mean = new.mean()
        found.before = max(found.before, old.max() / old.mean())
        found.now = max(found.now, new.max() / mean)
        found.least = max(found.least, float(FLOPS.sequence(batch.lengths.astype(np.float64)).max()) / mean, 1.0)
        found.whole = max(found.whole, size(encode(batch)) / 2**20)
        found.part = max(found.part, max(size(encode(rank_batch)) for rank_batch in rank_batches) / 2**20)
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 64])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--median", type=float, default=1500.0, help="response tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal")
    parser.add_argument("--longest", type=int, default=16384, help="response tokens")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args(words)


def main() -> None:
    """Print the table."""
    args = parse()
    print(
        "| ranks | heaviest over mean, dealt in turn | dealt by Karmarkar-Karp | least | MiB a rank, whole batch |",
        end="",
    )
    print(" its own | ms to divide |\n| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for ranks in args.ranks:
        row = measure(args, ranks)
        print(
            f"| {ranks} | {row.before:.3f} | {row.now:.3f} | {row.least:.3f} | {row.whole:.1f} | {row.part:.1f} "
            f"| {1000 * row.seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
