"""Scores and streamed pieces, read from SGLang's answers."""

import copy
import math

import numpy as np
import pytest
from client_case import answer, code_of, expected, request
from fake_sglang import FakeServer

from slime_sglang import bodies, wire
from slime_sglang.chunks import ChunkedAnswer
from slime_sglang.http import ServerFault

pytestmark = pytest.mark.unit


def test_scores_are_the_log_probs_of_what_was_given():
    tokens = [3, 4, 12, 9, 5]
    sent = bodies.score_body(tokens, 2, rid="r", features=frozenset())
    assert (sent["logprob_start_len"], sent["sampling_params"]["max_new_tokens"]) == (1, 0)
    found = wire.scores(FakeServer().answer(sent, 0, "length"), tokens, 2, unnamed=(98,))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32([-1.0, -1.5, -2.0]))


def test_the_last_id_of_the_vocabulary_is_told_as_0_in_scores_and_no_other_is():
    """As SGLang does, whose log-prob is of the token that was sent."""
    tokens = [3, 4, 98, 9, 5]
    told = FakeServer().answer(bodies.score_body(tokens, 1, rid="r", features=frozenset()), 0, "length")
    rows = told["meta_info"]["input_token_logprobs"]
    assert rows[2][1] == 98
    plain = wire.scores(told, tokens, 1, unnamed=(98,))
    rows[2][1] = 0
    np.testing.assert_array_equal(wire.scores(told, tokens, 1, unnamed=(98,)), plain)
    rows[3][1] = 0
    assert code_of(lambda: wire.scores(told, tokens, 1, unnamed=(98,)), ServerFault)[0] == "ENG79"


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda rows: rows.pop(), "ENG79"),
        (lambda rows: rows[1].__setitem__(1, 77), "ENG79"),
        (lambda rows: rows[2].__setitem__(0, None), "ENG80"),
        (lambda rows: rows[2].__setitem__(0, math.nan), "ENG80"),
    ],
)
def test_scores_that_cannot_be_are_rejected(spoil, code):
    tokens = [3, 4, 12, 9, 5]
    told = FakeServer().answer(bodies.score_body(tokens, 2, rid="r", features=frozenset()), 0, "length")
    spoil(told["meta_info"]["input_token_logprobs"])
    assert code_of(lambda: wire.scores(told, tokens, 2, unnamed=(98,)), ServerFault)[0] == code


# -- streams


def _chunks(incremental, sizes=(3, 6, 8)):
    asked, told, before = request(), [], 0
    for made in sizes:
        piece = answer(asked, made, "length" if made == 8 else None)
        if incremental:
            piece["output_ids"], piece["text"] = piece["output_ids"][before:], piece["text"][before:]
            piece["meta_info"]["output_token_logprobs"] = piece["meta_info"]["output_token_logprobs"][before:]
        told.append(piece)
        before = made
    return asked, told


@pytest.mark.parametrize("incremental", [False, True])
def test_chunks_become_the_answer_so_far_whether_they_repeat_it_or_not(incremental):
    asked, told = _chunks(incremental)
    pieces = ChunkedAnswer()
    for made, chunk in zip((3, 6, 8), told):
        final = made == 8
        done = wire.completion(pieces.add(copy.deepcopy(chunk), "here"), expected(asked), final=final)
        whole = wire.completion(answer(asked, made, "length"), expected(asked))
        assert (done.tokens, done.log_probs, done.text) == (whole.tokens, whole.log_probs, whole.text)
        assert done.finish == ("length" if final else "abort")


@pytest.mark.parametrize("incremental", [False, True])
def test_the_last_chunk_of_an_abort_has_all_log_probs_and_the_last_id(incremental):
    asked, told = _chunks(incremental)
    pieces = ChunkedAnswer()
    pieces.add(told[0], "here")
    last = answer(asked, 5, "abort")
    last["output_ids"] = last["output_ids"][-1:]
    done = wire.completion(pieces.add(last, "here"), expected(asked))
    assert done.tokens == answer(asked, 5, "abort")["output_ids"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c["meta_info"]["output_token_logprobs"].pop(),
        lambda c: c["output_ids"].__setitem__(-1, 1),
        lambda c: c["meta_info"].pop("output_token_logprobs"),
    ],
)
@pytest.mark.parametrize("incremental", [False, True])
def test_a_chunk_whose_lists_do_not_fit_is_rejected(spoil, incremental):
    _, told = _chunks(incremental)
    pieces = ChunkedAnswer()
    pieces.add(told[0], "here")
    spoil(told[1])
    assert code_of(lambda: pieces.add(told[1], "here"), ServerFault)[0] == "ENG79"
