"""SGLang's words for a request and an answer: pure functions, no server."""

import copy
import math

import numpy as np
import pytest
from faulty import Canned

from slime_core.engines.sglang import bodies, http, stops, wire
from slime_core.engines.sglang.http import ServerFault
from slime_core.engines.sglang.pieces import Pieces
from slime_core.errors import EngineError
from slime_core.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.unit

VOCAB, CONTEXT = 1000, 64


def request(tokens=(3, 4, 12), *, seed=7, kept=0, **params):
    """A request of a few tokens."""
    return GenerateRequest(
        id="grpo/17-0",
        tokens=list(tokens),
        params=SamplingParams(**{"max_new_tokens": 8, **params}),
        seed=seed,
        kept=kept,
    )


def body(asked, **changes):
    """Its body."""
    words = {
        "rid": "r",
        "limit": asked.params.max_new_tokens,
        "stream": False,
        "features": frozenset(),
        "dp_rank": None,
    }
    return bodies.body(asked, **(words | changes))


def expected(asked, **changes):
    """What its answer must fit."""
    words = {"request": asked, "limit": 8, "vocab_size": VOCAB, "epoch": 3, "low": 7, "high": 7, "spans": True}
    return wire.Expected(**(words | changes))


def answer(asked, made=8, finish="length", **changes):
    """A right answer, with changes of its meta_info."""
    found = Canned().answer(body(asked), made, finish)
    found["meta_info"].update(changes)
    return found


def code_of(call, kind=EngineError):
    """The code of the error that a call raises, and the whole error as text."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code, str(caught.value)


def test_every_sampling_parameter_is_sent_and_none_is_left_to_the_server():
    asked = request(temperature=0.7, top_p=0.9, top_k=40, stop=("\n",), stop_token_ids=(9,), ignore_eos=True)
    sent = body(asked, rid="x", limit=5, stream=True, dp_rank=2, features=frozenset({"routed_dp_rank"}))
    assert sent["rid"] == "x"
    assert sent["input_ids"] == [3, 4, 12]
    assert (sent["return_logprob"], sent["logprob_start_len"], sent["stream"], sent["routed_dp_rank"]) == (
        True,
        -1,
        True,
        2,
    )
    assert sent["sampling_params"] == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "skip_special_tokens": True,
        "no_stop_trim": False,
        "n": 1,
        "sampling_seed": 7,
        "stop": ["\n"],
        "stop_token_ids": [9],
    }


def test_what_is_off_is_sent_in_the_way_that_sglang_takes_it():
    sent = body(request(), dp_rank=1)
    assert sent["sampling_params"]["top_k"] == -1
    assert "stop" not in sent["sampling_params"]
    assert sent["data_parallel_rank"] == 1
    assert "routed_dp_rank" not in sent


def test_a_server_without_a_tokenizer_is_sent_no_stop_strings_which_would_end_it():
    assert "stop" not in body(request(stop=("a",)), features=frozenset({bodies.NO_TOKENIZER}))["sampling_params"]


@pytest.mark.parametrize("with_orjson", [True, False])
def test_numbers_of_numpy_are_sent_as_numbers_and_nan_is_read(with_orjson, monkeypatch):
    if not with_orjson:
        monkeypatch.setattr(http, "orjson", None)
    sent = http.dumps({"input_ids": [np.int64(5), np.int32(6)], "temperature": np.float64(0.5)})
    assert http.loads(sent) == {"input_ids": [5, 6], "temperature": 0.5}
    with pytest.raises(TypeError):
        http.dumps({"stop": {"a set"}})
    assert math.isnan(http.loads(b"[NaN]")[0])
    with pytest.raises(ValueError, match=r"."):
        http.loads(b"[" * 100000)


@pytest.mark.parametrize(
    ("given", "sent"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (2**63 + 9, 9), (2**64 - 1, 2**63 - 1), (2**64 + 5, 5)]
)
def test_a_seed_keeps_the_63_bits_that_both_sglang_and_its_router_take(given, sent):
    assert bodies.seed(given) == sent


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (request(()), "ENG01"),
        (request((3, VOCAB)), "ENG02"),
        (request((3, -1)), "ENG02"),
        (request((3, 1.5)), "ENG02"),
        (request(max_new_tokens=-1), "ENG03"),
        (request(temperature=-0.1), "ENG03"),
        (request(temperature=math.inf), "ENG03"),
        (request(temperature=math.nan), "ENG03"),
        (request(top_p=0.0), "ENG03"),
        (request(top_k=-2), "ENG03"),
        (request(kept=4), "ENG03"),
        (request(stop=("",)), "ENG03"),
        (request(range(CONTEXT)), "ENG72"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_it_is_sent(asked, code):
    """A token id outside the vocabulary would end the server; case 72: a prompt that is too long."""
    found, _ = code_of(lambda: bodies.check(asked, vocab_size=VOCAB, context_len=CONTEXT))
    assert found == code


def test_a_request_may_fill_the_context_and_no_more():
    assert bodies.check(request(range(60), max_new_tokens=100), vocab_size=VOCAB, context_len=CONTEXT) == 4
    assert bodies.check(request(range(60), max_new_tokens=3), vocab_size=VOCAB, context_len=CONTEXT) == 3


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
def test_case_78_an_empty_or_null_answer_has_no_shape(told):
    """Case 78: 200 with empty or null output."""
    asked = request()
    code, text = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG71"
    assert "meta_info are missing" in text


def test_case_78_an_answer_without_a_token_is_no_answer():
    """Case 78: an empty list of ids."""
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
def test_case_79_log_probs_that_are_missing_or_of_other_tokens_are_rejected(spoil):
    """Case 79: len(logprobs) differs from len(ids), missing log-probs, and ids that are not those in the rows."""
    asked = request()
    told = answer(asked)
    spoil(told["meta_info"])
    code, _ = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG79"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, None])
def test_case_80_an_impossible_log_prob_is_rejected_with_its_position(value):
    """Case 80: NaN, above 0 and -inf, which SGLang sends as null."""
    asked = request()
    told = answer(asked)
    told["meta_info"]["output_token_logprobs"][5][0] = value
    code, text = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG80"
    assert "at response token 5 of 8" in text


def test_case_80_the_rounding_of_a_certain_token_is_no_fault():
    asked = request()
    told = answer(asked)
    told["meta_info"]["output_token_logprobs"][5][0] = 1e-7
    assert wire.completion(told, expected(asked)).log_probs[5] == 1e-7


def test_case_80_a_token_that_sglang_chose_because_of_nan_is_rejected():
    """SGLang ends such a request with finish "stop" and an end token of its own choice."""
    asked = request()
    told = answer(asked, finish_reason={"type": "stop", "matched": "NaN happened"})
    assert code_of(lambda: wire.completion(told, expected(asked)), ServerFault)[0] == "ENG80"


@pytest.mark.parametrize("reason", [None, {}, {"type": "tired"}, "stop", {"type": None}])
def test_case_81_an_unknown_end_is_rejected_and_may_be_asked_again(reason):
    """Case 81: finish_reason unknown."""
    asked = request()
    with pytest.raises(ServerFault) as caught:
        wire.completion(answer(asked, finish_reason=reason), expected(asked))
    assert (caught.value.code, caught.value.again, caught.value.running) == ("ENG81", True, False)


def test_case_82_more_tokens_than_were_asked_for_are_rejected():
    """Case 82: more tokens than max_new_tokens."""
    asked = request(max_new_tokens=8)
    code, text = code_of(lambda: wire.completion(answer(asked, 9), expected(asked)), ServerFault)
    assert code == "ENG82"
    assert "9 tokens came where at most 8" in text


def test_case_82_an_echoed_prompt_is_rejected():
    """Case 82: prompt echoed."""
    asked = request()
    told = answer(asked, 4)
    told["output_ids"] = [*asked.tokens, *told["output_ids"]]
    code, text = code_of(lambda: wire.completion(told, expected(asked)), ServerFault)
    assert code == "ENG82"
    assert "begin with the prompt" in text


def test_case_82_a_prompt_of_another_length_is_rejected():
    """Case 82: the server saw another prompt than was sent."""
    asked = request()
    assert code_of(lambda: wire.completion(answer(asked, prompt_tokens=2), expected(asked)), ServerFault)[0] == "ENG82"


@pytest.mark.parametrize("value", [VOCAB, -1, 1.5])
def test_case_44_an_id_outside_the_vocabulary_is_rejected(value):
    """Case 44: token id >= vocab or negative in a reply."""
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
def test_case_83_a_version_that_cannot_be_is_rejected(stamp, why, spans):
    """Case 83: weight_version missing, older or newer than possible, or of another epoch; as stamp and as span."""
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


def test_case_83_spans_that_are_missing_are_rejected_where_versions_may_differ():
    asked = request()
    told = answer(asked)
    del told["meta_info"]["weight_versions"]
    assert code_of(lambda: wire.completion(told, expected(asked, high=9)), ServerFault)[0] == "ENG83"


@pytest.mark.parametrize(
    "spans", [[], [(0, 7)], [(1, 8)], [(0, 3), (4, 8)], [(0, 5), (3, 8)], [(0, 9)], [(0, 0), (0, 8)], "all", [7]]
)
def test_case_83_spans_that_do_not_cover_the_tokens_are_rejected(spans):
    asked = request()
    told = answer(asked)
    pairs = [{"version": "3.7", "start": s[0], "end": s[1]} if isinstance(s, tuple) else s for s in spans]
    told["meta_info"]["weight_versions"] = pairs if isinstance(spans, list) else spans
    assert code_of(lambda: wire.completion(told, expected(asked)), ServerFault)[0] == "ENG83"


def test_case_72_a_server_that_finds_the_prompt_too_long_says_so():
    """Case 72: in the two versions' words, as status 400 and within a stream."""
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


# -- scores


def test_scores_are_the_log_probs_of_what_was_given():
    tokens = [3, 4, 12, 9, 5]
    sent = bodies.score_body(tokens, 2, rid="r", features=frozenset())
    assert (sent["logprob_start_len"], sent["sampling_params"]["max_new_tokens"]) == (1, 0)
    found = wire.scores(Canned().answer(sent, 0, "length"), tokens, 2, vocab_size=99)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32([-1.0, -1.5, -2.0]))


def test_the_last_id_of_the_vocabulary_is_told_as_0_in_scores_and_no_other_is():
    """As SGLang does, whose log-prob is of the token that was sent."""
    tokens = [3, 4, 98, 9, 5]
    told = Canned().answer(bodies.score_body(tokens, 1, rid="r", features=frozenset()), 0, "length")
    rows = told["meta_info"]["input_token_logprobs"]
    assert rows[2][1] == 98
    plain = wire.scores(told, tokens, 1, vocab_size=99)
    rows[2][1] = 0
    np.testing.assert_array_equal(wire.scores(told, tokens, 1, vocab_size=99), plain)
    rows[3][1] = 0
    assert code_of(lambda: wire.scores(told, tokens, 1, vocab_size=99), ServerFault)[0] == "ENG79"


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
    """Cases 79 and 80, of a score."""
    tokens = [3, 4, 12, 9, 5]
    told = Canned().answer(bodies.score_body(tokens, 2, rid="r", features=frozenset()), 0, "length")
    spoil(told["meta_info"]["input_token_logprobs"])
    assert code_of(lambda: wire.scores(told, tokens, 2, vocab_size=99), ServerFault)[0] == code


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
    pieces = Pieces()
    for made, chunk in zip((3, 6, 8), told):
        final = made == 8
        done = wire.completion(pieces.add(copy.deepcopy(chunk), "here"), expected(asked), final=final)
        whole = wire.completion(answer(asked, made, "length"), expected(asked))
        assert (done.tokens, done.log_probs, done.text) == (whole.tokens, whole.log_probs, whole.text)
        assert done.finish == ("length" if final else "abort")


@pytest.mark.parametrize("incremental", [False, True])
def test_the_last_chunk_of_an_abort_has_all_log_probs_and_the_last_id(incremental):
    asked, told = _chunks(incremental)
    pieces = Pieces()
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
def test_case_79_a_chunk_whose_lists_do_not_fit_is_rejected(spoil, incremental):
    _, told = _chunks(incremental)
    pieces = Pieces()
    pieces.add(told[0], "here")
    spoil(told[1])
    assert code_of(lambda: pieces.add(told[1], "here"), ServerFault)[0] == "ENG79"


# -- stops


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
    asked = request(spelled("promptabxx"), kept=4, stop=("xxyz",))
    done = stops.cut(completed(spelled("yzmore")), asked, letters, tokenizer=True)
    assert (letters(done.tokens, False), done.finish) == ("yz", "stop")
    assert len(done.log_probs) == len(done.plain_log_probs) == len(done.versions) == 2
    assert done.text == "yz"  # the text before the stop string is the earlier try's


def test_a_stop_string_is_not_sought_in_the_prompt():
    asked = request(spelled("promptxx"), kept=1, stop=("xxy",))
    assert stops.cut(completed(spelled("yzmore")), asked, letters, tokenizer=True).finish == "length"


def test_without_kept_tokens_the_servers_own_stop_counts_and_nothing_is_decoded():
    asked = request(stop=("mo",))
    done = stops.cut(completed(spelled("yzmore")), asked, None, tokenizer=True)
    assert (len(done.tokens), done.finish) == (6, "length")


def test_all_stop_strings_are_sought_here_where_the_server_has_no_tokenizer():
    asked = request(stop=("mo", "re"))
    done = stops.cut(completed(spelled("yzmore")), asked, letters, tokenizer=False)
    assert (letters(done.tokens, False), done.finish, done.text) == ("yzmo", "stop", "yz")


def test_stop_token_ids_count_in_spite_of_ignore_eos():
    asked = request(ignore_eos=True, stop_token_ids=(26,))
    done = stops.cut(completed(spelled("yzmore")), asked, letters, tokenizer=True)
    assert (letters(done.tokens, False), done.finish) == ("yz", "stop")
    last = stops.cut(completed(spelled("abz")), asked, letters, tokenizer=True)
    assert (len(last.tokens), last.finish) == (3, "stop")


def test_the_text_keeps_the_token_that_a_stop_token_id_named():
    """SGLang leaves it out; the embedded engine decodes it like any other."""
    done = completed(spelled("abz"), "stop")
    done.text = "ab"
    assert stops.cut(done, request(stop_token_ids=(26,)), letters, tokenizer=True).text == "abz"


@pytest.mark.parametrize("text", ["", "a", "ab", "xabx", "xxab", "aab", "ba", "abab"])
def test_the_first_end_of_a_stop_string_is_found_by_halving(text):
    tokens = spelled(text)
    wanted = next((n for n in range(1, len(text) + 1) if "ab" in text[:n]), 0)
    assert stops.first_stop([], tokens, ("ab",), letters) == wanted
