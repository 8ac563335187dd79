"""Scheduler of jobs: slots are refilled at the next step, prompts run packed, every step draws for all slots.

    queue -> slot (copy what another cache shares) -> packed prefill of all but the last token -> [decode] -> out
                                                                                               ^______|

The last token of a prompt is fed by the first decode step, so logits are only ever made by decode steps. Everything
here runs on the torch thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from slime_core.engines.local.attention import Segment
from slime_core.engines.local.slots import Slots, check_size, fitting, free_memory, slot_length
from slime_core.errors import EngineError
from slime_core.kernels.sampling import Knobs, draw, uniforms
from slime_core.memory import is_out_of_memory
from slime_core.notices import notice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.media import JobMedia
    from slime_core.engines.local.served import ServedModel
    from slime_core.engines.local.slots import EngineJob


COMMON = 32
"""Fewer common leading tokens than this are not worth waiting for another prompt's prefill."""


TOKENS_A_CHARACTER = 4
"""A character is at most four byte tokens."""

MARGIN = 8


class Scheduler:
    """Owns the slots. ``sequences`` is how many sequences run at once, fewer where memory is short.

    ``load_tokenizer`` is called when a token is first decoded.
    """

    def __init__(self, served: ServedModel, load_tokenizer: Callable[[], Any], sequences: int) -> None:
        self.served, self._load_tokenizer, self._configured = served, load_tokenizer, sequences
        self.sequences, self.tokens = sequences, 0  # sequences at once, and what a slot has for each: nothing yet
        self._most = 0  # what the longest request since the last weights may come to
        self._slots = Slots(served.counts.pad(sequences), 1)
        self._queue: deque[EngineJob] = deque()
        self._done: list[EngineJob] = []  # ended and not yet handed over
        self._texts: dict[int, str] = {}  # of single tokens

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load_tokenizer()

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._queue) or bool(self._slots.active.any())

    @torch.inference_mode()
    def run(self, incoming: Iterable[EngineJob], seconds: float) -> list[EngineJob]:
        """Decode until nothing is left or the time is up (at least one step); the jobs that ended."""
        for job in incoming:
            self._queue.append(job)
            self._most = max(self._most, len(job.prompt) + job.limit)
        until = time.perf_counter() + seconds
        while True:
            self._done += self._admit()
            if not self._slots.active.any():
                break
            self._done += self._step()
            if time.perf_counter() > until:
                break
        return self.hand_over()

    def hand_over(self) -> list[EngineJob]:
        """The jobs that ended since the last call."""
        done, self._done = self._done, []
        return done

    def end(self, jobs: Iterable[EngineJob]) -> list[EngineJob]:
        """Stop these jobs, wherever they are, with what they have."""
        job_ids = set(map(id, jobs))
        ended = [self._vacate(slot) for slot in self._slots_of(job_ids)]
        ended += [job for job in self._queue if id(job) in job_ids]
        self._queue = deque(job for job in self._queue if id(job) not in job_ids)
        return [self._finish(job, "abort") for job in ended]

    def jobs(self) -> list[EngineJob]:
        """All jobs, running ones first."""
        return [job for job in self._slots.jobs if job is not None] + list(self._queue)

    def retract(self) -> None:
        """Take every sequence off its slot and put it, with its tokens, at the head of the queue."""
        running = [self._vacate(int(slot)) for slot in np.flatnonzero(self._slots.active)]
        self._queue.extendleft(reversed(running))

    def forget(self) -> None:
        """New weights, or no cache: nothing in it may be reused by another sequence."""
        self._slots.forget()
        self._most = max((len(job.prompt) + job.limit for job in self.jobs()), default=0)
        if self.sequences < self._configured and not self.busy:
            self.drop()

    def drop(self) -> None:
        """Release the cache, in which nothing runs; the next sequences choose its size anew."""
        self.served.drop()
        self._slots.forget()
        self.sequences, self.tokens = self._configured, 0

    @torch.inference_mode()
    def score(
        self, tokens: NDArray[np.int64], start: int, media: JobMedia | None = None, adapter: int = 0
    ) -> NDArray[np.float32]:
        """Plain log-prob of each of ``tokens[start:]``, through the spare slot."""
        self._make_room(len(tokens))
        out = np.empty(len(tokens) - start, dtype=np.float32)
        for begin, logits in self.served.sequence_logits(tokens[:-1], media, adapter):
            first = max(begin, start - 1)
            if first >= begin + len(logits):
                continue
            logp = torch.log_softmax(logits[first - begin :].float(), -1)
            at = slice(first + 1, begin + len(logits) + 1)
            ids = torch.from_numpy(self.served.reader.plain(tokens[at])).to(logp.device)
            out[first + 1 - start : at.stop - start] = logp.gather(-1, ids[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(out).all():
            self.served.cache.clear(self.served.cache.spare)
            raise self._not_finite("score")
        return out

    def _vacate(self, slot: int) -> EngineJob:
        """Free a slot; a cache from which nothing was drawn yet may not be finite."""
        slots = self._slots
        if slots.position[slot] < slots.start[slot]:
            self._wipe(slot)
        else:
            self._note_experts(slot, slot, int(slots.position[slot]))
        return slots.give_up(slot)

    def _note_experts(self, slot: int, place: Any, end: int) -> None:
        """Move the experts of the first ``end`` positions to the job; those that it has stay, of whatever weights.

        Args:
            place: where the cache holds the sequence
        """
        job = self._slots.jobs[slot]
        if self.served.routers is None or job is None or job.request.id.startswith("eval/"):
            return
        rows = job.completion.routed_experts
        begin = 0 if rows is None else len(rows)
        if begin < end:
            more = self.served.cache.experts(place, begin, end).astype(self.served.routers.dtype)
            job.completion.routed_experts = more if rows is None else np.concatenate([rows, more])

    def _wipe(self, slot: int) -> None:
        """Forget what a slot's cache holds."""
        self._slots.filled[slot] = 0
        self.served.cache.clear(slot)

    def _slots_of(self, job_ids: set[int]) -> list[int]:
        return [slot for slot, job in enumerate(self._slots.jobs) if job is not None and id(job) in job_ids]

    def _admit(self) -> list[EngineJob]:
        """Give waiting jobs slots and fill their caches."""
        done: list[EngineJob] = []
        while self._queue and not self._slots.active[: self.sequences].all():
            free = int(self.sequences - self._slots.active[: self.sequences].sum())
            self._make_room(max(len(job.prompt) + len(job.completion.tokens) for job in islice(self._queue, free)))
            pieces: list[tuple[int, int, int]] = []  # slot, and [begin, end) of its content without keys and values
            copies: list[tuple[int, int, int]] = []  # source, target, tokens; after the prefill, in order
            while self._queue and not self._slots.active[: self.sequences].all():
                job = self._queue[0]
                if job.limit <= len(job.completion.tokens):
                    done.append(self._finish(self._queue.popleft(), "length"))
                elif self._place(job, pieces, copies):
                    self._queue.popleft()
                else:
                    break  # it begins like one that is about to be computed: next round
            self._prefill(pieces)
            for source, target, count in copies:
                self.served.cache.copy(source, target, 0, count)
        return done

    def _place(self, job: EngineJob, pieces: list[tuple[int, int, int]], copies: list[tuple[int, int, int]]) -> bool:
        """Give the job a slot; False where it should rather wait for a prefill of this round that it can share."""
        slots, tokens = self._slots, job.history()
        last = len(tokens) - 1
        if self.served.rescans:
            slots.take(int(slots.free()[0]), job, tokens)
            return True
        pending = {slot for slot, _, _ in pieces} | {target for _, target, _ in copies}
        shared = slots.shared(tokens[:last], job.adapter)
        source = int(shared.argmax())
        count = int(shared[source])
        if source in pending and count < last:
            if count >= COMMON:
                return False
            count = 0
        in_place = count and not slots.active[source] and source < self.sequences
        target = source if in_place else int(slots.free()[0])
        slots.take(target, job, tokens)
        if count and source in pending:
            copies.append((source, target, count))
        elif count and source != target:
            self.served.cache.copy(source, target, 0, count)
        if count < last:
            pieces.append((target, count, last))
        return True

    def _prefill(self, pieces: list[tuple[int, int, int]]) -> None:
        room = self.served.counts.most
        segments: list[Segment] = []
        used = 0
        for slot, begin, end in pieces:
            while begin < end:
                count = min(end - begin, room - used)
                segments.append(Segment(slot, begin, used, used + count))
                begin, used = begin + count, used + count
                if used == room:
                    self.served.prefill(segments, self._slots)
                    segments, used = [], 0
        if segments:
            self.served.prefill(segments, self._slots)

    def _make_room(self, need: int) -> None:
        """Slots of at least ``need`` tokens: longer ones or, where memory is short, fewer."""
        if need <= self.tokens:
            return
        served, context = self.served, self.served.context_len
        size, allocated = served.position_bytes, (self._slots.count + 1) * self.tokens * served.position_bytes
        memory = free_memory(served.device, allocated)
        check_size(need, size, memory)
        positions = served.share * memory / size if size else math.inf
        sequences, tokens = fitting(
            need, self._most, sequences=self._configured, tokens=self.tokens, context_len=context, positions=positions
        )
        while True:
            try:
                self._resize(sequences, tokens)
                break
            except Exception as error:
                self.served.drop()
                self.tokens = 0
                if not is_out_of_memory(error) or sequences == 1:
                    raise
            sequences, tokens = sequences // 2, need
        if sequences < self._configured:
            text = f"memory holds {sequences} of {self._configured} sequences of {tokens} tokens: fewer run at once"
            notice("fewer sequences", text)

    def _resize(self, sequences: int, tokens: int) -> None:
        count, length = self.served.counts.pad(sequences), slot_length(tokens)
        if self.tokens and count == self._slots.count:
            self.served.cache.grow(tokens, self._slots.lengths().tolist())
            self._slots.grow(length)
        else:
            self.retract()
            self.served.allocate(count, tokens)
            self._slots = Slots(count, length)
        self.sequences, self.tokens = sequences, tokens

    def _step(self) -> list[EngineJob]:
        self._make_room(int(self._slots.position[self._slots.active].max()) + 1)
        if not self._slots.active.any():  # all were taken off for longer slots
            return []
        self._compact()
        slots = self._slots
        count = self.served.counts.pad(slots.rows)
        rows = np.flatnonzero(slots.active)
        logits = self.served.decode(slots, count)
        columns = slots.seed.view(np.int64), slots.position, slots.temperature, slots.top_k, slots.top_p
        seeds, positions, *knobs = (torch.from_numpy(column[:count]).to(logits.device) for column in columns)
        shaped = (slots.shaped & slots.active).any()
        draws = draw(logits, uniforms(seeds, positions + 1), Knobs(*knobs) if shaped else None)
        tokens, log_probs, plain = (column.cpu().numpy()[rows] for column in draws)
        return self._settle(rows, tokens, log_probs, plain, self.served.version)

    def _settle(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        log_probs: NDArray[np.float32],
        plain: NDArray[np.float32],
        version: int,
    ) -> list[EngineJob]:
        """Note what these slots drew; the jobs that end with it."""
        slots = self._slots
        slots.advance(rows, tokens, version)
        positions = slots.position[rows]
        for slot in rows[positions == slots.start[rows]]:
            if job := slots.jobs[slot]:
                job.token_time = job.token_time or time.monotonic()
        slots.log_probs[rows, positions] = log_probs
        slots.plain[rows, positions] = plain
        sound = np.isfinite(plain)
        done = [] if sound.all() else [self._broken(int(slot)) for slot in rows[~sound]]
        stopped = (slots.stops[rows] == tokens[:, None]).any(1)
        if slots.texts[rows].any():
            texts = zip(rows, slots.texts[rows] & sound, strict=True)
            stopped |= np.array([text and self._stopped(int(slot)) for slot, text in texts])
        over = (stopped | (slots.budget[rows] <= 0)) & sound
        for slot, stop in zip(rows[over], stopped[over]):
            done.append(self._finish(self._vacate(int(slot)), "stop" if stop else "length"))
        return done

    def _finish(self, job: EngineJob, finish: Literal["stop", "length", "abort"]) -> EngineJob:
        done = job.completion
        done.finish = finish
        if job.token_time:
            done.seconds = {"queue": job.slot_time - job.start, "prefill": job.token_time - job.slot_time}
        done.text = job.request.text(self._tokenizer, done.tokens, finish) if done.tokens else ""
        return job

    def _stopped(self, slot: int) -> bool:
        """Whether the token just drawn completed a stop string."""
        job, position = self._slots.jobs[slot], self._slots.position[slot]
        assert job is not None
        if position > self._slots.start[slot] and not self._may_end(int(self._slots.token[slot]), job):
            return False
        count = TOKENS_A_CHARACTER * max(map(len, job.request.params.stop)) + MARGIN
        tail = self._slots.new_tokens(slot, count)
        text = str(self._tokenizer.decode([*job.earlier(count - len(tail)), *tail], skip_special_tokens=False))
        return any(stop in text for stop in job.request.params.stop)

    def _may_end(self, token: int, job: EngineJob) -> bool:
        """Whether a text may end in a stop string with this token: by its last character, or by bytes of one."""
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        text = self._texts[token]
        ends = [stop[-1] for stop in job.request.params.stop]
        return "\ufffd" in text or any(end in text or end.isspace() for end in ends)  # decoders drop lone spaces

    def _broken(self, slot: int) -> EngineJob:
        position = int(self._slots.position[slot])
        job = self._slots.give_up(slot)
        self._wipe(slot)
        job.error = self._not_finite(f"request {job.request.id}", f"position {position}, ")
        return job

    def _not_finite(self, subject: str, where: str = "") -> EngineError:
        return EngineError(
            f"the model's logits for {subject} are not finite",
            code="ENG80",
            where=f"{subject}, {where}weights of version {self.served.version}",
            why="weights or activations hold NaN or infinity",
            fix="look at the last steps' grad_norm and loss; lower train.lr, or set train.dtype=float32",
        )

    def _compact(self) -> None:
        """Move the highest sequences down where that makes the pass smaller."""
        slots, pad = self._slots, self.served.counts.pad
        active = int(slots.active.sum())
        if pad(slots.rows) == pad(active):
            return
        for target in slots.free():
            source = slots.rows - 1
            if target >= pad(active) or source <= target or pad(slots.rows) == pad(active):
                return
            self.served.cache.copy(source, int(target), 0, int(slots.position[source]))
            slots.move(source, int(target))
