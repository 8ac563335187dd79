"""Token ids between two answers: the feedback that follows an answer's own ids.

    <|im_start|>assistant  [the engine's ids]  <|im_end|> <|im_start|>user FEEDBACK<|im_end|> <|im_start|>assistant
                                               `--------------------------- between ------------------------------'

Nothing that was sampled is rendered or encoded again. A small conversation with a mark in the answer's place goes
through the chat template; what comes after the mark is the text between. It is encoded together with what stands
before it, and the ids before it must come out as they are alone (an **exact prefix**): then the ids after it are those
that the model would read there, whatever the tokenizer merges or puts in front of a text. Another mark is tried where
the border is not clean; with none that is, the template cannot be used so, and that is an error.

Words are a text, which is one user message, or messages of any role: a tool's result, or several speakers.
An answer that ends with the first of these ids (the end of a turn, which the engine samples) does not get it twice.
Special tokens quoted in the words are split, so that no text can forge a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.data.chat import encode, render
from slime_core.errors import DataError
from slime_core.media.placing import bare
from slime_core.media.references import inputs_of
from slime_core.types import Message

if TYPE_CHECKING:
    from slime_core.media.processor import MediaProcessor

OPEN, CLOSE = "<think>", "</think>"
MARKS = ("Qturnq", "turn7", "(0)")
USER: Message = {"role": "user", "content": "x"}


@dataclass(slots=True)
class Speech:
    """Encodes words between two answers with one tokenizer.

    Example:
        speech = Speech(tokenizer, template=True)
        tokens += [*answer, *speech.between("It does not compile.", answer)]
    """

    tokenizer: Any
    template: bool  # whether prompts went through the chat template
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the template, as for prompts
    plain: str = "\n\n{{feedback}}\n\n"  # without a template: the text around words between two answers
    media: MediaProcessor | None = None  # of a model that takes pictures: what stands for those of the words
    _heads: dict[str, list[int]] = field(default_factory=dict)  # ids of texts before a border, of which there are few
    _header: tuple[list[int], list[int]] | None = None
    _open: bool | None = None
    _ends: frozenset[int] = field(init=False)
    _specials: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._ends, self._specials = ends_of(self.tokenizer), specials_of(self.tokenizer)

    def between(self, words: str | Sequence[Message], answer: Sequence[int]) -> list[int]:
        """Ids that follow ``answer`` and end where the next one begins. Without a template ``words`` is a text.

        Parts of messages may be pictures: `Context.append_media` then adds them to the sample.

        Raises:
            DataError: TOK43 the template has no clean border after an answer, DAT24 messages without a template,
                DAT25 messages that the template refuses, DAT38 to DAT41 a picture that cannot be used.
        """
        ids = self._between([{**USER, "content": words}] if isinstance(words, str) else words)
        if self.media is not None:
            ids = self.media.expand(ids, inputs_of(words))
        repeated = bool(answer) and answer[-1] == ids[0] and ids[0] in self._ends
        return ids[1:] if repeated else ids

    @property
    def reasoning_open(self) -> bool:
        """Whether prompts end inside of reasoning: the template itself writes ``<think>``."""
        if self._open is None:
            opening = self._render([USER], generation=True) if self.template else ""
            self._open = opening.rfind(OPEN) > opening.rfind(CLOSE)
        return self._open

    @property
    def header(self) -> tuple[list[int], list[int]]:
        """Ids at a prompt's end that the template writes for an answer to come only, and those it has for past ones.

        An answer whose reasoning is dropped takes the second in place of the first (Qwen3 without thinking begins an
        answer with an empty ``<think>``, and past ones without).

        Raises:
            DataError: TOK43 the two beginnings of an answer have nothing to do with each other.
        """
        if self._header is None:
            self._header = self._headers() if self.template else ([], [])
        return self._header

    def visible(self, answer: Sequence[int]) -> list[int]:
        """An answer without its reasoning: the ids after the one in which the last ``</think>`` ends, and after white
        space there; nothing of one whose reasoning never ends.
        """
        ids = list(answer)
        text = self._decode(ids)
        if CLOSE not in text:
            return [] if OPEN in text or self.reasoning_open else ids
        end = text.rfind(CLOSE) + len(CLOSE)
        low, high = 0, len(ids)
        while low < high:  # the fewest ids whose text reaches the end
            middle = (low + high) // 2
            low, high = (middle + 1, high) if len(self._decode(ids[:middle])) < end else (low, middle)
        while low < len(ids) and not self._decode(ids[low : low + 1]).strip() and ids[low] not in self._ends:
            low += 1
        return ids[low:]

    def text(self, answer: Sequence[int]) -> str:
        """What an answer's ids say, reasoning and its tags included, without the special tokens that end it."""
        ids, ends = list(answer), self._ends
        while ids and ids[-1] in ends:
            ids.pop()
        return self._decode(ids)

    def without_specials(self, value: Any) -> Any:
        """A message, or a part of one, in whose texts no special token is spelled out: names are a model's text too.

        Example: speech.without_specials({"role": "tool", "content": "<|im_end|>"})["content"] == "< |im_end|>"
        """
        if isinstance(value, str):
            return _split(value, self._specials)
        if isinstance(value, list):
            return [self.without_specials(item) for item in value]
        if isinstance(value, Mapping):
            return {key: item if key == "role" else self.without_specials(item) for key, item in value.items()}
        return value

    def _between(self, words: Sequence[Message]) -> list[int]:
        messages = [self.without_specials(message) for message in bare(words)]
        for mark in MARKS:
            if self.template:
                text = self._render([USER, {"role": "assistant", "content": mark}, *messages])
                place = text.find(mark) + len(mark)
            else:
                text, place = mark + self._plainly(messages), len(mark)
            ids = self._exact(text[:place], text[place:])
            if ids and place >= len(mark):
                return ids
        raise DataError(
            "the text between two answers has no clean beginning in tokens",
            code="TOK43",
            where="the tokenizer's chat template" if self.template else "the prompt template's `between`",
            why="its first characters melt into one token with the end of an answer",
            fix="end an answer with a special token in the chat template, or begin `between` with a line break",
        )

    def _plainly(self, messages: Sequence[Message]) -> str:
        content = messages[0].get("content") if len(messages) == 1 else None
        if isinstance(content, str):
            return self.plain.replace("{{feedback}}", content)
        raise DataError(
            "there are messages between two answers, but no chat template is applied",
            code="DAT24",
            where="a turn of a dialogue",
            fix="set data.apply_chat_template=true, or say one text",
        )

    def _headers(self) -> tuple[list[int], list[int]]:
        opening = self._render([USER], generation=True)
        whole = self._render([USER, {"role": "assistant", "content": MARKS[0]}, USER])
        past = whole[: whole.find(MARKS[0])]
        if opening.startswith(past):
            ids = self._exact(past, opening[len(past) :])
            headers: tuple[list[int], list[int]] | None = None if ids is None else (ids, [])
        else:
            ids = self._exact(opening, past[len(opening) :]) if past.startswith(opening) else None
            headers = None if ids is None else ([], ids)
        if headers is None:
            raise DataError(
                "the chat template begins past answers in another way than the one to come",
                code="TOK43",
                where="the tokenizer's chat template",
                why=f"{opening[-40:]!r} and {past[-40:]!r}, so reasoning cannot be dropped token by token",
                fix="--reasoning keep",
            )
        return headers

    def _exact(self, head: str, tail: str) -> list[int] | None:
        """The ids of ``tail`` after ``head``; None where they are not apart."""
        if head not in self._heads:
            self._heads[head] = encode(self.tokenizer, head)
        before, whole = self._heads[head], encode(self.tokenizer, head + tail)
        return whole[len(before) :] if whole[: len(before)] == before else None

    def _render(self, messages: list[Message], *, generation: bool = True) -> str:
        kwargs = {**self.kwargs, "add_generation_prompt": generation}
        return render(messages, self.tokenizer, template=True, where="a turn of a dialogue", kwargs=kwargs)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def ends_of(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens, the end of a text among them."""
    tokens = {*getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "eos_token_id", None)}
    return frozenset(int(token) for token in tokens if token is not None)


def unspecial(text: str, tokenizer: Any) -> str:
    """A text in which no special or added token of the tokenizer is spelled out: a space breaks each.

    Example: "<|im_end|>" becomes "< |im_end|>"
    """
    return _split(text, specials_of(tokenizer))


def specials_of(tokenizer: Any) -> list[str]:
    """Texts of special and added tokens, the longest first."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    names = {*map(str, getattr(tokenizer, "all_special_tokens", ())), *map(str, added)}
    return sorted((name for name in names if len(name) > 1), key=len, reverse=True)


def _split(text: str, names: Sequence[str]) -> str:
    for name in names:
        text = text.replace(name, f"{name[0]} {name[1:]}")
    return text


def split_reasoning(text: str, *, open_: bool = False) -> tuple[str, str]:
    """Reasoning and the rest of a text; ``open_``: the prompt ended inside of reasoning.

    Example: split_reasoning("<think>2+2</think>4") == ("2+2", "4")
    """
    opened = text.lstrip().startswith(OPEN)
    inside = text.lstrip().removeprefix(OPEN) if opened else text
    if not opened and not open_:
        return ("", text)
    thought, closed, rest = inside.partition(CLOSE)
    return (thought.strip(), rest.lstrip() if closed else "")
