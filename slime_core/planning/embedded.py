"""What the embedded engine has on a GPU: keys and values in pages, its passes, and weights where it has its own."""

from __future__ import annotations

from slime_core.config.stages import rollout_slots
from slime_core.lora.spec import LoraSpec
from slime_core.planning.footprint import EngineFootprint, Phase, Subject, TrainerFootprint
from slime_core.planning.fsdp import quantised_numbers

PAGE, WIDTH, PASS_ROWS = 16, 16, 8192  # see `engines.local.pages`, `engines.local.paged`
SHARE, SHARE_ALONE = 0.5, 0.85  # of the free memory, at most, for the cache: see `engines.local.slots`
BLOCK, STEP, ROWS = 32, 128, 16  # positions and slots on a processor, and slots of which there are a multiple
FUSE_BYTES = 1 << 30  # see `engines.local.lean`
DRAWING = 10  # bytes a logit: bfloat16, float32 and what a draw makes of it


def footprint(subject: Subject, trainer: TrainerFootprint | None) -> EngineFootprint:
    """See `EngineFootprint`; ``trainer`` is what shares its GPUs, None where nothing does."""
    config, gpu = subject.config, subject.gpu
    shared = trainer is not None and not subject.apart
    slots = rollout_slots(config, "cpu" if gpu.processor else "cuda")
    weights = _own_weights(subject, live=shared and trainer is not None and trainer.live)
    passes = _passes(subject, slots)
    resident = sum(trainer.resident.values()) if trainer is not None and shared else 0
    free = max(0, gpu.room - resident - weights)
    share = SHARE if shared else SHARE_ALONE
    cache, sequences, positions, size = (_slots_of if gpu.processor else _pages)(subject, slots, int(free * share))
    if config.train.offline:  # what it had to generate with stays
        cache, passes = subject.earlier, 0
    always = {"engine weights": weights, "KV cache": cache}
    rollout = {**always, "engine passes": passes}
    resting = {} if gpu.processor else always  # a processor's cache is dropped while the trainer trains
    phases: dict[Phase, dict[str, int]] = {"rollout": rollout, "sync": resting}
    if shared or trainer is None:
        phases |= {"score": resting, "train": resting, "update": resting}
    engines = max(1, config.rollout.rollout_num_engines) if subject.apart else 1
    return EngineFootprint(
        bytes=phases,
        sequences=sequences,
        positions=positions,
        position_bytes=size,
        engines=engines,
        slots=slots,
        shared=shared,
    )


def _longest(subject: Subject) -> int:
    return max(2, subject.lengths.longest)


def _pages(subject: Subject, slots: int, most: int) -> tuple[int, int, int, int]:
    """Bytes of the cache, sequences that it holds at their longest, positions, bytes of a position."""
    size = subject.itemsize * subject.sizes.kv_position
    page, reach = PAGE * size, -(-(_longest(subject) + 1) // (WIDTH * PAGE)) * WIDTH * PAGE
    least = max(-(-_longest(subject) // PAGE) + 1, subject.earlier // page)
    pages = max(least, min(slots * reach // PAGE + 1, most // page))
    positions = (pages - 1) * PAGE
    return pages * page, min(slots, positions // _longest(subject)), positions, size


def _slots_of(subject: Subject, slots: int, most: int) -> tuple[int, int, int, int]:
    """The same on a processor: slots of one length each, and a spare one, in float32."""
    size, context = 4 * subject.sizes.kv_position, subject.config.rollout.rollout_max_context_len
    longest = -(-_longest(subject) // STEP) * STEP
    length = -(-min(longest, context or longest) // BLOCK) * BLOCK + 1
    sequences = min(slots, max(1, most // (length * size) - 1))
    count = -(-sequences // ROWS) * ROWS
    return (count + 1) * length * size, sequences, sequences * length, size


def _own_weights(subject: Subject, *, live: bool) -> int:
    """Weights that the engine does not share with the trainer's live storage."""
    sizes, train, gpu = subject.sizes, subject.config.train, subject.gpu
    nbytes = subject.itemsize * sizes.parameters
    if not live:
        return nbytes
    if gpu.processor:
        return nbytes if sizes.fused and nbytes <= FUSE_BYTES else 0
    if (spec := LoraSpec.of(train)) is not None:  # a merged copy of what adapters change, or their base itself
        auto = train.base_weights == "auto"
        changed = sum(w.count for w in sizes.adapted(spec)) if auto else quantised_numbers(sizes)
        adapters = sizes.adapter_numbers(spec) * max(1, len(train.lora_adapters))
        return subject.itemsize * (changed if train.lora_sync == "merged" else adapters)
    if subject.half and not train.true_on_policy_mode:
        return 0
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return 0 if subject.half else sum(4 * w.count for w in sizes.weights if w.name.split(".")[-2] in joined)


def _passes(subject: Subject, slots: int) -> int:
    """What a pass that computes prompts, and one that draws for all sequences, have for a while."""
    layer, size = subject.sizes.layer, subject.itemsize
    prompts = PASS_ROWS * (3 * layer.hidden + 2 * layer.qkv + 3 * layer.inner) * size
    tower, patch = subject.sizes.tower, 0.0
    if tower is not None:  # of the pictures of a prompt, each token of which counts as one's
        patch = tower.patches * (tower.passing(size) + tower.resting(layer.hidden, size))
    return int(max(prompts, slots * subject.sizes.vocab * DRAWING, patch * subject.lengths.prompt))
