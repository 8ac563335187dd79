"""Memory that ran out in a pass, told with what the pass was made of and the keys that make it smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.errors import SlimeError, TrainerError
from slime_core.memory import first_line, is_out_of_memory

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.trainers.portion import Portion
    from slime_core.types import MicroBatch


@dataclass(slots=True, frozen=True, kw_only=True)
class Passes:
    """What a backend says of its passes. ``drop`` forgets gradients, ``pack`` answers a portion's micro-batches.

    Where there are several ranks, ``drop`` must not wait for the device: a collective there may wait for ranks that
    wait for this one, whose error would never be told.

    ``share`` ranks hold each sequence together, ``keys`` are lines of settings that make passes smaller, beside those
    of [train].
    """

    stage: Config
    where: str
    drop: Callable[[], None]
    pack: Callable[[Portion], list[list[MicroBatch]]]
    share: int = 1
    keys: Sequence[str] = ()


@contextmanager
def told_of_memory(passes: Passes, portion: Portion, what: str) -> Iterator[None]:
    """Turn an allocation that fails inside the block into TRN96, a plugin's too; gradients of the step are dropped.

    Raises:
        TrainerError: TRN96 with the tokens of this rank's portion, the largest micro-batch, and the keys to lower.
    """
    try:
        yield
    except SlimeError as error:  # of a plugin's loss or hook, say: its words name the plugin
        if error.__cause__ is None or not is_out_of_memory(error.__cause__):
            raise
        said = error.what.splitlines()[0]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = first_line(error)
    else:
        return
    passes.drop()  # outside of the handler: the trace that holds the pass's tensors is gone
    raise _short(passes, portion, what, said)


def _short(passes: Passes, portion: Portion, what: str, said: str) -> TrainerError:
    train, batch = passes.stage.train, portion.batch
    longest = int(batch.lengths.max())
    try:
        sizes = [len(micro.tokens) for step in passes.pack(portion) for micro in step]
    except MemoryError:  # not even for this
        sizes = [min(max(longest, train.max_tokens_per_gpu * passes.share), len(batch.tokens))]
    tokens = max(sizes)
    fixes = []
    if tokens > longest:
        lower = -(-max(longest, tokens // 2) // passes.share)
        fixes.append(f"train.max_tokens_per_gpu={lower}   (it is {train.max_tokens_per_gpu})")
    else:
        fixes.append("the longest sample alone is that large: lower rollout.rollout_max_response_len for a new run")
    chunk = train.logprob_chunk_tokens
    fixes.append(f"train.logprob_chunk_tokens={max(1, chunk // 2) if chunk else 256}   (it is {chunk or 'automatic'})")
    fixes += passes.keys
    return TrainerError(
        f"memory ran out while {what} step {batch.version}: {len(batch.tokens)} tokens of {len(batch)} samples in "
        f"{len(sizes)} micro-batches, the largest of {tokens} tokens",
        code="TRN96",
        where=f"step {batch.version}, {passes.where}",
        why=f"{said}; no weight was changed by this optimizer step, and the batch stays in the ledger, not trained",
        fix="go on with smaller passes: slime run --resume RUN_DIR, with one or more of\n" + "\n".join(fixes),
    )
