"""Replies that the data bring: their tokens, and which of them are trained.

    <|im_start|>user Q<|im_end|> <|im_start|>assistant [A<|im_end|>] <|im_start|>tool R<|im_end|> ... [B<|im_end|>]
    `------------------ prompt -----------------------'`------------- reply; brackets are trained ---------------'

A template that marks its answers (``{% generation %}``) says itself what is trained. With any other the text is
rendered up to each assistant message, as for generation, and without it: the answer is what stands between, with the
special token that ends it. Pieces are encoded one by one, each after the end of the text before it. A template that
writes earlier turns otherwise than it wrote them when they were the last (it drops their reasoning) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from slime_core.data.chat import decode, encode, render
from slime_core.data.turns import CLOSE, MARKS, OPEN
from slime_core.errors import DataError
from slime_core.types import Message

ASSISTANT = "assistant"
LAST_TURN = ("last", "distill_qwen")
"""Values of `data.loss_mask_type` that train the last turn alone; the second is slime's."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
WEIGHTS = ("weight", "step_loss_mask")
"""Keys of an assistant message, of OpenAI's format and of slime's: 0 leaves it out of the loss."""
BEFORE = 64  # characters before a piece that decide how it is encoded


@dataclass(slots=True, frozen=True, kw_only=True)
class EncodedReply:
    """A reply to a prompt: ids, and 1 for those that are trained."""

    prompt: list[int]
    tokens: list[int]
    loss_mask: list[int]

    def cut(self, limit: int) -> EncodedReply:
        """The reply's beginning, so that it has at most ``limit`` tokens with its prompt."""
        room = max(limit - len(self.prompt), 0)
        return EncodedReply(prompt=self.prompt, tokens=self.tokens[:room], loss_mask=self.loss_mask[:room])


@dataclass(slots=True, frozen=True)
class ReplyEncoder:
    """Encodes replies with one tokenizer; ``kwargs`` are the chat template's."""

    tokenizer: Any
    last_turn: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def conversation(self, messages: Sequence[Message], tools: list[Any] | None, where: str) -> EncodedReply:
        """A whole conversation: its prompt ends where the first trained answer begins.

        Raises:
            DataError: as :meth:`reply`; DAT25 no assistant message to train on.
        """
        return self.reply(messages, 0, tools, where)

    def reply(self, messages: Sequence[Message], first: int, tools: list[Any] | None, where: str) -> EncodedReply:
        """The messages from ``first`` on as a reply to those before; what follows the last answer is left out.

        Raises:
            DataError: DAT25 no assistant message to train on, or messages that the template refuses or rewrites.
        """
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        trained = [n for n in answers if n >= first and all(messages[n].get(key) != 0 for key in WEIGHTS)]
        if self.last_turn:
            trained = [n for n in trained if n == answers[-1]]
        if not trained:
            raise DataError(
                "the conversation has no assistant message to train on",
                code="DAT25",
                where=where,
                why=f"roles are {', '.join(str(message['role']) for message in messages[:8])}",
                fix="fix the row, or leave such rows out with data.max_bad_rows; "
                f"{' and '.join(WEIGHTS)} of a message may be 0",
            )
        dialogue = [{k: v for k, v in message.items() if k not in WEIGHTS} for message in messages[: trained[-1] + 1]]
        marked = MARKED.search(str(getattr(self.tokenizer, "chat_template", "")))
        pieces = self._by_markers(dialogue, answers, trained, tools, where) if marked else None
        pieces = pieces or self._by_prefixes(dialogue, trained, tools, where)
        (prompt, _), *rest = pieces
        tokens = [token for ids, _ in rest for token in ids]
        self._require_calls([dialogue[number] for number in trained], decode(self.tokenizer, tokens), where)
        return EncodedReply(prompt=prompt, tokens=tokens, loss_mask=[mask for ids, mask in rest for _ in ids])

    def _require_calls(self, answers: Sequence[Message], text: str, where: str) -> None:
        """Refuse a template that leaves tool calls out: an answer would be trained that says nothing."""
        calls = [call.get("function") or call for answer in answers for call in answer.get("tool_calls") or ()]
        missing = [call["name"] for call in calls if call["name"] not in text]
        if missing:
            raise DataError(
                f"the chat template leaves out the tool call '{missing[0]}'",
                code="DAT25",
                where=where,
                why="the model would learn an answer without it",
                fix="write calls into the content of the messages, or a template that knows tool_calls into the model "
                "folder: chat_template.jinja",
            )

    def text(self, prompt: str, answer: str) -> EncodedReply:
        """An answer to a prompt that are texts, read without a chat template; the end token follows."""
        ids = self.answer(prompt, answer)
        return EncodedReply(prompt=encode(self.tokenizer, prompt), tokens=ids, loss_mask=[1] * len(ids))

    def answer(self, prompt: str, answer: str) -> list[int]:
        """Ids of an answer as they follow a prompt, and the end token."""
        ids, end = self._after(prompt, answer), self.tokenizer.eos_token_id
        return [*ids, int(end)] if end is not None and ids[-1:] != [end] else ids

    def _by_markers(
        self, messages: list[Message], answers: list[int], trained: list[int], tools: list[Any] | None, where: str
    ) -> list[tuple[list[int], int]] | None:
        """Pieces by the template's own markers; None where these do not mark a run for each assistant message."""
        text = self._render(messages, tools, where, generation=False)  # raises for messages that the template refuses
        kwargs = {**self.kwargs, "add_generation_prompt": False, "tokenize": True, "return_dict": True}
        rendered = self.tokenizer.apply_chat_template(
            messages, tools=tools, return_assistant_tokens_mask=True, **kwargs
        )
        ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
        if decode(self.tokenizer, ids) != text:
            return None
        runs = [(marked, len(list(items))) for marked, items in groupby(mask)]
        if sum(marked for marked, _ in runs) != sum(number < len(messages) for number in answers):
            return None
        pieces: list[tuple[list[int], int]] = []
        place, turns = 0, iter(answers)
        for marked, count in runs:
            weight = int(marked and next(turns) in trained)
            pieces.append((ids[place : place + count], weight))
            place += count
        first = next(number for number, (_, weight) in enumerate(pieces) if weight)
        prompt = [token for piece, _ in pieces[:first] for token in piece]
        last = max(number for number, (_, weight) in enumerate(pieces) if weight)
        return [(prompt, 0), *pieces[first : last + 1]]

    def _by_prefixes(
        self, messages: list[Message], trained: list[int], tools: list[Any] | None, where: str
    ) -> list[tuple[list[int], int]]:
        """Pieces between renderings of the conversation up to each answer."""
        text = self._render(messages, tools, where, generation=False)
        pieces: list[tuple[list[int], int]] = []
        place = 0
        for number in trained:
            head = self._render(messages[:number], tools, where, generation=True)
            if not text.startswith(head) or len(head) < place:
                message = messages[number]
                text_alone = isinstance(message.get("content"), str) and not message.get("tool_calls")
                if text_alone and number == len(messages) - 1 and len(trained) == 1:
                    return [(encode(self.tokenizer, head), 0), (self._alone(message, head), 1)]
                raise self._rewritten(number, head, text, where)
            end = self._end(messages, number, text, len(head), tools, where)
            answer = text[len(head) : end]
            closed = end < len(text) or re.search(rf"(?:{self._specials})\Z", answer)
            ids = self._after(head, answer) if closed else self.answer(head, answer)
            pieces += [(self._after(text[:place], text[place : len(head)]), 0), (ids, 1)]
            place = end
        return pieces

    def _alone(self, message: Message, head: str) -> list[int]:
        """The last answer as a model would go on after ``head``, of a template that drops an answer's reasoning."""
        content = str(message["content"])
        if (reasoning := message.get("reasoning_content")) and OPEN not in content:
            content = f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{content}"
        if head.rstrip().endswith(OPEN) and content.lstrip().startswith(OPEN):
            content = content.split(OPEN, 1)[1].lstrip("\n")
        return self.answer(head, content)

    def _after(self, head: str, text: str) -> list[int]:
        """Ids of a text as they follow another: SentencePiece puts a space before a text that stands alone."""
        context = head[-BEFORE:]
        before, both = encode(self.tokenizer, context), encode(self.tokenizer, context + text)
        return both[len(before) :] if both[: len(before)] == before else encode(self.tokenizer, text)

    def _end(
        self, messages: list[Message], number: int, text: str, begin: int, tools: list[Any] | None, where: str
    ) -> int:
        """Where in ``text`` an answer ends: after the special token that closes it, or opens the next turn (GLM)."""
        past = self._render(messages[: number + 1], tools, where, generation=False)
        if text.startswith(past) and len(past) > begin:
            closings = [*re.finditer(rf"(?:{self._specials})(?=\s*\Z)", past[begin:])]
            return begin + closings[-1].end() if closings else self._closed(text, len(past))
        for mark in MARKS:  # the answer is written otherwise when it is the last: what follows it tells its end
            masked = [*messages[:number], {"role": ASSISTANT, "content": mark}, *messages[number + 1 :]]
            rest = self._render(masked, tools, where, generation=False).rpartition(mark)[2]
            if rest and text.endswith(rest) and len(text) - len(rest) > begin:
                return self._closed(text, len(text) - len(rest))
        raise self._rewritten(number, past, text, where)

    def _closed(self, text: str, end: int) -> int:
        """``end``, or the end of the special token there."""
        closing = re.compile(rf"\s*(?:{self._specials})").match(text, end)
        return closing.end() if closing else end

    @property
    def _specials(self) -> str:
        """A pattern of the special tokens."""
        return "|".join(re.escape(str(token)) for token in self.tokenizer.all_special_tokens) or r"(?!)"

    def _render(self, messages: list[Message], tools: list[Any] | None, where: str, *, generation: bool) -> str:
        kwargs = {**self.kwargs, "add_generation_prompt": generation}
        return render(messages, self.tokenizer, template=True, where=where, kwargs=kwargs, tools=tools)

    def _rewritten(self, number: int, head: str, text: str, where: str) -> DataError:
        same = next((n for n, (one, other) in enumerate(zip(head, text)) if one != other), min(len(head), len(text)))
        return DataError(
            f"the chat template writes message {number} in another way once others follow",
            code="DAT25",
            where=where,
            why=f"{head[same : same + 40]!r} became {text[same : same + 40]!r}, so what was generated is not known",
            fix="set data.loss_mask_type=last, put {% generation %} markers into the template, or leave reasoning out",
        )
