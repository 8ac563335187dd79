"""The code of an answer: between the fences exactly as sampled, whatever stands around it."""

import random

import pytest

from slime_kernelbench.dialogue.extract import extract, source_of

pytestmark = pytest.mark.unit
CODE = "import torch\n\nclass ModelNew(torch.nn.Module):\n    pass\n"
DRAFT = "class ModelNew: draft = 1\n"


def fenced(code, tag="python", marks="```"):
    return f"{marks}{tag}\n{code}{marks}\n"


CASES = {
    "one fence": (f"Here:\n\n{fenced(CODE)}", CODE),
    "no language": (fenced(CODE, ""), CODE),
    "py": (fenced(CODE, "py"), CODE),
    "Python with more words": (fenced(CODE, 'Python title="kernel.py"'), CODE),
    "cuda": (fenced(CODE, "cuda"), CODE),
    "triton": (fenced(CODE, "triton"), CODE),
    "tildes": (fenced(CODE, "python", "~~~"), CODE),
    "the end of the text closes nothing but a last line without a newline does": (fenced(CODE)[:-1], CODE),
    "a shell block comes after it": (fenced(CODE) + "Run it:\n" + fenced("python a.py\n", "bash"), CODE),
    "an output block comes after it": (fenced(CODE) + fenced("ok\n", "text"), CODE),
    "a usage example comes after it": (fenced(CODE) + fenced("y = ModelNew()(x)\n"), CODE),
    "a draft comes before it": (fenced(DRAFT) + "Better:\n" + fenced(CODE), CODE),
    "an untagged draft comes before it": (fenced(DRAFT, "") + fenced(CODE), CODE),
    "nothing defines ModelNew, the last with a language counts": (
        fenced("a = 1\n") + fenced("b = 2\n") + fenced("3\n", ""),
        "b = 2\n",
    ),
    "reasoning with a draft": (f"<think>try\n{fenced(DRAFT)}</think>\n{fenced(CODE)}", CODE),
    "the prompt opened the reasoning": (f"try\n{fenced(DRAFT)}</think>\n{fenced(CODE)}", CODE),
    "reasoning that speaks of </think>": (f"<think>a </think> b</think>{fenced(CODE)}", CODE),
    "Markdown around it, longer fence": ("````markdown\n" + fenced(CODE) + "````\n", CODE),
    "Markdown around it, same fence": ("```markdown\nText\n" + fenced(CODE) + "```\n", CODE),
    "a block without language around it": ("```\n" + fenced(CODE) + "```\n", CODE),
    "a docstring that shows code": (
        fenced(CODE + '"""\n```python\nModelNew()\n```\n"""\n'),
        CODE + '"""\n```python\nModelNew()\n```\n"""\n',
    ),
    "a comment that opens a fence": (fenced("# ```python\n" + CODE), "# ```python\n" + CODE),
    "a fence line in a comment that never closes": (fenced("```python\n" + CODE)[: -len("```\n")] + "```\n", CODE),
    "shorter fences inside": (f"````python\n{CODE}'''\n```\n'''\n````\n", f"{CODE}'''\n```\n'''\n"),
    "windows line ends": ("```python\r\na = 1\r\n```\r\n", "a = 1\r\n"),
    "trailing spaces and tabs are kept": (fenced("a = 1 \t\n\n\n"), "a = 1 \t\n\n\n"),
    "nothing between the fences": (fenced(""), ""),
    "an indented fence": ("  ```python\na\n  ```\n", "a\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_code_is_found_as_it_was_sampled(name):
    text, code = CASES[name]
    assert source_of(text) == code


NOTHING = {
    "unclosed reasoning with a fence inside": (f"<think>let me see\n{fenced(CODE)}", "the reasoning never ended"),
    "an unclosed block": ("```python\n" + CODE, "the code block is not closed"),
    "no block": ("I cannot do that.", "there is no code block"),
    "empty": ("", "there is no code block"),
    "a shell block alone": (fenced("ls\n", "bash"), "there is no code block"),
    "a diff": (fenced("+class ModelNew: ...\n", "diff"), "there is no code block"),
    "backticks inside a line": ("use ```python x``` here", "there is no code block"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_there_is_no_code_the_reason_is_told(name):
    text, why = NOTHING[name]
    found = extract(text)
    assert found.source is None
    assert found.why.startswith(why)


def test_reasoning_that_the_prompt_opened_and_nobody_closed_hides_its_drafts():
    assert source_of(fenced(CODE), reasoning_open=True) is None
    assert source_of(fenced(CODE)) == CODE


def test_extracted_code_is_always_a_part_of_the_answer():
    draw = random.Random(5)
    parts = [
        "```",
        "```python",
        "````",
        "~~~",
        "\n",
        "\n",
        "\n",
        "class ModelNew:",
        "x",
        "<think>",
        "</think>",
        " ",
        "`",
    ]
    found = 0
    for _ in range(3000):
        text = "".join(draw.choices(parts, k=draw.randrange(25)))
        source = source_of(text)
        found += source is not None
        assert source is None or source in text
    assert found > 30


def test_a_long_answer_takes_no_more_than_its_length():
    text = "```python\n" * 20_000 + "`" * 100_000 + "\n" + fenced(CODE)
    assert source_of(text) == CODE
