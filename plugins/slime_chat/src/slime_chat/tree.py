"""A session's dialogues as a tree of answers, and the deepest answer that a history holds.

    top -- [system, user] answer 0 -- [tool] answer 1 -- [tool] answer 3        the agent continues
                 |            `------ [tool] answer 2                           the same request again: a fork
                 `--- (another first message) answer 4                          a sub-agent, a compacted context

A node is an answer of the engine, with the messages that led to it from its parent's. A history goes down the tree as
long as its messages are those of a child, and the assistant's message is the one that was given there. What is left
over becomes the prompt of a new node, including assistant messages that the engine never generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_chat.messages import Key, key_of, sameness
from slime_core.types import Completion, MediaInputs, Message, Sample


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One answer; the top of a tree has none. ``prompt`` are the ids between the parent's answer and this one's."""

    parent: Node | None = None
    number: int = -1  # in the order in which answers came; a top has -1
    prompt: list[int] = field(default_factory=list)
    done: Completion | None = None
    temperature: float = 1.0  # of its draws
    role: str = "policy"  # that the agent played
    model: str = ""  # the adapter that made it
    message: Message = field(default_factory=dict)  # the message that the client was given
    stop: str = ""  # the text that ended it
    pictures: Sample = field(default_factory=Sample)  # those of ``prompt`` alone
    rewritten: int = 0  # assistant messages in the prompt that are no answer of ours there
    children: dict[tuple[Key, ...], list[Node]] = field(default_factory=dict)  # by messages, the answer's own the last
    spans: set[int] = field(default_factory=set)  # lengths of those keys

    @property
    def answer(self) -> list[int]:
        """The engine's ids."""
        return [] if self.done is None else self.done.tokens

    def path(self) -> list[Node]:
        """The answers from the first to this one."""
        nodes, node = list[Node](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> list[int]:
        """Ids of the whole dialogue up to the end of this answer."""
        return [token for node in self.path() for part in (node.prompt, node.answer) for token in part]


def joined_pictures(parts: Iterable[Sample]) -> Sample:
    """The pictures of a dialogue from those of its prompts, in order; arrays of one prompt alone are not copied."""
    inputs: MediaInputs = {}
    arrays: dict[str, list[Any]] = {}
    for part in parts:
        for kind, items in (part.multimodal_inputs or {}).items():
            inputs.setdefault(kind, []).extend(items)
        for name, array in (part.multimodal_train_inputs or {}).items():
            arrays.setdefault(name, []).append(array)
    joined = {name: same[0] if len(same) == 1 else np.concatenate(same) for name, same in arrays.items()}
    return Sample(multimodal_inputs=inputs or None, multimodal_train_inputs=joined or None)


class Tree:
    """See the module."""

    def __init__(self) -> None:
        self._tops: dict[str, Node] = {}  # by the tools that a dialogue began with
        self.nodes: list[Node] = []
        self.roots = 0  # first messages that dialogues began with
        self.forks = 0  # answers with an earlier sibling

    def find(self, messages: Sequence[Message], keys: Sequence[Key], tools: str) -> tuple[Node, int]:
        """The deepest answer that a history holds, and how many of its messages lead there.

        Of several answers with the same words, prefer the one with the same text and ids, then the latest.
        """
        if tools not in self._tops:
            self._tops[tools] = Node()
        top = self._tops[tools]
        best, waiting = (0, 0, -1, top), [(0, 0, -1, top)]
        while waiting:
            entry = waiting.pop()
            best = max(best, entry, key=lambda item: item[:3])
            start, alike, _, node = entry
            for span in node.spans:
                end = start + span
                for child in node.children.get(tuple(keys[start:end]), ()) if end <= len(keys) else ():
                    waiting.append((end, alike + sameness(messages[end - 1], child.message), child.number, child))
        return best[3], best[0]

    def add(self, parent: Node, words: Sequence[Key], node: Node) -> None:
        """Hang an answer under ``parent``, to which ``words`` led."""
        node.parent, node.number = parent, len(self.nodes)
        self.nodes.append(node)
        begins = parent.done is None and not any(key[:-1] == tuple(words) for key in parent.children)
        self.roots += begins
        self.forks += bool(parent.children) and not begins
        key = (*words, key_of(node.message))
        parent.children.setdefault(key, []).append(node)
        parent.spans.add(len(key))

    def leaves(self) -> list[Node]:
        """Answers without a follow-up request, in order of arrival."""
        return [node for node in self.nodes if not node.children]
