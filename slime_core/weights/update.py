"""One weight update: the trainer publishes, the engines load, and what they then serve is compared.

Engine.route -> Trainer.publish -> Engine.load -> version -> checksums -> Trainer.score     inside turns.syncing
                                                  Engine.score                  after it, when the engines serve
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_core.errors import EngineError
from slime_core.notices import notice
from slime_core.weights.canary import compare, compare_adapters
from slime_core.weights.logprob_check import LENGTH, PROMPTS, Band, LogprobCheck, probe, random_tokens

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Engine, Trainer
    from slime_core.types import WeightCheck, WeightRoute, WeightUpdate


SECONDS = "canary/compare_seconds"
EXPERTS = ".experts."  # in the names of tensors that a mixture of experts has, on every engine


@dataclass(slots=True, kw_only=True)
class Canary:
    """What is compared after each update of a stage, and what came of the last one.

    Example:
        canary = Canary(config=config, vocab_size=151936)
        async with turns.syncing():
            await sync_weights(trainer, engine, 4, canary=canary, check=canary.check(4))
        await canary.compare_log_probs(engine)
    """

    config: Config
    vocab_size: int  # rows of the embedding
    context_len: int = 0  # tokens that fit; 0 is not known
    text: Callable[[int], Sequence[int]] = lambda count: ()  # up to so many tokens of the run's prompts
    metrics: dict[str, float] = field(default_factory=dict)
    _served: dict[str, str] = field(default_factory=dict)  # checksums at the last call
    _logprob_check: LogprobCheck | None = None

    def check(self, version: int, *, first: bool = False, last: bool = False) -> WeightCheck:
        """Which tensors are compared: all at the start, at a checkpoint and at the end, else a few in turn."""
        how, interval = self.config.rollout.check_weights, self.config.report.save_interval
        if how == "off":
            return "none"
        due = first or last or bool(interval and version % interval == 0)
        return "all" if due or how == "all" else "rolling"

    def pop_metrics(self) -> dict[str, float]:
        """Figures of the last update, once."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    async def compare_tensors(self, engine: Engine, route: WeightRoute, update: WeightUpdate) -> None:
        """The exact half, when the engine has loaded; no-op for adapters that come without their base.

        Raises:
            EngineError: ENG83, see `canary.compare`.
        """
        if not route.base:
            return
        if not route.checks:
            off = self.config.rollout.check_weights == "off"
            reason = (
                "check_weights is off"
                if off
                else "they give no checksums of their tensors, or none that are known here"
            )
            return notice("canary", f"weights of the servers are not compared byte by byte: {reason}")
        served = await engine.fingerprints()
        count = compare(route.checks, update.fingerprints, served, update.version, self._served)
        self._served = served
        self.metrics["canary/tensors"] = float(count)

    async def ask_trainer(self, trainer: Trainer, engine: Engine, route: WeightRoute) -> None:
        """Take the trainer's log-probs of the run's text, if the engine can score too."""
        if self.config.rollout.debug_rollout_only:
            return notice("score", "debug_rollout_only: no trainer has log-probs to compare with the servers'")
        if "score" not in engine.abilities:
            return notice("score", "the servers give no log-probs of given tokens: canary/* has no such figures")
        if self._logprob_check is None:
            low = "bfloat16" in (route.dtype, self.config.train.dtype)
            text = self.text(PROMPTS * LENGTH) or random_tokens(self.config.seed, self.vocab_size).tolist()
            adapters = self.config.train.lora_adapters if "adapters" in engine.abilities else ()
            context_len = self.config.rollout.rollout_max_context_len or self.context_len or LENGTH
            prompts = probe(text, context_len, adapters)
            dtype, fixed = "bfloat16" if low else "float32", self.config.rollout.canary_band
            mixture = any(EXPERTS in check.name for check in route.checks)
            band = Band(dtype, fixed, mixture=mixture, fp8=self.config.rollout.rollout_quantization == "fp8")
            self._logprob_check = LogprobCheck(prompts, band)
        await self._logprob_check.ask(trainer)

    async def compare_log_probs(self, engine: Engine) -> None:
        """Compare log-probs once the engine serves; no-op if the trainer computed none.

        Raises:
            EngineError: ENG83, see `LogprobCheck.compare`.
        """
        if self._logprob_check is None or self._logprob_check.trainer_log_probs is None:
            return
        with _Clock(self.metrics):
            self.metrics |= await self._logprob_check.compare(engine, engine.version)
        notice(
            "canary figures",
            f"canary at version {engine.version}: {self.metrics.get('canary/tensors', 0):.0f} tensors are the "
            f"trainer's, log-probs differ by {self.metrics['canary/logprob_diff_mean']:.2g} on average "
            f"(band {self.metrics['canary/band']:.2g})",
        )


class _Clock:
    """Adds a block's wall time to ``canary/compare_seconds``."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics, self._start = metrics, 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._start
        self._metrics[SECONDS] = self._metrics.get(SECONDS, 0.0) + seconds


async def sync_weights(
    trainer: Trainer, engine: Engine, version: int, *, canary: Canary | None = None, check: WeightCheck = "all"
) -> None:
    """Bring ``version`` from the trainer to the engine, and compare its tensors with the trainer's checksums.

    An engine with a route is compared on the tensors of ``check``; with a ``canary`` the trainer is then asked for the
    log-probs that `Canary.compare_log_probs` needs. Another engine is compared on all that the trainer sent sums of.
    Adapters in the update are compared tensor by tensor, each time.

    Raises:
        EngineError: ENG83 the engine serves another version, or a tensor that differs (named).
    """
    route = await engine.route(check)
    update = await trainer.publish(version, route)
    await engine.load(update)
    if engine.version != version:
        raise EngineError(
            f"the engine serves version {engine.version} after version {version} was loaded",
            code="ENG83",
            why="weights did not reach the sampler",
        )
    if update.adapters and check != "none":
        compare_adapters(update, await engine.fingerprints(tuple(update.adapters)))
    if route is None or route.transport == "tensors":
        return await _compare_named(engine, update)
    if canary is None:
        compare(route.checks, update.fingerprints, await engine.fingerprints() if route.checks else {}, version)
        return
    canary.metrics.clear()
    with _Clock(canary.metrics):
        await canary.compare_tensors(engine, route, update)
        await canary.ask_trainer(trainer, engine, route)


async def _compare_named(engine: Engine, update: WeightUpdate) -> None:
    """Checksums by Hugging Face name, of an engine that takes tensors as they are."""
    expected = {
        name: one for name, one in update.fingerprints.items() if name.partition("/")[0] not in update.adapters
    }
    if not expected:
        return
    served = await engine.fingerprints()
    wrong = sorted(name for name, checksum in expected.items() if served.get(name) != checksum)
    if wrong:
        raise EngineError(
            f"{len(wrong)} tensors of the engine differ from the trainer's version {update.version}: {wrong[:5]}",
            code="ENG83",
            why="weights did not reach the sampler whole",
        )
