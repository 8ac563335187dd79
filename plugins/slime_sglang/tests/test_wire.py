"""SGLang's answers, read: what becomes of a right one, and each way in which one cannot be."""

import math
from base64 import b64encode

import numpy as np
import pytest
from client_case import answer, body, code_of, expected, request
from fake_sglang import VOCAB, FakeServer, experts

from slime_sglang import wire
from slime_sglang.http import ServerFault

pytestmark = pytest.mark.unit


def test_a_right_answer_becomes_a_completion():
    asked = request()
    told = answer(asked)
    done = wire.completion(told, expected(asked))
    assert done.tokens == told["output_ids"]
    assert done.log_probs == [row[0] for row in told["meta_info"]["output_token_logprobs"]]
    assert done.plain_log_probs == done.log_probs
    assert done.plain_log_probs is not done.log_probs
    assert (done.finish, done.versions, done.epoch, done.text) == ("length", [7] * 8, 3, told["text"])


def test_greedy_draws_have_log_prob_zero_and_their_plain_one():
    asked = request(temperature=0)
    done = wire.completion(answer(asked), expected(asked))
    assert done.log_probs == [0.0] * 8
    assert done.plain_log_probs[0] < 0


def test_plain_log_probs_are_empty_where_sglang_does_not_tell_them():
    asked = request(temperature=0.7)
    done = wire.completion(answer(asked), expected(asked))
    assert done.plain_log_probs == []
    assert len(done.log_probs) == 8


def test_the_experts_of_all_tokens_but_the_last_are_read():
    asked = request()
    message = FakeServer().answer(body(asked, experts=True), 8, "length")
    done = wire.completion(message, expected(asked, experts=(3, 2)))
    assert done.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(done.routed_experts, experts(3 + 8 - 1))
    assert wire.completion(message, expected(asked)).routed_experts is None


@pytest.mark.parametrize(
    ("text", "shape", "problem"),
    [
        (None, (3, 2), "11 tokens came with no routed experts"),
        ("AAAA", (3, 2), "11 tokens came with routed experts that do not fit"),
        ("no base64!", (3, 2), "11 tokens came with routed experts that do not fit"),
        (..., (4, 2), "11 tokens came with routed experts that do not fit"),
    ],
    ids=["missing", "short", "garbled", "of another model"],
)
def test_experts_that_are_missing_or_do_not_fit_are_a_fault(text, shape, problem):
    asked = request()
    message = FakeServer().answer(body(asked, experts=True), 8, "length")
    if text is not ...:
        message["meta_info"]["routed_experts"] = text
    code, words = code_of(lambda: wire.completion(message, expected(asked, experts=shape)), ServerFault)
    assert code == "ENG79"
    assert problem in words
    assert "--enable-return-routed-experts" in words


def test_an_aborted_answer_without_experts_has_no_tokens_where_experts_are_replayed():
    """Of a request that had been retracted: later turns of the sample could have no experts either."""
    asked = request()
    done = wire.completion(answer(asked, 5, "abort"), expected(asked, experts=(3, 2)))
    assert (done.finish, done.tokens, done.log_probs, done.versions) == ("abort", [], [], [])
    assert done.routed_experts is None
    piece = wire.completion(answer(asked, 5, "abort"), expected(asked, experts=(3, 2)), final=False)
    assert len(piece.tokens) == 5


def test_an_expert_below_0_stays_below_0():
    asked = request()
    message = FakeServer().answer(body(asked, experts=True), 8, "length")
    numbers = experts(3 + 8 - 1)
    numbers[4, 1, 1] = -1
    message["meta_info"]["routed_experts"] = b64encode(numbers.tobytes()).decode()
    done = wire.completion(message, expected(asked, experts=(3, 2)))
    np.testing.assert_array_equal(done.routed_experts, numbers)


def test_an_aborted_answer_keeps_its_partial_tokens():
    asked = request()
    done = wire.completion(answer(asked, 5, "abort"), expected(asked))
    assert (done.finish, len(done.tokens), len(done.log_probs), done.versions) == ("abort", 5, 5, [7] * 5)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        "text",
        {"output_ids": None, "meta_info": {}},
        {"output_ids": [1], "meta_info": None},
        {"meta_info": {}},
    ],
)
def test_an_empty_or_null_answer_has_no_shape(told):
    """200 with empty or null output."""
    asked = request()
    code, text = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG71"
    assert "meta_info are missing" in text


def test_an_answer_without_a_token_is_no_answer():
    """An empty list of ids."""
    asked = request()
    assert code_of(lambda: wire.completion(answer(asked, 0, "stop"), expected(asked)), ServerFault)[0] == "ENG81"
    assert code_of(lambda: wire.completion(answer(asked, 0, "length"), expected(asked)))[0] == "ENG72"


def _fewer(info):
    info["output_token_logprobs"].pop()


def _none(info):
    del info["output_token_logprobs"]


def _null(info):
    info["output_token_logprobs"] = None


def _another(info):
    info["output_token_logprobs"][3][1] += 1


def _flat(info):
    info["output_token_logprobs"] = [-0.1] * 8


def _words(info):
    info["output_token_logprobs"][2][0] = "much"


@pytest.mark.parametrize("spoil", [_fewer, _none, _null, _another, _flat, _words])
def test_log_probs_that_are_missing_or_of_other_tokens_are_rejected(spoil):
    """``len(logprobs)`` differs from len(ids), missing log-probs, and ids that are not those in the rows."""
    asked = request()
    told = answer(asked)
    spoil(told["meta_info"])
    code, _ = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG79"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, None])
def test_an_impossible_log_prob_is_rejected_with_its_position(value):
    """NaN, above 0 and -inf, which SGLang sends as null."""
    asked = request()
    told = answer(asked)
    told["meta_info"]["output_token_logprobs"][5][0] = value
    code, text = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG80"
    assert "at response token 5 of 8" in text


def test_the_rounding_of_a_certain_token_is_no_fault():
    asked = request()
    told = answer(asked)
    told["meta_info"]["output_token_logprobs"][5][0] = 1e-7
    assert wire.completion(told, expected(asked)).log_probs[5] == 1e-7


def test_a_token_that_sglang_chose_because_of_nan_is_rejected():
    """SGLang ends such a request with finish "stop" and an end token of its own choice."""
    asked = request()
    told = answer(asked, finish_reason={"type": "stop", "matched": "NaN happened"})
    assert code_of(lambda: wire.completion(told, expected(asked)), ServerFault)[0] == "ENG80"


@pytest.mark.parametrize("reason", [None, {}, {"type": "tired"}, "stop", {"type": None}])
def test_an_unknown_end_is_rejected_and_may_be_asked_again(reason):
    """``finish_reason`` unknown."""
    asked = request()
    with pytest.raises(ServerFault) as caught:
        wire.completion(answer(asked, finish_reason=reason), expected(asked))
    assert (caught.value.code, caught.value.again, caught.value.running) == ("ENG81", True, False)


def test_more_tokens_than_were_asked_for_are_rejected():
    """More tokens than max_new_tokens."""
    asked = request(max_new_tokens=8)
    code, text = code_of(lambda: wire.completion(answer(asked, 9), expected(asked)), ServerFault)
    assert code == "ENG82"
    assert "9 tokens came, but at most 8 were requested" in text


def test_an_echoed_prompt_is_rejected():
    """Prompt echoed."""
    asked = request()
    told = answer(asked, 4)
    told["output_ids"] = [*asked.tokens, *told["output_ids"]]
    code, text = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG82"
    assert "begin with the prompt" in text


def test_a_prompt_of_another_length_is_rejected():
    """The server saw another prompt than was sent."""
    asked = request()
    assert code_of(lambda: wire.completion(answer(asked, prompt_tokens=2), expected(asked)), ServerFault)[0] == "ENG82"


@pytest.mark.parametrize("value", [VOCAB, -1, 1.5])
def test_an_id_outside_the_vocabulary_is_rejected(value):
    """Token id >= vocab or negative in a reply."""
    asked = request()
    told = answer(asked)
    told["output_ids"][6] = told["meta_info"]["output_token_logprobs"][6][1] = value
    code, _ = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == ("ENG79" if isinstance(value, float) else "TOK44")


@pytest.mark.parametrize(
    ("stamp", "why"),
    [
        (None, "not loaded by this run"),
        ("default", "not loaded by this run"),
        ("7", "not loaded by this run"),
        ("3.7.1", "not loaded by this run"),
        ("3.-7", "not loaded by this run"),
        ("3.6", "older than version 7"),
        ("3.9", "newer than version 8"),
        ("2.7", "this process is epoch 3"),
    ],
)
@pytest.mark.parametrize("spans", [False, True])
def test_a_version_that_cannot_be_is_rejected(stamp, why, spans):
    """``weight_version`` missing, older or newer than possible, or of another epoch; as stamp and as span."""
    asked = request()
    told = answer(asked)
    told["meta_info"]["weight_version"] = stamp
    told["meta_info"]["weight_versions"] = [{"version": stamp, "start": 0, "end": 8}] if spans else None
    code, text = code_of(lambda: wire.completion(told, expected(asked, high=8, spans=spans)), ServerFault)
    assert code == "ENG83"
    assert why in text


def test_spans_tell_which_version_made_each_token():
    asked = request()
    spans = [{"version": "3.7", "start": 0, "end": 3}, {"version": "3.9", "start": 3, "end": 8}]
    done = wire.completion(answer(asked, weight_versions=spans), expected(asked, high=9))
    assert done.versions == [7, 7, 7, 9, 9, 9, 9, 9]


def test_one_stamp_counts_for_all_tokens_where_the_server_knows_no_spans():
    """SGLang 0.5.12."""
    asked = request()
    told = answer(asked)
    del told["meta_info"]["weight_versions"]
    assert wire.completion(told, expected(asked, high=9, spans=False)).versions == [7] * 8
    assert wire.completion(told, expected(asked, spans=True)).versions == [7] * 8  # no other version is possible


def test_spans_that_are_missing_are_rejected_where_versions_may_differ():
    asked = request()
    told = answer(asked)
    del told["meta_info"]["weight_versions"]
    assert code_of(lambda: wire.completion(told, expected(asked, high=9)), ServerFault)[0] == "ENG83"


@pytest.mark.parametrize(
    "spans", [[], [(0, 7)], [(1, 8)], [(0, 3), (4, 8)], [(0, 5), (3, 8)], [(0, 9)], [(0, 0), (0, 8)], "all", [7]]
)
def test_spans_that_do_not_cover_the_tokens_are_rejected(spans):
    asked = request()
    told = answer(asked)
    pairs = [{"version": "3.7", "start": s[0], "end": s[1]} if isinstance(s, tuple) else s for s in spans]
    told["meta_info"]["weight_versions"] = pairs if isinstance(spans, list) else spans
    assert code_of(lambda: wire.completion(told, expected(asked)), ServerFault)[0] == "ENG83"


def test_a_server_that_finds_the_prompt_too_long_says_so():
    """In the two versions' words, as status 400 and within a stream."""
    for said in (
        "The input (70 tokens) is longer than the model's context length (64 tokens).",
        "Requested token count exceeds the model's maximum context length of 64 tokens.",
        "Input length (70 tokens) exceeds the maximum allowed length (58 tokens).",
    ):
        assert wire.refusal(said, "here").code == "ENG72"
        asked = request()
        told = answer(asked, 0, finish_reason={"type": "abort", "message": said, "status_code": 400})
        assert code_of(lambda told=told, asked=asked: wire.completion(told, expected(asked)))[0] == "ENG72"
    assert wire.refusal("temperature must be non-negative", "here").code == "ENG78"


def test_an_abort_because_the_server_failed_is_a_fault_of_the_server():
    asked = request()
    told = answer(asked, 2, finish_reason={"type": "abort", "message": "queue full", "status_code": 503})
    with pytest.raises(ServerFault) as caught:
        wire.completion(told, expected(asked))
    assert (caught.value.code, caught.value.again) == ("ENG75", True)
