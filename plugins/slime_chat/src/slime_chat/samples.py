"""Training samples of a session's dialogues: every token of the engine's trains in exactly one of them.

    A -- B -- C          leaves C and D     sample 0: A B C   trains A, B, C
      `- D                                  sample 1: A D     trains D; A is prompt there

A sample's ids are the engine's input and output, in order. Its prompt ends where its first trained answer begins, so a
shared beginning costs no response token. Draws at another temperature, in another role or of another adapter train in
a sample of their own, since a sample has one of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_chat.tree import Node, joined_pictures
from slime_core.context import FINISHED
from slime_core.rollout.groups import sibling
from slime_core.types import Sample, Status, joined_experts

CHAT = "chat"
"""Key of a sample's metadata."""


def samples_of(
    issued: Sample,
    prompt: Sequence[int],
    leaves: Sequence[Node],
    facts: Mapping[str, Any],
    tokenizer: Any,
    status: Status | None = None,
) -> list[Sample]:
    """The samples of ``leaves``, the issued one first; without any answer that one alone, with ``prompt`` and nothing.

    Args:
        issued: the sample that the session was opened for; it is filled.
        prompt: its own prompt's ids.
        leaves: last answers of the dialogues.
        facts: what all samples' metadata say.
        tokenizer: decodes the text between answers.
        status: of every sample, if it is not that of its last answer.
    """
    parts = _parts(leaves)
    samples = [issued, *(sibling(issued, number) for number in range(1, len(parts)))]
    joined: dict[tuple[int, ...], Sample] = {}
    for number, sample in enumerate(samples):
        _empty(sample, prompt)
        sample.metadata[CHAT] = {**facts, "branches": len(leaves), "branch": 0, "answer": ""}
        if parts:
            branch, path, trained = parts[number]
            _fill(sample, path, trained, tokenizer)
            pictures = _pictures(path, joined)
            sample.multimodal_inputs = pictures.multimodal_inputs
            sample.multimodal_train_inputs = pictures.multimodal_train_inputs
            sample.metadata[CHAT] |= {"branch": branch, "answer": path[-1].message["content"]}
        else:
            sample.status = Status.COMPLETED
        sample.status = status or sample.status
    return samples


def _parts(leaves: Sequence[Node]) -> list[tuple[int, list[Node], set[int]]]:
    """Of each sample: its branch, its answers, and the numbers of those that train in it."""
    used: set[int] = set()
    parts = []
    for branch, leaf in enumerate(leaves):
        path = leaf.path()
        nodes = [node for node in path if node.number not in used]
        for kind in dict.fromkeys(map(_kind, nodes)):
            trained = {node.number for node in nodes if _kind(node) == kind}
            length = 1 + max(place for place, node in enumerate(path) if node.number in trained)
            parts.append((branch, path[:length], trained))
        used |= {node.number for node in nodes}
    return parts


def _kind(node: Node) -> tuple[float, str, str]:
    """What all trained answers of a sample have in common."""
    return node.temperature, node.role, node.model


def _empty(sample: Sample, prompt: Sequence[int]) -> None:
    sample.tokens, sample.response_length, sample.response = list(prompt), 0, ""
    sample.loss_mask = sample.rollout_log_probs = None
    sample.weight_versions, sample.rollout_routed_experts = [], None


def _pictures(path: Sequence[Node], joined: dict[tuple[int, ...], Sample]) -> Sample:
    """The pictures of a dialogue; those with the same ones share the arrays, which ``joined`` keeps by prompts."""
    nodes = [node for node in path if node.pictures.multimodal_inputs]
    key = tuple(id(node.pictures) for node in nodes)
    if key not in joined:
        joined[key] = joined_pictures(node.pictures for node in nodes)
    return joined[key]


def _fill(sample: Sample, path: Sequence[Node], trained: set[int], tokenizer: Any) -> None:
    first = next(place for place, node in enumerate(path) if node.number in trained)
    before = [token for node in path[:first] for token in (*node.prompt, *node.answer)]
    sample.tokens = [*before, *path[first].prompt]
    tokens: list[int] = []
    log_probs: list[float] = []
    mask: list[int] = []
    versions: list[int] = []
    texts: list[str] = []
    for node in path[first:]:
        assert node.done is not None
        words = node.prompt if tokens else []
        count = len(node.answer)
        tokens += [*words, *node.answer]
        log_probs += [*([0.0] * len(words)), *node.done.log_probs]
        mask += [*([0] * len(words)), *([int(node.number in trained)] * count)]
        versions += [*([-1] * len(words)), *node.done.versions]
        texts += [tokenizer.decode(words, skip_special_tokens=True) if words else "", node.done.text]
    experts = joined_experts(node.done for node in path if node.done is not None)
    sample.append_response(tokens, log_probs, mask, text="".join(texts), version=versions, routed_experts=experts)
    last = path[-1].done
    assert last is not None
    sample.status = FINISHED[last.finish]
    sample.temperature, sample.role, sample.model = _kind(path[first])
