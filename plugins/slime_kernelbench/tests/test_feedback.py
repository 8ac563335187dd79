"""What a model is told: outcome, compiler's words, differences, speed; each field in its budget, and no secret."""

import math

import pytest
from dialogue_actors import BROKEN, RIGHT, WRONG
from speakers import speaker

from slime_core import ConfigError
from slime_kernelbench.dialogue.extract import Extraction
from slime_kernelbench.dialogue.feedback import CUT, brief, clip, kind, write
from slime_kernelbench.dialogue.turns import unanswered
from slime_kernelbench.dialogue.words import load_words, put
from slime_kernelbench.types import Case, Diagnostic, Flag, KernelProblem, Timing, Verdict

pytestmark = pytest.mark.unit
TOKENIZER = speaker("qwen3")
WORDS = load_words("")


def told(verdict, tokens=256):
    return write(verdict, attempt=1, of=3, words=WORDS, tokenizer=TOKENIZER, tokens=tokens)


def test_a_compile_error_by_hand():
    assert told(BROKEN) == (
        "Attempt 1 of 3 does not compile.\n"
        "SyntaxError (line 2): invalid syntax\n"
        "```\n"
        "x = = 1\n"
        "```\n"
        "\n"
        "Find the cause, mend it, and answer with the whole of your code."
    )


def test_a_wrong_result_by_hand():
    assert told(WRONG) == (
        "Attempt 1 of 3 runs and gives wrong results.\n"
        "0 of 1 cases agree with PyTorch.\n"
        "- 8x64 normal: differs by 0.531 at [3, 5], tolerance 0.0001\n"
        "\n"
        "Find out what is computed wrongly, mend it, and answer with the whole of your code."
    )


def test_tracebacks_flags_and_speed_are_told():
    failed = Verdict(
        status="runtime_error",
        reached="correctness",
        diagnostics=(Diagnostic(stage="correctness", kind="KeyError", message="'x'", traceback="line 3\n    a['x']"),),
    )
    assert "Traceback:\nline 3\n    a['x']\n" in told(failed)
    cheat = Verdict(
        status="hack", reached="correctness", flags=(Flag(rule="decoy_launch", layer="launch", detail="the output"),)
    )
    assert "does not compute what it returns.\n- decoy_launch: the output\n" in told(cheat)
    timing = Timing(
        device="g",
        candidate=0.5,
        candidate_ci=0.01,
        eager=0.9,
        compiled=0.75,
        floor=0.1,
        repeats=9,
        remeasured=0.4,
        host_over_event=1.0,
    )
    fast = Verdict(status="correct", reached="speed", timing=timing)
    assert "Speed: 0.5 ms; PyTorch 0.9 ms, compiled 0.75 ms: 1.5 times as fast as the faster of these." in told(fast)
    assert told(RIGHT).startswith("Attempt 1 of 3 is right.\n")


def test_an_answer_without_code_is_told_why():
    text = told(unanswered(Extraction(source=None, why="the code block is not closed")))
    assert text.startswith("Attempt 1 of 3 has no code to judge.\nno_code: the code block is not closed.\n")
    assert text.endswith(WORDS.requests["no_code"])


def test_results_that_are_not_finite_are_called_so():
    case = Case(shapes="4", regime="large", agrees=False, max_abs=math.nan)
    assert "4 large: not finite\n" in told(Verdict(status="wrong", reached="correctness", cases=(case,)))


@pytest.mark.parametrize("tokens", [8, 20, 64])
def test_no_field_has_more_tokens_than_its_budget(tokens):
    long = "".join(f"word{i} ü\t\x1b[31m" for i in range(5000))
    text = clip(long, tokens, TOKENIZER)
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) <= tokens + 2  # a cut may part a merge
    assert text.startswith("w")
    assert CUT in text
    assert "\x1b" not in text
    everything = Verdict(
        status="runtime_error",
        reached="correctness",
        diagnostics=(Diagnostic(stage="import", kind="E", message=long, excerpt=long, traceback=long),) * 5,
        cases=(Case(shapes=long, regime=long, agrees=False, max_abs=1.0),) * 9,
        flags=(Flag(rule="r", layer="static", detail=long),) * 9,
    )
    fields = 2 * 3 + 3 + 3
    assert len(TOKENIZER.encode(told(everything, tokens), add_special_tokens=False)) < fields * (tokens + 2) + 200
    assert len(TOKENIZER.encode(brief(everything, tokenizer=TOKENIZER, tokens=tokens))) <= tokens + 2


def test_the_end_of_a_long_message_stays_too():
    assert clip("a" * 900 + "the cause", 60, TOKENIZER).endswith("the cause")
    assert clip("short", 60, TOKENIZER) == "short"


def test_a_brief_line_by_hand():
    assert brief(WRONG, tokenizer=TOKENIZER, tokens=99) == "wrong: 8x64 normal"
    case = Case(shapes="4", regime="large", agrees=False, max_abs=math.inf)
    told_first = Diagnostic(stage="correctness", kind="values", message="3 of 4 elements differ by 1.5")
    infinite = Verdict(status="wrong", reached="correctness", cases=(case,), diagnostics=(told_first,))
    assert brief(infinite, tokenizer=TOKENIZER, tokens=99) == "wrong: 4 large, not finite"
    assert brief(BROKEN, tokenizer=TOKENIZER, tokens=99) == "compile_error: SyntaxError (line 2): invalid syntax"
    assert brief(RIGHT, tokenizer=TOKENIZER, tokens=99) == "correct"


def test_prompts_show_the_problem_once_and_take_nothing_in_it_for_a_template():
    problem = KernelProblem(id="a", name="a", source="# {{system}} {{problem}}\nclass Model: ...\n")
    system, user = WORDS.prompt(problem, chat=True)
    assert user["content"].count("# {{system}} {{problem}}\nclass Model: ...") == 1
    assert "is_cuda" not in user["content"]
    assert "cuda" not in user["content"].lower()
    assert WORDS.prompt(problem, chat=False).startswith(system["content"])
    assert put("{{a}} {{b}} {{c}}", a="{{b}}", b="2") == "{{b}} 2 {{c}}"


def test_a_file_of_ones_own_replaces_the_words_that_it_has(tmp_path):
    path = tmp_path / "words.toml"
    path.write_text('user = "Do {{short}}!"\nsystem = ""\n[requests]\nwrong = "Again."\n')
    words = load_words(str(path))
    problem = KernelProblem(
        id="a", name="a", source="N = 3\nclass Model:\n    def forward(self, x):\n        return x\n"
    )
    assert words.prompt(problem, chat=True) == [{"role": "user", "content": "Do N = 3\nreturn x\n!"}]
    assert words.requests["wrong"] == "Again."
    assert words.requests["correct"] == WORDS.requests["correct"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('usr = "{{problem}}"', "CFG01"),
        ('[requests]\nslow = "x"', "CFG01"),
        ('user = "no place for it"', "CFG02"),
        ("system = 3", "CFG02"),
        ("system = ", "CFG06"),
        (None, "CFG05"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, code):
    path = tmp_path / "words.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_words(str(path))
    assert caught.value.code == code


def test_the_outcome_and_its_kind_alone():
    assert kind(WRONG).startswith("wrong")
    assert not any(character.isdigit() for character in kind(WRONG))
    assert kind(BROKEN) == "compile_error: SyntaxError"
    assert kind(RIGHT) == "correct"


def test_words_of_ours_by_name_show_a_problems_short_form_alone():
    problem = KernelProblem(
        id="p", name="p", source="N = 9\nclass Model:\n    def forward(self, x):\n        return -x\n"
    )
    words = load_words("short")
    assert words.prompt(problem, chat=True) == [{"role": "user", "content": "N = 9\nreturn -x\n"}]
    assert words.prompt(problem, chat=False) == "N = 9\nreturn -x\n"
