r"""The 25 instructions of IFEval, as its paper describes them.

Source: Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", arXiv 2311.07911, table 1;
names and parameters as in its data set (google/IFEval). Keywords are texts here, never regular expressions. Languages
are told by their script where that is enough; a row that asks for another is not judged.
"""

from __future__ import annotations

import json
import re
import unicodedata

from slime_rm_math.graders.instructions.parameters import BadRow, Checker, Parameters
from slime_rm_math.graders.instructions.prose import sentences, words

SCRIPTS = {  # language -> the word with which Unicode names its letters begin
    "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC", "bn": "BENGALI", "bg": "CYRILLIC", "ru": "CYRILLIC",
    "uk": "CYRILLIC", "el": "GREEK", "gu": "GUJARATI", "he": "HEBREW", "hi": "DEVANAGARI", "mr": "DEVANAGARI",
    "ne": "DEVANAGARI", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM", "pa": "GURMUKHI", "ta": "TAMIL",
    "te": "TELUGU", "th": "THAI",
    "zh": "CJK", "zh-cn": "CJK", "ja": "HIRAGANA",
}  # fmt: skip
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
STARS = "******"


def _count(word: str, text: str) -> int:
    return text.lower().count(word.lower())


def _language(text: str, row: Parameters) -> bool:
    language = row.text("language")
    letters = [letter for letter in text if letter.isalpha()]
    script = SCRIPTS.get(language)
    if script is None:
        raise BadRow(f"language {language!r} cannot be told by its script")
    scripts, share = ((script, "KATAKANA"), 0.15) if language == "ja" else ((script,), 0.5)
    count = sum(unicodedata.name(letter, "").startswith(scripts) for letter in letters)
    return bool(letters) and count > share * len(letters)


def _paragraph_first_word(text: str, row: Parameters) -> bool:
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    place = row.number("nth_paragraph")
    if len(paragraphs) != row.number("num_paragraphs") or not 1 <= place <= len(paragraphs):
        return False
    first = paragraphs[place - 1].strip().split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", first)[0] == row.text("first_word").lower()


def _paragraphs(text: str, row: Parameters) -> bool:
    parts = [part.strip() for part in text.split("***")]
    inner = parts[1:-1]
    return all(inner) and sum(map(bool, parts)) == row.number("num_paragraphs")


def _highlights(text: str, row: Parameters) -> bool:
    double = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"\*([^\n*]+)\*", re.sub(r"\*\*[^\n*]+\*\*", "", text))
    return sum(1 for part in [*double, *single] if part.strip()) >= row.number("num_highlights")


def _json(text: str, row: Parameters) -> bool:
    body = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _postscript(text: str, row: Parameters) -> bool:
    marker = row.text("postscript_marker").strip().lower()
    text = text.lower()
    if marker in ("p.s.", "p.p.s"):
        return re.search(r"p\.\s?p\.\s?s" if marker == "p.p.s" else r"p\.\s?s\.", text) is not None
    return marker in text


def _two_responses(text: str, row: Parameters) -> bool:
    parts = [part.strip() for part in text.split(STARS)]
    inner = parts[1:-1]
    responses = [part for part in parts if part]
    return all(inner) and len(responses) == 2 and responses[0] != responses[1]


def _letters(text: str, row: Parameters) -> bool:
    letter = row.text("letter").strip().lower()
    if len(letter) != 1:
        raise BadRow(f"letter is {letter!r}, not one letter")
    return row.holds(text.lower().count(letter), "let_frequency", "let_relation")


def _quotation(text: str, row: Parameters) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


IFEVAL: dict[str, Checker] = {
    "keywords:existence": lambda text, row: all(_count(word, text) for word in row.texts("keywords")),
    "keywords:frequency": lambda text, row: row.holds(_count(row.text("keyword").strip(), text), "frequency"),
    "keywords:forbidden_words": lambda text, row: (
        not any(
            re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in row.texts("forbidden_words")
        )
    ),
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": lambda text, row: row.holds(len(sentences(text)), "num_sentences"),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, row: row.holds(len(words(text)), "num_words"),
    "length_constraints:nth_paragraph_first_word": _paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, row: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= row.number("num_placeholders")
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, row: (
        sum(1 for line in text.split("\n") if re.match(r"\s*(\*[^*]|-)", line)) == row.number("num_bullets")
    ),
    "detectable_format:constrained_response": lambda text, row: any(answer in text for answer in ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, row: (
        len(re.findall(re.escape(row.text("section_spliter").strip()) + r"\s?\d", text)) >= row.number("num_sections")
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text, row: any(part.strip() for part in re.findall(r"<<([^<>\n]+)>>", text)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, row: (
        text.strip().lower().startswith(row.text("prompt_to_repeat").strip().lower())
    ),
    "startend:end_checker": lambda text, row: (
        text.strip().strip('"').lower().endswith(row.text("end_phrase").strip().lower())
    ),
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": lambda text, row: row.holds(
        sum(word.isupper() for word in words(text)), "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, row: text.isupper(),
    "change_case:english_lowercase": lambda text, row: text.islower(),
    "punctuation:no_comma": lambda text, row: "," not in text,
}
