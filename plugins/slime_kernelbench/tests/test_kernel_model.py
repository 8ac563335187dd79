"""The small model's folder: the tokenizer that the tool makes, and a config that fits it."""

import json
import runpy
from pathlib import Path

import pytest

import slime_kernelbench
from slime_kernelbench.warmup.pupil import fenced
from slime_kernelbench.warmup.rows import Family

pytestmark = pytest.mark.integration

MODEL = Path(slime_kernelbench.__file__).parent / "model"
TOOL = Path(__file__).parents[1] / "tools" / "make_kernel_tokenizer.py"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.nightly
def test_the_tokenizer_is_the_one_the_tool_makes(tmp_path):
    runpy.run_path(str(TOOL))["main"](tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((MODEL / name).read_text()), name


def test_any_ascii_text_comes_back_and_no_token_completes_a_line(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n\n    odd text 1234"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    pieces = [tokenizer.decode([token]) for token in range(5, len(tokenizer))]
    assert max(map(len, pieces)) <= 12
    assert [piece for piece in pieces if "\n" in piece and piece.strip()] == []  # line ends stand alone


def test_a_kernel_of_an_operator_never_seen_takes_about_a_hundred_tokens(tokenizer):
    answers = [fenced(operator.kernel()) for operator in Family(heldout=0.15, seed=0).operators("heldout")]
    counts = [len(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers]
    assert min(counts) > 70
    assert max(counts) < 120
    assert [tokenizer.decode(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers] == answers


def test_the_template_gives_an_answer_its_end_and_begins_the_next(tokenizer):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<user>x<assistant>y<eos><user>z<assistant>"


def test_the_config_fits_the_tokenizer(tokenizer):
    config = json.loads((MODEL / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert (config["eos_token_id"], config["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
