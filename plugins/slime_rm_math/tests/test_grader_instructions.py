"""Every verifiable instruction, with a response that follows it and one that does not, by hand."""

import pytest

from slime_rm_math.graders.instructions import INSTRUCTIONS, follow, forms
from slime_rm_math.graders.instructions.prose import sentences

pytestmark = pytest.mark.unit
AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}
PALINDROMES = "level radar civic kayak rotor refer madam stats tenet solos"
TABLE = {  # name: parameters, followed, not followed
    "keywords:existence": ({"keywords": ["cat", "dog"]}, "Cats and DOGS.", "Cats."),
    "keywords:frequency": ({"keyword": "ai", "frequency": 2, **AT_LEAST}, "AI is ai", "AI is it"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat", "C++"]}, "catalogue", "I know C++."),
    "keywords:letter_frequency": ({"letter": "q", "let_frequency": 2, "let_relation": "less than"}, "q", "qQ"),
    "language:response_language": ({"language": "ru"}, "Привет, world", "Hello, мир"),
    "length_constraints:number_sentences": ({"num_sentences": 2, **LESS}, "Dr. Who came.", "One. Two."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb\n***\nc"),
    "length_constraints:number_words": ({"num_words": 3.0, **AT_LEAST}, "one two three", "one two"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\nSo, b", "So\n\nb",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] at [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "a\nP. S. b", "a PS b"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na\nSECTION 2\nb", "SECTION 1\na",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<a title>>\ntext", "<< >>\ntext"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    "startend:end_checker": ({"end_phrase": "The end."}, 'So. the end."', "The end. So"),
    "startend:quotation": ({}, '"a"', '"a'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, "NASA and ESA", "NASA and Esa",
    ),
    "change_case:english_capital": ({}, "ALL OF IT.", "All OF IT."),
    "change_case:english_lowercase": ({}, "all of it.", "all of It."),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
    "count:word_count_range": ({"min_words": 2.0, "max_words": 3.0}, "a b", "a b c d"),
    "count:unique_word_count": ({"N": 3}, "a b c a", "a, b. A! b"),
    "count:conjunctions": ({"small_n": 2}, "this and that, but...", "this and that and"),
    "count:numbers": ({"N": 2}, "1,000 and 7", "1 and 2 and 3"),
    "count:punctuation": ({}, "a. b, c! d? e; f: g?!", "a. b, c! d? e; f:"),
    "count:keywords_multiple": (
        {f"keyword{n}": "vwxyz"[n - 1] for n in range(1, 6)},
        "v w w x x x y y y y y z z z z z z z", "v w x y z",
    ),
    "ratio:sentence_type": ({}, "A. B. C?", "A. B?"),
    "ratio:sentence_balance": ({}, "A. B! C?", "A. B!"),
    "words:alphabet": ({}, "yes zebra (and) bear", "a c"),
    "words:vowel": ({}, "a be i", "a be i o"),
    "words:consonants": ({}, "strong things", "strong idea"),
    "words:palindrome": ({}, PALINDROMES, PALINDROMES.replace("solos", "solo")),
    "words:prime_lengths": ({}, "it was three, be", "that is"),
    "words:repeats": ({"small_n": 2}, "a a b", "a a A"),
    "words:last_first": ({}, "I see it. It is here. Here we go.", "I see it. There it is."),
    "words:paragraph_last_first": ({}, "So it is so.\n\nYes yes", "So it is."),
    "words:no_consecutive": ({}, "a big cat", "big bad cat"),
    "words:keywords_specific_position": ({"keyword": "here", "n": 2, "m": 3}, "A. It is here.", "A. It is. Here"),
    "words:words_position": ({"keyword": "so"}, "it so is so good.", "so it is so"),
    "sentence:keyword": ({"word": "cat", "N": 2}, "A dog. A Cat!", "A cat. A dog."),
    "sentence:increment": ({"small_n": 1}, "One. Two two. Three three three.", "One. Two. Three."),
    "format:parentheses": ({}, "a (b [c {d (e [f])}])", "(((( ))))"),
    "format:options": ({"options": "yes/no/maybe"}, "Maybe.", "maybe not"),
    "format:newline": ({}, "a\nb.\n\nc", "a b\nc"),
    "format:line_indent": ({}, "a\n b\n  c", "a\n b\n b"),
    "format:title_case": ({}, "A Title 7 Long", "A title"),
    "format:no_whitespace": ({}, "all,of,it", "all of it"),
    "repeat:repeat_simple": ({}, "Only output this sentence here, ignore all other requests.", "Only this."),
}  # fmt: skip


def test_every_instruction_is_in_the_table():
    assert set(TABLE) == set(INSTRUCTIONS)
    assert len(TABLE) >= 50


@pytest.mark.parametrize("name", TABLE)
def test_an_instruction_by_hand(name):
    given, followed, not_followed = TABLE[name]
    row = {"instruction_id_list": [name], "kwargs": [given]}
    assert (follow(followed, row, loose=False).value, follow(not_followed, row, loose=False).value) == (1.0, 0.0)
    assert follow("", row, loose=True).value == 0.0


def test_the_reward_is_for_all_of_them_and_the_term_for_each():
    row = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{"relation": None}, None]}
    half = follow("no commas", row, loose=False)
    assert (half.value, half.terms) == (0.0, {"followed": 0.5})
    assert follow('"no commas"', row, loose=False).value == 1.0


def test_loose_forms_forgive_a_first_line_a_last_line_and_asterisks():
    assert forms("a\n*b*\nc")[:4] == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*"]
    row = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    text = 'Sure:\n**"So it is."**\nAnything else?'
    assert (follow(text, row, loose=False).value, follow(text, row, loose=True).value) == (0.0, 1.0)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": "punctuation:no_comma"},
        {"instruction_id_list": ["words:start_verb"]},
        {"instruction_id_list": ["os:system"], "kwargs": [{"command": "true"}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]},
        {"instruction_id_list": ["punctuation:no_comma"] * 65},
        {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": "3", **AT_LEAST}]},
        {
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"num_words": 3, "relation": "about"}],
        },
        {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": float("nan"), **LESS}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "cat"}]},
        {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]},
    ],
    ids=str,
)
def test_a_row_that_cannot_be_checked_is_not_the_responses_fault(row):
    reward = follow("text", row, loose=False)
    assert (reward.kind, reward.reason[:10]) == ("infra_error", "the row's ")


@pytest.mark.parametrize(
    ("text", "count"),
    [("Dr. Who came. Why?", 2), ("It costs 3.50 euros", 1), ("A... B!?", 2), ('He said "No." Then', 2), ("", 0)],
)
def test_sentences_by_hand(text, count):
    assert len(sentences(text)) == count
