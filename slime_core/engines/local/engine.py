"""The embedded engine over asyncio; all torch work runs in short hops on the torch thread.

generate -> inbox -> [hop: a few decode steps of the Scheduler] -> futures          one task, alive while there is work
abort pause load release score                                   between two hops
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.engines.admission import BASE_NAME, check_adapter, check_vocabulary, too_long
from slime_core.engines.local.adapters import BASE
from slime_core.engines.local.media import MediaReader
from slime_core.engines.local.paged import PagedScheduler
from slime_core.engines.local.scheduler import Scheduler
from slime_core.engines.local.served import ServedModel
from slime_core.engines.local.slots import SHARE, EngineJob, make_job
from slime_core.errors import EngineError
from slime_core.media.positions import MediaLayout
from slime_core.memory import first_line, is_out_of_memory, trim
from slime_core.peaks import PhasePeaks
from slime_core.profile import ENGINE_SECONDS
from slime_core.protocols import Ability, PauseMode
from slime_core.types import Completion, WeightRoute

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.media import JobMedia
    from slime_core.profile import StepProfile
    from slime_core.threads import TorchThread
    from slime_core.types import GenerateRequest, Media, WeightCheck, WeightUpdate
    from slime_core.weights.folder import ModelFolder

HOP_SECONDS = 0.02
"""How long a hop decodes before it looks for new requests, aborts and pauses (at least one step)."""

MEMORY = frozenset({"kv", "weights"})


class LocalEngine:
    """Any Hugging Face causal language model on this process's CPU or GPU, batch-invariant on CPU.

    Example:
        engine = LocalEngine(folder, slots=64, context_len=512, dtype="float32", device="cpu", thread=thread)
        await engine.load(WeightUpdate(version=0, epoch=0, transport="tensors", tensors=model.state_dict()))
        done = await engine.generate(GenerateRequest(id="a", tokens=[5, 6], params=SamplingParams(max_new_tokens=8),
                                                     seed=1))
        await engine.close()
    """

    version: int
    epoch: int

    def __init__(
        self,
        folder: ModelFolder,
        *,
        slots: int,
        context_len: int,
        dtype: str,
        device: str,
        thread: TorchThread,
        epoch: int = 0,
        share: float = SHARE,  # of the free memory, at most, for the cache
        paged: bool | None = None,  # whether the cache lies in pages: None is on a GPU
        exact: bool = False,  # the arithmetic of a trainer with true_on_policy_mode
        routing: bool = False,  # completions carry the experts of every token
        profile: StepProfile | None = None,
        peaks: PhasePeaks | None = None,
        name: str = "engine",  # of its profile
    ) -> None:
        if slots < 1 or context_len < 2:
            raise ValueError(f"slots must be at least 1 and context_len at least 2, not {slots} and {context_len}")
        self.version, self.epoch = -1, epoch
        self.abilities: frozenset[Ability] = frozenset(
            {"per_sample_seed", "score", "batch_invariant", "live_load", "release", "adapters"}
        )
        if routing:
            self.abilities |= {"routed_experts"}
        self._reader = MediaReader(MediaLayout.of(folder.config), folder.config.model_type)
        if self._reader.layout is not None:
            self.abilities |= {"multimodal"}
        self._folder, self._thread = folder, thread
        self._slots, self._context_len = slots, context_len
        self._dtype, self._device, self._share, self._paged, self._exact = dtype, device, share, paged, exact
        self._routing = routing
        self._profile, self._name = profile, name
        self._peaks = peaks or PhasePeaks(None, device)
        self._scheduler: Scheduler | None = None  # from the first load on
        self._inbox: list[EngineJob] = []
        self._leavers: list[EngineJob] = []  # their callers were cancelled
        self._adapters: tuple[str, ...] = ()
        self._resident = set(MEMORY)
        self._paused = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a request's tokens.

        Raises:
            EngineError: ENG01-ENG03 and ENG72 a request that cannot be served, ENG80 logits that are not finite,
                ENG83 no weights were loaded, ENG84 the engine failed or was closed.
        """
        self._require_weights(f"request {request.id}")
        adapter = self._adapter(request.adapter, f"request {request.id}")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        job = make_job(
            request,
            future,
            vocab_size=self._folder.vocab_size,
            context_len=self._context_len,
            eos=tuple(self._folder.eos_token_ids),
            epoch=self.epoch,
            reader=self._reader,
        )
        job.adapter = adapter
        self._inbox.append(job)
        self._stir()
        try:
            return await future
        except asyncio.CancelledError:
            self._leavers.append(job)
            self._stir()
            raise

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """Log-prob of each of ``tokens[start:]`` under the plain softmax, float32, bit for bit as `generate` gives it.

        Raises:
            EngineError: as `generate`; ENG03 a start outside 1..len(tokens), ENG06 no cache is held.
        """
        self._require_weights("score")
        number = self._adapter(adapter, "score")
        ids = np.asarray(tokens, dtype=np.int64)
        check_vocabulary(ids, self._folder.vocab_size, "score")
        if not 1 <= start <= len(ids):
            raise EngineError(f"start is {start} of {len(ids)} tokens", code="ENG03", where="score")
        if len(ids) > self._context_len:
            raise too_long(f"{len(ids)} tokens do not fit the context of {self._context_len}", "score")
        pictures = self._reader.read(ids, media, "score")
        if start == len(ids):
            return np.empty(0, dtype=np.float32)
        return await self._thread.run(self._score, ids, start, pictures, number)

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Stop these requests; each waiting ``generate`` returns what it has, with finish ``abort``."""
        request_ids = set(ids)
        return await self._end(lambda job: job.request.id in request_ids)

    async def load(self, update: WeightUpdate) -> None:
        """Serve an update's weights. Running requests go on with them; each token says its version.

        Raises:
            EngineError: ENG86 tensors that do not fit, ENG06 weights whose memory is released.
        """
        self._require_open()
        if "weights" not in self._resident:
            raise EngineError("weights were loaded while their memory was released", code="ENG06")
        try:
            await self._thread.run(self._load, update)
        except Exception as error:
            if is_out_of_memory(error):
                raise self._no_memory(error, "loading weights") from error
            raise
        self.version, self._adapters = update.version, tuple(update.adapters)
        self._stir()

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """See `protocols.Engine`: it reads the trainer's tensors, the base of adapters once."""
        if self._scheduler is None or not self._scheduler.served.has_base:
            return None
        return WeightRoute(transport="tensors", dtype=self._dtype, base=False)

    async def fingerprints(self, adapters: Sequence[str] = ()) -> dict[str, str]:
        """crc32 of every served tensor's bytes, by Hugging Face name; of adapters see `fingerprint.checksums`."""
        if self._scheduler is None:
            return {}
        return await self._thread.run(self._scheduler.served.fingerprints, tuple(adapters))

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing: ``abort`` ends requests, ``retract`` gives up their slots, ``keep`` keeps both."""
        self._paused = True
        if mode == "abort":
            await self._end(lambda job: True)
        else:
            await self._thread.run(self._hold, mode)

    async def resume(self) -> None:
        """Go on after :meth:`pause`.

        Raises:
            EngineError: ENG06, memory is released.
        """
        if self._resident != MEMORY:
            raise EngineError(f"resumed while {sorted(MEMORY - self._resident)} were released", code="ENG06")
        self._paused = False
        self._stir()

    async def release(self, what: set[str]) -> None:
        """Release memory; sequences that lose their cache are computed again after :meth:`resume`."""
        self._resident -= what
        await self._thread.run(self._release, set(what))

    async def reacquire(self, what: set[str]) -> None:
        """Reacquire memory; weights come with the next :meth:`load`."""
        back = (what & MEMORY) - self._resident
        self._resident |= back
        if "kv" in back and self._scheduler is not None:
            self._scheduler.served.holds_cache = True
        self._stir()

    async def close(self) -> None:
        """End the serving task and free the model; requests still waiting fail with ENG84."""
        if self._closed:
            return
        self._closed = True
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        jobs = await self._thread.run(self._free)
        self._fail([*jobs, *self._inbox], EngineError("the engine was closed", code="ENG84"))
        self._inbox.clear()

    # -- asyncio side

    def _adapter(self, name: str, where: str) -> int:
        check_adapter(name, self._adapters, where)
        return BASE if name == BASE_NAME else self._adapters.index(name) if name else 0

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed", code="ENG84")

    def _require_weights(self, where: str) -> None:
        self._require_open()
        if self.version < 0 or ("weights" not in self._resident and not self._paused):
            raise EngineError("no weights are loaded yet", code="ENG83", where=where, fix="call load first")

    def _stir(self) -> None:
        if self._task is None or self._task.done():
            self._wake = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="slime-local-engine")
        self._wake.set()

    async def _serve(self) -> None:
        while not self._closed:
            if not self._runnable():
                self._wake.clear()
                await self._wake.wait()
                continue
            incoming, self._inbox = self._inbox, []
            leavers, self._leavers = self._leavers, []
            hop = self._thread.submit(self._hop, incoming, leavers)  # before any later call
            try:
                done = await asyncio.shield(hop)
            except asyncio.CancelledError:
                self._deliver(await hop)
                raise
            except Exception as error:
                done, lost = await self._thread.run(self._reset)
                self._deliver(done)
                self._fail(lost, self._no_memory(error, "decoding") if is_out_of_memory(error) else _wrapped(error))
            else:
                self._deliver(done)

    def _runnable(self) -> bool:
        if self._paused or self._scheduler is None or not self._scheduler.served.ready:
            return False
        return bool(self._inbox or self._leavers or self._scheduler.busy)

    async def _end(self, chosen: Any) -> list[Completion]:
        waiting = [job for job in self._inbox if chosen(job)]
        self._inbox = [job for job in self._inbox if not chosen(job)]
        for job in waiting:
            job.completion.finish = "abort"
        ended = waiting + await self._thread.run(self._end_running, chosen)
        self._deliver(ended)
        return [job.completion for job in ended]

    def _deliver(self, jobs: Sequence[EngineJob]) -> None:
        for job in jobs:
            if job.future.done():
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.completion)

    def _fail(self, jobs: Sequence[EngineJob], error: EngineError) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def _no_memory(self, error: Exception, what: str) -> EngineError:
        scheduler = self._scheduler
        slots = scheduler.sequences if scheduler is not None else self._slots
        size = f": {slots} slots of {scheduler.tokens} tokens" if scheduler is not None else ""
        return EngineError(
            f"memory ran out while {what}{size}",
            code="ENG05",
            where=f"the embedded engine, {self._device}",
            why=f"{first_line(error)}; what was running is lost with it and is generated again by a resume",
            fix=f"rollout.rollout_slots={max(1, slots // 2)}\nrollout.rollout_max_response_len: what responses need",
        )

    # -- torch thread side

    def _load(self, update: WeightUpdate) -> None:
        if self._scheduler is not None:
            self._scheduler.served.load(update)
            self._scheduler.forget()
            return
        options: Any = {"dtype": self._dtype, "device": self._device, "share": self._share}
        options |= {"paged": self._paged, "exact": self._exact, "routing": self._routing, "reader": self._reader}
        served = ServedModel(self._folder, context_len=self._context_len, **options)
        served.load(update)
        if served.rescans:
            self.abilities -= {"multimodal"}
            self._reader.layout = None
        if not served.batch_invariant:
            self.abilities -= {"batch_invariant"}
        scheduler = PagedScheduler if served.paged else Scheduler
        self._scheduler = scheduler(served, self._folder.tokenizer, self._slots)

    def _hop(self, incoming: list[EngineJob], leavers: list[EngineJob]) -> list[EngineJob]:
        assert self._scheduler is not None
        self._scheduler.served.wake()
        leaving = {id(job) for job in leavers}
        self._scheduler.end(leavers)
        jobs, step = [job for job in incoming if id(job) not in leaving], self.version + 1
        if self._profile is not None and self._profile.due(step, self._name) and self._rolls_out(jobs):
            with self._profile.record(step, self._name):
                return self._scheduler.run(jobs, ENGINE_SECONDS)
        return self._peaks.during("rollout", self._scheduler.run, jobs, HOP_SECONDS)

    def _rolls_out(self, jobs: list[EngineJob]) -> bool:
        """Whether a request that is no evaluation's is new or running."""
        assert self._scheduler is not None
        return any(not job.request.id.startswith("eval/") for job in (*jobs, *self._scheduler.jobs()))

    def _score(self, ids: NDArray[np.int64], start: int, media: JobMedia | None, adapter: int) -> NDArray[np.float32]:
        if self._scheduler is None or not self._scheduler.served.ready:
            raise EngineError("score was called while memory is released", code="ENG06", fix="reacquire first")
        self._scheduler.served.wake()
        return self._scheduler.score(ids if media is None else media.ids, start, media, adapter)

    def _end_running(self, chosen: Any) -> list[EngineJob]:
        if self._scheduler is None:
            return []
        return self._scheduler.end([job for job in self._scheduler.jobs() if chosen(job)])

    def _hold(self, mode: PauseMode) -> None:
        if self._scheduler is None:
            return
        if mode == "retract":
            self._scheduler.retract()
        if self._device == "cpu":  # a trainer may be about to need the memory
            self._scheduler.served.rest()
            if not self._scheduler.busy:
                self._scheduler.drop()
            trim()

    def _release(self, what: set[str]) -> None:
        if self._scheduler is None:
            return
        if "kv" in what:
            self._scheduler.retract()
            self._scheduler.forget()
            self._scheduler.drop()
        self._scheduler.served.release(what)

    def _reset(self) -> tuple[list[EngineJob], list[EngineJob]]:
        """After a failure in a hop: the jobs that had ended before it, those that are lost, and empty slots."""
        if self._scheduler is None:
            return [], []
        lost = self._scheduler.end(self._scheduler.jobs())
        self._scheduler.forget()
        return self._scheduler.hand_over(), lost

    def _free(self) -> list[EngineJob]:
        jobs = self._scheduler.jobs() if self._scheduler is not None else []
        self._scheduler = None
        return jobs


def _wrapped(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return EngineError(
        f"a decode step failed: {type(error).__name__}: {error}",
        code="ENG84",
        why="all requests that were running are lost with it",
    )
