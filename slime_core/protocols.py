"""What the rooms promise each other: engines, trainers, ledgers, clusters, and what plugins register by name.

Every protocol has fakes in `slime_core.testing` and one contract suite that runs against every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from slime_core.types import Completion, joined_experts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.durable import FileMark
    from slime_core.types import (
        Batch,
        Columns,
        Drop,
        GenerateRequest,
        Group,
        Media,
        Prompt,
        Sample,
        StepReport,
        WeightCheck,
        WeightRoute,
        WeightUpdate,
    )

Ability = Literal[
    "per_sample_seed",  # draws are a function of (seed, position)
    "score",
    "multimodal",
    "routed_experts",
    "batch_invariant",
    "live_load",  # weights change under running requests, and every token says which made it
    "release",  # memory can be given back
    "adapters",  # computes with adapters beside the base, those of several requests in one batch
]
Role = Literal["policy", "old_policy", "reference", "teacher", "values", "float32", "bfloat16"]
PauseMode = Literal["abort", "retract", "keep"]


@runtime_checkable
class Engine(Protocol):
    """Samples tokens. Fan-out over servers or ranks stays inside an implementation."""

    abilities: frozenset[Ability]
    version: int  # of the weights it serves
    epoch: int  # process start

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.tokens``; raises EngineError where the request cannot be served."""
        ...

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """Log-prob of each of ``tokens[start:]`` (start >= 1) under the plain softmax at temperature 1, float32.

        Args:
            media: pictures and videos of the tokens' placeholders, for an engine with the ability ``multimodal``
            adapter: see `types.GenerateRequest.adapter`, for an engine with the ability ``adapters``
        """
        ...

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Stop these requests; each waiting ``generate`` returns its partial tokens with finish ``abort``, as here."""
        ...

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """How the next weights are to come, and which tensors are compared; None: as ``WeightUpdate.tensors``.

        An engine that has the base of its adapters says so with ``WeightRoute.base``.
        """
        ...

    async def load(self, update: WeightUpdate) -> None:
        """Complete the transfer that ``publish`` started and serve ``update.version`` from here on."""
        ...

    async def fingerprints(self, adapters: Sequence[str] = ()) -> dict[str, str]:
        """Checksum of every tensor served: by Hugging Face name, or by ``RankTensor.key`` where it has a route.

        Those of adapters go under ``ADAPTER/NAME``; with ``adapters``, theirs alone, as `fingerprint.checksums`.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing: ``abort`` ends requests with what they have, ``retract`` and ``keep`` hold them."""
        ...

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        ...

    async def release(self, what: set[str]) -> None:
        """Give back memory: any of ``{"kv", "weights"}``."""
        ...

    async def reacquire(self, what: set[str]) -> None:
        """Take back what :meth:`release` gave."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """Trains the policy. Critic, reference and teacher models that are not engines live inside."""

    async def begin(self, stage: Config) -> None:
        """Start a stage: its loss, optimizer (fresh), schedule, and the reference model where its KL needs one."""
        ...

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """Role to columns over the batch's R response tokens.

        ``policy`` and ``old_policy`` give ``log_probs`` (at the batch's temperature) and ``entropy``, ``values`` gives
        ``values``, the others ``log_probs``; ``float32`` and ``bfloat16`` the policy's in it, if cheap.
        """
        ...

    async def step(self, batch: Batch) -> dict[str, float]:
        """All optimizer steps of one batch, whose columns hold ``advantages`` and what the loss needs."""
        ...

    async def verify(self, batch: Batch) -> dict[str, float]:
        """Compare the loss and gradients that ``step`` would make with those of a slow recomputation; change nothing.

        ``gradient_error`` (the worst parameter's, relative), ``loss_error``, ``limit`` for both, and
        ``gradient_error/PARAMETER``.
        """
        ...

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """Start a transfer of the current weights, by the engine's ``route``, without waiting for any engine."""
        ...

    async def save(self, path: Path) -> None:
        """Begin to write parameters and training state into the new folder ``path``.

        On return the state is copied and training may continue; :meth:`saved` waits until it is on disk.
        """
        ...

    async def saved(self) -> dict[str, FileMark]:
        """Wait for the last :meth:`save`: every file of it is durable, by its path relative to the folder.

        The marks are of the intended bytes, not read back. Raises StorageError if writing failed.
        """
        ...

    async def restore(self, path: Path) -> None:
        """Read what :meth:`save` wrote, on any number of ranks; after :meth:`begin` of the stage that saved."""
        ...

    async def fingerprint(self) -> str:
        """A checksum of the parameters, the same for any number of ranks."""
        ...

    async def export(self, path: Path) -> None:
        """Write a Hugging Face model folder (config, safetensors, tokenizer)."""
        ...

    async def release(self, what: set[str]) -> None:
        """Give back memory: any of ``{"gradients", "optimizer", "parameters"}``."""
        ...

    async def reacquire(self, what: set[str]) -> None:
        """Take back what :meth:`release` gave."""
        ...


Drops = Sequence[tuple[Sequence["Sample"], "Drop"]]
"""Samples and the reason why they do not train."""


@dataclass(slots=True, kw_only=True)
class RequestTurn:
    """One request of a sample to its engine and its result: whole, or in pieces if it was suspended.

    Whoever stops a request between two tokens (`rollout.suspendable_engine`, an engine whose server went away or takes
    new weights) keeps one, sends its continuation, and returns one Completion.

    Example: RequestTurn(request=request, pieces=[completion], finish="stop")
    """

    request: GenerateRequest
    pieces: list[Completion] = field(default_factory=list)
    finish: Literal["stop", "length", "abort", ""] = ""  # empty while unfinished
    media: str | None = ""  # of a turn from a ledger, `Media.digest` of its request; None where it was not kept

    @property
    def tokens(self) -> list[int]:
        """New tokens so far."""
        return [token for piece in self.pieces for token in piece.tokens]

    def answers(self, request: GenerateRequest) -> bool:
        """Whether this turn from a ledger is that of ``request``."""
        media = request.media.digest() if request.media is not None else ""
        earlier = self.request
        same = (earlier.tokens, earlier.seed, earlier.adapter) == (request.tokens, request.seed, request.adapter)
        return same and self.media in (None, media)

    def continuation(self, room: int | None = None) -> GenerateRequest:
        """The request for the tokens that are missing, ``room`` of them at most."""
        tokens, request = self.tokens, self.request
        remaining = request.params.max_new_tokens - len(tokens)
        params = replace(request.params, max_new_tokens=remaining if room is None else min(remaining, room))
        return replace(request, tokens=[*request.tokens, *tokens], kept=request.kept + len(tokens), params=params)

    def add(self, piece: Completion, limit: int) -> None:
        """Note a piece of at most ``limit`` tokens; fewer without a stop mean that the context is full."""
        self.pieces.append(piece)
        complete = len(self.tokens) >= self.request.params.max_new_tokens
        if piece.finish != "length" or complete or len(piece.tokens) < limit:
            self.finish = piece.finish

    def completion(self, tokenizer: Any) -> Completion:
        """All pieces as one; the text is decoded anew where there are several. Plain log-probs are of all or none."""
        finish, pieces, tokens = self.finish or "length", self.pieces, self.tokens
        if len(pieces) == 1:
            return replace(pieces[0], finish=finish)
        complete = all(len(piece.plain_log_probs) == len(piece.tokens) for piece in pieces)
        return Completion(
            id=self.request.id,
            tokens=tokens,
            log_probs=[p for piece in pieces for p in piece.log_probs],
            plain_log_probs=[p for piece in pieces for p in piece.plain_log_probs] if complete else [],
            finish=finish,
            versions=[v for piece in pieces for v in piece.versions],
            epoch=pieces[-1].epoch if pieces else 0,
            text=self.request.text(tokenizer, tokens, finish),
            seconds={name: sum(piece.seconds.get(name, 0.0) for piece in pieces) for name in pieces[0].seconds}
            if pieces
            else {},
            routed_experts=joined_experts(pieces),
        )


@dataclass(slots=True, kw_only=True)
class Span:
    """Something that takes time in a run: a ``request`` to an engine, a ``reward``, or a part of a step.

    Example: Span(name="request", start=12.5, facts={"sample": "grpo/17-0", "prompt": 6}, seconds=0.8)
    """

    name: str  # request, reward; rollout, score, train, fingerprint, sync, evaluate
    start: float  # monotonic seconds
    facts: dict[str, Any] = field(default_factory=dict)  # more of them at the end
    seconds: float | None = None  # None while it goes on


class SpanObserver(Protocol):
    """Sees every span of a run, on the thread of the event loop; it may fail without stopping the run."""

    def begin(self, span: Span) -> None:
        """A span begins."""
        ...

    def end(self, span: Span) -> None:
        """The same object, with its time."""
        ...


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """A ledger's record of one prompt's group, over the latest attempt of each sample.

    ``new``: there is none. ``pending``: not finished, and generated again. ``finished`` and ``trained``: ``samples``
    are stored and in the group's order. ``dropped``: nothing of it trains; it has ``samples`` where it was finished.
    """

    state: Literal["new", "pending", "finished", "trained", "dropped"] = "new"
    attempt: int = 0
    version: int = 0  # that it made, where it is trained
    samples: list[Sample] = field(default_factory=list)  # those that were stored
    drops: dict[str, int] = field(default_factory=dict)  # reason -> samples that were not
    last_reason: str = ""  # of the drops
    newest: int = -1  # highest version that made a token in any sample, dropped ones too
    ticks: dict[str, int] = field(default_factory=dict)  # sample id -> tokens that ``newest`` made in it

    @property
    def ended(self) -> bool:
        """Whether it was finished or dropped."""
        return self.state not in ("new", "pending")


@runtime_checkable
class Ledger(Protocol):
    """The Data Buffer: every sample of the run in exactly one state.

    pending (issued) -> finished -> trained, or from any of the first two -> dropped(reason).
    """

    async def issue(self, groups: Sequence[Group]) -> None:
        """Record groups as pending before any of them is generated. Idempotent by sample id and attempt."""
        ...

    async def finish(self, group: Group, drops: Drops = ()) -> None:
        """Store what of a group trains, and drop the rest of it, in one transaction.

        Fan-out siblings that were not issued are added. A finished group is left unchanged.
        """
        ...

    async def drop(self, drops: Drops) -> None:
        """Move samples to their final state dropped(reason), all in one transaction; the first reason stands."""
        ...

    async def groups(self, prompt_ids: Sequence[str]) -> dict[str, GroupRecord]:
        """Records of these prompts' groups, by prompt id; groups that were never issued are left out."""
        ...

    async def suspend(self, turns: Mapping[str, Sequence[RequestTurn]]) -> None:
        """Keep what unfinished samples have generated, by sample id; it replaces what an earlier call kept."""
        ...

    async def suspended(self, ids: Sequence[str], before: int) -> dict[str, list[RequestTurn]]:
        """What :meth:`suspend` kept of these samples, tokens of version ``before`` and later cut off."""
        ...

    async def rewind(self, version: int) -> None:
        """Go back to the moment when ``version`` was made: samples of later steps are finished, not trained.

        Their journals stay: a later version is made again from the same samples, and must have the same fingerprint.
        """
        ...

    async def journal(self, batch: Batch) -> None:
        """Write the step's composition (ordered sample ids) before the step trains."""
        ...

    async def trained(self, version: int, fingerprint: str = "") -> None:
        """Mark the journaled samples of the step that made ``version`` as trained.

        Raises StorageError where the version was made before with another fingerprint.
        """
        ...

    async def composition(self, version: int) -> list[str]:
        """The ordered sample ids of the step that makes ``version``; empty where none was journaled."""
        ...

    async def samples(self, ids: Sequence[str]) -> list[Sample]:
        """Read finished samples back, in the order of ``ids``."""
        ...

    async def prune(self, before_version: int) -> None:
        """Forget the payloads and turns of samples that trained, or were made and dropped, before a version."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """``issued trained pending`` and one ``dropped/REASON`` a reason; issued = trained + dropped + pending."""
        ...

    async def close(self) -> None:
        """Flush and close."""
        ...


class DeviceSharing(Protocol):
    """Who holds the accelerators: a no-op where training and rollout have their own."""

    metrics: dict[str, float]  # cost of the last hand-over

    def training(self) -> AbstractAsyncContextManager[None]:
        """Engines are quiet and have given their memory to the trainer inside this block."""
        ...

    def syncing(self) -> AbstractAsyncContextManager[None]:
        """The trainer keeps only parameters and engines take weights inside this block."""
        ...


class ServerProcess(Protocol):
    """A server of an engine, as the watch over hanging processes sees it."""

    @property
    def title(self) -> str:
        """What messages call it."""
        ...

    @property
    def pid(self) -> int:
        """Of the process that leads its session; it changes when the server is restarted."""
        ...

    @property
    def owned(self) -> bool:
        """Whether slime started it."""
        ...

    @property
    def host(self) -> Any:
        """The `clusters.host.ProcessHost` that runs it."""
        ...


@dataclass(slots=True, kw_only=True)
class Serving:
    """What evaluation needs: engines that serve a model."""

    engines: Engine  # the policy's engines as one
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    vocab_size: int  # rows of the embedding: the bound of every token id
    roles: dict[str, Engine] = field(default_factory=dict)  # frozen engines by role: teacher, reward model


@dataclass(slots=True, kw_only=True)
class RunComponents(Serving):
    """What a cluster hands to the loop."""

    trainer: Trainer
    ledger: Ledger
    devices: DeviceSharing
    reserve_engine: Callable[[], AbstractAsyncContextManager[Engine]] | None = None  # one whose weights stay
    context_len: int = 0  # tokens that fit the model's context; 0 is not known


class PromptSource(Protocol):
    """What `slime_prompts` returns: rows by number. Order, epochs and resume are the core's.

    A source whose rows take long to make may have ``async def prepare(positions)`` too: it is awaited before ``at`` of
    these positions, so that threads or processes make the rows while the event loop continues.
    """

    def __len__(self) -> int:
        """Rows, where they are countable; otherwise raise TypeError and the stream is endless."""
        ...

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the same answer every time."""
        ...

    def state(self) -> dict[str, Any]:
        """A fingerprint and whatever must be equal for a resumed run to see the same rows."""
        ...


class Sink(Protocol):
    """A tracker. It may fail without stopping the run."""

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Called once, with the config's secrets already redacted."""
        ...

    def write(self, report: StepReport) -> None:
        """One step's metrics."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Estimator:
    """An advantage estimator under a name: ``fn(batch, train)`` gives ``advantages`` [R] and perhaps ``returns`` [R].

    ``batch.columns`` holds a column per role in ``needs`` (``policy``: log-probs, ``reference``, ``values``, ...);
    ``train`` is the [train] section. The core adds what ``kl_coef``, ``opd_kl_coef`` and ``normalize_advantages`` ask
    for to the advantages of every estimator, whoever registers it.
    """

    name: str
    fn: Callable[[Batch, Any], Columns]
    needs: frozenset[Role] = frozenset()
    needs_when: Callable[[Any], frozenset[Role]] | None = None  # more of them, from the run's [train] section
    terms: bool = True  # False: the core adds nothing to its advantages
    kl_in_reward: bool = False  # subtracts kl_coef times KL from its token rewards itself
    whitens: bool = False  # whitened over the step by definition, whatever normalize_advantages says


@dataclass(slots=True, frozen=True, kw_only=True)
class Loss:
    """A policy loss under a name, a loss value a response token.

    ``fn(log_probs, entropy, columns, train)`` gets tensors of shape [R] of one micro-batch and returns the per-token
    loss [R] and named per-token metrics [R]; the trainer multiplies by the step's token weights and sums. ``columns``
    always holds ``loss_mask`` and ``sample``, a number a sequence of the micro-batch; sequences are never split.

    A loss whose value at a token depends on that token alone may say so with ``local``: its gradient is then taken
    block by block inside the forward pass, and the logits are made once instead of twice.
    """

    name: str
    fn: Callable[[Any, Any, Mapping[str, Any], Any], tuple[Any, dict[str, Any]]]
    needs: frozenset[Role] = frozenset()  # roles whose log-probs or values it reads
    needs_when: Callable[[Any], frozenset[Role]] | None = None  # more of them, from the run's [train] section
    columns: tuple[str, ...] = ()  # columns it reads
    local: Callable[[Any], bool] | None = None  # from [train]: whether a token's value depends on that token alone
    prepare: Callable[[Columns, Any], Columns] | None = None  # columns of an optimizer step, in numpy, to more of them


@dataclass(slots=True, frozen=True, kw_only=True)
class Check:
    """One row of `slime doctor`: ``run`` returns ok, or the problem and its fix."""

    name: str
    run: Callable[[], CheckResult]


@dataclass(slots=True, frozen=True, kw_only=True)
class CheckResult:
    """What a check found.

    Example:
        CheckResult(status="fail", found="no bwrap on PATH", fix="apt-get install bubblewrap")
    """

    status: Literal["ok", "warn", "fail"]
    found: str = ""
    fix: str = ""
    details: tuple[str, ...] = ()  # further lines, of `slime doctor -v` and `--json`
