"""`/generate` before the run's engine, as SGLang would answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_compat import sglang
from slime_compat.handlers import LOOPBACK, Events, HttpError, Request
from slime_compat.loopback import LoopbackServer, require_token
from slime_core.engines.admission import score_options
from slime_core.errors import DataError, SlimeError
from slime_core.plugins.boundary import hook_loop
from slime_core.seeds import seed_of
from slime_core.types import Completion, GenerateRequest, Media, Sample

if TYPE_CHECKING:
    from slime_core.compat.session import GenerationCall
    from slime_core.context import Context


KEPT_PICTURES = 16
"""Requests whose pictures' arrays are kept for the next with the same."""


class GenerateServer:
    """SGLang's `/generate` on the loopback; it starts when its port is first needed.

    ``calls`` are the running ones by their seeds: a request that bears such a seed belongs to it. With a ``token`` the
    server requires it; slime's own functions could not send one.
    """

    def __init__(self, calls: Mapping[int, GenerationCall], token: str = "") -> None:
        self._calls, self._token = calls, token
        self._unknown: Counter[int] = Counter()
        self._server: tuple[LoopbackServer, Context] | None = None
        self._lock = threading.Lock()
        self._served = 0
        self._arrays: dict[tuple[int, ...], dict[str, Any]] = {}  # of the last requests with pictures

    def port(self, ctx: Context | None, loop: asyncio.AbstractEventLoop | None = None) -> int | None:
        """The server's port; starts it, unless there is no engine here. ``loop`` is the engine's, None the hook's."""
        if ctx is None or ctx.engine is None:
            return None
        with self._lock:
            if self._server is not None and (self._server[1].engine is not ctx.engine or self._server[0].orphaned):
                self._server[0].close()
                self._server = None
            if self._server is None:
                routes = dict.fromkeys(("POST /generate", "PUT /generate"), self._handle)
                routes["GET /workers"] = self._workers
                self._server = (
                    LoopbackServer(
                        routes, loop or hook_loop() or asyncio.get_running_loop(), require_token(self._token)
                    ),
                    ctx,
                )
            return self._server[0].port

    def close(self) -> None:
        """Close the server."""
        with self._lock:
            if self._server is not None:
                self._server[0].close()
            self._server = None

    async def _handle(self, request: Request) -> Any:
        """Serve one `/generate` payload; runs on the engine's loop. Lists of prompts give lists of responses.

        A stream is one event, with the whole answer.
        """
        payload = request.payload
        sglang.check(payload)
        ids, text = payload.get("input_ids"), payload.get("text")
        if (ids is None) == (text is None):
            raise HttpError(400, "send one of text and input_ids")
        given_prompt: Any = text if ids is None else ids
        many = isinstance(given_prompt, list) and bool(given_prompt) and not isinstance(given_prompt[0], int)
        prompts = [self._tokens(one, text is not None) for one in (given_prompt if many else [given_prompt])]
        images = sglang.images(payload.get("image_data"), len(prompts) if many else 0)
        params_given = payload.get("sampling_params") or {}
        params = params_given if isinstance(params_given, list) else [params_given] * len(prompts)
        answers = await asyncio.gather(
            *(self._one(*arguments, payload) for arguments in zip(prompts, images, params, strict=True))
        )
        answer = answers if many else answers[0]
        return Events([answer]) if payload.get("stream") else answer

    async def _workers(self, request: Request) -> Any:
        """What slime's router has: this server alone."""
        assert self._server is not None
        return {"workers": [{"url": f"http://{LOOPBACK}:{self._server[0].port}"}]}

    def _tokens(self, prompt: Any, is_text: bool) -> list[int]:
        ctx = self._context()
        if is_text and isinstance(prompt, str):
            return [int(token) for token in ctx.tokenizer.encode(prompt, add_special_tokens=False)]
        if not is_text and isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return prompt
        raise HttpError(400, "a prompt is a text or a list of token ids")

    async def _pictures(self, tokens: list[int], images: list[str]) -> tuple[list[int], Media | None]:
        """The tokens with a run for each picture, where they have one placeholder for each, and what engines get."""
        ctx = self._context()
        if not images:
            return tokens, None
        if ctx.media is None:
            raise HttpError(400, f"image_data: {ctx.config.rollout.hf_checkpoint or 'the model'} takes text alone")
        inputs = {"images": [_reference(image) for image in images]}
        key = tuple(map(hash, images))
        sample = Sample(id="image_data", tokens=tokens, multimodal_inputs=inputs)
        sample.multimodal_train_inputs = self._arrays.get(key)  # of another sample of the group, or an earlier turn
        try:
            if tokens.count(ctx.media.layout.placeholders["images"]) == len(images):
                sample.tokens = await asyncio.to_thread(ctx.media.expand, tokens, inputs)
            media = await ctx.request_media(sample)
            ctx.media.check(sample)
        except DataError as error:
            raise HttpError(400, str(error)) from error
        self._arrays[key] = sample.multimodal_train_inputs or {}
        while len(self._arrays) > KEPT_PICTURES:
            del self._arrays[next(iter(self._arrays))]
        return sample.tokens, media

    async def _one(
        self, tokens: list[int], images: list[str], sampling_params: dict[str, Any], payload: dict[str, Any]
    ) -> dict[str, Any]:
        ctx, start = self._context(), time.monotonic()
        tokens, media = await self._pictures(tokens, images)
        engine: Any = ctx.engine
        call = self._calls.get(sampling_params.get("sampling_seed", -1))
        params = sglang.from_dict(sampling_params)
        try:
            adapter = self._adapter(payload, call)
            scored = await self._scored(tokens, media, adapter, payload)
            request = GenerateRequest(
                id=f"door/{self._number()}",
                tokens=tokens,
                params=params,
                seed=self._seed(tokens, sampling_params, call) if params.max_new_tokens else 0,
                media=media,
                adapter=adapter,
            )
            done = await engine.generate(request) if params.max_new_tokens else _nothing(request)
        except SlimeError as error:
            if call is not None:
                call.error = error
            raise
        if call is not None:
            call.note(done.versions)
        text = done.text
        if sampling_params.get("no_stop_trim"):
            text = ctx.tokenizer.decode(
                done.tokens, skip_special_tokens=bool(sampling_params.get("skip_special_tokens", True))
            )
        log_probs, seconds = bool(payload.get("return_logprob")), time.monotonic() - start
        parts: dict[str, bool] = {"log_probs": log_probs, "experts": bool(payload.get("return_routed_experts"))}
        answer = sglang.answer(done, len(tokens), text, version=engine.version, seconds=seconds, **parts)
        answer["meta_info"] |= {"input_token_logprobs": scored} if log_probs else {}
        return answer

    async def _scored(
        self, tokens: Sequence[int], media: Media | None, adapter: str, payload: dict[str, Any]
    ) -> list[list[Any]]:
        """The log-probs of the prompt itself from ``logprob_start_len`` on, the first of them None."""
        start = payload.get("logprob_start_len")
        if not payload.get("return_logprob") or start in (None, -1):
            return []
        if type(start) is not int or not 0 <= start <= len(tokens):
            raise HttpError(
                400, f"logprob_start_len is {start!r}: send -1, or 0 to {len(tokens)}, the prompt's tokens"
            )
        engine: Any = self._context().engine
        options = score_options(media, adapter)
        values = await engine.score(tokens, start + 1, **options) if start + 1 < len(tokens) else []
        return sglang.entries(tokens[start:], [None, *map(float, values)][: len(tokens) - start])

    def _adapter(self, payload: dict[str, Any], call: GenerationCall | None) -> str:
        """The adapter that ``lora_path`` names, or that of the sample."""
        ctx, name = self._context(), payload.get("lora_path")
        if name and name not in ctx.config.train.lora_adapters:
            adapters = ", ".join(ctx.config.train.lora_adapters) or "none"
            raise HttpError(400, f"lora_path is {name!r}, and the adapters of train.lora_adapters are {adapters}")
        return ctx.adapter(name or (call.model if call is not None else ""), "lora_path")

    def _seed(self, tokens: Sequence[int], params: dict[str, Any], call: GenerationCall | None) -> int:
        """A draw's key: the sample's, and for the k-th continuation of the same tokens another one."""
        if call is None and params.get("sampling_seed") is not None:
            return int(params["sampling_seed"])
        seed = call.seed if call else seed_of(self._context().config.seed, "door")
        counts = call.continuations if call else self._unknown
        key = seed_of(seed, *tokens)
        counts[key] += 1
        repeat = counts[key] - 1
        if call is None:
            return seed_of(key, "again", repeat)
        return seed if repeat == 0 else seed_of(seed, "again", repeat)

    def _number(self) -> int:
        self._served += 1
        return self._served

    def _context(self) -> Context:
        if self._server is None:
            raise HttpError(503, "the run has ended")
        return self._server[1]


def _reference(image: str) -> str:
    """A picture of a payload as a reference: base64 alone is that of a file."""
    return image if image.startswith("data:") else f"data:application/octet-stream;base64,{image}"


def _nothing(request: GenerateRequest) -> Completion:
    """The completion of a request for no new tokens."""
    return Completion(id=request.id, tokens=[], log_probs=[], plain_log_probs=[], finish="length", versions=[])
