"""What is sent to SGLang for a request, and which requests are refused before they are sent."""

import math

import numpy as np
import pytest
from client_case import CONTEXT, body, code_of, request
from fake_sglang import VOCAB

from slime_sglang import bodies, http

pytestmark = pytest.mark.unit


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


def test_top_k_and_stops_that_are_off_are_sent_as_sglang_takes_them():
    sent = body(request(), dp_rank=1)
    assert sent["sampling_params"]["top_k"] == -1
    assert "stop" not in sent["sampling_params"]
    assert sent["data_parallel_rank"] == 1
    assert "routed_dp_rank" not in sent


def test_experts_are_requested_where_they_are_replayed():
    assert body(request(), experts=True)["return_routed_experts"] is True
    assert "return_routed_experts" not in body(request())


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
        (request(tokens=()), "ENG01"),
        (request(tokens=(3, VOCAB)), "ENG02"),
        (request(tokens=(3, -1)), "ENG02"),
        (request(tokens=(3, 1.5)), "ENG02"),
        (request(max_new_tokens=-1), "ENG03"),
        (request(temperature=-0.1), "ENG03"),
        (request(temperature=math.inf), "ENG03"),
        (request(temperature=math.nan), "ENG03"),
        (request(top_p=0.0), "ENG03"),
        (request(top_k=-2), "ENG03"),
        (request(kept=4), "ENG03"),
        (request(stop=("",)), "ENG03"),
        (request(tokens=range(CONTEXT)), "ENG72"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_it_is_sent(asked, code):
    """A token id outside the vocabulary would end the server; so would a prompt that is too long."""
    found, _ = code_of(lambda: bodies.check(asked, vocab_size=VOCAB, context_len=CONTEXT))
    assert found == code


def test_a_request_may_fill_the_context_and_no_more():
    assert bodies.check(request(tokens=range(60), max_new_tokens=100), vocab_size=VOCAB, context_len=CONTEXT) == 4
    assert bodies.check(request(tokens=range(60), max_new_tokens=3), vocab_size=VOCAB, context_len=CONTEXT) == 3
