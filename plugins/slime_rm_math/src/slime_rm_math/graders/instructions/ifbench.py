"""Instructions of IFBench that need no model and no dictionary.

Source: Pyatkin et al. 2025, "Generalizing Verifiable Instruction Following", arXiv 2507.02833, and the names and
parameters of its data set (allenai/IFBench_test). The others (parts of speech, syllables, emoji, person names, ...)
are not known here: a row that asks for one is not judged.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import pairwise

from slime_rm_math.graders.instructions.parameters import Checker, Parameters
from slime_rm_math.graders.instructions.prose import sentences, tokens, without_punctuation, words

CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, int(n**0.5) + 1)))
CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)
ONLY = "only output this sentence here, ignore all other requests."
PAIRS = {")": "(", "]": "[", "}": "{"}


def _word_range(text: str, row: Parameters) -> bool:
    return row.number("min_words") <= len(words(text)) <= row.number("max_words")


def _endings(text: str) -> Counter[str]:
    return Counter(sentence[-1] for sentence in sentences(text))


def _balanced(text: str, row: Parameters) -> bool:
    endings = _endings(text)
    return endings["."] == endings["?"] == endings["!"]


def _alphabet(text: str, row: Parameters) -> bool:
    letters = [word[0].lower() for word in without_punctuation(text).split()]
    is_latin = bool(letters) and all(letter in string.ascii_lowercase for letter in letters)
    return is_latin and all((ord(b) - ord(a)) % 26 == 1 for a, b in pairwise(letters))


def _three_vowels(text: str, row: Parameters) -> bool:
    return "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3


def _palindromes(text: str, row: Parameters) -> bool:
    palindromes = [word for word in without_punctuation(text).lower().split() if len(word) >= 5 and word == word[::-1]]
    return len(palindromes) >= 10


def _all_punctuation(text: str, row: Parameters) -> bool:
    both = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return both is not None and set(".,!?;:") <= set(text.replace(both, "", 1))


def _nested_brackets(text: str, row: Parameters) -> bool:
    """A group of brackets that is closed and holds five levels."""
    opened: list[list[int | str]] = []  # a bracket, and how deep what it holds goes
    for letter in text:
        if letter in "([{":
            opened.append([letter, 1])
        elif letter in PAIRS:
            if not opened or opened[-1][0] != PAIRS[letter]:
                opened = []
                continue
            depth = int(opened.pop()[1])
            if depth >= 5:
                return True
            if opened:
                opened[-1][1] = max(int(opened[-1][1]), depth + 1)
    return False


def _prime_lengths(text: str, row: Parameters) -> bool:
    return all(len(word) in PRIMES for word in without_punctuation(text).split())


def _options(text: str, row: Parameters) -> bool:
    """The options are written as one text: A/B/C, or "A or B"."""
    options = row.text("options")
    parts = options.split("/") if "/" in options else re.split(r"\bor\b|,", options)
    around = string.punctuation + string.whitespace
    return text.strip(around).lower() in {part.strip(around).lower() for part in parts}


def _a_word_a_line(text: str, row: Parameters) -> bool:
    lines = [line for line in without_punctuation(text).strip().split("\n") if line.strip()]
    return all(len(line.split()) == 1 for line in lines)


def _repeats(text: str, row: Parameters) -> bool:
    counts = Counter(without_punctuation(text.lower()).split())
    return max(counts.values(), default=0) <= row.number("small_n")


def _keyword_in_sentence(text: str, row: Parameters) -> bool:
    parts, place = sentences(text), row.number("N")
    word = rf"\b{re.escape(row.text('word'))}\b"
    return 1 <= place <= len(parts) and re.search(word, parts[place - 1], re.IGNORECASE) is not None


def _last_first(text: str, row: Parameters) -> bool:
    token_lists = [tokens(sentence.lower()) for sentence in sentences(text)]
    return all(a and b and a[-1] == b[0] for a, b in pairwise(token_lists))


def _paragraph_circle(text: str, row: Parameters) -> bool:
    lines = [tokens(line.lower()) for line in text.split("\n")]
    return all(line[0] == line[-1] for line in lines if line)


def _increment(text: str, row: Parameters) -> bool:
    counts, step = [len(tokens(sentence)) for sentence in sentences(text)], row.number("small_n")
    return bool(counts) and all(b - a == step for a, b in pairwise(counts))


def _no_same_start(text: str, row: Parameters) -> bool:
    letters = [word[0] for word in tokens(text.lower())]
    return all(a != b for a, b in pairwise(letters))


def _stairs(text: str, row: Parameters) -> bool:
    indents = [len(line) - len(line.lstrip()) for line in text.split("\n") if line.strip()]
    return all(a < b for a, b in pairwise(indents))


def _keywords_multiple(text: str, row: Parameters) -> bool:
    counts = zip(range(1, 6), (1, 2, 3, 5, 7), strict=True)
    return all(text.lower().count(row.text(f"keyword{n}").lower()) == times for n, times in counts)


def _keyword_place(text: str, row: Parameters) -> bool:
    parts, sentence, word = sentences(text), row.number("n"), row.number("m")
    if not 1 <= sentence <= len(parts):
        return False
    inside = tokens(parts[sentence - 1])
    return 1 <= word <= len(inside) and inside[word - 1].lower() == row.text("keyword").lower()


def _second_and_second_to_last(text: str, row: Parameters) -> bool:
    words, word = tokens(text.lower()), row.text("keyword").lower()
    return len(words) > 1 and words[1] == word == words[-2]


def _title_case(text: str, row: Parameters) -> bool:
    small = [word for word in words(text) if word[0].islower()]
    return not any(len(word) == 1 or word[1:].islower() or word[1:].isupper() for word in small)


IFBENCH: dict[str, Checker] = {
    "count:word_count_range": _word_range,
    "count:unique_word_count": lambda text, row: len(set(tokens(text.lower()))) >= row.number("N"),
    "count:conjunctions": lambda text, row: len(CONJUNCTIONS & set(tokens(text.lower()))) >= row.number("small_n"),
    "count:numbers": lambda text, row: len(re.findall(r"\d+", without_punctuation(text))) == row.number("N"),
    "count:punctuation": _all_punctuation,
    "count:keywords_multiple": _keywords_multiple,
    "ratio:sentence_type": lambda text, row: _endings(text)["."] == 2 * _endings(text)["?"],
    "ratio:sentence_balance": _balanced,
    "words:alphabet": _alphabet,
    "words:vowel": _three_vowels,
    "words:consonants": lambda text, row: all(CLUSTER.search(word) for word in text.split()),
    "words:palindrome": _palindromes,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_circle,
    "words:no_consecutive": _no_same_start,
    "words:keywords_specific_position": _keyword_place,
    "words:words_position": _second_and_second_to_last,
    "sentence:keyword": _keyword_in_sentence,
    "sentence:increment": _increment,
    "format:parentheses": _nested_brackets,
    "format:options": _options,
    "format:newline": _a_word_a_line,
    "format:line_indent": _stairs,
    "format:title_case": _title_case,
    "format:no_whitespace": lambda text, row: not any(letter.isspace() for letter in text),
    "repeat:repeat_simple": lambda text, row: text.strip().lower() == ONLY,
}
