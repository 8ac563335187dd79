"""One episode of a sample: reset, then answers and observations in turn until something ends it.

    reset -> first message -> [answer -> action -> step -> observation -> ids between] ... -> close
                               the engine's ids, train            do not train

What it was worth lies in ``metadata["openenv"]``, JSON-ready (:func:`reward_of` makes a Reward of it):

    turn_rewards   of each answer, in order
    invalid        answers that were no valid action
    ended          done, answer (no tool was called), turns, cut, context, or fault with the reason in ``fault``

A fault is the environment's: the sample is dropped, and neither its tokens nor a reward of it train.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from slime_core import ConfigError, Context, DataError, EngineError, Reward, Sample, Status
from slime_core.data.chat import encode, render
from slime_core.data.tool_calls import PARSERS, Parser, template_tools
from slime_core.data.turns import Speech, unspecial
from slime_core.media.placing import bare, checked_parts
from slime_core.media.references import Access, inputs_of
from slime_core.plugins.locate import locate
from slime_core.types import Message, Prompt
from slime_openenv.actions import to_action, to_calls
from slime_openenv.options import AUTO, Options
from slime_openenv.servers import POLL, EnvServer, EnvServers
from slime_openenv.session import EnvFault, EnvSession, Full, InvalidAction, Result
from slime_openenv.templates import plain, rendered, to_json

KEY = "openenv"
"""Of a sample's metadata."""
MESSAGES = "openenv_messages"
"""Of a prompt's metadata: the row's messages, before the chat template."""
BROKEN_TOOLS = ("timeout", "transport_error")
"""Errors of a tool's call that are the environment's."""

Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts of type text and image."""
Words = str | list[Message]


@dataclass(slots=True)
class Turns:
    """What an episode's turns were worth."""

    rewards: list[float] = field(default_factory=list)
    invalid: int = 0
    ended: str = ""

    def facts(self) -> dict[str, Any]:
        """For the metadata."""
        return {"turn_rewards": self.rewards, "invalid": self.invalid, "ended": self.ended}


@dataclass(slots=True, frozen=True)
class Start:
    """An episode that has begun."""

    session: EnvSession
    result: Result
    schema: dict[str, Any]
    tools: list[dict[str, Any]] | None


class EpisodePlayer:
    """Plays episodes of one environment."""

    def __init__(self, servers: EnvServers, ctx: Context) -> None:
        options: Options = servers.options
        data = ctx.config.data
        self._servers, self._options, self._ctx = servers, options, ctx
        self._speech = Speech(
            ctx.tokenizer,
            template=data.apply_chat_template,
            kwargs=dict(data.apply_chat_template_kwargs),
            plain="\n{{feedback}}\n",
            media=ctx.media,
        )
        self._observe = _function(options.observation_path, "observation_path")
        self._act = _function(options.action_path, "action_path")
        self._parser = parser_for(options, ctx) if options.tools else None

    async def play(self, sample: Sample, row: Prompt) -> None:
        """Fill a sample with an episode of a row; one that a fault ends is FAILED."""
        _clear(sample)
        turns = Turns()
        try:
            async with self._begin(sample) as start:
                await self._open(sample, row, start)
                await self._converse(sample, start, turns)
        except EnvFault as error:
            sample.status, turns.ended = Status.FAILED, "fault"
            sample.metadata[KEY] = {**turns.facts(), "fault": str(error)}
            return
        sample.metadata[KEY] = turns.facts()

    @asynccontextmanager
    async def _begin(self, sample: Sample) -> AsyncIterator[Start]:
        """A session that has been reset; tried on other connections where that fails, and while servers are full."""
        options, failed = self._options, set[EnvServer]()
        tries, wait, waited = options.reset_tries, POLL, 0.0
        while True:
            started = False
            try:
                async with self._servers.open_session(failed) as (server, session):
                    schema = {} if options.tools else await self._servers.schema(server)
                    tools = await self._servers.tools(session) if options.tools else None
                    result = await session.reset(_arguments(sample, options), options.reset_timeout)
                    if result.done:
                        raise EnvFault("its reset ends the episode")
                    server.faults, started = 0, True
                    yield Start(session, result, schema, tools)
                    return
            except EnvFault as error:
                tries -= not isinstance(error, Full)
                if started or not tries or waited > options.start_timeout:
                    raise
            await asyncio.sleep(wait)
            waited, wait = waited + wait, min(2 * wait, 1.0)

    async def _open(self, sample: Sample, row: Prompt, start: Start) -> None:
        """Make the prompt's tokens of the row and the first observation, whose pictures follow those of the row."""
        words = row.metadata.get(MESSAGES, row.prompt) if not row.multimodal_inputs else row.prompt
        messages, question = ([], words) if isinstance(words, str) else (list(words), "")
        if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
            question = messages.pop()["content"]
        content = await self._content(start.result)
        pictures = [part for part in content if part["type"] != "text"] if isinstance(content, list) else []
        text = unspecial(text_of_parts(content), self._ctx.tokenizer)
        values: dict[str, Any] = {"prompt": question, "text": text, "observation": start.result.observation}
        values |= {"schema": start.schema, "tools": start.tools}
        first = rendered("prompt_template", self._options.prompt_template, values)
        row_inputs = row.multimodal_inputs or inputs_of(messages)
        part = {"type": "text", "text": first}
        question_first = bool(row_inputs) and not messages  # the row's placeholders are in its text
        content = [part, *pictures] if question_first else [*pictures, part]
        opening: list[Message] = [*messages, {"role": "user", "content": content if pictures else first}]
        prompt = bare(opening) if messages or self._speech.template else first
        words = render(
            prompt,
            self._ctx.tokenizer,
            template=self._speech.template,
            where=f"sample {sample.id}",
            kwargs=self._speech.kwargs,
            tools=start.tools,
        )
        first_inputs, ids, media = inputs_of(opening[-1:]), encode(self._ctx.tokenizer, words), self._ctx.media
        inputs = {kind: [*row_inputs.get(kind, []), *first_inputs.get(kind, [])] for kind in row_inputs | first_inputs}
        sample.prompt, sample.multimodal_inputs = prompt, inputs or None
        if media is not None:
            ids = await asyncio.to_thread(media.expand, ids, inputs, f"sample {sample.id}")
        sample.tokens = ids

    async def _converse(self, sample: Sample, start: Start, turns: Turns) -> None:
        options, act = self._options, self._step if self._parser is None else self._call
        before = (0, "")  # tokens and text of the response, before the last observation
        pictures = sample.multimodal_inputs, sample.multimodal_train_inputs
        for turn in range(options.max_turns):
            begin = len(sample.tokens)
            try:
                done = await self._ctx.generate(sample)
            except EngineError as error:
                if not error.ends_dialogue:
                    raise
                if not turn:
                    raise EnvFault(f"its first message of {begin} tokens leaves no room for an answer") from None
                sample.truncate_response(*before)
                sample.multimodal_inputs, sample.multimodal_train_inputs = pictures
                sample.status, turns.ended = Status.TRUNCATED, "context"
                return
            if done.finish == "abort":
                return
            if done.finish == "length" and options.cut_answer == "end":
                turns.ended = "cut"
                return
            before = (sample.response_length, sample.response)
            pictures = sample.multimodal_inputs, sample.multimodal_train_inputs
            answer = sample.tokens[begin:]
            words, over = await act(self._answer_text(answer, done.finish), start, turns)
            if over:
                sample.status = Status.COMPLETED
                return
            if turn + 1 < options.max_turns:
                await self._tell(sample, words, answer)
        sample.status, turns.ended = Status.TRUNCATED, "turns"

    async def _step(self, text: str, start: Start, turns: Turns) -> tuple[Words, bool]:
        """Act as an answer says; what follows, and whether the episode is over."""
        try:
            action = await self._action(text, start)
            result = await start.session.step(action, self._options.step_timeout)
        except InvalidAction as error:
            turns.invalid += 1
            turns.rewards.append(self._options.invalid_reward)
            return _sound(f"Invalid action: {error}"), False
        turns.rewards.append(result.reward or 0.0)
        if result.done:
            turns.ended = "done"
        content = await self._content(result)
        return content if isinstance(content, str) else [{"role": "user", "content": content}], result.done

    async def _action(self, text: str, start: Start) -> dict[str, Any]:
        if self._act is None:
            return to_action(text, start.schema, self._options.action_field)
        try:
            action = await _called(self._act, text)
        except ValueError as error:
            raise InvalidAction(str(error)) from error
        if not isinstance(action, dict):
            raise TypeError(f"{self._options.action_path} returned a {type(action).__name__}, and no dict")
        return action

    async def _call(self, text: str, start: Start, turns: Turns) -> tuple[Words, bool]:
        """Call the tools that an answer names; their results, and whether the episode is over."""
        assert self._parser is not None
        turns.rewards.append(0.0)
        messages: list[Message] = []
        try:
            calls = to_calls(text, self._parser, start.tools or ())
        except InvalidAction as error:
            turns.invalid += 1
            turns.rewards[-1] = self._options.invalid_reward
            return f"Invalid call: {error}", False
        for call in calls:
            try:
                result = await start.session.step(call, self._options.step_timeout)
            except InvalidAction as error:
                turns.invalid += 1
                turns.rewards[-1] += self._options.invalid_reward
                content: Content = _sound(f"Invalid call: {error}")
            else:
                turns.rewards[-1] += result.reward or 0.0
                if result.done:
                    turns.ended = "done"
                    return messages, True
                content = await self._parts(_result_content(result.observation))
            messages.append({"role": "tool", "name": call["tool_name"], "content": content})
        if not calls:
            turns.ended = "answer"
        return messages, not calls

    async def _tell(self, sample: Sample, words: Words, answer: list[int]) -> None:
        """Append what follows an answer; it does not train."""
        ids = self._speech.between(words, answer)
        sample.append_response(ids, mask=0, text=self._ctx.tokenizer.decode(ids))
        await self._ctx.append_media(sample, words)

    def _answer_text(self, answer: list[int], finish: str) -> str:
        """What an answer says after its reasoning, without the stop string that ended it."""
        text = self._speech.text(self._speech.visible(answer))
        stops = self._ctx.sampling.stop if self._ctx.sampling is not None and finish == "stop" else ()
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    async def _content(self, result: Result) -> Content:
        """What an observation says, as a text, or as parts where ``observation_path`` returns pictures."""
        if self._observe is not None:
            value = await _called(self._observe, result.observation)
            return await self._parts(value if isinstance(value, list) else str(value))
        parts = {"observation": result.observation, "reward": result.reward, "done": result.done}
        values = {**result.observation, **parts, "text": plain(result.observation)}
        return _sound(rendered("observation_template", self._options.observation_template, values))

    async def _parts(self, content: Content) -> Content:
        """A content that can be used: pictures are files themselves, never paths of this machine.

        Raises:
            EnvFault: a text that no tokenizer takes, a picture that cannot be decoded.
        """
        if isinstance(content, str):
            return _sound(content)
        if self._ctx.media is None:
            return _sound(text_of_parts(content))
        where, access = "an observation", Access(limits=self._ctx.media.limits)
        try:
            parts = checked_parts([{**part} for part in content], where, access)
            await asyncio.to_thread(self._ctx.media.open, inputs_of([{"content": parts}]), where)
        except DataError as error:
            raise EnvFault(f"its picture cannot be used: {error.what}") from error
        return [part if part["type"] != "text" else {**part, "text": _sound(part["text"])} for part in parts]


def parser_for(options: Options, ctx: Context) -> Parser:
    """The parser of tool calls.

    Raises:
        ConfigError: the chat template offers no tools, or writes no call that is known.
    """
    if options.tools != AUTO:
        return PARSERS[options.tools]
    trial = template_tools(ctx.tokenizer, ctx.config.data.apply_chat_template_kwargs)
    if trial.describes and trial.parser:
        return PARSERS[trial.parser]
    raise ConfigError(
        "the chat template " + ("writes no tool call that is known" if trial.describes else "offers no tools"),
        where="plugin.openenv.tools",
        why=f"a call is rendered as {trial.example!r}" if trial.describes else "its text of a prompt names none",
        fix="name the format in plugin.openenv.tools, and offer {{ tools | tojson }} in prompt_template",
    )


def reward_of(sample: Sample, options: Options) -> Reward:
    """The reward of an episode: the sum of its turns', or the last one."""
    facts = sample.metadata.get(KEY, {})
    if "fault" in facts:
        return Reward(value=0.0, kind="infra_error", reason=f"openenv: {facts['fault']}")
    rewards = facts.get("turn_rewards", [])
    value = sum(rewards) if options.reward == "sum" else (rewards or [0.0])[-1]
    terms = {"turns": float(len(rewards)), "invalid": float(facts.get("invalid", 0))}
    return Reward(value=value, terms={**terms, "done": float(facts.get("ended") == "done")})


def _arguments(sample: Sample, options: Options) -> dict[str, Any]:
    """What the reset gets: a row's own arguments, the config's, and a seed by the prompt's position."""
    arguments = sample.metadata.get("reset", {})
    if not isinstance(arguments, dict):
        raise DataError(
            f"metadata.reset is a {type(arguments).__name__}",
            code="DAT24",
            where=f"the row of sample {sample.id}",
            fix='make it an object of arguments: {"reset": {"seed": 7}}',
        )
    return {"seed": sample.group_index or 0, **options.reset, **arguments}


def _clear(sample: Sample) -> None:
    """Undo a try that was stopped: its session is gone."""
    sample.tokens, sample.response, sample.response_length = [], "", 0
    sample.loss_mask = sample.rollout_log_probs = None
    sample.weight_versions = []
    sample.multimodal_inputs = sample.multimodal_train_inputs = None


def text_of_parts(content: Content) -> str:
    """The text of a content, its parts as lines; pictures are left out."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _result_content(observation: Mapping[str, Any]) -> Content:
    """What a tool's call has brought, as a text, or as parts where it has pictures.

    Raises:
        EnvFault: the tool's server failed, and not the call.
    """
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        if error.get("error_type") in BROKEN_TOOLS:
            raise EnvFault(f"its tool failed: {error.get('error_type')}: {error.get('message')}")
        return f"Error: {error.get('message')}"
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        if not any(part.get("type") == "image" for part in parts):
            return text_of_parts(parts)
        return [
            {"type": "image", "image": f"data:{part.get('mimeType', 'image/png')};base64,{part.get('data', '')}"}
            if part.get("type") == "image"
            else {"type": "text", "text": str(part.get("text", ""))}
            for part in parts
        ]
    return result if isinstance(result, str) else to_json(result if result is not None else observation)


def _sound(text: str) -> str:
    """A text that a tokenizer can take.

    Raises:
        EnvFault: it has half of a character, which JSON can carry.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise EnvFault("its observation has half of a character, which has no token") from None
    return text


def _function(path: str, key: str) -> Callable[..., Any] | None:
    return locate(path, f"plugin.openenv.{key}") if path else None


async def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value
