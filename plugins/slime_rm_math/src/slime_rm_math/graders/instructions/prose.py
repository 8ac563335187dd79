"""Words, sentences and paragraphs of a response, by simple rules that take linear time."""

from __future__ import annotations

import re
import string

WORD = re.compile(r"\w+")
SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]]*+(?=\s|$)")
ABBREVIATIONS = ("mr", "mrs", "ms", "dr", "prof", "st", "vs", "etc", "e.g", "i.e", "jr", "sr", "inc", "no", "fig")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, as IFEval counts them."""
    return WORD.findall(text)


def tokens(text: str) -> list[str]:
    """What blanks separate, without the punctuation around it."""
    return [bare for word in text.split() if (bare := word.strip(string.punctuation))]


def without_punctuation(text: str) -> str:
    """The text without ASCII punctuation."""
    return text.translate(str.maketrans("", "", string.punctuation))


def sentences(text: str) -> list[str]:
    """Sentences: they end with . ! or ? before a blank, unless after a usual abbreviation, or at the end.

    IFEval asks nltk's punkt, which learned its abbreviations; on ordinary prose both count the same.

    Example:
        sentences("Dr. Who came. Why?")    # ["Dr. Who came.", "Why?"]
    """
    sentences_read, start = [], 0
    for end in SENTENCE_END.finditer(text):
        before = text[max(start, end.start() - 12) : end.start()].split()
        if end.group() == "." and before and before[-1].lower().lstrip("(\"'") in ABBREVIATIONS:
            continue
        sentences_read.append(text[start : end.end()].strip())
        start = end.end()
    sentences_read.append(text[start:].strip())
    return [sentence for sentence in sentences_read if sentence]
