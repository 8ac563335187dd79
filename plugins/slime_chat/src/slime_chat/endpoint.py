"""The endpoint of a run: sessions of samples in front of its engine, behind one loopback server.

    agent -- POST /v1/chat/completions, /v1/messages or /v1/responses, key of a session -- server -- Session -- engine

The server starts with the first session and closes with the last. A key names its session and is checked in constant
time; nothing but the key's own session can be reached with it, and one whose session has ended is answered 410.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slime_chat.answers import model
from slime_chat.request import POLICY
from slime_chat.session import Branches, Session
from slime_compat.handlers import LOOPBACK, Handler, HttpError, Request
from slime_core.data.chat import require_template
from slime_core.data.template_trial import try_template
from slime_core.data.tool_calls import Calls, Parser, parser_of, template_tools
from slime_core.data.turns import Speech
from slime_core.plugins.boundary import Deadline, together
from slime_core.types import Group, Sample, Status

if TYPE_CHECKING:
    from slime_compat.loopback import LoopbackServer
    from slime_core.context import Context

Agent = Callable[[Session], Awaitable[Any]]
ToolParser = str | Callable[[str], tuple[str, Calls]]
NOTHING: Mapping[str, Any] = MappingProxyType({})
SHARED = "chat"  # key of `Context.shared`
MAX_BODY, MAX_PICTURES = 8 << 20, 128 << 20  # bytes of a request: two million tokens of text; with pictures
ROLE = "x-slime-role"  # header that names the role of a request
METHODS = {
    "chat/completions": Session.complete,
    "messages": Session.messages,
    "messages/count_tokens": Session.count_tokens,
    "responses": Session.respond,
}
"""What answers a path under /v1."""


class Endpoint:
    """See the module; :meth:`of` gives a context's own."""

    def __init__(self, ctx: Context) -> None:
        require_template(ctx.tokenizer)
        try_template(ctx.tokenizer, ctx.config.data.apply_chat_template_kwargs)
        self._speeches: dict[str, Speech] = {}  # by the template's arguments
        self._parsers: dict[int, Parser] = {}  # by the speech's id; speeches live as long as this
        self._secret = secrets.token_bytes(32)
        self._opened = 0
        self._models = (POLICY, *ctx.config.train.lora_adapters)
        self._sessions: dict[str, Session] = {}  # by key
        self._server: LoopbackServer | None = None

    @classmethod
    def of(cls, ctx: Context) -> Endpoint:
        """The endpoint that this stage's hooks share.

        Raises:
            DataError: TOK41 the tokenizer has no chat template.
        """
        if SHARED not in ctx.shared:
            ctx.shared[SHARED] = cls(ctx)
        endpoint: Endpoint = ctx.shared[SHARED]
        return endpoint

    @asynccontextmanager
    async def session(
        self,
        sample: Sample,
        ctx: Context,
        *,
        tool_parser: ToolParser,
        leave_out: Collection[str],
        branches: Branches,
        template_kwargs: Mapping[str, Any],
    ) -> AsyncIterator[Session]:
        """See :func:`open_session`."""
        speech = self._speech(ctx, template_kwargs)
        parser = self._parser(speech) if tool_parser == "auto" else parser_of(tool_parser)
        if self._server is None or self._server.orphaned:
            from slime_compat.loopback import LoopbackServer

            routes = {f"POST /v1/{path}": self._handler(method) for path, method in METHODS.items()}
            routes |= {"GET /v1/models": self._list} | {
                f"GET /v1/models/{name}": self._one(name) for name in self._models
            }
            self._server = LoopbackServer(
                routes,
                asyncio.get_running_loop(),
                self._authorize,
                threaded=False,
                max_body=MAX_BODY if ctx.media is None else MAX_PICTURES,
            )
        key = self._key(self._opened)
        self._opened += 1
        url = f"http://{LOOPBACK}:{self._server.port}/v1"
        session = self._sessions[key] = Session(
            sample,
            ctx,
            speech,
            base_url=url,
            api_key=key,
            parser=parser,
            leave_out=leave_out,
            branches=branches,
        )
        try:
            yield session
        finally:
            del self._sessions[key]
            await session.close()
            if not self._sessions and self._server is not None:
                server, self._server = self._server, None
                await server.aclose()

    def _speech(self, ctx: Context, more: Mapping[str, Any]) -> Speech:
        kwargs = {**ctx.config.data.apply_chat_template_kwargs, **more}
        name = json.dumps(kwargs, sort_keys=True, default=str)
        if name not in self._speeches:
            self._speeches[name] = Speech(ctx.tokenizer, template=True, kwargs=kwargs, media=ctx.media)
        return self._speeches[name]

    def _parser(self, speech: Speech) -> Parser:
        """The parser of what the chat template writes; Hermes' where it writes no calls."""
        if id(speech) not in self._parsers:
            name = template_tools(speech.tokenizer, speech.kwargs).parser
            self._parsers[id(speech)] = parser_of(name or "hermes")
        return self._parsers[id(speech)]

    def _key(self, number: int) -> str:
        return f"slime-{number}-{hmac.digest(self._secret, str(number).encode(), 'sha256').hex()}"

    def _authorize(self, key: str) -> None:
        number = key.removeprefix("slime-").partition("-")[0]
        valid = number.isdecimal() and number.isascii() and len(number) < 20 and int(number) < self._opened
        expected = self._key(int(number) if valid else 0)
        if not (hmac.compare_digest(key.encode("latin-1"), expected.encode()) and valid):
            raise HttpError(401, "the key is missing or wrong", code="invalid_api_key")
        if key not in self._sessions:
            raise HttpError(410, "this session is over", code="session_over")

    def _handler(self, method: Callable[[Session, Mapping[str, Any], str], Awaitable[Any]]) -> Handler:
        async def handle(request: Request) -> Any:
            session = self._sessions.get(request.token)
            if session is None:
                raise HttpError(410, "this session is over", code="session_over")
            return await method(session, request.payload, request.headers.get(ROLE, ""))

        return handle

    async def _list(self, request: Request) -> Any:
        return {"object": "list", "data": [model(name) for name in self._models]}

    def _one(self, name: str) -> Handler:
        async def handle(request: Request) -> Any:
            return model(name)

        return handle


@asynccontextmanager
async def open_session(
    sample: Sample,
    ctx: Context,
    *,
    tool_parser: ToolParser = "auto",
    leave_out: Collection[str] = (),
    branches: Branches | None = None,
    template_kwargs: Mapping[str, Any] = NOTHING,
) -> AsyncIterator[Session]:
    """Serve the run's model to an agent of one sample, over OpenAI's and Anthropic's APIs.

    Args:
        sample: a pending sample of the group; `Session.samples` fills it.
        ctx: the context of `slime_generate`.
        tool_parser: how tool calls are written in answers: ``auto`` (as the chat template writes them), a name of
            `slime_core.data.tool_calls`, or a function of the text that returns content and (name, arguments) pairs.
        leave_out: parameters of the agent's requests that the run's own values replace, such as ``("temperature",)``.
        branches: ``all`` dialogues become samples (the default in training), or the ``last`` alone (in evaluation).
        template_kwargs: arguments of the chat template, laid over ``data.apply_chat_template_kwargs``.

    Raises:
        DataError: TOK41 the tokenizer has no chat template.
        EngineError: an engine error of a request, in place of the agent's own exception.
        ValueError: an unknown ``tool_parser``.

    Example:
        async with open_session(sample, ctx) as session:
            process = await asyncio.create_subprocess_exec("agent", env={**os.environ, **session.env})
            await process.wait()
        samples = session.samples()
    """
    chosen: Branches = branches or ("last" if ctx.evaluation else "all")
    if ctx.engine is None or ctx.sampling is None:
        raise RuntimeError("this context has no engine; agents belong in slime_generate")
    async with Endpoint.of(ctx).session(
        sample,
        ctx,
        tool_parser=tool_parser,
        leave_out=leave_out,
        branches=chosen,
        template_kwargs=template_kwargs,
    ) as session:
        try:
            yield session
        except Exception as error:
            if session.error is not None:
                raise session.error from error
            raise
    if session.error is not None:
        raise session.error


async def converse(
    group: Group,
    ctx: Context,
    agent: Agent,
    *,
    tool_parser: ToolParser = "auto",
    leave_out: Collection[str] = (),
    branches: Branches | None = None,
    template_kwargs: Mapping[str, Any] = NOTHING,
    tolerate: tuple[type[Exception], ...] = (),
    agent_timeout: float | None = None,
) -> Group:
    """Let ``agent`` work on every pending sample of a group, side by side; the group with the samples that came.

    A sample whose session the run stopped comes back ABORTED, whatever the agent made of it. An agent that is not done
    in ``agent_timeout`` seconds is cancelled; those for which the run holds a request do not count. It and one that
    raises an exception of the types ``tolerate`` make their own sample FAILED, which drops it. Other exceptions end
    the whole group. Other arguments and errors are those of :func:`open_session`.

    Example:
        async def generate(group, ctx):
            async def agent(session):
                await solve(session.base_url, session.api_key, session.sample.metadata["task"])

            return await converse(group, ctx, agent)
    """

    async def one(sample: Sample) -> list[Sample]:
        async with open_session(
            sample,
            ctx,
            tool_parser=tool_parser,
            leave_out=leave_out,
            branches=branches,
            template_kwargs=template_kwargs,
        ) as session:
            clock = Deadline(math.inf if agent_timeout is None else agent_timeout)
            try:
                async with clock:
                    session.use_deadline()
                    await agent(session)
            except Exception as error:
                if clock.over:
                    session.fail(f"the agent is not done in agent_timeout = {agent_timeout} s")
                elif isinstance(error, tolerate):
                    session.fail(f"{type(error).__name__}: {error}")
                elif not session.aborted:
                    raise
        return session.samples()

    waiting = [
        (rollout, group.samples[places[0]])
        for rollout, places in group.rollouts.items()
        if group.samples[places[0]].status in (Status.PENDING, Status.ABORTED)
    ]
    results = await together(one(sample) for _, sample in waiting)
    for (rollout, _), samples in zip(waiting, results, strict=True):
        for sample in samples[1:]:
            group.rollouts[rollout].append(len(group.samples))
            group.samples.append(sample)
    return group
