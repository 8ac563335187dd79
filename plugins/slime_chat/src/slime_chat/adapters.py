"""`slime.agent.adapters` and `slime.agent.aiohttp_threaded` of THUDM/slime: sessions by id before a `/generate`.

An agent's bearer token is its session's id. Everything else is as in :mod:`slime_chat.session`: ids are the engine's
own, and dialogues become samples by the same tree.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_chat.endpoint import MAX_BODY
from slime_chat.session import Session
from slime_compat.handlers import LOOPBACK, Handler, HttpError, Request
from slime_compat.http import HttpStatusError, post
from slime_compat.sglang import from_dict
from slime_core.compat.sample import Sample
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.tool_calls import parser_of, template_tools
from slime_core.data.turns import Speech
from slime_core.errors import EngineError
from slime_core.types import Completion, GenerateRequest, Status

PARSERS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_coder": "qwen_xml",
    "glm45": "glm",
    "glm47": "glm",
    "llama3": "llama",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
}
"""SGLang's names of tool parsers, to ours."""
DEFAULT_NEW_TOKENS = 4096  # slime's


PICTURES = ("image", "image_url", "input_image")


def flatten_content(content: Any) -> str:
    """The text of a message's content in OpenAI's or Anthropic's form, a line a part; a picture is "[image omitted]".

    Example: flatten_content([{"type": "text", "text": "a"}, {"type": "image"}]) is "a" and "[image omitted]"
    """
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "\n".join(filter(None, map(_part_text, content)))


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    if part.get("type") in PICTURES:
        return "[image omitted]"
    return flatten_content(part["content"] if "content" in part else part.get("text"))


class GenerateClient:
    """An engine behind an address's `/generate`, for the requests of one session.

    Args:
        url: without ``/generate``.
        defaults: ``sampling_params`` of slime's; its ``sampling_seed`` names the sample that is generated.
        max_context_tokens: of a prompt and its answer together; 0 is no limit.
    """

    def __init__(self, url: str, defaults: Mapping[str, Any], max_context_tokens: int) -> None:
        self._url, self._defaults, self._limit = url, dict(defaults), max_context_tokens

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises EngineError: ENG72 the prompt leaves no room, ENG00 the address answered an error."""
        params = request.params
        room = self._limit - len(request.tokens) if self._limit else params.max_new_tokens
        if room < 1:
            raise EngineError(f"the dialogue has {len(request.tokens)} tokens of {self._limit}", code="ENG72")
        sampling = {
            **self._defaults,
            "max_new_tokens": min(params.max_new_tokens, room),
            "temperature": params.temperature,
            "stop": list(params.stop),
        }
        payload = {"input_ids": request.tokens, "sampling_params": sampling, "return_logprob": True}
        try:
            answer = await post(f"{self._url}/generate", payload)
        except HttpStatusError as error:
            raise EngineError(str(error), where=self._url) from error
        meta = answer["meta_info"]
        rows = meta.get("output_token_logprobs") or []
        version = str(meta.get("weight_version", ""))
        log_probs = [float(row[0]) for row in rows]
        return Completion(
            id=request.id,
            tokens=[int(row[1]) for row in rows],
            log_probs=log_probs,
            plain_log_probs=[],
            finish=meta["finish_reason"]["type"],
            versions=meta.get("weight_versions") or [int(version) if version.isdigit() else -1] * len(rows),
            text=answer["text"],
        )


class BaseAdapter:
    """Sessions of agents before the engine at ``sglang_url``; served by :func:`run_app_in_thread`.

    ``fork_threshold_tokens`` is accepted and changes nothing: here a rewritten answer always is a fork, and every
    answer trains once.

    Args:
        tool_parser: SGLang's name of a tool parser or one of `slime_core.data.tool_calls`; None reads what the chat
            template writes.
        max_turns_per_sid: answers of a session; requests beyond are refused with 429.
    """

    methods: ClassVar[dict[str, Any]] = {}  # path -> method of Session

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self.sglang_url, self.max_turns_per_sid = tokenizer, sglang_url.rstrip("/"), max_turns_per_sid
        self._speech = Speech(tokenizer, template=True, kwargs={})
        name = PARSERS.get(tool_parser, tool_parser) if tool_parser else template_tools(tokenizer, {}).parser
        self._parser = parser_of(name or "hermes")
        self.store: dict[str, Session] = {}
        self._turns: Counter[str] = Counter()
        self.loop: asyncio.AbstractEventLoop | None = None  # where requests are handled

    @property
    def app(self) -> BaseAdapter:
        """What :func:`run_app_in_thread` serves."""
        return self

    @property
    def routes(self) -> dict[str, Handler]:
        """Handlers of the adapter's paths."""
        return {f"POST /v1/{path}": self._handler(method) for path, method in self.methods.items()} | {
            "GET /healthz": self._healthy,
            "GET /v1/models": self._healthy,
        }

    def authorize(self, sid: str) -> None:
        """Refuse a key that no open session has: HttpError 410."""
        if sid not in self.store:
            raise HttpError(410, "no session has this key, or it is closed", code="session_over")

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Let an agent with the key ``sid`` ask; ``sampling_defaults`` are slime's ``sampling_params``.

        Raises:
            ValueError: the session is open.
        """
        if sid in self.store:
            raise ValueError(f"session {sid!r} is open: every run of an agent needs another id")
        defaults = {"max_new_tokens": DEFAULT_NEW_TOKENS, **(sampling_defaults or {})}
        engine: Any = GenerateClient(self.sglang_url, defaults, int(max_context_tokens or 0))
        ctx = Context(config=Config(), engine=engine, tokenizer=self.tokenizer, sampling=from_dict(defaults))
        self.store[sid] = Session(
            Sample(id=sid, session_id=sid),
            ctx,
            self._speech,
            base_url="",
            api_key=sid,
            parser=self._parser,
            leave_out=(),
            branches="all",
        )

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """Close a session and return its dialogues as samples like ``base_sample``, each with the whole reward.

        Without an answer, or for a session that is closed, there is none.

        Args:
            wait_timeout: seconds for requests under way; then they are cancelled.

        Raises:
            EngineError: an engine error of a request.
        """
        session = self.store.get(sid)
        await self.drop_session(sid, wait_timeout=wait_timeout)
        if session is None or not (session.answers or session.error):
            return []
        session.sample = base_sample
        samples = [Sample.of(sample) for sample in session.samples()]
        for sample in samples:
            truncated, response = sample.status is Status.TRUNCATED, sample.tokens[sample.prompt_length :]
            sample.response = self.tokenizer.decode(response, skip_special_tokens=False)
            sample.reward, sample.metadata = (
                reward,
                {**sample.metadata, **(extra_metadata or {}), "truncated": truncated},
            )
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Close a session; its requests get ``wait_timeout`` seconds to end. Closing again does nothing."""
        session = self.store.pop(sid, None)
        if session is None or self.loop is None:
            return
        closing = asyncio.run_coroutine_threadsafe(session.close(wait_timeout), self.loop)
        await asyncio.wrap_future(closing)

    shutdown_session = drop_session

    def _handler(self, method: Any) -> Handler:
        async def handle(request: Request) -> Any:
            sid = request.token
            self.authorize(sid)
            limit = self.max_turns_per_sid
            if limit is not None and self._turns[sid] >= limit:
                raise HttpError(429, f"session {sid!r} has had its {limit} turns", code="max_turns_per_sid")
            self._turns[sid] += 1
            return await method(self.store[sid], request.payload)

        return handle

    async def _healthy(self, request: Request) -> Any:
        return {"ok": True}


class OpenAIAdapter(BaseAdapter):
    """Chat Completions and Responses."""

    methods: ClassVar[dict[str, Any]] = {"chat/completions": Session.complete, "responses": Session.respond}


class AnthropicAdapter(BaseAdapter):
    """Messages."""

    methods: ClassVar[dict[str, Any]] = {"messages": Session.messages, "messages/count_tokens": Session.count_tokens}


@dataclass
class AppHandle:
    """An adapter that is served at ``host`` and ``port``, until :meth:`stop`."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    server: Any

    def stop(self) -> None:
        """End the server and its thread."""
        asyncio.run_coroutine_threadsafe(self.server.aclose(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


class FilteredAccessLogger:
    """Nothing: requests are not logged."""


def run_app_in_thread(
    app: BaseAdapter,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    thread_name: str = "slime-adapter",
    start_timeout_sec: float = 15.0,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve an adapter from a thread of its own, on a free port of 127.0.0.1, whatever ``host`` and ``port`` say.

    Read the port from the handle. A client that hangs up ends its request.
    """
    from slime_compat.loopback import LoopbackServer

    loop = asyncio.new_event_loop()

    def serve() -> None:
        loop.run_forever()
        loop.close()

    async def start() -> LoopbackServer:
        return LoopbackServer(app.routes, loop, app.authorize, threaded=False, max_body=MAX_BODY)

    thread = threading.Thread(target=serve, name=thread_name, daemon=True)
    thread.start()
    app.loop = loop
    server = asyncio.run_coroutine_threadsafe(start(), loop).result(start_timeout_sec)
    return AppHandle(LOOPBACK, server.port, thread, loop, server)


__all__ = [
    "AnthropicAdapter",
    "AppHandle",
    "BaseAdapter",
    "FilteredAccessLogger",
    "OpenAIAdapter",
    "flatten_content",
    "run_app_in_thread",
]
