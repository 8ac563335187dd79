"""Suspended turns: bytes and back bit for bit, and cut before a version as if the later tokens had never been made."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from durability.ledger_contract import suspended_turns
from slime_core.ledger.codec import cut, decode_turns, encode_turns
from slime_core.protocols import RequestTurn
from slime_core.types import Completion, GenerateRequest, SamplingParams

pytestmark = pytest.mark.unit

TEXT = st.text(st.characters(codec=None), max_size=8)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
LOG_PROBS = st.floats(max_value=0, allow_nan=False)


@st.composite
def histories(draw):
    """Turns of one sample; versions never go down, from the first piece to the last."""
    version, turns = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(0, 3))):
        params = SamplingParams(
            max_new_tokens=draw(st.integers(1, 2**20)),
            temperature=draw(st.floats(0, 2)),
            top_p=draw(st.floats(0, 1, exclude_min=True)),
            stop=tuple(draw(st.lists(TEXT, max_size=2))),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        )
        request = GenerateRequest(
            id=draw(TEXT),
            tokens=draw(TOKENS),
            params=params,
            seed=draw(st.integers(0, 2**64 - 1)),
            session_id=draw(TEXT),
            kept=draw(st.integers(0, 3)),
        )
        turn = RequestTurn(request=request, finish=draw(st.sampled_from(["", "stop", "length", "abort"])))
        for _ in range(draw(st.integers(0, 3))):
            tokens, versions = draw(TOKENS), []
            for _ in tokens:
                version += draw(st.integers(0, 1))
                versions.append(version)
            routed = draw(st.booleans())
            shape = len(request.tokens) + len(tokens), 2, 2
            floats = st.lists(LOG_PROBS, min_size=len(tokens), max_size=len(tokens))
            turn.pieces.append(
                Completion(
                    id=request.id,
                    tokens=tokens,
                    log_probs=draw(floats),
                    plain_log_probs=draw(floats) if draw(st.booleans()) else [],  # an engine may not tell
                    finish=draw(st.sampled_from(["stop", "length", "abort"])),
                    versions=versions,
                    epoch=draw(st.integers(0, 9)),
                    text=draw(TEXT),
                    routed_experts=np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) if routed else None,
                )
            )
        turns.append(turn)
    return turns


def back_and_forth(turns):
    return decode_turns(b"".join(bytes(part) for part in encode_turns(turns)))


@settings(max_examples=150, deadline=None)
@given(turns=histories())
def test_turns_come_back_as_they_were(turns):
    back = back_and_forth(turns)
    assert back == turns
    for one, other in zip(pieces_of(back), pieces_of(turns), strict=True):
        assert (one.routed_experts is None) == (other.routed_experts is None)
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def pieces_of(turns):
    return [piece for turn in turns for piece in turn.pieces]


def test_a_piece_that_is_cut_keeps_the_experts_of_the_tokens_before_its_last():
    """A prompt of 2, then tokens of versions 3, 3 and 4: experts of the prompt and of the first token stay."""
    turn = suspended_turns("a")[0]
    rows = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    lists = {"tokens": [5, 6, 7], "versions": [3, 3, 4], "log_probs": [-0.1] * 3, "plain_log_probs": []}
    (cut_turn,) = cut([replace(turn, pieces=[replace(turn.pieces[0], **lists, routed_experts=rows)])], 4)
    assert cut_turn.pieces[0].tokens == [5, 6]
    assert cut_turn.pieces[0].routed_experts.ravel().tolist() == [0, 1, 2]


def test_log_probs_keep_every_bit():
    values = [-0.0, -5e-324, -1e308, -0.1, struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]]
    turn = suspended_turns("a")[0]
    piece = replace(turn.pieces[0], tokens=[1] * 5, versions=[3] * 5, log_probs=values, plain_log_probs=values)
    (back,) = back_and_forth([replace(turn, pieces=[piece])])
    assert struct.pack("<5d", *back.pieces[0].log_probs) == struct.pack("<5d", *values)


@settings(max_examples=150, deadline=None)
@given(turns=histories(), before=st.integers(0, 6))
def test_a_cut_keeps_the_tokens_of_earlier_versions_and_no_others(turns, before):
    kept = cut(turns, before)
    made = [
        (t, i, p)
        for i, turn in enumerate(turns)
        for piece in turn.pieces
        for t, p in zip(piece.tokens, piece.log_probs)
    ]
    versions = [v for turn in turns for piece in turn.pieces for v in piece.versions]
    left = [(t, p) for turn in kept for piece in turn.pieces for t, p in zip(piece.tokens, piece.log_probs)]
    assert left == [(t, p) for (t, _, p), v in zip(made, versions) if v < before]
    assert all(v < before for turn in kept for piece in turn.pieces for v in piece.versions)
    for turn in kept:
        original = next(t for t in turns if t.request is turn.request)
        lost = sum(len(p.tokens) for p in original.pieces) - sum(len(p.tokens) for p in turn.pieces)
        assert turn.finish == ("" if lost else original.finish)
        assert lost == 0 or turn is kept[-1]


def test_a_turn_that_loses_its_last_token_goes_on_again():
    ended, running = suspended_turns("a")
    running.finish = "stop"
    first, second = cut([ended, running], 4)
    assert first == ended
    assert (second.finish, second.pieces[-1].finish, second.pieces[-1].text) == ("", "abort", "")
    assert running.finish == "stop", "what was handed in stays as it was"


def test_what_comes_behind_a_cut_is_left_out_even_without_tokens():
    ended, running = suspended_turns("a")
    nothing = replace(ended.pieces[0], tokens=[], versions=[], log_probs=[], plain_log_probs=[], finish="abort")
    waiting = RequestTurn(request=ended.request, pieces=[nothing])
    assert cut([ended, waiting], 4) == [ended, waiting]
    assert [len(t.pieces) for t in cut([ended, running, waiting], 4)] == [1, 2]
    assert cut([ended, running, waiting], 3) == []


def test_a_piece_without_a_version_for_every_token_is_refused():
    turn = suspended_turns("a")[0]
    turn.pieces[0].versions.pop()
    with pytest.raises(ValueError, match="versions"):
        encode_turns([turn])
