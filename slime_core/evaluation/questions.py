"""Records of an evaluated set, one a question: its category, what each sample scored and answered.

The answer of a sample, for majority votes, is the first of
    metadata["extracted_answer"]   set by the reward function or by generation; "" for no answer
    the last \\boxed{...}           balanced braces
    what follows the last "####"   (GSM8K), or the last line that begins with "Answer:" (DAPO)
and none otherwise: a sample without one does not vote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.types import Group, Sample

ANSWER = "extracted_answer"  # not "answer", under which many data sets keep the label
CATEGORY = "category"
MAX_ANSWER = 200  # characters; a longer answer votes by its beginning and a hash
BOXED = "\\boxed{"
LABELLED = re.compile(r"^\W*(?:final )?answer\W*:(.*)$", re.IGNORECASE | re.MULTILINE)
HASHES = re.compile(r"####(.*)")


@dataclass(slots=True, frozen=True, kw_only=True)
class Question:
    """What came of one prompt of a set; a list has an entry a rollout.

    Example:
        Question(id="eval/aime/3", key="9f3c...", category="algebra", scores=[1.0, None], answers=["204", "12"])
    """

    id: str  # eval/NAME/ROW
    key: str  # hash of the row's label: evaluations are comparable only where it agrees
    category: str  # empty where rows have none
    scores: list[float | None]  # rewards; None where the reward could not judge
    answers: list[str | None]

    @property
    def judged(self) -> list[tuple[float, str | None]]:
        """Score and answer of the rollouts that were judged."""
        pairs = zip(self.scores, self.answers, strict=True)
        return [(score, answer) for score, answer in pairs if score is not None]


def questions_of(groups: Sequence[Group]) -> list[Question]:
    """The records of a set, in its order. A rollout of several samples (fan-out) is judged by its last."""
    questions = []
    for group in groups:
        ends = [group.samples[indices[-1]] for indices in group.rollouts.values() if indices]
        category = group.prompt.metadata.get(CATEGORY)
        questions.append(
            Question(
                id=group.id,
                key=key_of(group.prompt.label),
                category="" if category is None else str(category)[:MAX_ANSWER],
                scores=[float(s.reward) if isinstance(s.reward, (int, float)) else None for s in ends],
                answers=[answer_of(sample) for sample in ends],
            )
        )
    return questions


def key_of(label: Any) -> str:
    """16 hex digits of a label, which is any JSON value."""
    text = json.dumps(label, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def answer_of(sample: Sample) -> str | None:
    """The answer that a sample votes for, white space normalised; None without an answer."""
    answer = sample.metadata.get(ANSWER)
    text = answer if answer is not None else final_answer(sample.response)
    shown = " ".join(str(text).split()) if text is not None else ""
    if len(shown) > MAX_ANSWER:
        shown = f"{shown[: MAX_ANSWER - 20]}... {key_of(shown)}"
    return shown or None


def final_answer(text: str) -> str | None:
    """The answer that a response ends with, by the forms above.

    Example:
        final_answer("so \\\\boxed{1} or \\\\boxed{\\\\frac{1}{2}}") == "\\\\frac{1}{2}"
    """
    start = text.rfind(BOXED)
    if start >= 0:
        return _balanced(text, start + len(BOXED))
    matches = HASHES.findall(text) or LABELLED.findall(text)
    return matches[-1].strip(" \t$*.") if matches else None


def _balanced(text: str, start: int) -> str | None:
    """Text up to the brace that closes the one before ``start``; None where it is never closed."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[start:place]
    return None
