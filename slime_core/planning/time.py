"""Expected seconds of a step by phase, and what each is bound by: a roofline with measured shares of the peaks.

    train     products with weights and attention (`weights.flops`), each at a share of the peak, and what activations
              and logits write and read; or launches, where they take longer.
              Under adapters a third of the products with weights is spared, and each layer's outputs are added to
    update    bytes that AdamW reads and writes / bandwidth, or over the bus where masters lie in main memory
    sync      copies of the weights by the way they go; swap: state to main memory and back

Shares were fitted to ten steps of models from 135 million to 4 billion weights on H100 and H200, each of which they
give within 14 % (docs/benchmarks.md); for other GPUs they are assumed the same, which ``measured`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_core.lora.spec import LoraSpec
from slime_core.planning.activations import TokenCosts
from slime_core.planning.batch import BatchPlan
from slime_core.planning.decoding import Decoding
from slime_core.planning.memory import MemoryPlan, swapped

if TYPE_CHECKING:
    from slime_core.planning.footprint import EngineFootprint, TrainerFootprint

PRODUCTS, ATTENTION = 0.66, 0.565  # shares of the peak in forward and backward passes
STREAMING = 0.8  # share of bandwidth that optimizers and copies reach
TRAFFIC = 20  # times that what a layer keeps is written and read at the full bandwidth, both passes
LOGIT = 12  # bytes a logit that is written and read, both passes
LOW_RANK = 28  # bytes an output of a layer with an adapter, and token: forward and backward passes of low rank
ADAMW = 40  # bytes a parameter: norm 4, scaling 8, masters 8, moments 16, gradient 4 (`fsdp.adamw`), copies
IPC, NCCL_SHARE, DISK = 0.08, 0.3, 1.6e9  # seconds of an update by CUDA IPC, share of a link, bytes/s of a disk
SWAP_SHARE = 1.0  # of the bus
HOST, PACKING = 1e-5, 5e-5  # seconds a sample: ledger and checks; its place in packs, and its columns
FINGERPRINT = 7e-12  # seconds a parameter
PER_STEP = 0.012  # seconds a step
MEASURED = ("h100", "h200")


@dataclass(slots=True, frozen=True, kw_only=True)
class TimePlan:
    """Seconds of a step.

    Example: TimePlan.of(plan).total
    """

    seconds: Mapping[str, float]  # rollout, score, train, update, sync, swap, other
    bottlenecks: Mapping[str, str] = field(default_factory=dict)  # phase -> what bounds it
    total: float = 0.0
    overlapped: bool = False  # the engine generates while the trainer trains
    measured: bool = True  # shares were measured on this kind of GPU
    tokens_per_second: float = 0.0  # response tokens of all, a second
    mfu: float = 0.0  # of training

    @property
    def bottleneck(self) -> str:
        """The longest phase and what bounds it."""
        name = max(self.seconds, key=lambda phase: self.seconds[phase])
        return f"{name}: {self.bottlenecks[name]}" if name in self.bottlenecks else name

    @classmethod
    def of(cls, plan: MemoryPlan) -> TimePlan | None:
        """Of a memory plan; None on a processor, whose rates are not known, and where nothing trains or generates."""
        if plan.subject.gpu.processor or (plan.trainer is None and plan.engine is None):
            return None
        return _Step(plan).time()


class _Step:
    def __init__(self, plan: MemoryPlan) -> None:
        self.plan, self.subject = plan, plan.subject
        self.gpu, self.sizes, self.lengths = self.subject.gpu, self.subject.sizes, self.subject.lengths
        self.batch = BatchPlan.of(self.subject.config, self.lengths)
        self.spec = LoraSpec.of(self.subject.config.train)
        self.bottlenecks: dict[str, str] = {}

    def time(self) -> TimePlan:
        trainer, engine = self.plan.trainer, self.plan.engine
        seconds: dict[str, float] = {}
        if engine is not None:
            seconds["rollout"] = self._rollout(engine)
        mfu = 0.0
        if trainer is not None:
            seconds["score"] = self._score(trainer)
            seconds["train"] = self._train(trainer)
            mfu = sum(self._operations()) / self.subject.ranks / self.gpu.bf16 / seconds["train"]
            seconds["update"] = self._update(trainer)
            mfu *= seconds["train"] / (seconds["train"] + seconds["update"])
        if trainer is not None and engine is not None:
            seconds["sync"] = self._sync(trainer, engine)
            seconds["swap"] = swapped(self.subject, self.plan) / 2 / (self.gpu.host_link * SWAP_SHARE)
        if engine is not None:
            seconds["other"] = PER_STEP + HOST * self.batch.samples + FINGERPRINT * self.sizes.parameters
        seconds = {name: value for name, value in seconds.items() if value > 0}
        apart = engine is not None and trainer is not None and not engine.shared
        overlapped = apart and self.subject.config.rollout.max_staleness > 0
        total = sum(seconds.values())
        if overlapped:
            total = max(seconds["rollout"], total - seconds["rollout"])
        return TimePlan(
            seconds=seconds,
            bottlenecks=self.bottlenecks,
            total=total,
            overlapped=overlapped,
            measured=self.gpu.name.split(" ")[0] in MEASURED,
            tokens_per_second=self.batch.response_tokens / total if total else 0.0,
            mfu=mfu,
        )

    def _rollout(self, engine: EngineFootprint) -> float:
        decoding = Decoding.of(self.subject, engine)
        samples = -(-self.batch.samples // engine.engines)
        slots = max(1, min(engine.slots or samples, engine.positions // max(1, int(self.lengths.mean))))
        prompts = self.subject.config.rollout.rollout_batch_size / engine.engines * self.lengths.prompt
        at_once = min(samples, slots)
        self.bottlenecks["rollout"] = decoding.bottleneck(at_once, self.lengths.prompt + self.lengths.response / 2)
        return decoding.generate(samples, self.lengths, slots, prompts)

    def _operations(self) -> tuple[float, float]:
        """With weights and in attention, of all passes of a step: prompts once for each sample of a pack."""
        flops, n = self.sizes.flops, self.subject.config.rollout.n_samples_per_prompt
        prompt, length = self.lengths.prompt, self.lengths.mean
        prompts = self.batch.samples / n
        total = prompts * flops.sequence(prompt) + self.batch.samples * flops.sequence(length, prompt)
        weights = flops.token * self.batch.computed
        return weights, total - weights

    def _micros(self, trainer: TrainerFootprint) -> int:
        context = trainer.layout.get("context parallel", 1)
        return self.batch.micro_batches(trainer.tokens * context, trainer.data)

    def _launches(self, trainer: TrainerFootprint, part: float) -> float:
        layers = self.sizes.layers / trainer.pipeline
        return part * trainer.launch * layers * self._micros(trainer) * self.batch.optimizer_steps

    def _passes(self, trainer: TrainerFootprint, part: float) -> float:
        """Seconds of a ``part`` of forward and backward passes over the step's samples, on one GPU."""
        learns, layer, (weights, attention) = part >= 1, self.sizes.layer, self._operations()
        spared = weights / 3 if learns and self.spec is not None else 0.0  # frozen weights have no gradient
        seconds = ((part * weights - spared) / PRODUCTS + part * attention / ATTENTION) / self.gpu.bf16
        form = "fused" if trainer.exact else "plain"
        costs = TokenCosts.of(layer, form)  # type: ignore[arg-type]
        written = part * TRAFFIC * costs.saved * self.batch.computed * self.sizes.layers
        written += part * LOW_RANK * self._adapted_outputs() * self.batch.computed
        written += LOGIT * self.sizes.vocab * self.batch.response_tokens / (1 if learns else 3)
        seconds += written / self.gpu.bandwidth
        bubble = 1 + (trainer.pipeline - 1) / self._micros(trainer)
        return max(seconds / self.subject.ranks, self._launches(trainer, part)) * bubble

    def _adapted_outputs(self) -> int:
        """Of a token, in all layers with adapters."""
        if self.spec is None:
            return 0
        experts = self.sizes.layer.top_k
        return sum(one.shape[-2] * (experts if one.kind == "experts" else 1) for one in self.sizes.adapted(self.spec))

    def _train(self, trainer: TrainerFootprint) -> float:
        part = 1 + trainer.recomputed / 3
        seconds = self._passes(trainer, part)
        launched = seconds <= self._launches(trainer, part) * 1.01
        self.bottlenecks["train"] = "launches and the host" if launched else "products"
        return seconds + PACKING * self.batch.samples / trainer.data + self._gathering(trainer)

    def _gathering(self, trainer: TrainerFootprint) -> float:
        """Weights gathered twice and gradients scattered once a micro-batch, where products do not hide them."""
        shards = trainer.layout.get("shards", 1)
        if shards == 1:
            return 0.0
        passes = self._micros(trainer) * self.batch.optimizer_steps
        moved = (2 * self.subject.itemsize + 4) * self.sizes.parameters * (shards - 1) / shards * passes
        across = moved / (self.gpu.link * 0.6)
        within = self._passes(trainer, 1.0)
        if across > within:
            self.bottlenecks["train"] = "gathering weights from other GPUs"
        return max(0.0, across - within)

    def _score(self, trainer: TrainerFootprint) -> float:
        roles = self.subject.needs & {"policy", "reference", "teacher", "values"}
        return len(roles) * self._passes(trainer, 1 / 3) if roles else 0.0

    def _update(self, trainer: TrainerFootprint) -> float:
        """Of all optimizer steps."""
        shards = trainer.layout.get("shards") or trainer.data * trainer.pipeline
        learning = self.sizes.parameters if self.spec is None else self.sizes.adapter_numbers(self.spec)
        parameters = learning / max(1, min(shards, self.subject.ranks))
        seconds = ADAMW * parameters / (self.gpu.bandwidth * STREAMING)
        bus = trainer.moved / 2 / self.gpu.host_link
        self.bottlenecks["update"] = "the bus to main memory" if bus > seconds else "memory bandwidth"
        return max(seconds, bus) * self.batch.optimizer_steps

    def _sync(self, trainer: TrainerFootprint, engine: EngineFootprint) -> float:
        """Of a weight update, until the first token of the new version."""
        size = trainer.publish
        if not engine.staging:
            return size / (self.gpu.bandwidth * STREAMING) if self.subject.ranks > 1 else PER_STEP
        if self.subject.config.rollout.update_weight_transport == "disk":
            return size / DISK
        if engine.shared:
            return IPC + 4 * size / (self.gpu.bandwidth * STREAMING)
        return IPC + size / (self.gpu.link * NCCL_SHARE)
