"""The last argument of every hook: the run as a plugin may see it, and one turn of generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError, nearest
from slime_core.seeds import seed_of
from slime_core.types import Completion, GenerateRequest, Media, Message, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.media.processor import MediaProcessor
    from slime_core.protocols import Engine, GroupRecord

    ReadGroups = Callable[[Sequence[str]], Awaitable[Mapping[str, GroupRecord]]]

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(slots=True, frozen=True, kw_only=True)
class Context:
    """What a hook may read. ``options`` is the calling plugin's own table, `[plugin.NAME]`, as its model.

    Example:
        async def slime_generate(group, ctx):
            for sample in group.samples:
                await ctx.generate(sample)
            return group
    """

    config: Config
    options: Any = None
    engine: Engine | None = None
    engines: dict[str, Engine] = field(default_factory=dict)  # frozen ones by role
    tokenizer: Any = None
    media: MediaProcessor | None = None  # of a model that takes pictures
    sampling: SamplingParams | None = None  # of this prompt, training or evaluation
    run_dir: Path | None = None
    version: int = 0  # of the weights in training
    stage: str = "main"
    evaluation: bool = False
    recorded_groups: ReadGroups | None = None  # the run's ledger: records of prompts' groups, by prompt id
    shared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # by all calls of hooks

    def with_options(self, options: Any) -> Context:
        """The same context for another plugin."""
        return self if options is self.options else replace(self, options=options)

    async def generate(
        self, sample: Sample, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> Completion:
        """One model turn: continue the sample's tokens, append what came and set its status.

        The draw depends on (run seed, sample id, attempt, token position) only, so turns never repeat a draw. A
        sibling of a fan-out passes the id of the sample that was issued as ``request_id``: under that name the run
        stops and continues requests.

        Raises:
            EngineError: the engine could not serve it.
        """
        params = params or self.sampling
        if params is None or self.engine is None:
            raise RuntimeError("this context has no engine; generation belongs in slime_generate")
        seed = seed_of(self.config.seed, "eval" if self.evaluation else "sample", sample.id, sample.attempt)
        request = GenerateRequest(
            id=request_id or sample.id,
            tokens=list(sample.tokens),
            params=params,
            seed=seed,
            session_id=sample.session_id,
            media=await self.request_media(sample),
            adapter=self.adapter(sample.model, f"sample {sample.id}"),
        )
        done = await self.engine.generate(request)
        sample.append_response(
            done.tokens, done.log_probs, text=done.text, version=done.versions, routed_experts=done.routed_experts
        )
        sample.status = FINISHED[done.finish]
        sample.temperature = params.temperature or 1.0
        return done

    def adapter(self, model: str, where: str) -> str:
        """What computes the requests of a sample of ``model``; empty where adapters have no names, or engines none.

        Raises:
            EngineError: ENG09 the run has no such adapter; ``where`` names what asks for it.
        """
        names = self.config.train.lora_adapters
        if not names or any(self.engine is frozen for frozen in self.engines.values()):
            return ""
        if model and model not in names:
            raise unknown_adapter(model, names, where)
        beside = self.config.train.lora_sync == "adapter" and not self.config.rollout.debug_rollout_only
        return (model or names[0]) if beside else ""

    async def prepare_media(self, samples: Iterable[Sample]) -> None:
        """Make the arrays of samples that have references to pictures: one set for all that have the same.

        Raises:
            DataError: a picture that cannot be read or decoded, or is too large.
        """
        if self.media is not None:
            await self.media.prepare(samples)

    async def request_media(self, sample: Sample) -> Media | None:
        """What a request of a sample brings to the engine beside its tokens: None without pictures.

        Raises:
            DataError: as :meth:`prepare_media`.
        """
        return None if self.media is None else await self.media.request(sample)

    async def score(self, engine: Engine, sample: Sample, start: int) -> NDArray[Any]:
        """The engine's log-probs of a sample's tokens from ``start`` on; the run's own under the sample's adapter.

        Engines get arguments for pictures and adapters only where there are some: those of plugins may take none.

        Raises:
            DataError: as :meth:`prepare_media`.
            EngineError: the engine could not serve it.
        """
        media = await self.request_media(sample)
        options: dict[str, Any] = {} if media is None else {"media": media}
        if engine is self.engine and (adapter := self.adapter(sample.model, f"sample {sample.id}")):
            options["adapter"] = adapter
        return await engine.score(sample.tokens, start, **options)

    async def append_media(self, sample: Sample, words: str | Sequence[Message]) -> None:
        """Add the pictures of what an environment or a tool says; their placeholders are appended as ids before.

        Parts of messages name them: ``{"type": "image", "image": PATH, data URI, bytes or PIL picture}``.

        Example:
            words = [{"role": "tool", "content": [{"type": "image", "image": screenshot}]}]
            sample.append_response(speech.between(words, answer), mask=0)  # Speech(..., media=ctx.media)
            await ctx.append_media(sample, words)

        Raises:
            DataError: as :meth:`prepare_media`.
        """
        if self.media is not None:
            await self.media.append(sample, words)


def unknown_adapter(name: str, names: Sequence[str], where: str) -> EngineError:
    """ENG09: an adapter that is not among the ``names`` of the run's."""
    return EngineError(
        f"the run has no adapter '{name}'",
        code="ENG09",
        where=where,
        why=f"train.lora_adapters names {', '.join(names)}",
        fix=nearest(name, set(names)) or f"set Sample.model to one of them, or add '{name}' to train.lora_adapters",
    )
