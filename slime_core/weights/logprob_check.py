"""The statistical half of the canary: log-probs of text, the trainer's against the engine's.

    text -> probe -> Trainer.score -> LogprobCheck.ask ..... LogprobCheck.compare <- Engine.score
                                          `-> canary/* metrics, and an end where they leave the band

Checksums say that bytes arrived; this says that both sides make the same of them: position ids, rope, norms, an order
of q, k and v that both sides agree on wrongly. The text is that of the run's own prompts, one after another, cut into
pieces: what models are made for. In bfloat16 rounding alone moves log-probs, of some models ten times as far as of
others. How far is measured, before the first comparison, on the trainer's own model and the same text.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import EngineError
from slime_core.seeds import seed_of
from slime_core.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Engine, Role, Trainer

PROMPTS, LENGTH = 8, 32  # tokens of a prompt; the first is the context of the others, which are scored
FIRST = {"float32": 1e-3, "bfloat16": 0.05}
"""Band before the run has shown its own, where rounding was not measured. bfloat16: means of 0.003 to 0.009 were seen
on a GPU (SGLang 0.5.12, dense models of 0.6B and 4B), so more than five times that. float32: 1e-6 to 5e-6 on a CPU; on
a GPU attention may multiply in TF32, which has 10 bits."""
ROUNDINGS = 4.0  # the first band is so many times what rounding does to the trainer's own log-probs
CEILING = 0.5  # and no wider: weights of another model, or swapped ones, move log-probs by more
FLOOR = {"float32": 2e-5, "bfloat16": 0.02}  # no band is narrower: twice the largest that was seen, or more
MIXTURE = 4.0
"""FIRST and FLOOR are so many times as wide for a mixture of experts: of two that are close, rounding chooses one."""
FP8 = 5.0
"""FIRST, FLOOR and what rounding to bfloat16 does count so many times where the engine computes in fp8. Measured on
SmolLM2-135M on a CPU, 496 tokens: bfloat16 moves log-probs by 0.048 on average, weights in fp8 by 0.182, weights and
inputs of linear layers (128 of a token at a time, as SGLang rounds them) by 0.222, which is 4.6 times as much."""
TIMES = 8.0  # the running band is so many medians wide
SEEN, ENOUGH = 32, 4  # differences it remembers, and after how many it begins

PRECISIONS: tuple[Role, ...] = ("float32", "bfloat16")

Metrics = dict[str, float]


def probe(text: Sequence[int], context_len: int, adapters: Sequence[str] = ()) -> Batch:
    """Prompts as a batch to score: the first token of each is the prompt, the rest its response.

    Args:
        text: token ids; PROMPTS pieces of up to LENGTH are cut from it, and it is repeated where it is shorter.
        adapters: names of several, which the prompts take in turn; each has one at least.
    """
    length, count = max(2, min(LENGTH, context_len)), max(PROMPTS, len(adapters))
    tokens = np.resize(np.asarray(text, dtype=np.int32), count * length)
    responses = count * (length - 1)
    return Batch(
        version=0,
        stage="canary",
        sample_ids=[f"canary/{n}" for n in range(count)],
        tasks=["canary"] * count,
        group=np.arange(count, dtype=np.int64),
        rollout=np.arange(count, dtype=np.int64),
        reward=np.zeros(count),
        tokens=tokens,
        offsets=np.arange(count + 1, dtype=np.int64) * length,
        loss_mask=np.ones(responses, dtype=np.float32),
        response_offsets=np.arange(count + 1, dtype=np.int64) * (length - 1),
        models=[adapters[n % len(adapters)] for n in range(count)] if adapters else [],
        train_metadata=[{} for _ in range(count)],
    )


def random_tokens(seed: int, vocab_size: int) -> NDArray[np.int64]:
    """Token ids for a run without prompts: one of each of equal parts of the vocabulary, shuffled."""
    count = PROMPTS * LENGTH
    generator = np.random.Generator(np.random.Philox(seed_of(seed, "canary")))
    ids = (np.arange(count) + generator.random(count)) * vocab_size / count
    return generator.permutation(np.minimum(ids, vocab_size - 1).astype(np.int64))


class Band:
    """The largest mean difference that passes: ``fixed``, or the effect of rounding, narrowed by the run's history.

    ``mixture``: the model is a mixture of experts. ``fp8``: the engine computes in fp8. ``rounding`` is a mean
    |difference| of log-probs, once measured.
    """

    def __init__(self, dtype: str, fixed: float = 0.0, *, mixture: bool = False, fp8: bool = False) -> None:
        self._coarser = FP8 if fp8 else 1.0
        wide = self._coarser * (MIXTURE if mixture else 1.0)
        self._first, self._floor = (min(CEILING, wide * band[dtype]) for band in (FIRST, FLOOR))
        self._fixed = fixed
        self._differences: deque[float] = deque(maxlen=SEEN)
        self.rounding: float | None = None
        self.measures = dtype != "float32" and not fixed  # whether rounding decides, and is yet to be measured

    def measure(self, exact: NDArray[np.float32], rounded: NDArray[np.float32]) -> None:
        """Set the first band by the trainer's log-probs in float32 and in the dtype of compute."""
        self.rounding = differences(exact, rounded)["canary/logprob_diff_mean"]
        self._first = min(CEILING, max(self._floor, ROUNDINGS * self._coarser * self.rounding))

    @property
    def limit(self) -> float:
        """Of the next difference."""
        if self._fixed:
            return self._fixed
        if len(self._differences) < ENOUGH:
            return self._first
        return min(self._first, max(self._floor, TIMES * float(np.median(self._differences))))

    def add(self, difference: float) -> None:
        """Note a difference that passed."""
        self._differences.append(difference)


@dataclass(slots=True)
class LogprobCheck:
    """Compares both sides, update after update.

    Example:
        check = LogprobCheck(probe(text, context_len), Band("float32"))
        await check.ask(trainer)                            # while the trainer has its parameters
        metrics = await check.compare(engine, version=4)    # while the engine serves
    """

    batch: Batch
    band: Band
    trainer_log_probs: NDArray[np.float32] | None = None  # [R]

    async def ask(self, trainer: Trainer) -> None:
        """Take the trainer's log-probs of the weights that it has now; the first time, what rounding does to them."""
        roles: frozenset[Role] = frozenset({"policy", *(PRECISIONS if self.band.measures else ())})
        scores = await trainer.score(self.batch, roles)
        self.trainer_log_probs = np.asarray(scores["policy"]["log_probs"], dtype=np.float32)
        if self.band.measures and all(role in scores for role in PRECISIONS):
            self.band.measure(*(scores[role]["log_probs"] for role in PRECISIONS))
        self.band.measures = False

    async def compare(self, engine: Engine, version: int) -> Metrics:
        """Take the engine's and compare; of several adapters the one with the largest mean difference counts.

        Raises:
            EngineError: ENG83 the mean difference is beyond the band: the worst prompt and token.
        """
        assert self.trainer_log_probs is not None, "ask the trainer first"
        models = self.batch.models or [""] * len(self.batch)
        options: list[dict[str, Any]] = [{"adapter": name} if name else {} for name in models]
        scores = [engine.score(self._tokens(n), 1, **one) for n, one in enumerate(options)]
        served = [np.asarray(part, dtype=np.float32) for part in await asyncio.gather(*scores)]
        served_log_probs = np.concatenate(served)
        owners = np.repeat(models, [len(part) for part in served])
        of_adapters = [
            differences(self.trainer_log_probs[owners == name], served_log_probs[owners == name])
            for name in dict.fromkeys(models)
        ]
        metrics = max(of_adapters, key=_rank)
        limit = self.band.limit
        mean = metrics["canary/logprob_diff_mean"]
        if not mean <= limit:
            raise self._outside(version, served_log_probs, metrics, limit)
        self.band.add(mean)
        self.trainer_log_probs = None
        return metrics | {"canary/band": limit}

    def _rounding(self) -> str:
        if self.band.rounding is None:
            return ""
        return f"; rounding to bfloat16 moves the trainer's own by {self.band.rounding:.3g}"

    def _tokens(self, sample: int) -> list[int]:
        tokens: list[int] = self.batch.tokens[self.batch.offsets[sample] : self.batch.offsets[sample + 1]].tolist()
        return tokens

    def _outside(self, version: int, served: NDArray[np.float32], metrics: Metrics, limit: float) -> EngineError:
        assert self.trainer_log_probs is not None
        apart = np.abs(self.trainer_log_probs.astype(np.float64) - served)
        row = int(np.argmax(np.where(np.isfinite(apart), apart, np.inf)))
        sample = int(np.searchsorted(self.batch.response_offsets, row, side="right")) - 1
        owner = f"adapter {self.batch.models[sample]}, " if self.batch.models else ""
        place = row - int(self.batch.response_offsets[sample]) + 1
        return EngineError(
            f"log-probs of trainer and engine differ by {metrics['canary/logprob_diff_mean']:.3g} on average after "
            f"version {version}; the band is {limit:.3g}",
            code="ENG83",
            where=f"{owner}prompt {self.batch.sample_ids[sample]}, token {place} (id {self._tokens(sample)[place]}): "
            f"trainer {self.trainer_log_probs[row]:.4f}, engine {served[row]:.4f}",
            why="the engine does not compute what is trained: it has other weights or another model"
            + self._rounding(),
            fix="compare config.json and dtypes of both sides; where the difference is known and harmless: "
            "--canary-band, above it",
        )


def _rank(metrics: Metrics) -> tuple[bool, float]:
    """For comparing: what is not a number is beyond all."""
    mean = metrics["canary/logprob_diff_mean"]
    return math.isnan(mean), mean


def differences(trainer: NDArray[np.float32], served: NDArray[np.float32]) -> Metrics:
    """Mean and largest |difference| of log-probs [R], and the mean of exp(d) - 1 - d (Schulman's k3) as ``kl``."""
    d = trainer.astype(np.float64) - served.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kl = np.expm1(d) - d
    return {
        "canary/logprob_diff_mean": math.fsum(np.abs(d)) / len(d),
        "canary/logprob_diff_max": float(np.abs(d).max()),
        "canary/kl": math.fsum(kl) / len(kl),
    }
