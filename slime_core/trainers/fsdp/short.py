"""Memory that ran out in a pass, told with what the pass was made of and the keys that make it smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slime_core.errors import SlimeError, TrainerError
from slime_core.memory import first_line, is_out_of_memory

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.worker import Worker
    from slime_core.types import Batch


@contextmanager
def told_of_memory(worker: Worker, batch: Batch, what: str) -> Iterator[None]:
    """Turn an allocation that fails inside the block into TRN96; gradients of the step are dropped.

    Raises:
        TrainerError: TRN96 with the batch's tokens, the largest micro-batch, and the keys to lower.
    """
    try:
        yield
    except SlimeError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = first_line(error)
    else:
        return
    worker.release(set())  # outside of the handler: the trace that holds the pass's tensors is gone
    raise _short(worker, batch, what, said)


def _short(worker: Worker, batch: Batch, what: str, said: str) -> TrainerError:
    assert worker.stage is not None
    train = worker.stage.train
    longest = int(batch.lengths.max())
    try:
        sizes = [len(micro.tokens) for step in worker._pack(batch) for micro in step]
    except MemoryError:  # not even for this
        sizes = [min(max(longest, train.max_tokens_per_gpu), len(batch.tokens))]
    tokens = max(sizes)
    fixes = []
    if tokens > longest:
        fixes.append(f"train.max_tokens_per_gpu={max(longest, tokens // 2)}   (it is {train.max_tokens_per_gpu})")
    else:
        fixes.append("the longest sample alone is that large: lower rollout.rollout_max_response_len for a new run")
    chunk = train.logprob_chunk_tokens
    fixes.append(f"train.logprob_chunk_tokens={max(1, chunk // 2) if chunk else 256}   (it is {chunk or 'automatic'})")
    if not train.gradient_checkpointing:
        fixes.append("train.gradient_checkpointing=true")
    return TrainerError(
        f"memory ran out while {what} step {batch.version}: {len(batch.tokens)} tokens of {len(batch)} samples in "
        f"{len(sizes)} micro-batches, the largest of {tokens} tokens",
        code="TRN96",
        where=f"step {batch.version}, rank {worker.rank}, {worker.device}",
        why=f"{said}; no weight was changed by this optimizer step, and the batch stays in the ledger, not trained",
        fix="go on with smaller passes: slime run --resume RUN_DIR, with one or more of\n" + "\n".join(fixes),
    )
