"""`slime.utils.mask_utils`: token ids and loss masks of whole conversations, as slime's supervised training has them.

Unlike `slime_core.data.conversations`, which leaves out what no model generates, slime also trains the line break
after an answer's end token, and leaves nothing out after the last answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from slime_core.types import Message

PROBE: Message = {"role": "user", "content": "probe"}
TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
ANSWER = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>\n?)", re.DOTALL)


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each mask from its first 1 to its end; 0 without one."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of conversations, for one tokenizer and one of slime's ``--loss-mask-type``.

    ``qwen`` renders each message alone, ``qwen3`` behind a user's message, so that every answer has its reasoning.
    ``qwen3_5`` renders the conversation once. ``distill_qwen`` trains the last message after the first. An answer
    whose ``step_loss_mask`` is not 1 has mask 0.

    Example:
        MultiTurnLossMaskGenerator(tokenizer, "qwen3").get_loss_mask(messages)   # (token_ids, loss_mask)
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type
        self.system_message_length = self.gen_token_length = 0
        if tokenizer_type in ("qwen", "qwen3"):
            self.system_message_length, self.gen_token_length = self.get_system_message_length()

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """See the function of this name."""
        return get_response_lengths(loss_masks)

    def get_system_message_length(self) -> tuple[int, int]:
        """Tokens of the template's own system message, and of what opens an answer."""
        system, turn = self._probe()
        opening = self._text([PROBE], add_generation_prompt=True).removeprefix(system + turn)
        return len(self._ids(system)), len(self._ids(opening))

    def get_loss_mask(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and 1 for those that are trained.

        Raises:
            ValueError: an unknown type, or with ``qwen3_5`` a template that writes answers in another way.
        """
        if self.tokenizer_type not in TYPES:
            raise ValueError(f"Unsupported tokenizer type: {self.tokenizer_type}; types are {', '.join(TYPES)}")
        distilled = self.tokenizer_type == "qwen" and "<｜Assistant｜>" in self.tokenizer.get_added_vocab()
        kind = "distill_qwen" if distilled else self.tokenizer_type
        masked: tuple[list[int], list[int]] = getattr(self, f"gen_multi_turn_loss_mask_{kind}")(messages, tools)
        return masked

    def gen_multi_turn_loss_mask_qwen(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Each message rendered alone, the template's own system message before the first."""
        first, *others = messages
        system, _ = self._probe()
        texts = [self._text([message]) for message in others]
        texts = [
            text if message["role"] == "system" else text.removeprefix(system)
            for message, text in zip(others, texts, strict=True)
        ]
        return self._masked(messages, [self._text([first], tools=tools), *texts])

    def gen_multi_turn_loss_mask_qwen3(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Each message rendered beside a user's, which is cut off again; consecutive results of tools share a turn."""
        runs = [(role, list(run)) for role, run in groupby(messages, lambda message: message["role"])]
        parts = [part for role, run in runs for part in ([run] if role == "tool" else [[item] for item in run])]
        system, turn = self._probe()
        texts = [self._text([*parts[0], PROBE], tools=tools).removesuffix(turn)]
        texts += [self._text([PROBE, *part]).removeprefix(system + turn) for part in parts[1:]]
        return self._masked([part[0] for part in parts], texts)

    def gen_multi_turn_loss_mask_qwen3_5(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """The conversation rendered once; an answer is trained from behind its opening ``<think>`` line."""
        text = self._text(messages, tools=tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers = [message for message in messages if message["role"] == "assistant"]
        spans = [match.span(1) for match in ANSWER.finditer(text)]
        if len(spans) < len(answers) or encoded.get("offset_mapping") is None:
            raise ValueError(
                f"{len(answers)} assistant messages, but {len(spans)} <|im_start|>assistant turns in the rendered text"
                if len(spans) < len(answers)
                else "qwen3_5 needs a fast tokenizer, one that returns offsets"
            )
        trained = [span for span, message in zip(spans, answers, strict=False) if _trains(message)]
        mask = [
            int(any(max(start, begin) < min(stop, end) for begin, end in trained))
            for start, stop in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), mask

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """The last message's content after the first message; no end token follows."""
        prompt = self._ids(self._text(messages[:1], tools=tools, add_generation_prompt=True))
        answer = self._ids(messages[-1]["content"])
        return prompt + answer, [0] * len(prompt) + [int(_trains(messages[-1]))] * len(answer)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Sequence[Message], input_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """``input_ids`` of a processor, and the mask of the messages' text, aligned at the end.

        Raises:
            ValueError: the text alone has more tokens than ``input_ids``.
        """
        _, mask = self.get_loss_mask([{**message, "content": _text_of(message)} for message in messages], tools)
        if len(mask) > len(input_ids):
            raise ValueError(f"the processor made {len(input_ids)} tokens, and the text alone has {len(mask)}")
        return input_ids, [0] * (len(input_ids) - len(mask)) + mask

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The text of each trained run."""
        runs = groupby(zip(token_ids, loss_masks, strict=False), lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in run]) for mask, run in runs if mask == 1]

    def _probe(self) -> tuple[str, str]:
        """The template's own system message, and a user's turn."""
        once, twice = self._text([PROBE]), self._text([PROBE, PROBE])
        return once[: 2 * len(once) - len(twice)], twice[len(once) :]

    def _masked(self, messages: Sequence[Message], texts: Sequence[str]) -> tuple[list[int], list[int]]:
        """Ids and mask of messages by their texts: an answer is trained from behind its opening."""
        ids: list[int] = []
        mask: list[int] = []
        for message, text in zip(messages, texts, strict=True):
            tokens = self._ids(text)
            trains = message["role"] == "assistant" and _trains(message)
            opening = self.gen_token_length if trains else len(tokens)
            ids += tokens
            mask += [int(place >= opening) for place in range(len(tokens))]
        return ids, mask

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, messages: Sequence[Message], **kwargs: Any) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs))


def _trains(message: Mapping[str, Any]) -> bool:
    return bool(message.get("step_loss_mask", 1) == 1)


def _text_of(message: Message) -> Any:
    """A message's content, of a list of parts the texts."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    return " ".join(part if isinstance(part, str) else part.get("text", "") for part in content if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or part.get("type") == "text"


__all__ = ["MultiTurnLossMaskGenerator", "get_response_lengths"]
