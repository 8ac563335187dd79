"""The engine's answers to one request, before they take the form of an API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_chat.request import ChatRequest
    from slime_chat.tree import Node


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatReply:
    """See the module; ``name`` is unique in a run as often as its draws are."""

    ask: ChatRequest
    nodes: Sequence[Node]
    prompt_tokens: int
    name: str

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(node.answer) for node in self.nodes)
