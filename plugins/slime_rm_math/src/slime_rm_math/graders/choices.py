"""Grading of multiple choice and short texts: gpqa's letter, SQuAD's F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from slime_rm_math.graders.answers import after_thought, label_text
from slime_rm_math.graders.verdict import RIGHT, WRONG, GradingVerdict, unjudged, unparsable

LETTERS = tuple(string.ascii_uppercase[:10])
GAP = r"[\s:*]{0,6}"
LETTER = (  # a capital, or a small letter that is no article: (b), b.
    r"[\s:(*\[{$\"'_`]{0,8}(?:\\(?:boxed|text|textbf|mathbf|mathrm)[\s({*\\]{0,4}){0,3}"
    r"([A-Z]|[a-z](?=[)\]}.,;*$\"']|\s{0,9}\Z))\b"
)
NAMED = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"\b(?i:answer|(?:correct|right|best|final)\s{{1,3}}(?:option|choice)){GAP}"
        rf"(?i:is)?{GAP}(?i:option\s|choice\s)?{LETTER}",
        r"\b([A-Z])[)*\]]{0,3}\s{1,3}is\s{0,3}(?:the\s{1,3})?correct",
        rf"\b(?i:option|choice){GAP}(?i:is)?{LETTER}",
    )
)
"""What says that a letter is the answer, the plainest first: an "option A" that is turned down counts only without."""
_CAPITAL = r"[(*\[{]{0,3}(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{){0,2}\b[A-Z]\b[)*\]}]{0,4}"
_CAPITALS = (
    rf"(?:(?:option|choice)s?\s)?{_CAPITAL}"
    rf"(?:\s{{0,3}}(?:,\s{{0,3}}(?:and|or|nor)?|/|and|or|nor|&)\s{{0,3}}(?:(?:option|choice)\s)?{_CAPITAL}){{0,9}}"
)
REFUSED = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"(?:\b(?i:not|never|neither|nor|cannot|rather\sthan|instead\sof|except|(?:exclud|eliminat|reject)(?:e|es|s|ed|ing)?"
        r"|rul(?:e|es|ed|ing)\sout)|n['\u2019]t)"
        rf"(?:\s{{1,3}}(?:be|is|the|an?|correct|right|answer|letter)\b){{0,4}}:?\s{{0,3}}{_CAPITALS}",
        rf"{_CAPITALS}\s{{1,3}}(?i:is|are|was|were|can|could|does|do|must|seems?|looks?|would)?"
        r"(?:\s{0,3}(?i:be|clearly|definitely|also|both|all|therefore|thus)){0,2}"
        r"(?:\s{0,3}(?i:not|never|cannot|wrong|incorrect|false|excluded|eliminated|rejected|ruled\sout|impossible)\b"
        r"|n['\u2019]t\b)(?!\s{1,3}(?i:wrong|incorrect|false|excluded|only))",
    )
)
"""Letters that a response turns down: "the answer is not B", "B and C are wrong". They are no choice."""
ALONE = re.compile(r"\b([A-Z])\b", re.ASCII)
ONLY = re.compile(r"[\s(*\[]{0,4}([A-Za-z])[\s)*\].]{0,4}")
BRACKETS = "()[]{}.:* "
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
DECISIONS = frozenset(("yes", "no", "noanswer"))


def choice(response: str, label: Any, metadata: Mapping[str, Any]) -> GradingVerdict:
    """GPQA: whether the letter that a response chooses is the label's.

    As THUDM/slime's scorer of GPQA (Rein et al. 2023, arXiv 2311.12022): after the chain of thought, a letter said to
    be the answer, else the last capital letter that stands alone. The label is a letter ("B", "(B)"), the number of a
    choice, or its text; the row's metadata may hold ``choices``, ``valid_letters`` and ``correct_letter``. Unlike
    there, of several letters that are said to be the answer the last counts, "option A" does not count beside "the
    answer is B", letters that are turned down ("not B", "B is wrong") never count, and
    without a letter a choice's text must be the whole response.

    Example:
        choice("so the answer is (B)", "B", {})    # RIGHT
    """
    if reason := _misshapen(metadata):
        return unjudged(reason)
    right = _right_letter(label, metadata, *_offered(metadata))
    if right is None:
        return unjudged(f"the label {label_text(label) or '':.40} is none of the choices")
    chosen = letter_of(response, metadata)
    if chosen is None:
        return unparsable("no choice in it")
    return RIGHT if chosen == right else WRONG


def letter_of(response: str, metadata: Mapping[str, Any]) -> str | None:
    """The letter that a response chooses, as :func:`choice` reads it; None where it chooses none.

    Example:
        letter_of("so the answer is (B)", {})    # "B"
    """
    if _misshapen(metadata):
        return None
    letters, texts = _offered(metadata)
    text = after_thought(response)
    chosen = _chosen(text, letters)
    if chosen is not None:
        return chosen
    letters_of = [letter for letter, one in zip(letters, texts, strict=False) if plain_text(one) == plain_text(text)]
    return letters_of[0] if letters_of else None


def _misshapen(metadata: Mapping[str, Any]) -> str:
    for key, kinds in (("choices", (list, tuple, Mapping)), ("valid_letters", (list, tuple, str))):
        if metadata.get(key) is not None and not isinstance(metadata[key], kinds):
            return f"the row's {key} are a {type(metadata[key]).__name__}, not a list"
    return ""


def _offered(metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Letters, and the texts of the choices where the row has them."""
    choices = metadata.get("choices")
    texts = [str(one) for one in (choices.values() if isinstance(choices, Mapping) else choices or ())]
    return [str(one).upper() for one in metadata.get("valid_letters") or LETTERS[: len(texts) or None]], texts


def _right_letter(label: Any, metadata: Mapping[str, Any], letters: list[str], texts: list[str]) -> str | None:
    correct = metadata.get("correct_letter")
    if isinstance(correct, str) and correct.strip().upper() in letters:
        return str(correct).strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    text = str(label or "").strip()
    if text.strip(BRACKETS).upper() in letters:
        return text.strip(BRACKETS).upper()
    same = [letter for letter, one in zip(letters, texts, strict=False) if plain_text(one) == plain_text(text)]
    return same[0] if same else None


def _chosen(text: str, letters: list[str]) -> str | None:
    whole = ONLY.fullmatch(text)
    if whole is not None and whole[1].upper() in letters:
        return whole[1].upper()
    for pattern in REFUSED:
        text = pattern.sub(" ; ", text)
    for pattern in NAMED:
        letters_chosen: list[str] = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if letters_chosen:
            return letters_chosen[-1]
    alone: list[str] = [letter for letter in ALONE.findall(text) if letter in letters]
    return alone[-1] if alone else None


def plain_text(text: str) -> str:
    """Lower case, without punctuation, articles and double blanks (SQuAD's normal form, Rajpurkar et al. 2016)."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", bare).split())


def f1(response: str, label: str) -> tuple[float, float, float]:
    """F1, precision and recall of a response's words against the label's.

    SQuAD's F1 (Rajpurkar et al. 2016, arXiv 1606.05250) with HotpotQA's rule (Yang et al. 2018) that yes, no and
    noanswer are right or wrong as a whole.

    Example:
        f1("the cat sat", "a cat sat down")    # (0.8, 1.0, 0.667): cat, sat of cat, sat; of cat, sat, down
    """
    answer, target = plain_text(response), plain_text(label)
    if answer != target and (answer in DECISIONS or target in DECISIONS):
        return 0.0, 0.0, 0.0
    words, label_words = answer.split(), target.split()
    same = sum((Counter(words) & Counter(label_words)).values())
    if same == 0:
        return 0.0, 0.0, 0.0
    precision, recall = same / len(words), same / len(label_words)
    return 2 * precision * recall / (precision + recall), precision, recall
