"""What a run's functions by path share: args, threads, the calls under way, the last step, the server of /generate."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from slime_core.compat.args import SharedArgs
from slime_core.compat.flat import flat
from slime_core.compat.modules import GenerateEndpoint, server
from slime_core.errors import SlimeError
from slime_core.plugins.boundary import HookThreads, hook_loop
from slime_core.seeds import seed_of

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.types import Sample


@dataclass(slots=True)
class GenerationCall:
    """One sample's generation by a function, between its first and last request."""

    seed: int
    model: str = ""  # of the sample
    continuations: Counter[int] = field(default_factory=Counter)  # tokens' hash -> how often they were continued
    version: int | None = None  # the oldest weights that made a token
    error: SlimeError | None = None  # the error of one of its requests

    def note(self, versions: Sequence[int]) -> None:
        """Remember the oldest weights of a completion."""
        numbers = [v for v in versions if v >= 0] + ([] if self.version is None else [self.version])
        self.version = min(numbers, default=None)


class CompatSession:
    """One a run. Its server starts when a function first reads the address, and closes with the run."""

    def __init__(self) -> None:
        self.plugins: Plugins | None = None
        self.state: Any = None  # slime's GenerateState, created at its first use
        self.threads = HookThreads()
        self.loop: asyncio.AbstractEventLoop | None = None  # of the engine; functions may run loops of their own
        self.alive: WeakValueDictionary[str, Any] = WeakValueDictionary()  # slime's samples, by id
        self.rewards: NDArray[np.float64] | None = None  # of the step, where functions set or replace them
        self.step: dict[str, Any] = {}  # slime's samples of the last step, by id
        self.judged: list[list[Any]] = []  # slime's groups that were judged since the last step, dropped ones too
        self._flat: dict[int, tuple[Config, dict[str, Any]]] = {}
        self._writes: dict[str, Any] = {}  # what functions have set in args
        self._calls: dict[int, GenerationCall] = {}
        self._server: GenerateEndpoint | None = None
        self._lock = threading.Lock()

    def args(self, config: Config, ctx: Context | None = None) -> SharedArgs:
        """slime's ``args`` for this config, with what functions have set in those of any."""
        self.loop = hook_loop() or self.loop
        if id(config) not in self._flat:
            self._flat[id(config)] = (config, flat(config) | self._writes)
        return SharedArgs(self._flat[id(config)][1], self, ctx, self._write)

    def _write(self, name: str, value: Any) -> None:
        self._writes[name] = value
        for _, values in list(self._flat.values()):
            values[name] = value

    @contextmanager
    def call(self, sample: Sample, ctx: Context) -> Iterator[GenerationCall]:
        """The block in which a function generates one sample; its draws are keyed by the sample's id alone.

        Raises:
            SlimeError: an engine error of a request in the block, in place of the function's own exception.
        """
        kind = "eval" if ctx.evaluation else "sample"
        seed = seed_of(ctx.config.seed, kind, sample.id, sample.attempt)
        call = GenerationCall(seed=seed, model=sample.model)
        self._calls[call.seed] = call
        try:
            yield call
        except Exception as error:
            if call.error is not None:
                raise call.error from error
            raise
        finally:
            self._calls.pop(call.seed, None)  # a function may copy a sample and generate it twice at once

    def server(self) -> GenerateEndpoint:
        """The server of /generate, started when its port is first needed.

        Raises:
            PluginError: PLG51 slime-compat is not installed.
        """
        with self._lock:
            if self._server is None:
                self._server = server("args.sglang_router_ip", self._calls)
            return self._server

    def close(self) -> None:
        """Stop the background worker of rollouts, if there is one, and close the server."""
        if (worker := getattr(self.state, "worker", None)) is not None:
            worker.stop()
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None
