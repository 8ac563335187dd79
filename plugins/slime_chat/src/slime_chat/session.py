"""One sample's session: its agent's requests, the engine's answers, and training samples at the end.

    request -> tree.find -> [ids of the answers so far] + [ids of the new messages] -> engine -> Completion -> tree.add
                                                                                                    `-> message

No answer is ever encoded again: the ids that the engine made stand in every later prompt as they came. What is new
goes through the chat template once, as `Speech.between` renders it after an answer; a dialogue that begins anew is
rendered whole, as a row of data is.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from slime_chat import answers, messages_api, request, responses_api
from slime_chat.messages import bad, call_of
from slime_chat.reply import ChatReply
from slime_chat.samples import samples_of
from slime_chat.tree import Node, Tree, joined_pictures
from slime_compat.handlers import LOOPBACK, HttpError
from slime_core.data.chat import encode, render
from slime_core.data.turns import split_reasoning
from slime_core.errors import DataError, EngineError
from slime_core.media.placing import bare
from slime_core.media.references import Access, checked, inputs_of
from slime_core.plugins.boundary import together
from slime_core.seeds import seed_of
from slime_core.types import Completion, GenerateRequest, Media, Message, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from slime_chat.request import ChatRequest
    from slime_core.context import Context
    from slime_core.data.tool_calls import Calls, Parser
    from slime_core.data.turns import Speech

Branches = Literal["all", "last"]


class Session:
    """What an agent talks to while it works on one sample; made by :func:`slime_chat.open_session`.

    ``base_url`` and ``api_key`` go to the agent, under any names that it reads (``env`` has OpenAI's and Anthropic's).
    The key is good for this session alone and ends with it. An agent in this process may call :meth:`complete`,
    :meth:`messages` and :meth:`respond` instead.
    """

    def __init__(
        self,
        sample: Sample,
        ctx: Context,
        speech: Speech,
        *,
        base_url: str,
        api_key: str,
        parser: Parser,
        leave_out: Collection[str],
        branches: Branches,
    ) -> None:
        self.sample, self.base_url, self.api_key = sample, base_url, api_key
        self.error: EngineError | None = None  # the engine's error of a request
        self.aborted = False  # the run stopped a request
        self.failed = ""  # why the agent's work counts for nothing
        self.counts: Counter[str] = Counter()
        self._ctx, self._speech, self._tree = ctx, speech, Tree()
        self._parser, self._leave_out, self._branches = parser, tuple(leave_out), branches
        self._prompt, self._role = sample.tokens[: sample.prompt_length], sample.role
        self._sample_model = sample.model
        self._responses: dict[str, list[Message]] = {}  # by id, the messages up to the end of each response
        self._seed = seed_of(ctx.config.seed, "eval" if ctx.evaluation else "sample", sample.id, sample.attempt)
        self._continuations: Counter[bytes] = Counter()  # digest of tokens -> how often they were continued
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._over = False
        self.use_deadline()

    def use_deadline(self) -> None:
        """Take the caller's deadline, which stops while the run holds a request."""
        self._context = contextvars.copy_context()

    @property
    def env(self) -> dict[str, str]:
        """The variables that OpenAI's and Anthropic's clients read; this machine's proxies are not used."""
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK)))
        address = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), self.base_url)
        address["ANTHROPIC_BASE_URL"] = self.base_url.removesuffix("/v1")
        names = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        return {**address, **dict.fromkeys(names, self.api_key), "NO_PROXY": direct, "no_proxy": direct}

    @property
    def answers(self) -> list[Message]:
        """The messages that the agent was given, in the order in which they came."""
        return [node.message for node in self._tree.nodes]

    def fail(self, reason: str) -> None:
        """Say that the agent broke: the session's samples are FAILED, which drops them with that reason."""
        self.failed = reason

    def samples(self) -> list[Sample]:
        """The training samples: the issued one first, filled, then its siblings of the same rollout.

        Each is a dialogue from its first message to an answer without a follow-up request, and is exactly what the
        engine read and made. Every token of an answer trains in one sample (mask 1); in others that share it, and of
        every message that the agent wrote, the mask is 0 or it is part of the prompt. Log-probs and versions are
        those of the engine. With ``branches="last"`` there is one sample, of the dialogue that came last.

        ``metadata["chat"]`` says how the agent went about it: ``calls``, ``branches``, ``roots``, ``forks``,
        ``rewritten`` (assistant messages that no answer of ours is), ``cancelled``, ``left_out``, and of this sample
        ``branch`` (from 0) and ``answer`` (the last message's text); after :meth:`fail` also ``failed``.

        Raises:
            EngineError: an engine error of a request.
        """
        if self.error is not None:
            raise self.error
        nodes = self._tree.nodes
        facts: dict[str, Any] = {
            "calls": len(nodes),
            "roots": self._tree.roots,
            "forks": self._tree.forks,
            "rewritten": sum(node.rewritten for node in nodes),
            "cancelled": self.counts["cancelled"],
            "left_out": self.counts["left_out"],
        }
        status = Status.ABORTED if self.aborted else None
        if self.failed and not self.aborted:
            status, facts["failed"] = Status.FAILED, self.failed
        leaves = self._tree.leaves() if self._branches == "all" else self._tree.leaves()[-1:]
        return samples_of(self.sample, self._prompt, leaves, facts, self._ctx.tokenizer, status)

    async def complete(self, payload: Mapping[str, Any], role: str = "") -> Any:
        """Answer the body of a chat completion, asked in a role of the agent's.

        Raises:
            HttpError: 400 what is not served or does not fit the context, 410 the session is over or was stopped, 500
                the engine failed.
        """
        reply = await self._reply(self._read(self._fields(payload), role))
        return answers.completion(reply, self._ctx.tokenizer)

    async def messages(self, payload: Mapping[str, Any], role: str = "") -> Any:
        """Answer the body of `/v1/messages` (Anthropic's); errors are those of :meth:`complete`."""
        try:
            chat = messages_api.to_chat(self._fields(payload))
            return messages_api.completion(await self._reply(self._read(chat, role, object_arguments=True)))
        except HttpError as error:
            raise messages_api.refusal(error) from error

    async def count_tokens(self, payload: Mapping[str, Any], role: str = "") -> Any:
        """Answer the body of `/v1/messages/count_tokens`; errors are those of :meth:`complete`."""
        ask = self._read(messages_api.to_chat(self._fields(payload)), role)
        parent, _, prompt = await self._place(ask)
        return {"input_tokens": len(parent.tokens()) + len(prompt)}

    async def respond(self, payload: Mapping[str, Any], role: str = "") -> Any:
        """Answer the body of `/v1/responses` (OpenAI's); errors are those of :meth:`complete`."""
        fields = self._fields(payload)
        previous = str(fields.get("previous_response_id", ""))
        if previous and previous not in self._responses:
            raise HttpError(404, f"no response {previous!r} in this session", param="previous_response_id")
        chat = responses_api.to_chat(fields, self._responses.get(previous, []))
        reply = await self._reply(self._read(chat, role))
        history = responses_api.history_of(chat["messages"], reply, bool(fields.get("instructions")))
        self._responses[f"resp_{reply.name}"] = history
        return responses_api.completion(reply, fields)

    async def close(self, wait_seconds: float = 0.0) -> None:
        """End the session: new requests are refused, and after ``wait_seconds`` those under way too."""
        self._over = True
        tasks = list(self._running.values())
        if tasks and wait_seconds:
            await asyncio.wait(tasks, timeout=wait_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require_open(self) -> None:
        if self.aborted:
            raise HttpError(410, "the run has stopped this session", code="session_aborted")
        if self._over or self.error is not None:
            raise HttpError(410, "this session is over", code="session_over")

    def _fields(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """A request's parameters, without those that the run's own values replace."""
        self._require_open()
        fields = {name: value for name, value in payload.items() if value is not None}
        self.counts["left_out"] += sum(name in fields for name in self._leave_out)
        return {name: value for name, value in fields.items() if name not in self._leave_out}

    def _read(self, fields: Mapping[str, Any], role: str, *, object_arguments: bool = False) -> ChatRequest:
        fields = {name: value for name, value in fields.items() if value is not None}
        defaults, training = self._ctx.sampling, not self._ctx.evaluation
        assert defaults is not None
        return request.read(fields, defaults, training=training, role=role, object_arguments=object_arguments)

    async def _place(self, ask: ChatRequest) -> tuple[Node, int, list[int]]:
        """The deepest answer of a history, how many messages lead there, and the ids of those that follow."""
        parent, start = self._tree.find(ask.messages, ask.keys, ask.tools_key)
        new = ask.messages[start:]
        try:
            await self._open_pictures(new)
            return parent, start, self._words(new, parent, ask)
        except DataError as error:
            raise _refused(error) from error

    async def _reply(self, ask: ChatRequest) -> ChatReply:
        """Draw a request's answers and hang them into the tree."""
        parent, start, prompt = await self._place(ask)
        tokens = [*parent.tokens(), *prompt]
        pictures = await self._pictures(ask.messages[start:])
        media = await self._media(parent, pictures)
        self._require_open()
        seeds, model = [self._draw(tokens, ask.seed) for _ in range(ask.n)], self._model(ask)
        works = [self._generate(tokens, ask.params, seed, media, model) for seed in seeds]
        completions = await together(works) if ask.n > 1 else [await works[0]]
        nodes = []
        for done, seed in zip(completions, seeds, strict=True):
            message, stop = self._message(done, ask, seed)
            node = Node(
                prompt=prompt,
                done=done,
                temperature=ask.params.temperature or 1.0,
                role=ask.role or self._role,
                model=model,
                message=message,
                stop=stop,
                rewritten=sum(message["role"] == "assistant" for message in ask.messages[start:]),
                pictures=pictures,
            )
            self._tree.add(parent, ask.keys[start:], node)
            nodes.append(node)
        return ChatReply(ask=ask, nodes=nodes, prompt_tokens=len(tokens), name=f"{seeds[0]:016x}")

    def _words(self, new: Sequence[Message], parent: Node, ask: ChatRequest) -> list[int]:
        """Ids of the messages after ``parent``'s answer, up to where the next one begins."""
        speech = self._speech
        if parent.done is not None:
            return speech.between(new, parent.answer)
        where, kwargs = f"the agent's messages of {self.sample.id}", speech.kwargs
        messages = [speech.without_specials(one) if one["role"] == "tool" else one for one in bare(new)]
        text = render(messages, speech.tokenizer, template=True, where=where, kwargs=kwargs, tools=ask.tools)
        ids = encode(speech.tokenizer, text)
        return ids if speech.media is None else speech.media.expand(ids, inputs_of(new), where)

    async def _open_pictures(self, new: Sequence[Message]) -> None:
        """An agent sends pictures themselves, or names addresses that the run may fetch: never a file of this machine.

        They are fetched and decoded in a thread; ids can then be made at once.

        Raises:
            DataError: DAT33, DAT39, DAT40.
            HttpError: 400, the model takes none.
        """
        inputs, media, where = inputs_of(new), self._speech.media, "the agent's messages"
        if not inputs:
            return
        if media is None:
            raise bad("the model takes no pictures", "messages")
        for reference in inputs.get("images", []):
            checked(reference, where, Access(limits=media.limits))
        await asyncio.to_thread(media.open, inputs, where)

    async def _pictures(self, new: Sequence[Message]) -> Sample:
        """The pictures of messages."""
        pictures = Sample(id=self.sample.id)
        try:
            await self._ctx.append_media(pictures, new)
        except DataError as error:
            raise _refused(error) from error
        return pictures

    async def _media(self, parent: Node, pictures: Sample) -> Media | None:
        """The pictures of a dialogue up to its next answer, as the engine takes them."""
        parts = [*(node.pictures for node in parent.path()), pictures]
        if not any(part.multimodal_inputs for part in parts):
            return None
        return await self._ctx.request_media(await asyncio.to_thread(joined_pictures, parts))

    def _draw(self, tokens: Sequence[int], chosen: int | None) -> int:
        """The seed of a draw: of the sample, its tokens so far, the client's own seed and its number of requests."""
        digest = blake2b(array("q", tokens).tobytes(), digest_size=16).digest()
        names = (digest.hex(), *(() if chosen is None else (chosen,)))
        key = "/".join(map(str, names)).encode()
        self._continuations[key] += 1
        return seed_of(self._seed, *names, self._continuations[key] - 1)

    def _model(self, ask: ChatRequest) -> str:
        """The adapter that a request names, or the sample's own.

        Raises:
            HttpError: 404 the run has no such adapter.
        """
        names = self._ctx.config.train.lora_adapters
        if not names or ask.model in (*names, request.POLICY) or ask.model.startswith(request.OF_RUN):
            return ask.model if ask.model in names else self._sample_model
        raise HttpError(
            404,
            f"no model {ask.model[:80]!r}: adapters are {', '.join(names)}; {request.POLICY} is the sample's own",
            code="model_not_found",
            param="model",
        )

    async def _generate(
        self, tokens: list[int], params: SamplingParams, seed: int, media: Media | None, model: str
    ) -> Completion:
        name = self._free_name()
        request = GenerateRequest(
            id=name,
            tokens=tokens,
            params=params,
            seed=seed,
            session_id=self.sample.session_id,
            media=media,
            adapter=self._ctx.adapter(model, f"sample {self.sample.id}"),
        )
        engine = self._ctx.engine
        assert engine is not None
        task = self._running[name] = asyncio.get_running_loop().create_task(
            _awaited(engine.generate(request)), context=self._context
        )
        try:
            done = await task
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the client has disconnected
            self._require_open()
            raise
        except EngineError as error:
            if error.ends_dialogue:
                raise bad(error.what, "messages", "context_length_exceeded") from error
            self.error = error
            raise HttpError(500, str(error), code=error.code) from error
        finally:
            del self._running[name]
        if done.finish == "abort":
            self.aborted = True
            self._require_open()
        return done

    def _free_name(self) -> str:
        """The sample's id, by which the run stops and continues requests, for one request at a time."""
        if self.sample.id not in self._running:
            return self.sample.id
        self.counts["beside"] += 1
        return f"{self.sample.id}~{self.counts['beside']}"

    def _message(self, done: Completion, ask: ChatRequest, seed: int) -> tuple[Message, str]:
        """The message that an answer's ids make, and the text that stopped it."""
        text, stop = self._speech.text(done.tokens), ""
        positions = [(place, stop) for stop in ask.params.stop if (place := text.find(stop)) >= 0]
        if positions and done.finish == "stop":
            place, stop = min(positions)
            text = text[:place]
        reasoning, answer = split_reasoning(text, open_=self._speech.reasoning_open)
        content = answer
        calls: Calls = []
        if ask.calls:
            with suppress(ValueError):  # a text whose calls are not well formed is content, whole
                content, calls = self._parser(answer, ask.tools or ())
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                call_of(
                    name, arguments, f"c{seed_of(seed, 'call', place):016x}"[:9]
                )  # some templates want nine letters
                for place, (name, arguments) in enumerate(calls)
            ]
            objects = all(isinstance(call["function"]["arguments"], dict) for call in message["tool_calls"])
            if (ask.one_call and len(calls) > 1) or (ask.object_arguments and not objects):
                del message["tool_calls"]
                message["content"] = answer
        return message, stop


def _refused(error: DataError) -> HttpError:
    return bad(f"{error.what}: {error.why}" if error.why else error.what, "messages", error.code)


async def _awaited(work: Any) -> Completion:
    done: Completion = await work
    return done
