"""Seconds of generating a step's samples: a roofline of decode steps over the lengths that are drawn.

    a decode step of n sequences = fixed + layers * launches + max(weights / bandwidth, 2 N n / peak)
                                   + keys and values of n sequences / bandwidth + logits + n * host

The shares of bandwidth and peak and the seconds of the host were fitted to docs/benchmarks.md's measurements of three
models at 64, 256 and 1,024 sequences on an H100: the embedded engine within 11 % of all nine, SGLang within 6 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from slime_core.planning.footprint import DecodeCosts
from slime_core.planning.fsdp import quantised_numbers, stored_bytes

if TYPE_CHECKING:
    from slime_core.planning.footprint import EngineFootprint, Lengths, Subject

PREFILL = 0.5  # share of peak that computing prompts reaches
LOGITS, LOGITS_SHARE = 10, 0.7  # bytes a logit that a draw reads and writes, share of bandwidth
MOST, CHUNK = 2048, 64  # sequences that are followed one by one; decode steps that are alike


EMBEDDED = DecodeCosts(
    fixed=3.64e-4, layer=1.92e-5, sequence=1.57e-6, request=8e-5, weights=0.95, cache=0.826, products=0.638
)
SERVED = DecodeCosts(
    fixed=2.26e-4, layer=2.97e-5, sequence=2.08e-6, request=1e-3, weights=0.797, cache=0.542, products=0.608
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Decoding:
    """Decode steps of one engine on its GPUs.

    Example: Decoding.of(subject, engine).step(64, 384) is seconds of a step of 64 sequences of 384 tokens
    """

    costs: DecodeCosts
    bytes: int  # of the weights, on one GPU
    active: float  # weights that a token is multiplied by, on one GPU
    position: float  # bytes of a position, on one GPU
    layers: int
    vocab: int
    peak: float
    bandwidth: float

    @classmethod
    def of(cls, subject: Subject, engine: EngineFootprint) -> Decoding:
        """Of an engine that shares its products over its GPUs."""
        sizes, gpus = subject.sizes, engine.gpus
        return cls(
            costs=engine.costs or EMBEDDED,
            bytes=subject.itemsize * sizes.parameters // gpus + _dequantised(subject, engine),
            active=sizes.active / gpus,
            position=engine.position_bytes / gpus,
            layers=sizes.layers,
            vocab=sizes.vocab,
            peak=subject.gpu.bf16,
            bandwidth=subject.gpu.bandwidth,
        )

    def step(self, sequences: float, context: float) -> float:
        """Seconds of a decode step of ``sequences`` that have ``context`` tokens on average."""
        costs = self.costs
        weights = self.bytes / (self.bandwidth * costs.weights)
        products = 2 * self.active * sequences / (self.peak * costs.products)
        cache = sequences * context * self.position / (self.bandwidth * costs.cache)
        logits = sequences * self.vocab * LOGITS / (self.bandwidth * LOGITS_SHARE)
        overhead = costs.fixed + costs.layer * self.layers + costs.sequence * sequences
        return overhead + max(weights, products) + cache + logits

    def bottleneck(self, sequences: float, context: float) -> str:
        """What takes most of a step."""
        costs = self.costs
        parts = {
            "reading weights": self.bytes / (self.bandwidth * costs.weights),
            "products": 2 * self.active * sequences / (self.peak * costs.products),
            "reading keys and values": sequences * context * self.position / (self.bandwidth * costs.cache),
            "launches and the host": costs.fixed + costs.layer * self.layers + costs.sequence * sequences,
        }
        return max(parts, key=lambda name: parts[name])

    def prefill(self, tokens: float) -> float:
        """Seconds of computing prompts of so many tokens in all."""
        return tokens * 2 * self.active / (self.peak * PREFILL)

    def generate(self, samples: int, lengths: Lengths, slots: int, prompts: float) -> float:
        """Seconds until the last of ``samples`` has ended, at most ``slots`` at once.

        Args:
            prompts: tokens of prompts that are computed: once for samples that share them
        """
        if samples <= 0:
            return 0.0
        factor = max(1.0, samples / MOST)
        responses = sorted(response_lengths(lengths, min(samples, MOST)), reverse=True)
        most = max(1, int(slots / factor))
        running = [(length, 0) for length in _dealt(responses)[:most]]
        waiting = _dealt(responses)[most:]
        seconds = self.prefill(prompts) + self.costs.request * samples
        while running:
            steps = max(1, min(CHUNK, min(length - done for length, done in running)))
            context = lengths.prompt + sum(done for _, done in running) / len(running)
            seconds += steps * self.step(len(running) * factor, context)
            running = [(length, done + steps) for length, done in running if done + steps < length]
            while waiting and len(running) < most:
                running.append((waiting.pop(0), 0))
        return seconds


def _dequantised(subject: Subject, engine: EngineFootprint) -> int:
    """Bytes more of a step whose weights are in few bits: reading those, and writing the floats that products read."""
    train = subject.config.train
    stored = stored_bytes(subject.sizes, train, subject.itemsize)
    direct = train.lora_sync == "adapter" and engine.costs is None and engine.shared and subject.ranks == 1
    return int((stored + subject.itemsize) * quantised_numbers(subject.sizes)) if stored and direct else 0


def _dealt(responses: list[int]) -> list[int]:
    """The same lengths in an order that mixes long and short ones, always the same."""
    stride = next(n for n in (617, 409, 211, 101, 37, 11, 3, 1) if math.gcd(n, len(responses)) == 1)
    return [responses[i * stride % len(responses)] for i in range(len(responses))]


def response_lengths(lengths: Lengths, count: int) -> Iterator[int]:
    """Quantiles of the lengths of responses: log-normal by mean and 95th percentile, all alike where these are."""
    longest = max(1, int(lengths.longest - lengths.prompt))
    sigma = _sigma(lengths.response, lengths.p95)
    middle = math.log(max(1.0, lengths.response)) - sigma * sigma / 2
    normal = NormalDist()
    for number in range(count):
        value = math.exp(middle + sigma * normal.inv_cdf((number + 0.5) / count))
        yield max(1, min(longest, round(value)))


def _sigma(mean: float, p95: float) -> float:
    """Of log-normal lengths: p95 = mean * exp(1.645 s - s^2 / 2), the smaller root."""
    ratio = math.log(max(1.0, p95 / max(1.0, mean)))
    inside = 1.645**2 - 2 * ratio
    return 1.645 if inside < 0 else 1.645 - math.sqrt(inside)
