"""The best and the worst samples of each step, as lines of ``samples.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.types import Group, Message, Sample

LIMIT = 4000
"""Characters kept of a prompt and of a response."""


class SampleLog:
    """Appends ``count`` samples a step to ``samples.jsonl``."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count

    def write(self, version: int, groups: Sequence[Group]) -> None:
        """Write the picks of one step."""
        rows = pick(groups, self._count)
        if rows:
            with self._path.open("a", encoding="utf-8", errors="surrogatepass") as file:
                for rank, sample in rows:
                    file.write(json.dumps(row(version, rank, sample)) + "\n")


def pick(groups: Sequence[Group], count: int) -> list[tuple[str, Sample]]:
    """Half of ``count`` (rounded up) best and the rest worst by reward; ties go by index, none twice."""
    samples = [s for group in groups for s in group.samples if isinstance(s.reward, (int, float))]
    order = sorted(samples, key=lambda s: -float(s.reward))  # type: ignore[arg-type]
    best = order[: min((count + 1) // 2, len(order))]
    remaining = order[len(best) :]
    worst = remaining[max(0, len(remaining) - count // 2) :]
    return [("best", s) for s in best] + [("worst", s) for s in reversed(worst)]


def row(version: int, rank: str, sample: Sample) -> dict[str, Any]:
    """One line of ``samples.jsonl``, with stable keys."""
    return {
        "version": version,
        "rank": rank,
        "id": sample.id,
        "task": sample.task,
        "model": sample.model,
        "reward": sample.reward,
        "status": str(sample.status),
        "response_length": sample.response_length,
        "terms": sample.metadata.get("reward_terms", {}),
        "prompt": _cut(prompt_text(sample.prompt)),
        "response": _cut(sample.response),
        "label": _cut(sample.label if isinstance(sample.label, str) else json.dumps(sample.label, default=str)),
    }


def prompt_text(prompt: str | list[Message]) -> str:
    """A prompt as text: chat messages become ``role: content`` lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)


def _cut(text: str) -> str:
    if len(text) <= LIMIT:
        return text
    half = LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - LIMIT} characters ...]\n{text[-half:]}"
