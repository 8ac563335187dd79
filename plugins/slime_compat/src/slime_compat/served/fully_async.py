"""`slime.rollout.fully_async_rollout`: a worker that keeps groups in flight across steps.

As the value of ``--rollout-function-path`` it means the core's own collector, which runs ahead with
``rollout.max_staleness`` above 0. Called by a function of yours, or over a data source of yours, it is this worker.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_compat.served.collection import first_of
from slime_compat.served.generation import GenerateState, concurrency, generate_and_rm_group
from slime_core.compat.rollouts import DataBuffer
from slime_core.notices import notice
from slime_core.types import Status

if TYPE_CHECKING:
    from slime_core.config.schema import Config

POLL_SECONDS = 0.05
STOP_SECONDS = 5.0


@dataclass(eq=False)
class AsyncRolloutWorker:
    """Generates groups of a data buffer on a thread, ``concurrency`` at once, and queues those that are complete.

    It takes no further groups while that many wait in ``output_queue``. An aborted group goes back into the buffer.
    """

    args: Any
    data_buffer: Any
    concurrency: int = 10
    worker_thread: threading.Thread | None = field(default=None, init=False)
    running: bool = field(default=True, init=False)
    error: Exception | None = field(default=None, init=False)
    output_queue: queue.Queue[tuple[int, list[Any]]] = field(default_factory=queue.Queue, init=False)

    def __post_init__(self) -> None:
        self.state = GenerateState(self.args)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self.worker_thread is None or not self.worker_thread.is_alive():
            self.running, self.error = True, None
            self.worker_thread = threading.Thread(target=self._work, name="slime-fully-async", daemon=True)
            self.worker_thread.start()

    def stop(self) -> None:
        """End the thread; groups that it generates are lost."""
        self.running = False
        if self.worker_thread is not None:
            self.worker_thread.join(timeout=STOP_SECONDS)

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, list[Any]]]:
        """Numbers and groups that are complete, in the order in which they were, at most ``limit``; waits for none."""
        count = self.queue_size() if limit is None else min(limit, self.queue_size())
        return [self.output_queue.get() for _ in range(count)]

    def queue_size(self) -> int:
        """Complete groups that wait."""
        return self.output_queue.qsize()

    def _work(self) -> None:
        try:
            asyncio.run(self._loop())
        except Exception as error:
            self.error = error

    async def _loop(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        number = 0
        while self.running:
            while len(tasks) < self.concurrency and self.queue_size() < self.concurrency and (groups := self._next()):
                for group in groups:
                    tasks.add(asyncio.create_task(self._generate(number, group)))
                    number += 1
            await asyncio.sleep(POLL_SECONDS)
            done = {task for task in tasks if task.done()}
            tasks -= done
            for task in done:
                task.result()

    def _next(self) -> list[Any]:
        if isinstance(self.data_buffer, DataBuffer) and not len(self.data_buffer):
            return []
        return self.data_buffer.get_samples(1)  # type: ignore[no-any-return]

    async def _generate(self, number: int, group: list[Any]) -> None:
        result = await generate_and_rm_group(self.args, group, dict(self.state.sampling_params))
        flat = [sample for item in result for sample in (item if isinstance(item, list) else [item])]
        if any(sample.status is Status.ABORTED for sample in flat):
            self.data_buffer.add_samples([result])
        else:
            self.output_queue.put((number, result))


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[list[Any]]:
    """``rollout_batch_size`` complete groups, by their index; all those that the core issued for a step.

    Over a source of yours the worker goes on generating for the next step.

    Raises:
        ValueError: in an evaluation.
        RuntimeError: what a group's generation raised.
    """
    if evaluation:
        raise ValueError("fully-async rollouts do not evaluate; set eval_function_path to another function")
    issued = len(data_buffer) if isinstance(data_buffer, DataBuffer) else 0
    worker = _worker(args, data_buffer)
    groups: list[list[Any]] = []
    try:
        while len(groups) < (issued or args.rollout_batch_size):
            try:
                groups.append(worker.output_queue.get(timeout=POLL_SECONDS)[1])
            except queue.Empty:
                if worker.error is not None:
                    raise RuntimeError(f"a group could not be generated: {worker.error}") from worker.error
    finally:
        if issued:  # the buffer ends with the step
            worker.stop()
    return sorted(groups, key=lambda group: first_of(group).index or 0)


def _worker(args: Any, data_buffer: Any) -> AsyncRolloutWorker:
    """The run's worker over this buffer, started."""
    state = GenerateState(args)
    if state.worker is None or state.worker.data_buffer is not data_buffer:
        state.worker = AsyncRolloutWorker(args, data_buffer, concurrency=concurrency(args))
    state.worker.start()
    return state.worker  # type: ignore[no-any-return]


def _core_makes(config: Config) -> bool:
    if not config.rollout.max_staleness:
        text = "fully_async_rollout is the core's collector, which runs ahead only with rollout.max_staleness above 0"
        notice(("fully_async_rollout",), text)
    return True


generate_rollout_fully_async.core_makes = _core_makes  # type: ignore[attr-defined]
__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]
