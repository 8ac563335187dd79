"""Stop strings and stop ids that are sought here, as in the embedded engine."""

import numpy as np
import pytest
from client_case import answer, expected, request

from slime_sglang import stop_strings, wire

pytestmark = pytest.mark.unit


def letters(ids, skip_special_tokens):
    """A tokenizer of one letter a token; 0 is special."""
    return "".join(
        "" if token == 0 and skip_special_tokens else "#" if token == 0 else chr(96 + token) for token in ids
    )


def spelled(text):
    """The ids of a text."""
    return [ord(letter) - 96 for letter in text]


def completed(tokens, finish="length"):
    """A completion of these tokens."""
    asked = request()
    done = wire.completion(answer(asked), expected(asked))
    count = len(tokens)
    done.tokens, done.log_probs, done.plain_log_probs = tokens, [-0.1] * count, [-0.1] * count
    done.versions, done.finish, done.text = [7] * count, finish, letters(tokens, True)
    return done


def test_a_stop_string_that_begins_in_kept_tokens_ends_the_completion_as_in_the_embedded_engine():
    asked = request(tokens=spelled("promptabxx"), kept=4, stop=("xxyz",))
    done = stop_strings.cut(completed(spelled("yzmore")), asked, letters, tokenizer=True)
    assert (letters(done.tokens, False), done.finish) == ("yz", "stop")
    assert len(done.log_probs) == len(done.plain_log_probs) == len(done.versions) == 2
    assert done.text == "yz"  # the text before the stop string is the earlier try's


def test_a_cut_completion_keeps_the_experts_of_all_tokens_but_its_last():
    asked = request(tokens=spelled("promptabxx"), kept=4, stop=("xxyz",))
    done = completed(spelled("yzmore"))
    done.routed_experts = np.arange(10 + 6 - 1).reshape(-1, 1, 1)
    stop_strings.cut(done, asked, letters, tokenizer=True)
    assert done.routed_experts.ravel().tolist() == list(range(10 + 2 - 1))


def test_a_stop_string_is_not_sought_in_the_prompt():
    asked = request(tokens=spelled("promptxx"), kept=1, stop=("xxy",))
    assert stop_strings.cut(completed(spelled("yzmore")), asked, letters, tokenizer=True).finish == "length"


def test_without_kept_tokens_the_servers_own_stop_counts_and_nothing_is_decoded():
    asked = request(stop=("mo",))
    done = stop_strings.cut(completed(spelled("yzmore")), asked, None, tokenizer=True)
    assert (len(done.tokens), done.finish) == (6, "length")


def test_all_stop_strings_are_sought_here_where_the_server_has_no_tokenizer():
    asked = request(stop=("mo", "re"))
    done = stop_strings.cut(completed(spelled("yzmore")), asked, letters, tokenizer=False)
    assert (letters(done.tokens, False), done.finish, done.text) == ("yzmo", "stop", "yz")


def test_stop_token_ids_count_in_spite_of_ignore_eos():
    asked = request(ignore_eos=True, stop_token_ids=(26,))
    done = stop_strings.cut(completed(spelled("yzmore")), asked, letters, tokenizer=True)
    assert (letters(done.tokens, False), done.finish) == ("yz", "stop")
    last = stop_strings.cut(completed(spelled("abz")), asked, letters, tokenizer=True)
    assert (len(last.tokens), last.finish) == (3, "stop")
    ended = stop_strings.cut(completed(spelled("abz"), "abort"), asked, letters, tokenizer=True)
    assert ended.finish == "stop"  # it is whole: nobody goes on with it


@pytest.mark.parametrize(
    ("words", "finish"),
    [
        ({}, "stop"),
        ({"ignore_eos": True}, "length"),
        ({"ignore_eos": True, "stop_token_ids": (26,)}, "stop"),
        ({"stop": ("bz",), "ignore_eos": True}, "stop"),
        ({"stop": ("zb",), "ignore_eos": True}, "length"),
    ],
)
def test_the_last_token_that_is_allowed_may_end_the_response(words, finish):
    """SGLang 0.5.12 says `length` there; a response with its end is no cut one."""
    done = stop_strings.cut(completed(spelled("abz")), request(**words), letters, tokenizer=True, eos=(26,))
    assert (letters(done.tokens, False), done.finish) == ("abz", finish)


def test_the_text_keeps_the_token_that_a_stop_token_id_named():
    """SGLang leaves it out; the embedded engine decodes it like any other."""
    done = completed(spelled("abz"), "stop")
    done.text = "ab"
    assert stop_strings.cut(done, request(stop_token_ids=(26,)), letters, tokenizer=True).text == "abz"


@pytest.mark.parametrize("text", ["", "a", "ab", "xabx", "xxab", "aab", "ba", "abab"])
def test_the_first_end_of_a_stop_string_is_found_by_halving(text):
    tokens = spelled(text)
    wanted = next((n for n in range(1, len(text) + 1) if "ab" in text[:n]), 0)
    assert stop_strings.first_stop([], tokens, ("ab",), letters) == wanted
